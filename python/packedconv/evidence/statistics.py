"""From samples to figures and intervals.

A round's value is the mean over its executions. Figures show the mean over rounds and its
standard error (section 6 of the paper). Verdicts use medians over rounds, with a percentile
interval from resampling the rounds: all contenders of a resample keep the same rounds, as the
rounds are interleaved over them.
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from packedconv import roofline
from packedconv.evidence.samples import layers

CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 1

Key = tuple[str, str, float]


def round_values(samples: pd.DataFrame) -> pd.DataFrame:
    """Mean seconds per round: layer, out_channels, sparsity, implementation, layout, round,
    seconds."""
    keys = ["layer", "out_channels", "sparsity", "implementation", "layout", "round"]
    # A sum depends on the order of its terms, in the last digit.
    ordered = samples.sort_values([*keys, "execution"])
    values = ordered.groupby(keys, as_index=False)["seconds"].mean()
    return values.sort_values(
        ["out_channels", "layer", "sparsity", "implementation", "round"], ignore_index=True
    )


def times(samples: pd.DataFrame) -> pd.DataFrame:
    """Execution times in seconds per (layer, sparsity, implementation).

    Columns layer, out_channels, sparsity, implementation, layout, rounds, mean, sem, median,
    low, high; low and high are the interval of the median.
    """
    keys = ["layer", "out_channels", "sparsity", "implementation", "layout"]
    rows = []
    for key, group in round_values(samples).groupby(keys, sort=False):
        values = group["seconds"].to_numpy()
        median = resampled_median(values)
        low, high = interval(median)
        rows.append((*key, len(values), values.mean(), sem(values), median[0], low, high))
    columns = [*keys, "rounds", "mean", "sem", "median", "low", "high"]
    return pd.DataFrame(rows, columns=columns)


def speedups(samples: pd.DataFrame) -> pd.DataFrame:
    """Dense time over sparse time per (layer, sparsity).

    Columns layer, out_channels, sparsity, rounds, mean, sem (of the ratio of each round),
    ratio (of the medians over rounds), low, high (interval of that ratio).
    """
    keys = ["layer", "out_channels", "sparsity"]
    rows = []
    for key, group in round_values(samples).groupby(keys, sort=False):
        table = group.pivot(index="round", columns="implementation", values="seconds")
        per_round = (table["dense"] / table["sparse"]).to_numpy()
        ratio = resampled_median(table["dense"].to_numpy()) / resampled_median(
            table["sparse"].to_numpy()
        )
        low, high = interval(ratio)
        rows.append((*key, len(per_round), per_round.mean(), sem(per_round), ratio[0], low, high))
    columns = [*keys, "rounds", "mean", "sem", "ratio", "low", "high"]
    return pd.DataFrame(rows, columns=columns)


def throughputs(samples: pd.DataFrame) -> pd.DataFrame:
    """Throughput on the nonzeros, dense too, in GFLOP/s (paper equation 8, figure 7).

    Columns layer, out_channels, sparsity, implementation, arithmetic_intensity (FLOP/byte,
    equations 7 and 8, of the sparse convolution for both implementations), rounds, mean, sem
    (over rounds), median (work over the median time), low, high.
    """
    shapes = layers(samples)
    keys = ["layer", "out_channels", "sparsity", "implementation"]
    rows = []
    for key, group in round_values(samples).groupby(keys, sort=False):
        layer, sparsity = shapes[key[0]], key[2]
        flops = roofline.sparse_flops(layer, sparsity)
        moved = roofline.sparse_bytes(layer, sparsity)
        values = flops / group["seconds"].to_numpy() / 1e9
        median = flops / resampled_median(group["seconds"].to_numpy()) / 1e9
        low, high = interval(median)
        intensity = roofline.arithmetic_intensity(flops, moved)
        rows.append(
            (*key, intensity, len(values), values.mean(), sem(values), median[0], low, high)
        )
    columns = [*keys, "arithmetic_intensity", "rounds", "mean", "sem", "median", "low", "high"]
    return pd.DataFrame(rows, columns=columns)


def bound_fractions(samples: pd.DataFrame, peaks: Mapping[str, Any]) -> pd.DataFrame:
    """How near the sparse convolution comes to the bound of the device, per (layer, sparsity).

    peaks: peak_flops (FLOP/s) and bandwidth (bytes/s) as measured. Columns layer, sparsity,
    implementation ("sparse"), bound_seconds (roofline.execution_bound), bound_fraction: that
    over the median time.
    """
    shapes = layers(samples)
    device = roofline.Device("measured", peaks["peak_flops"], peaks["bandwidth"])
    sparse = samples[samples["implementation"] == "sparse"]
    nonzeros = sparse.groupby(["layer", "sparsity"])["nonzeros"].first()
    rows = []
    for row in times(sparse).itertuples():
        count = int(nonzeros[row.layer, row.sparsity])
        bound = float(roofline.execution_bound(shapes[row.layer], count, device))
        rows.append((row.layer, row.sparsity, "sparse", bound, bound / row.median))
    columns = ["layer", "sparsity", "implementation", "bound_seconds", "bound_fraction"]
    return pd.DataFrame(rows, columns=columns)


def sem(values: np.ndarray) -> float:
    """Standard error of the mean over rounds (n - 1 degrees of freedom); NaN for one round."""
    if len(values) < 2:
        return math.nan
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def resampled_median(values: np.ndarray, seed: int = SEED) -> np.ndarray:
    """Median over rounds, then the medians of RESAMPLES resamples of the rounds.

    Shape (1 + RESAMPLES,). Which rounds a resample takes depends on their number and the seed
    alone, so arithmetic on several results compares the same rounds. Rounds that have nothing in
    common, those of two runs, need two seeds.
    """
    values = np.asarray(values, dtype=np.float64)
    chosen = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    return np.concatenate([[np.median(values)], np.median(values[chosen], axis=1)])


def resampled_medians(samples: pd.DataFrame, between_runs: float = 0.0) -> dict[Key, np.ndarray]:
    """`resampled_median` of the seconds by (implementation, layer, sparsity).

    between_runs: how far another run of the same may lie off, beside what the rounds show; see
    `run_factors`. It is the same for all sparsities of a layer and implementation.
    """
    keys = ["implementation", "layer", "sparsity"]
    return {
        (str(key[0]), str(key[1]), float(key[2])): resampled_median(group["seconds"].to_numpy())
        * run_factors(f"{key[0]} of {key[1]}", between_runs)
        for key, group in round_values(samples).groupby(keys, sort=True)
    }


def run_factors(name: str, between_runs: float) -> np.ndarray:
    """Factors by which a second run may differ, one for each entry of `resampled_median`.

    Shape (1 + RESAMPLES,), 1 first; the logarithms of the others have the standard deviation
    `between_runs`. Draws of another `name` are independent of these.
    """
    draws = np.random.default_rng([SEED, zlib.crc32(name.encode())]).standard_normal(RESAMPLES)
    return np.concatenate([[1.0], np.exp(between_runs * draws)])


def interval(values: np.ndarray, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Percentile interval of an estimate (first entry) and its resamples (the others).

    The ends are resampled values, never between two, so infinite ones are allowed.
    """
    ordered = np.sort(values[1:])
    tail = (1 - confidence) / 2 * (len(ordered) - 1)
    return float(ordered[math.floor(tail)]), float(ordered[len(ordered) - 1 - math.floor(tail)])


