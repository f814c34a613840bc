"""Experiments on a CPU beside the paper's layers, loaded: the tables of layers, the ladder."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from packedconv import collect
from packedconv.evidence import rounds
from packedconv.evidence.samples import (
    distribution,
    file_error,
    load_csv,
    load_json,
    require_same,
)
from packedconv.samples_file import (
    CEILING_COLUMNS,
    EXPERIMENT_COLUMNS,
    read_rows,
    read_text,
    text_sha256,
)
from packedconv.settings import load_settings, settings_hash

# What is compared must have been measured alike.
_ALIKE = ("stamp", "threads", "comparable")
_SAME_PROTOCOL = ("protocol", "repeats", "widest_spread", "set_bytes")


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

    def resampled(self) -> dict[rounds.Point, np.ndarray]:
        """`rounds.resampled` of the samples."""
        return rounds.resampled(self.samples)

    def quality(self) -> dict[tuple[str, float], dict[str, Any]]:
        """How well every layer and sparsity was measured.

        spread: the widest of any contender; attempts; wide: whether it is still too wide; busy:
        whether the peak during the rounds says that the machine was.
        """
        widest = rounds.widest_spreads(self.samples)
        attempts = self.samples.groupby(["layer", "sparsity"])["attempt"].first()
        return {
            (name, sparsity): {
                "spread": value,
                "attempts": 1 + int(attempts[name, sparsity]),
                "wide": value > self.facts[name]["experiment"]["widest_spread"],
                "busy": name in self.peaks["busy_layers"],
            }
            for (name, sparsity), value in widest.items()
        }


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
        facts[path.stem] = found
        if "skipped" not in found:
            frame = load_csv(path, EXPERIMENT_COLUMNS, nullable=())
            require_same(path, "device", set(frame["device"]), {settings["device"]["name"]})
            require_same(path, "run", set(frame["run"]), {settings["run"]})
            _require_name(path, set(frame["layer"]))
            frames.append(rounds.last_attempts(frame))
    if not frames:
        raise ValueError(f"{folder}: expected a layer that was measured, got none; measure one")
    ceilings = folder / "ceilings.csv"
    measured = [found for found in facts.values() if "skipped" not in found]
    load_json(folder / "ceilings.json", ("stamp", "comparable"))
    ceiling_facts = collect.load_ceilings_facts(str(ceilings), str(folder / "ceilings.json"))
    for found in measured:
        _require_alike(found, {**ceiling_facts, "threads": measured[0]["threads"]})
        _require_same_protocol(found, measured[0])
    peaks = collect.reduce_peaks(read_rows(str(ceilings), CEILING_COLUMNS), measured)
    samples = pd.concat(frames, ignore_index=True)
    collect.require_below_peak(
        samples.astype(str).to_dict("records"),
        {name: found for name, found in facts.items() if "skipped" not in found},
        peaks["peak_flops"],
    )
    return Experiments(settings, samples, facts, peaks)


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
    _require_name(path.with_suffix(".json"), {facts["experiment"]["layer"]["name"]})
    return facts


def _require_name(path: Path, names: set[str]) -> None:
    """Raises ValueError unless a file is about the layer that it is named for."""
    if names != {path.stem}:
        raise file_error(
            path,
            "layer",
            f"{path.stem} as the file's name",
            ", ".join(sorted(names)),
            "measure the layer again",
        )


def _require_same_protocol(facts: dict[str, Any], first: dict[str, Any]) -> None:
    """Raises ValueError unless a layer was measured in the protocol of another."""
    name, other = (found["experiment"]["layer"]["name"] for found in (facts, first))
    for key in _SAME_PROTOCOL:
        wanted, found = first["experiment"][key], facts["experiment"][key]
        if wanted != found:
            raise ValueError(
                f"facts of layer {name}: {key}: expected {json.dumps(wanted)} as layer {other} "
                f"has, got {json.dumps(found)}; measure the older of them again"
            )


def _require_alike(facts: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises ValueError unless a layer was measured as the ceilings were."""
    name = facts["experiment"]["layer"]["name"]
    for key in _ALIKE:
        wanted, found = expected[key], facts[key]
        if key == "comparable":
            asked = facts["experiment"]["environment"]
            wanted, found = _without(wanted, asked), _without(found, asked)
        if wanted != found:
            raise ValueError(
                f"facts of layer {name}: {key}: expected {json.dumps(wanted)} as the ceilings or "
                f"the other layers have, got {json.dumps(found)}; measure the older of them again"
            )


def _without(comparable: dict[str, Any], asked: dict[str, str]) -> dict[str, Any]:
    """What must be the same whatever variables a layer asked for."""
    kept = dict(comparable)
    if "PACKEDCONV_ISA" in asked:
        kept.pop("isa", None)
    if "environment" in kept:
        kept["environment"] = {
            name: value for name, value in kept["environment"].items() if name not in asked
        }
    return kept


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


def distributions_sentence(experiments: Experiments) -> str:
    """What weights and inputs were drawn from, in words."""
    settings = experiments.settings
    return f"Weights {distribution(settings['weights'])}, inputs {distribution(settings['inputs'])}"


def skipped_layouts(experiments: Experiments) -> list[str]:
    """Which dense layouts were not timed, for how many layers, and why."""
    layers: dict[tuple[str, str], int] = {}
    for facts in experiments.measured.values():
        for trial in facts["dense"].get("skipped", {}).items():
            layers[trial] = layers.get(trial, 0) + 1
    return [
        f"dense layout {layout} was not timed for {count} layer{'s' * (count != 1)}: {reason}"
        for (layout, reason), count in layers.items()
    ]


def range_text(values: Iterable[float], unit: str = "") -> str:
    """`3`, or `3 to 7` where values differ."""
    low, high = min(values), max(values)
    text = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return f"{text} {unit}" if unit else text
