"""Experiments on a CPU beside the paper's layers, loaded: the tables of layers, the ladder."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from packedconv import collect
from packedconv.evidence.samples import file_error, load_csv, load_json
from packedconv.evidence.statistics import resampled_median
from packedconv.samples_file import (
    CEILING_COLUMNS,
    EXPERIMENT_COLUMNS,
    read_rows,
    read_text,
    text_sha256,
)
from packedconv.settings import load_settings, settings_hash

POINT = ["layer", "sparsity", "implementation"]
# What is compared must have been measured alike.
_ALIKE = ("stamp", "threads", "comparable")


class Experiments(NamedTuple):
    """Layers that were measured one by one.

    settings: settings.json; samples: one row per execution of the last attempt at each point;
    facts: of each layer by name, in the order asked for, those left out (`skipped`) included;
    peaks: peak_flops (FLOP/s), bandwidth (bytes/s), busy_layers.
    """

    settings: dict[str, Any]
    samples: pd.DataFrame
    facts: dict[str, dict[str, Any]]
    peaks: dict[str, Any]

    @property
    def measured(self) -> dict[str, dict[str, Any]]:
        """Facts of the layers that were not left out."""
        return {name: facts for name, facts in self.facts.items() if "skipped" not in facts}

    @property
    def title(self) -> str:
        """The processor that was measured, for captions."""
        return next(iter(self.measured.values()))["machine"]["cpu"]

    def resampled(self) -> dict[tuple[str, float, str], np.ndarray]:
        """`statistics.resampled_median` over the round medians, seconds, by `POINT`."""
        return {
            (str(key[0]), float(key[1]), str(key[2])): resampled_median(values.to_numpy())
            for key, values in round_medians(self.samples).groupby(POINT)["seconds"]
        }


def round_medians(samples: pd.DataFrame) -> pd.DataFrame:
    """Median seconds of every round, by `POINT` and round."""
    return samples.groupby([*POINT, "round"], as_index=False)["seconds"].median()


def load_experiments(folder: str | Path, sample_paths: Sequence[str | Path]) -> Experiments:
    """Load samples of layers, facts beside them, and the ceilings of results/<device>/<run>/.

    Raises FileNotFoundError or ValueError when a file is missing, cut or measured otherwise
    than the others, CheckError when a contender is faster than the measured peak allows.
    """
    folder = Path(folder)
    settings = load_settings(str(folder / "settings.json"))
    facts: dict[str, dict[str, Any]] = {}
    frames = []
    for path in map(Path, sample_paths):
        found = _load_facts(path, settings)
        facts[found["experiment"]["layer"]["name"]] = found
        if "skipped" not in found:
            frames.append(_last_attempts(load_csv(path, EXPERIMENT_COLUMNS, nullable=())))
    if not frames:
        raise ValueError(f"{folder}: expected a layer that was measured, got none; measure one")
    ceilings = folder / "ceilings.csv"
    measured = [found for found in facts.values() if "skipped" not in found]
    ceiling_facts = load_json(folder / "ceilings.json", ("stamp", "comparable"))
    for found in measured:
        _require_alike(found, {**ceiling_facts, "threads": measured[0]["threads"]})
    peaks = collect.reduce_peaks(read_rows(str(ceilings), CEILING_COLUMNS), measured)
    samples = pd.concat(frames, ignore_index=True)
    collect.require_below_peak(
        samples.astype(str).to_dict("records"),
        {name: found for name, found in facts.items() if "skipped" not in found},
        peaks["peak_flops"],
    )
    return Experiments(settings, samples, facts, peaks)


def _last_attempts(samples: pd.DataFrame) -> pd.DataFrame:
    last = samples.groupby(["layer", "sparsity"])["attempt"].transform("max")
    return samples[samples["attempt"] == last]


def _load_facts(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    facts = load_json(
        path.with_suffix(".json"), ("samples_sha256", "settings_hash", "experiment", "stamp")
    )
    again = f"delete {path} and measure it again"
    if facts["samples_sha256"] != text_sha256(read_text(str(path)) or ""):
        raise file_error(
            path, "content", f"the samples that {path.stem}.json belongs to", "others", again
        )
    if facts["settings_hash"] != settings_hash(settings):
        raise file_error(
            path.with_suffix(".json"), "settings_hash", "that of settings.json", "another", again
        )
    return facts


def _require_alike(facts: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises ValueError unless a layer was measured as the ceilings were."""
    name = facts["experiment"]["layer"]["name"]
    for key in _ALIKE:
        wanted, found = expected[key], facts[key]
        if key == "comparable" and "PACKEDCONV_ISA" in facts["experiment"]["environment"]:
            wanted, found = dict(wanted, isa=None), dict(found, isa=None)
        if wanted != found:
            raise ValueError(
                f"facts of layer {name}: {key}: expected {json.dumps(wanted)} as the ceilings or "
                f"the other layers have, got {json.dumps(found)}; measure the older of them again"
            )


def protocol_sentence(experiments: Experiments) -> str:
    """Device, threads and protocol of all layers, in words."""
    device, facts = experiments.settings["device"], list(experiments.measured.values())
    protocol, threads = facts[0]["experiment"]["protocol"], facts[0]["threads"]
    return (
        f"{experiments.title} (device {device['name']}, run {experiments.settings['run']}), "
        f"{threads} thread{'s' * (threads != 1)}: {protocol['rounds']} rounds of "
        f"{protocol['executions']} executions, contenders interleaved"
    )


def ceilings_sentence(experiments: Experiments) -> str:
    """The measured ceilings, in words."""
    peaks = experiments.peaks
    return (
        f"Measured ceilings: {peaks['peak_flops'] / 1e9:.0f} GFLOP/s, "
        f"{peaks['bandwidth'] / 1e9:.1f} GB/s"
    )


def range_text(values: Iterable[float], unit: str = "") -> str:
    """`3`, or `3 to 7` where values differ."""
    low, high = min(values), max(values)
    text = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return f"{text} {unit}" if unit else text