def spearman(sparsities: np.ndarray, values: np.ndarray) -> float:
    """Spearman rank correlation of a value with sparsity; NaN when it is not defined
    (fewer than two points, or all values equal)."""
    return float(rank_correlation(sparsities, np.asarray(values)[np.newaxis])[0])


def rank_correlation(sparsities: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`spearman` of every row of `values`, shape (rows, n), with `sparsities` (n,)."""
    x = _centred_ranks(np.asarray(sparsities)[np.newaxis])
    y = _centred_ranks(np.asarray(values))
    scale = np.sqrt((x**2).sum(axis=1) * (y**2).sum(axis=1))
    result = np.full(len(y), math.nan)
    np.divide((x * y).sum(axis=1), scale, out=result, where=scale > 0)
    # Rounding must not push a perfect correlation beyond 1.
    return np.clip(result, -1, 1)


def _centred_ranks(values: np.ndarray) -> np.ndarray:
    # pandas' ranks are those of scipy.stats, which takes a second to import.
    ranks = pd.DataFrame(values).rank(axis=1).to_numpy()
    return ranks - (values.shape[1] + 1) / 2


def crossover(sparsities: np.ndarray, ratios: np.ndarray) -> np.ndarray:
    """Lowest sparsity at which a ratio reaches 1, linear between neighbouring sparsities.

    `sparsities` (n,) ascending, `ratios` (..., n) measured at them. -inf where the ratio is 1
    or more at the lowest sparsity already, inf where it never gets there.
    """
    ratios = np.asarray(ratios, dtype=np.float64)
    above = ratios >= 1
    result = np.full(ratios.shape[:-1], math.inf)
    first = np.argmax(above, axis=-1)
    result[above[..., 0]] = -math.inf
    crosses = above.any(axis=-1) & ~above[..., 0]
    right = first[crosses]
    rows = np.arange(right.size)
    after, before = ratios[crosses][rows, right], ratios[crosses][rows, right - 1]
    left = sparsities[right - 1]
    result[crosses] = left + (1 - before) / (after - before) * (sparsities[right] - left)
    return result
