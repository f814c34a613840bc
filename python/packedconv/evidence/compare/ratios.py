"""Which layers two results have in common, and how their times and speedups compare.

A ratio is above 1 where the right side is ahead: its speedup over that of the left, and the
left's time over its own. Rounds of the two sides have nothing in common, so each side is
resampled by itself. What an interval covers beside that is how far all times of a layer and
implementation may move from one run to another, as in the verdicts.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from packedconv.evidence import statistics
from packedconv.evidence.compare.side import Side
from packedconv.evidence.samples import against_dense
from packedconv.layer import Layer

QUANTITIES = ("speedup", "sparse", "dense")
COLUMNS = [
    *("side", "left_layer", "right_layer", "out_channels", "left_batch", "right_batch"),
    *("sparsity", "quantity"),
    *("left", "left_low", "left_high", "right", "right_low", "right_high"),
    *("ratio", "ratio_low", "ratio_high", "rounds_low", "rounds_high", "differs"),
]
ERROR_COLUMNS = [
    *("side", "left_layer", "right_layer", "out_channels", "sparsity", "weights"),
    *("left", "right", "ratio"),
]
BOTH, LEFT, RIGHT = "both", "left", "right"
# Rounds of two runs are drawn apart.
_SEEDS = {LEFT: statistics.SEED, RIGHT: statistics.SEED + 1}


class Pair(NamedTuple):
    """A layer as both sides have it, but for its name and batch."""

    left: Layer
    right: Layer

    @property
    def out_channels(self) -> int:
        return self.left.out_channels


class Overall(NamedTuple):
    """Geometric mean of the ratios of all points in both, with its interval."""

    ratio: float
    low: float
    high: float
    points: int
    smallest: float
    largest: float
    above: int
    below: int


class Comparison(NamedTuple):
    """Two sides and all that is computed of them.

    pairs, only_left, only_right: layers in both or in one; sparsities: those in both, with
        sparsities_left and sparsities_right in one alone.
    table: `COLUMNS`, a row per layer, sparsity and quantity. "speedup" is dense time over sparse
        time (medians over rounds), "sparse" and "dense" are seconds of an execution, or of an image
        where `per_image`. Each has its 95 % interval over rounds. ratio has two: rounds_low and
        rounds_high of rounds alone; ratio_low and ratio_high of another run too. differs: whether
        that one leaves out 1. Of a point in one side only (`side`), the other's are missing.
    overall: by quantity; empty where no point is in both.
    between_runs: standard deviation of the logarithm, of either side.
    """

    left: Side
    right: Side
    pairs: tuple[Pair, ...]
    only_left: tuple[Layer, ...]
    only_right: tuple[Layer, ...]
    sparsities: tuple[float, ...]
    sparsities_left: tuple[float, ...]
    sparsities_right: tuple[float, ...]
    per_image: bool
    table: pd.DataFrame
    overall: dict[str, Overall]
    between_runs: tuple[float, float]


def match(
    left: Sequence[Layer], right: Sequence[Layer]
) -> tuple[list[Pair], list[Layer], list[Layer]]:
    """Pairs of the same shape, and the layers of one side only.

    The same shape and batch comes first; layers that differ in batch alone are a pair where no
    other layer could stand for either.
    """
    pairs, ours, theirs = [], list(left), list(right)
    for alike in (_shape_and_batch, _shape):
        for layer in list(ours):
            here = [other for other in ours if alike(other) == alike(layer)]
            there = [other for other in theirs if alike(other) == alike(layer)]
            if len(here) == len(there) == 1:
                pairs.append(Pair(layer, there[0]))
                ours.remove(layer)
                theirs.remove(there[0])
    pairs.sort(key=lambda pair: (pair.out_channels, pair.left.name))
    return pairs, ours, theirs


def compare(left: Side, right: Side, between_runs: Mapping[str, float] | None = None) -> Comparison:
    """Everything about two sides. between_runs: by kind of device, as config/paper.yaml has it;
    without it intervals are those of the rounds alone.

    Raises ValueError where both are the same results.
    """
    if left.name == right.name:
        raise ValueError(
            f"left and right: expected two results, got {left.name} twice; name another"
        )
    layers = [list(side.results.layers.values()) for side in (left, right)]
    pairs, only_left, only_right = match(*layers)
    per_image = any(pair.left.batch != pair.right.batch for pair in pairs)
    ours, theirs = (set(side.results.samples["sparsity"].unique()) for side in (left, right))
    spreads = tuple((between_runs or {}).get(side.kind, 0.0) for side in (left, right))
    values = {
        LEFT: _values(left, LEFT, per_image, spreads[0]),
        RIGHT: _values(right, RIGHT, per_image, spreads[1]),
    }
    rows, ratios = [], {quantity: [] for quantity in QUANTITIES}
    for pair in pairs:
        for sparsity in sorted(ours | theirs):
            for quantity in QUANTITIES:
                first = values[LEFT].get((pair.left.name, sparsity, quantity))
                second = values[RIGHT].get((pair.right.name, sparsity, quantity))
                row, ratio = _row(pair.left, pair.right, sparsity, quantity, first, second)
                rows.append(row)
                if ratio is not None:
                    ratios[quantity].append((ratio, row["differs"]))
    for side, alone in ((LEFT, only_left), (RIGHT, only_right)):
        for layer in alone:
            for sparsity in sorted(ours if side == LEFT else theirs):
                for quantity in QUANTITIES:
                    found = values[side][layer.name, sparsity, quantity]
                    both = (
                        (layer, None, found, None) if side == LEFT else (None, layer, None, found)
                    )
                    rows.append(_row(*both[:2], sparsity, quantity, *both[2:])[0])
    table = pd.DataFrame(rows, columns=COLUMNS).astype(
        {"left_batch": "Int64", "right_batch": "Int64", "differs": "boolean"}
    )
    return Comparison(
        left,
        right,
        tuple(pairs),
        tuple(only_left),
        tuple(only_right),
        tuple(sorted(ours & theirs)),
        tuple(sorted(ours - theirs)),
        tuple(sorted(theirs - ours)),
        per_image,
        table,
        {quantity: _overall(found) for quantity, found in ratios.items() if found},
        spreads,
    )


def compare_errors(comparison: Comparison) -> pd.DataFrame:
    """Maximum absolute errors against dense of both sides, with `ERROR_COLUMNS`.

    A row per layer, sparsity and weights; ratio is right over left, missing where either is 0 or
    not there. Errors are not times: they are the same in every run of the same kernels.
    """
    found = {}
    for side, one in ((LEFT, comparison.left), (RIGHT, comparison.right)):
        errors = against_dense(one.results.errors)
        found[side] = {
            (row.layer, row.sparsity, row.weights): row.max_abs_error for row in errors.itertuples()
        }
    weights = sorted({key[2] for one in found.values() for key in one})
    rows = []
    for first, second in _both_or_one(comparison):
        for sparsity in sorted({key[1] for one in found.values() for key in one}):
            for kind in weights:
                left = found[LEFT].get((first.name, sparsity, kind)) if first else None
                right = found[RIGHT].get((second.name, sparsity, kind)) if second else None
                if left is None and right is None:
                    continue
                rows.append(
                    {
                        **_identity(first, second, left is not None, right is not None),
                        "sparsity": sparsity,
                        "weights": kind,
                        "left": left,
                        "right": right,
                        "ratio": right / left if left and right else None,
                    }
                )
    return pd.DataFrame(rows, columns=ERROR_COLUMNS).astype(
        dict.fromkeys(("left", "right", "ratio"), "float64")
    )


def _both_or_one(comparison: Comparison) -> list[tuple[Layer | None, Layer | None]]:
    return [
        *comparison.pairs,
        *((layer, None) for layer in comparison.only_left),
        *((None, layer) for layer in comparison.only_right),
    ]


class _Values(NamedTuple):
    """An estimate (first entry) and its resamples: of the rounds, and of another run too."""

    rounds: np.ndarray
    runs: np.ndarray


def _values(
    side: Side, position: str, per_image: bool, between_runs: float
) -> dict[tuple[str, float, str], _Values]:
    """By layer, sparsity and quantity."""
    found = {}
    keys = ["layer", "sparsity", "implementation"]
    for (name, sparsity, implementation), group in statistics.round_values(
        side.results.samples
    ).groupby(keys, sort=True):
        images = side.results.layers[name].batch if per_image else 1
        seconds = statistics.resampled_median(
            group["seconds"].to_numpy() / images, _SEEDS[position]
        )
        factors = statistics.run_factors(f"{position} {implementation} of {name}", between_runs)
        found[name, sparsity, implementation] = _Values(seconds, seconds * factors)
    for name, sparsity, implementation in list(found):
        if implementation == "sparse":
            sparse, dense = found[name, sparsity, "sparse"], found[name, sparsity, "dense"]
            found[name, sparsity, "speedup"] = _Values(
                dense.rounds / sparse.rounds, dense.runs / sparse.runs
            )
    return found


def _row(
    left: Layer | None,
    right: Layer | None,
    sparsity: float,
    quantity: str,
    first: _Values | None,
    second: _Values | None,
) -> tuple[dict, np.ndarray | None]:
    """A row of the table, and the ratio with its resamples where both sides have the point."""
    row = {
        **_identity(left, right, first is not None, second is not None),
        "left_batch": left.batch if left else None,
        "right_batch": right.batch if right else None,
        "sparsity": sparsity,
        "quantity": quantity,
    }
    for side, values in ((LEFT, first), (RIGHT, second)):
        if values is not None:
            low, high = statistics.interval(values.rounds)
            row |= {side: values.rounds[0], f"{side}_low": low, f"{side}_high": high}
    if first is None or second is None:
        return row, None
    by_rounds, by_runs = (
        after / before if quantity == "speedup" else before / after
        for before, after in zip(first, second, strict=True)
    )
    low, high = statistics.interval(by_runs)
    row |= {"ratio": by_rounds[0], "ratio_low": low, "ratio_high": high}
    row["rounds_low"], row["rounds_high"] = statistics.interval(by_rounds)
    row["differs"] = not low <= 1 <= high
    return row, by_runs


def _identity(
    left: Layer | None, right: Layer | None, in_left: bool, in_right: bool
) -> dict[str, object]:
    return {
        "side": BOTH if in_left and in_right else LEFT if in_left else RIGHT,
        "left_layer": left.name if left else None,
        "right_layer": right.name if right else None,
        "out_channels": (left or right).out_channels,
    }


def _overall(found: Sequence[tuple[np.ndarray, bool]]) -> Overall:
    ratios = np.array([ratio for ratio, _ in found])
    mean = np.exp(np.log(ratios).mean(axis=0))
    estimates = ratios[:, 0]
    differing = [ratio[0] for ratio, differs in found if differs]
    return Overall(
        float(mean[0]),
        *statistics.interval(mean),
        len(found),
        float(estimates.min()),
        float(estimates.max()),
        sum(ratio > 1 for ratio in differing),
        sum(ratio < 1 for ratio in differing),
    )


def _shape(layer: Layer) -> Layer:
    return layer._replace(name="", batch=0)


def _shape_and_batch(layer: Layer) -> Layer:
    return layer._replace(name="")
