"""The experiments on a GPU beside the comparison, loaded: the ablation and the fixed cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from packedconv.evidence.samples import file_error, load_csv, load_json, require_same
from packedconv.layer import Layer
from packedconv.samples_file import (
    ABLATION_COLUMNS,
    FIXED_COST_COLUMNS,
    MAPPING_FIELDS,
    read_text,
    text_sha256,
)
from packedconv.settings import layers_of, load_settings

# Least and largest of the timed executions, and how many there are.
TIMES = ["seconds", "fastest", "slowest", "executions"]
# Columns that are empty where something was left out, or was not.
_LEFT_OUT = ("executions_per_pair", "execution", "seconds", "skipped")
# What is compared must have been measured alike, and as the layer's contenders were.
_ALIKE = ("settings_hash", "stamp", "comparable")


class Experiment(NamedTuple):
    """One experiment of a run.

    settings: settings.json; table: one row per thing that was timed, with `TIMES`: seconds is
    the median over timed executions, each the mean within a pair of events; facts: of each
    layer, by name.
    """

    settings: dict[str, Any]
    table: pd.DataFrame
    facts: dict[str, dict[str, Any]]

    @property
    def title(self) -> str:
        """The device, for captions."""
        device = self.settings["device"]
        return device.get("title") or device["name"]


def load_ablation(folder: str | Path) -> Experiment:
    """Medians of every mapping, by out_channels, sparsity and mapping; columns layer,
    out_channels, sparsity, nonzeros, MAPPING_FIELDS, `TIMES`, skipped.

    Raises FileNotFoundError or ValueError without a layer, for one that is not whole, or for
    one that was measured otherwise than the contenders of the run.
    """
    keys = ["layer", "out_channels", "sparsity", "nonzeros", *MAPPING_FIELDS]
    return _load(Path(folder), "ablation", ABLATION_COLUMNS, keys, _LEFT_OUT)


def load_fixed_cost(folder: str | Path) -> Experiment:
    """Medians of every experiment; columns layer, out_channels, experiment, implementation,
    slices, nonzeros, bytes, `TIMES`, skipped.

    Raises as `load_ablation` does.
    """
    keys = [
        *("layer", "out_channels", "experiment", "implementation"),
        *("slices", "nonzeros", "bytes"),
    ]
    nullable = ("slices", "nonzeros", "bytes", *_LEFT_OUT)
    return _load(Path(folder), "fixed_cost", FIXED_COST_COLUMNS, keys, nullable)


def _load(
    folder: Path, name: str, columns: Sequence[str], keys: list[str], nullable: Sequence[str]
) -> Experiment:
    settings = load_settings(str(folder / "settings.json"))
    layers = {layer.name: layer for layer in layers_of(settings)}
    found = {path.stem: path for path in sorted((folder / name).glob("*.csv"))}
    for left_over in sorted(set(found) - set(layers)):
        raise file_error(
            found[left_over],
            "layer",
            f"one of {', '.join(layers)}, which settings.json has",
            left_over,
            "it is left over from other settings: move it, and its .json, away",
        )
    for missing in (layer for layer in layers if layer not in found):
        raise file_error(
            folder / name,
            f"layer {missing}",
            "its times",
            "none",
            f"measure it on the GPU: snakemake --cores 1 {folder / name}/{missing}.csv --config "
            f"device={settings['device']['name']} (and what else the run was configured with)",
        )
    frames, facts = [], {}
    for layer in layers.values():
        path = folder / name / f"{layer.name}.csv"
        frame = load_csv(path, columns, nullable)
        facts[layer.name] = _checked_facts(path, frame, layer, settings)
        frames.append(frame)
    _require_alike(folder, name, facts)
    frame = pd.concat(frames, ignore_index=True)
    frame["skipped"] = frame["skipped"].where(frame["skipped"] != "", None)
    groups = frame.groupby(keys, dropna=False, sort=True)["seconds"]
    table = groups.agg(seconds="median", fastest="min", slowest="max", executions="count")
    table["skipped"] = frame.groupby(keys, dropna=False, sort=True)["skipped"].first()
    table = table.reset_index().sort_values(["out_channels", *keys[2:]], ignore_index=True)
    return Experiment(settings, table, facts)


def _checked_facts(
    path: Path, frame: pd.DataFrame, layer: Layer, settings: dict[str, Any]
) -> dict[str, Any]:
    """The facts of a layer's rows. Raises ValueError unless both belong together and are whole."""
    again = f"delete it and measure {path.parent.name} of layer {layer.name} again"
    expected = {
        "device": settings["device"]["name"],
        "run": settings["run"],
        "layer": layer.name,
        "out_channels": layer.out_channels,
    }
    for column, value in expected.items():
        require_same(path, column, set(frame[column]), {value})
    facts = load_json(path.with_suffix(".json"), ("rows_sha256", "layer", *_ALIKE))
    if facts["rows_sha256"] != text_sha256(read_text(str(path)) or ""):
        raise file_error(
            path, "content", f"the rows that {path.stem}.json belongs to", "others", again
        )
    if facts["layer"] != layer._asdict():
        raise file_error(
            path.with_suffix(".json"), "layer", f"{layer._asdict()}", f"{facts['layer']}", again
        )
    timed = frame["skipped"] == ""
    if not (frame["seconds"].notna() == timed).all():
        raise file_error(path, "seconds", "a value, or why it was skipped", "both or none", again)
    if not (frame.loc[timed, "seconds"] > 0).all():
        lowest = frame["seconds"].min()
        raise file_error(path, "seconds", "positive values", f"{lowest}", again)
    return facts


def _require_alike(folder: Path, name: str, facts: dict[str, dict[str, Any]]) -> None:
    """Raises ValueError unless all layers were measured as those in bench/ were."""
    for layer, found in facts.items():
        bench = load_json(folder / "bench" / f"{layer}.json", _ALIKE)
        for key in _ALIKE:
            first = next(iter(facts))
            for other, value in (
                (f"bench/{layer}.json", bench[key]),
                (f"{name}/{first}.json", facts[first][key]),
            ):
                if found[key] != value:
                    raise file_error(
                        folder / name / f"{layer}.json",
                        key,
                        f"{value} as in {other}",
                        f"{found[key]}",
                        "measure the older of the two again",
                    )
