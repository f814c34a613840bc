"""What the places of the nonzeros do to time, beside how they are balanced and adjacent."""

from typing import Any

import numpy as np
import pandas as pd

from packedconv.evidence.cpu_experiments import Experiments
from packedconv.evidence.statistics import interval
from packedconv.layer import sparsity_key

COLUMNS = [
    *("layer", "sparsity", "mask", "source", "nonzeros", "share_of_weights"),
    *("seconds", "low", "high", "ratio", "ratio_low", "ratio_high", "verdict"),
    *("dense_seconds", "dense_layout", "speedup", "speedup_low", "speedup_high"),
    *("channel_balance", "slice_balance", "adjacent_weights", "adjacent_channels"),
    *("same_schedule", "spread", "attempts", "wide", "busy", "left_out"),
]

# In the order in which they are shown; "sparse" is what the others are compared with.
TITLES = {
    "sparse": "uniform",
    "uniform": "uniform, another draw",
    "one_of_m": "1:M along input channels",
    "channel_blocks": "4×1 blocks of channels",
    "kernels": "whole kernels",
    "runs": "runs of 8",
    "neighbourhoods": "neighbourhoods",
    "skewed": "skewed channels",
    "trained": "trained and pruned",
}


def masks(experiments: Experiments) -> pd.DataFrame:
    """One row per layer, sparsity and mask, with `COLUMNS`, in the order of `TITLES`.

    seconds: median over the medians of the rounds, low and high its 95 % interval from resampling
    them. ratio: time over that of the uniform mask in the same rounds; verdict: "slower",
    "faster", or "inconclusive" where its interval holds 1. speedup: of the mask over dense.
    channel_balance: largest over mean number of nonzeros of an output channel; slice_balance: the
    same of as many slices of output channels as there are threads, cut alike.
    adjacent_weights: share of the nonzeros that come right after another one of their channel;
    adjacent_channels: share that has one at the same place of the channel before.
    same_schedule: whether its plan has the schedule of the uniform mask's.
    A mask that was left out has its reason in `left_out` and no times.
    """
    resampled, quality = experiments.resampled(), experiments.quality()
    rows = []
    for name, facts in experiments.measured.items():
        weights = int(np.prod(_weight_shape(facts)))
        for sparsity in facts["experiment"]["sparsities"]:
            key, sparsity = sparsity_key(sparsity), round(sparsity, 6)
            uniform, dense = (
                resampled[name, sparsity, implementation] for implementation in ("sparse", "dense")
            )
            for mask in TITLES:
                row = {"layer": name, "sparsity": sparsity, "mask": mask}
                if mask not in facts["masks"][key]:
                    rows.append({**row, "left_out": facts["left_out"][key][mask]})
                    continue
                found = facts["masks"][key][mask]
                seconds = resampled[name, sparsity, mask]
                nonzeros = sum(found["channel_nonzeros"])
                low, high = interval(seconds)
                rows.append(
                    {
                        **row,
                        "source": found.get("source"),
                        "nonzeros": nonzeros,
                        "share_of_weights": nonzeros / weights,
                        "seconds": seconds[0],
                        "low": low,
                        "high": high,
                        **_compared(seconds, uniform),
                        "dense_seconds": dense[0],
                        "dense_layout": facts["dense"]["layout"],
                        **_named("speedup", dense / seconds),
                        **_balance(found["channel_nonzeros"], facts["threads"]),
                        "adjacent_weights": found["adjacent_weights"] / nonzeros,
                        "adjacent_channels": found["adjacent_channels"] / nonzeros,
                        "same_schedule": found["schedule"]
                        == facts["masks"][key]["sparse"]["schedule"],
                        **quality[name, sparsity],
                    }
                )
    table = pd.DataFrame(rows, columns=COLUMNS)
    return table.astype(dict.fromkeys(("nonzeros", "attempts"), "Int64"))


def _weight_shape(facts: dict[str, Any]) -> tuple[int, ...]:
    layer = facts["layer"]
    size = layer["kernel_size"]
    return layer["out_channels"], layer["in_channels"] // layer["groups"], size, size


def _compared(seconds: np.ndarray, uniform: np.ndarray) -> dict[str, Any]:
    """The ratio to the uniform mask, and what can be said of it; of itself nothing."""
    values = _named("ratio", seconds / uniform)
    verdict = None
    if seconds is not uniform:
        verdict = "inconclusive"
        if values["ratio_low"] > 1:
            verdict = "slower"
        if values["ratio_high"] < 1:
            verdict = "faster"
    return {**values, "verdict": verdict}


def _named(name: str, values: np.ndarray) -> dict[str, float]:
    low, high = interval(values)
    return {name: float(values[0]), f"{name}_low": low, f"{name}_high": high}


def _balance(channels: list[int], threads: int) -> dict[str, float]:
    slices = [part.sum() for part in np.array_split(np.array(channels), threads)]
    return {
        "channel_balance": max(channels) / np.mean(channels),
        "slice_balance": float(max(slices) / np.mean(slices)),
    }
