"""Every contender of a run on a GPU beside the sparse kernel, those left out included."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from packedconv.evidence import statistics
from packedconv.evidence.samples import Results, clock_notes
from packedconv.evidence.tabular import Group
from packedconv.layer import sparsity_key
from packedconv.samples_file import IMPLEMENTATIONS

COLUMNS = [
    *("layer", "out_channels", "sparsity", "implementation", "layout"),
    *("seconds", "low", "high", "ratio", "ratio_low", "ratio_high"),
    *("column_ratio", "column_ratio_low", "column_ratio_high"),
    *("rounds", "call_bound", "skipped", "kernels"),
]

TITLES = {
    "sparse": "sparse: the paper's kernel",
    "sparse_column": "sparse: column kernel",
    "dense": "dense: PyTorch's default",
    "dense_fp32": "dense: FP32",
    "dense_tf32": "dense: TF32",
    "dense_fp16": "dense: FP16",
    "dense_channels_last": "dense: FP32, channels last",
}
NOTES = [
    "ratio: median time of a contender over that of the paper's kernel, so above 1 the paper's "
    "kernel is faster; column ratio: over that of the column kernel; in brackets their 95 % "
    "intervals from resampling the rounds",
    "PyTorch's default allows TF32 and picks the algorithm without benchmarking; FP32 and TF32 "
    "are benchmarked. TF32 rounds products to 10 bits of mantissa",
    "FP16 (input, weight and output) is another class: half the bytes, and 10 bits of mantissa",
    "layouts and types are made outside an execution; what that takes stands in the facts "
    "(bench/<layer>.json: conversion_seconds)",
    "kernels: names that the profiler saw in one untimed execution at the first sparsity, by "
    "which cuDNN's algorithm is known",
    "*: the host took at least 0.9 of that time to queue an execution, so that it is the time of "
    "the call; the kernel may be faster",
]


def contenders(results: Results) -> pd.DataFrame:
    """One row per layer, sparsity and contender, with `COLUMNS`.

    seconds: median over rounds, low and high its interval; ratio: that over "sparse" of the
    same rounds, column_ratio over "sparse_column", where that was timed. A contender that was
    left out has its reason in `skipped` and no times. call_bound: whether the host's call is
    what was timed (missing where it was not recorded).
    Raises ValueError for results of a CPU, which has one sparse and one dense side.
    """
    device = results.settings["device"]
    if device["kind"] == "cpu":
        raise ValueError(
            f"--results {results.folder}: expected those of a GPU, got {device['name']}, which "
            "has one sparse and one dense side; figures 5 and 6 compare them"
        )
    samples = results.every_sample
    medians = statistics.resampled_medians(samples)
    rounds = samples["round"].nunique()
    rows = []
    for name, layer in results.layers.items():
        facts = results.facts[name]
        layouts = dict(
            samples.loc[samples["layer"] == name, ["implementation", "layout"]]
            .drop_duplicates()
            .itertuples(index=False)
        )
        for sparsity in sorted(samples["sparsity"].unique()):
            base = {"layer": name, "out_channels": layer.out_channels, "sparsity": sparsity}
            sparse = medians["sparse", name, sparsity]
            column = medians.get(("sparse_column", name, sparsity))
            for implementation in IMPLEMENTATIONS:
                row = {**base, "implementation": implementation}
                if implementation in facts.get("skipped", {}):
                    rows.append({**row, "skipped": facts["skipped"][implementation]})
                elif implementation in layouts:
                    seconds = medians[implementation, name, sparsity]
                    low, high = statistics.interval(seconds)
                    rows.append(
                        {
                            **row,
                            "layout": layouts[implementation],
                            "seconds": seconds[0],
                            "low": low,
                            "high": high,
                            **_ratio("ratio", seconds, sparse),
                            **_ratio("column_ratio", seconds, column),
                            "rounds": rounds,
                            "call_bound": _call_bound(facts, implementation, sparsity),
                            "kernels": _kernels(facts, implementation),
                        }
                    )
    return pd.DataFrame(rows, columns=COLUMNS).astype({"rounds": "Int64", "call_bound": "boolean"})


def shown(table: pd.DataFrame) -> list[Group]:
    """What a reader sees: a part per layer, and the kernels that were seen."""
    groups = []
    for (name, channels), rows in table.groupby(["layer", "out_channels"], sort=False):
        skipped = rows["skipped"].notna()
        frame = pd.DataFrame(
            {
                "S": [f"{value:.2f}" for value in rows["sparsity"]],
                "Contender": [TITLES[value] for value in rows["implementation"]],
                "Layout": rows["layout"].fillna(""),
                "ms": [
                    f"skipped: {reason}" if left_out else f"{1e3 * seconds:.4g}{'*' * bound}"
                    for seconds, reason, left_out, bound in zip(
                        rows["seconds"],
                        rows["skipped"],
                        skipped,
                        rows["call_bound"].fillna(False).astype(bool),
                        strict=True,
                    )
                ],
                "Ratio": _brackets(rows, "ratio"),
                "Column ratio": _brackets(rows, "column_ratio"),
            }
        )
        groups.append(Group(f"OC {channels} ({name})", "", frame))
    seen = table.dropna(subset="kernels")
    seen = seen.drop_duplicates(["layer", "implementation", "kernels"])
    kernels = pd.DataFrame(
        {
            "OC": seen["out_channels"],
            "Contender": [TITLES[value] for value in seen["implementation"]],
            "Kernels": seen["kernels"],
        }
    )
    return [*groups, Group("Kernels", "", kernels)]


def preamble(results: Results) -> str:
    """What a reader has to know before the table."""
    protocol = results.settings["protocol"]
    text = (
        f"{results.title} (device {results.device}, run {results.run}):"
        f" {protocol['rounds']} rounds of {protocol['executions']} executions, contenders"
        f" interleaved; {results.execution(IMPLEMENTATIONS)}."
    )
    text += "".join(f"\n\n{note}" for note in clock_notes(results.facts))
    busy = results.peaks["busy_layers"]
    if busy:
        text += f"\n\nThe GPU was busy with something else while {', '.join(busy)} was timed."
    return text


def _ratio(name: str, seconds: np.ndarray, other: np.ndarray | None) -> dict[str, float]:
    """A ratio with its interval, as columns; nothing without the other's times."""
    if other is None:
        return {}
    ratio = seconds / other
    low, high = statistics.interval(ratio)
    return {name: ratio[0], f"{name}_low": low, f"{name}_high": high}


def _brackets(rows: pd.DataFrame, name: str) -> list[str]:
    """Ratios with their intervals as a reader sees them; empty where there is none."""
    columns = rows[[name, f"{name}_low", f"{name}_high"]].astype(float)
    return [
        "" if np.isnan(value) else f"{value:.2f} [{low:.2f}, {high:.2f}]"
        for value, low, high in columns.itertuples(index=False)
    ]


def _call_bound(facts: Mapping[str, Any], implementation: str, sparsity: float) -> bool | None:
    keys = facts.get("implementations", {}).get(implementation, {}).get("call_bound")
    return None if keys is None else sparsity_key(sparsity) in keys


def _kernels(facts: Mapping[str, Any], implementation: str) -> str:
    found = facts.get("implementations", {}).get(implementation, {})
    if found.get("kernels"):
        return " + ".join(found["kernels"])
    return f"not known: {found.get('kernels_unknown') or 'no record'}"
