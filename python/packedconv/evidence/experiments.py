"""The experiments on a GPU beside the comparison, loaded: the ablation and the fixed cost."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from packedconv.samples_file import ABLATION_COLUMNS, FIXED_COST_COLUMNS, read_rows
from packedconv.settings import load_settings

MAPPING = ["col_per_warp", "rows_per_thread", "warps_per_block", "slices"]
# Least and largest of the pairs, and how many there are.
TIMES = ["seconds", "fastest", "slowest", "pairs"]


class Experiment(NamedTuple):
    """One experiment of a run.

    settings: settings.json; table: one row per thing that was timed, with `TIMES`: seconds is
    the median over pairs of events; facts: of each layer, by name.
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
    out_channels, sparsity, nonzeros, `MAPPING`, `TIMES`, skipped.

    Raises ValueError without a file or for one that is not whole.
    """
    keys = ["layer", "out_channels", "sparsity", "nonzeros", *MAPPING]
    return _load(Path(folder), "ablation", ABLATION_COLUMNS, keys)


def load_fixed_cost(folder: str | Path) -> Experiment:
    """Medians of every experiment; columns layer, out_channels, experiment, implementation,
    slices, nonzeros, bytes, `TIMES`, skipped.

    Raises ValueError without a file or for one that is not whole.
    """
    keys = [
        *("layer", "out_channels", "experiment", "implementation"),
        *("slices", "nonzeros", "bytes"),
    ]
    return _load(Path(folder), "fixed_cost", FIXED_COST_COLUMNS, keys)


_WHOLE = ("out_channels", "nonzeros", "slices", "bytes", *MAPPING)


def _load(folder: Path, name: str, columns: Sequence[str], keys: list[str]) -> Experiment:
    settings = load_settings(str(folder / "settings.json"))
    paths = sorted((folder / name).glob("*.csv"))
    if not paths:
        raise ValueError(
            f"{folder / name}: expected the times of a layer, found none; measure on a GPU: "
            f"snakemake {folder / name}/LAYER.csv"
        )
    rows = [row for path in paths for row in read_rows(str(path), columns)]
    frame = pd.DataFrame(rows).replace("", None)
    for column in frame:
        if column in (*_WHOLE, "sparsity", "seconds", "pair", "executions_per_pair"):
            frame[column] = pd.to_numeric(frame[column])
    for column in _WHOLE:
        if column in frame:
            frame[column] = frame[column].astype("Int64")
    groups = frame.groupby(keys, dropna=False, sort=True)["seconds"]
    table = groups.agg(seconds="median", fastest="min", slowest="max", pairs="count")
    table["skipped"] = frame.groupby(keys, dropna=False, sort=True)["skipped"].first()
    table = table.reset_index().sort_values(["out_channels", *keys[2:]], ignore_index=True)
    facts = {
        path.stem: json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        for path in paths
    }
    return Experiment(settings, table, facts)
