"""The step that trains and prunes the network on digits, one at a time with measurements."""

import json
import os
from typing import Any

from packedconv.bench.cpu_steps import require_cpu
from packedconv.bench.lock import measurement_lock
from packedconv.bench.steps import SCHEMA, load_stamp, require_stamped_extension
from packedconv.device import require
from packedconv.samples_file import write_facts
from packedconv.settings import settings_hash
from packedconv.weights import array_sha256, save_weights


def digits(
    settings: dict[str, Any], training_text: str, stamp_path: str, out: str, facts_path: str
) -> None:
    """Write the pruned weights (`out`, .npz) and the facts of the whole.

    training_text: section `digits` of config/extended.yaml, as JSON. On a CPU, under the lock of
    its measurements, which training would disturb.
    Raises DeviceError for another device, ValueError without scikit-learn, CheckError where
    packedconv computes wrongly.
    """
    require_cpu(settings)
    require(settings["device"])
    stamp = load_stamp(stamp_path)
    with measurement_lock(settings["device"]["name"]):
        # torch first: whichever OpenMP library comes first serves both.
        import torch  # noqa: F401

        from packedconv.bench.extended.digits import measure
        from packedconv.bench.machine import comparable_facts, machine_facts

        require_stamped_extension(stamp_path, stamp)
        weights, facts = measure(json.loads(training_text), settings["seed"])
        facts.update(
            schema=SCHEMA,
            settings_hash=settings_hash(settings),
            stamp=stamp,
            device=settings["device"]["name"],
            run=settings["run"],
            weights_sha256={key: array_sha256(weight) for key, weight in weights.items()},
            comparable=comparable_facts(),
            machine=machine_facts(),
        )
        os.makedirs(os.path.dirname(os.path.abspath(facts_path)), exist_ok=True)
        write_facts(facts_path, facts)
        save_weights(out, weights)
