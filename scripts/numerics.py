"""Errors by cause, against float64, over distributions of inputs and weights; on a CPU."""

import json

from packedconv.bench.cpu_steps import require_cpu
from packedconv.bench.extended.numerics_rows import COLUMNS
from packedconv.bench.lock import measurement_lock
from packedconv.bench.steps import SCHEMA, load_stamp, require_stamped_extension, thread_count
from packedconv.device import require
from packedconv.samples_file import format_csv, text_sha256, write_facts, write_text
from packedconv.script import experiment_parser, run
from packedconv.settings import load_settings, settings_hash


def main() -> None:
    options = experiment_parser(__doc__).parse_args()
    settings = load_settings(options.settings)
    require_cpu(settings)
    device = require(settings["device"])
    experiment, stamp = json.loads(options.experiment), load_stamp(options.stamp)
    # Under the lock, since its work would disturb a measurement.
    with measurement_lock(settings["device"]["name"]):
        import torch

        from packedconv.bench.extended.numerics import measure
        from packedconv.bench.machine import comparable_facts, machine_facts

        require_stamped_extension(options.stamp, stamp)
        torch.set_num_threads(thread_count(settings, device))
        rows, facts = measure(settings, experiment)
        text = format_csv(rows, COLUMNS)
        facts = {
            **facts,
            "schema": SCHEMA,
            "settings_hash": settings_hash(settings),
            "stamp": stamp,
            "experiment": experiment,
            "comparable": comparable_facts(),
            "machine": machine_facts(),
            "rows_sha256": text_sha256(text),
        }
        write_facts(options.facts, facts)
        write_text(options.out, text)


if __name__ == "__main__":
    run(main)
