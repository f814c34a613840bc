"""Speedup over sparsity and size of the layer, where it reaches 1, and what it calibrates."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from packedconv import calibration
from packedconv.evidence.contenders import TITLES
from packedconv.evidence.cpu_experiments import Experiments
from packedconv.evidence.samples import Results
from packedconv.evidence.statistics import crossover, interval, resampled_medians
from packedconv.layer import Layer, nonzero_count, sparsity_key
from packedconv.samples_file import IMPLEMENTATIONS

COLUMNS = [
    *("layer", *Layer._fields[1:], "sparsity", "nonzeros"),
    *("sparse_seconds", "dense_seconds", "dense_layout"),
    *("speedup", "speedup_low", "speedup_high", "inconclusive"),
    *("break_even", "break_even_low", "break_even_high"),
    *("spread", "attempts", "wide", "busy"),
]


def crossover_table(experiments: Experiments) -> pd.DataFrame:
    """One row per layer and sparsity with `COLUMNS`.

    speedup: median dense over median sparse time, the medians over rounds, with its 95 % interval
    from resampling them; inconclusive: whether that interval has 1 in it. break_even: of the
    layer, the lowest sparsity at which the speedup reaches 1, linear between two measured ones,
    with its interval; -inf where it is there at the lowest one, inf where it never is.
    """
    resampled, quality = experiments.resampled(), experiments.quality()
    rows = []
    for name, facts in experiments.measured.items():
        layer = Layer(**facts["experiment"]["layer"])
        shape = {"layer": name, **layer._asdict()}
        del shape["name"]
        sparsities = [round(value, 6) for value in sorted(facts["experiment"]["sparsities"])]
        ratios = np.stack(
            [
                resampled[name, value, "dense"] / resampled[name, value, "sparse"]
                for value in sparsities
            ]
        )
        reached = crossover(np.array(sparsities), ratios.T)
        low_reached, high_reached = interval(reached)
        for sparsity, ratio in zip(sparsities, ratios, strict=True):
            low, high = interval(ratio)
            rows.append(
                {
                    **shape,
                    "sparsity": sparsity,
                    "nonzeros": nonzero_count(layer.weight_count, sparsity),
                    "sparse_seconds": resampled[name, sparsity, "sparse"][0],
                    "dense_seconds": resampled[name, sparsity, "dense"][0],
                    "dense_layout": facts["dense"]["layout"],
                    "speedup": ratio[0],
                    "speedup_low": low,
                    "speedup_high": high,
                    "inconclusive": low <= 1 <= high,
                    "break_even": reached[0],
                    "break_even_low": low_reached,
                    "break_even_high": high_reached,
                    **quality[name, sparsity],
                }
            )
    return pd.DataFrame(rows, columns=COLUMNS)


def layer_titles(table: pd.DataFrame) -> dict[str, str]:
    """How a reader knows the layers of a table, by name: `3×3, 64→128, 56², N 8, /2`."""
    titles = {}
    for row in table.drop_duplicates("layer").itertuples():
        size = f"{row.height}²" if row.height == row.width else f"{row.height}×{row.width}"
        text = f"{row.kernel_size}×{row.kernel_size}, {row.in_channels}→{row.out_channels}, {size}"
        text += f", N {row.batch}" * (row.batch > 1) + f", stride {row.stride}" * (row.stride > 1)
        titles[row.layer] = text
    return titles


def fit_crossover(experiments: Experiments) -> calibration.Calibration:
    """The calibration that the times of layers give, with the plans that computed them.

    Layers timed while the machine was busy are left out, unless all were.
    """
    resampled = experiments.resampled()
    busy = experiments.peaks["busy_layers"]
    quiet = {name: facts for name, facts in experiments.measured.items() if name not in busy}
    layers = quiet or experiments.measured
    points = []
    for name, facts in layers.items():
        layer = Layer(**facts["experiment"]["layer"])
        for sparsity in facts["experiment"]["sparsities"]:
            work = planned_workload(facts, layer, sparsity)
            points += [
                calibration.Point(
                    name, work, side, float(resampled[name, round(sparsity, 6), side][0])
                )
                for side in ("sparse", "dense")
            ]
    first = next(iter(experiments.measured.values()))
    return calibration.fit(
        points,
        "cpu",
        experiments.title,
        first["threads"],
        first["comparable"]["isa"],
        experiments.peaks["peak_flops"],
        experiments.peaks["bandwidth"],
        f"crossover map of run {experiments.settings['run']}, {len(layers)} layers",
    )


def planned_workload(facts: dict, layer: Layer, sparsity: float) -> calibration.Workload:
    """The workload of a layer at a sparsity, with the plan that its facts state."""
    plan = facts["plans"][sparsity_key(sparsity)]
    nonzeros = nonzero_count(layer.weight_count, sparsity)
    return calibration.workload_of_layer(
        layer, nonzeros, facts["threads"], plan["schedule"], plan["facts"]
    )


def fit_gpu_results(results: Results) -> calibration.Calibration:
    """The calibration that a run on a GPU gives, its other precisions included.

    Of contenders that were left out, or timed for fewer than two layers, there is nothing in it.
    Raises ValueError for results of a CPU, whose calibration takes plans (`fit_crossover`).
    """
    device = results.settings["device"]
    if device["kind"] != "cuda":
        raise ValueError(
            f"--results {results.folder}: expected those of a GPU, got {device['name']}; a CPU is "
            "calibrated by its crossover map, or by packedconv.calibrate()"
        )
    points = [
        calibration.Point(
            name,
            calibration.workload_of_layer(
                results.layers[name], nonzero_count(results.layers[name].weight_count, sparsity)
            ),
            implementation,
            float(seconds[0]),
        )
        for (implementation, name, sparsity), seconds in resampled_medians(
            results.every_sample
        ).items()
        if implementation in IMPLEMENTATIONS
    ]
    layers_of = {
        name: {point.layer for point in points if point.contender == name} for name in TITLES
    }
    points = [point for point in points if len(layers_of[point.contender]) > 1]
    return calibration.fit(
        points,
        "cuda",
        results.title,
        None,
        None,
        results.peaks["peak_flops"],
        results.peaks["bandwidth"],
        f"run {results.settings['run']} of device {device['name']}",
    )


def sample_paths(results: str | Path, name: str = "crossover") -> Sequence[Path]:
    """Samples of an experiment's layers beside those of another, by name.

    Raises FileNotFoundError where there are none.
    """
    paths = sorted((Path(results) / name).glob("*.csv"))
    if not paths:
        raise FileNotFoundError(
            f"{Path(results) / name}: expected the samples of {name}, which this is fitted to, "
            f"got none; measure it first: the target figures/<device>/{name}.pdf"
        )
    return paths


def break_even_text(value: float, low: float, high: float) -> str:
    """A break-even sparsity with its interval, as a reader sees it."""
    if math.isinf(value):
        return "at every S" if value < 0 else "at no S"
    return f"{value:.2f} [{_end(low)}, {_end(high)}]"


def _end(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else ("below" if value < 0 else "above")
