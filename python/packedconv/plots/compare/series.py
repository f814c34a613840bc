"""Figures 5, 6 and 8 of two sides: against sparsity, the ratio below."""

import pandas as pd
from matplotlib.figure import Figure

from packedconv.evidence import statistics
from packedconv.evidence.compare.ratios import COLUMNS, Comparison, compare_errors
from packedconv.evidence.compare.side import Side
from packedconv.evidence.compare.words import answer, chance, counts, ratio_text
from packedconv.evidence.samples import against_dense
from packedconv.plots.compare.frame import (
    Frame,
    channel_entries,
    draw_ratios,
    ends,
    finish,
    finish_ratios,
    in_both,
    measured_rows,
    new_frame,
    panel_rows,
    plotted,
    scale_values,
)
from packedconv.plots.series import Kind, draw_measured, sparsity_axis
from packedconv.plots.style import GREY, IMPLEMENTATIONS, legend_entry, out_channel_styles

ERROR_BARS = (
    "Panels: means over rounds; error bars: standard error, none where it is smaller than the "
    "marker."
)
TIME_KINDS = [
    ("sparse", IMPLEMENTATIONS["sparse"], "-"),
    ("dense", IMPLEMENTATIONS["dense"], "--"),
]
ERROR_KINDS = [
    ("packed", "packed weights on both sides", "-"),
    ("original", "original weights: FP16 quantisation too", "--"),
]


def draw_speedups(comparison: Comparison) -> tuple[Figure, pd.DataFrame]:
    """Figure 5 of two sides."""
    tables = [
        statistics.speedups(side.results.samples).rename(columns={"mean": "speedup"})
        for side in (comparison.left, comparison.right)
    ]
    frame = new_frame(comparison)
    styles = _draw_panels(frame, comparison, tables, "speedup", "Speedup over PyTorch")
    scale_values(frame.left, _values(tables, "speedup"), mark=1.0)
    for panel in (frame.left, frame.right):
        panel.axhline(1, color="#222222", linewidth=0.8, linestyle=":", zorder=1)
    ratios = in_both(comparison.table, quantity="speedup")
    _draw_ratios(frame, 0, comparison, "speedup", styles, "Speedup, right / left", "larger")
    overall = comparison.overall.get("speedup")
    finish(
        frame,
        comparison,
        answer("speedup", overall) if overall else "speedup: nothing to compare point by point",
        [channel_entries(comparison, styles)],
        [ERROR_BARS, *([chance(comparison, len(ratios))] if overall else [])],
    )
    columns = ["layer", "out_channels", "sparsity", "speedup", "sem", "rounds"]
    return frame.figure, _plotted(comparison, tables, columns, ratios)


def draw_times(comparison: Comparison) -> tuple[Figure, pd.DataFrame]:
    """Figure 6 of two sides; time of an image where their batches differ."""
    tables = []
    for side in (comparison.left, comparison.right):
        times = statistics.times(side.results.samples)
        factor = 1e3 / _images(times, side, comparison)
        tables.append(times.assign(milliseconds=factor * times["mean"], sem=factor * times["sem"]))
    frame = new_frame(comparison, below=2)
    label = "Time per image (ms)" if comparison.per_image else "Execution time (ms)"
    styles = _draw_panels(frame, comparison, tables, "milliseconds", label, TIME_KINDS)
    scale_values(frame.left, _values(tables, "milliseconds"))
    for number, quantity in enumerate(("sparse", "dense")):
        label = f"{quantity.capitalize()} time, left / right"
        _draw_ratios(frame, number, comparison, quantity, styles, label, "faster")
    ratios = in_both(comparison.table)
    ratios = ratios[ratios["quantity"] != "speedup"]
    answers = [
        answer(quantity, comparison.overall[quantity])
        for quantity in ("sparse", "dense")
        if quantity in comparison.overall
    ]
    finish(
        frame,
        comparison,
        "; ".join(answers) or "times: nothing to compare point by point",
        [channel_entries(comparison, styles), _kind_entries(TIME_KINDS)],
        [ERROR_BARS, *([chance(comparison, len(ratios))] if answers else [])],
    )
    columns = [
        *("layer", "out_channels", "sparsity", "implementation", "layout"),
        *("milliseconds", "sem", "rounds"),
    ]
    return frame.figure, _plotted(comparison, tables, columns, ratios)


def draw_errors(comparison: Comparison) -> tuple[Figure, pd.DataFrame]:
    """Figure 8 of two sides; ratios have no interval, as errors do not vary from run to run."""
    tables = [against_dense(side.results.errors) for side in (comparison.left, comparison.right)]
    frame = new_frame(comparison, below=2)
    styles = _draw_panels(
        frame,
        comparison,
        tables,
        "max_abs_error",
        "Maximum absolute error",
        ERROR_KINDS,
        kind_column="weights",
        error_bars=False,
    )
    frame.left.set_yscale("log")
    table = compare_errors(comparison)
    # Drawn as times are, with intervals of no length.
    ratios = in_both(table).dropna(subset=["ratio"])
    drawn = ratios.assign(
        **dict.fromkeys(COLUMNS[-5:-1], ratios["ratio"]), differs=ratios["ratio"] != 1
    )
    titles = {"packed": "Order of summation alone", "original": "FP16 quantisation included"}
    answers = []
    for axes, (kind, _, _) in zip(frame.below, ERROR_KINDS, strict=True):
        rows = drawn[drawn["weights"] == kind]
        draw_ratios(axes, rows, "out_channels", styles)
        title = f"{titles[kind]}: {_reach(rows['ratio'])}"
        finish_ratios(axes, comparison, ends(rows), None, title, "Error, right / left", "larger")
        if len(rows):
            answers.append(f"{_reach(rows['ratio'])} with {kind} weights")
    headline = f"error, right / left: {'; '.join(answers)}" if answers else "errors: no ratio"
    finish(
        frame,
        comparison,
        headline,
        [channel_entries(comparison, styles), _kind_entries(ERROR_KINDS)],
        [
            "Maximum over all outputs of one input, against dense PyTorch in FP32. Filled: the "
            "errors are not the same. The maximum over a larger batch is over more outputs.",
        ],
        timed=False,
    )
    columns = ["layer", "out_channels", "sparsity", "weights", "max_abs_error"]
    return frame.figure, _plotted(comparison, tables, columns, in_both(table))


def _draw_panels(
    frame: Frame,
    comparison: Comparison,
    tables: list[pd.DataFrame],
    value: str,
    label: str,
    kinds: list[Kind] | tuple = (),
    **options: object,
) -> dict[int, tuple[str, str]]:
    """Draw the table of each side into its panel; the styles of output channels in both."""
    styles = out_channel_styles(pd.concat(tables)["out_channels"])
    sides = (comparison.left, comparison.right)
    panels = (frame.left, frame.right)
    for panel, side, table in zip(panels, sides, tables, strict=True):
        draw_measured(panel, measured_rows(side, table), value, styles, kinds, **options)
        panel.set_xlabel("Sparsity")
    sparsity_axis(frame.left, sorted({*tables[0]["sparsity"], *tables[1]["sparsity"]}))
    frame.left.set_ylabel(label)
    frame.right.tick_params(labelleft=False)
    return styles


def _draw_ratios(
    frame: Frame,
    number: int,
    comparison: Comparison,
    quantity: str,
    styles: dict[int, tuple[str, str]],
    label: str,
    ahead: str,
) -> None:
    axes, overall = frame.below[number], comparison.overall.get(quantity)
    rows = in_both(comparison.table, quantity=quantity)
    draw_ratios(axes, rows, "out_channels", styles)
    title = counts(overall) if overall else ""
    if overall and len(frame.below) > 1:
        title = f"{quantity.capitalize()}: {title}"
    finish_ratios(axes, comparison, ends(rows), overall, title, label, ahead)


def _reach(ratios: pd.Series) -> str:
    if ratios.empty:
        return "no ratio"
    if (ratios == 1).all():
        return "the same"
    return f"{ratio_text(ratios.min())} to {ratio_text(ratios.max())}"


def _kind_entries(kinds: list[Kind]) -> list:
    return [legend_entry(text, color=GREY, linestyle=line) for _, text, line in kinds]


def _values(tables: list[pd.DataFrame], value: str) -> list[float]:
    return [
        end
        for table in tables
        for end in (
            *(table[value] - table["sem"].fillna(0)),
            *(table[value] + table["sem"].fillna(0)),
        )
    ]


def _images(times: pd.DataFrame, side: Side, comparison: Comparison) -> pd.Series:
    layers = side.results.layers
    return times["layer"].map(
        {name: layer.batch if comparison.per_image else 1 for name, layer in layers.items()}
    )


def _plotted(
    comparison: Comparison,
    tables: list[pd.DataFrame],
    columns: list[str],
    ratios: pd.DataFrame,
) -> pd.DataFrame:
    left, right = comparison.left.name, comparison.right.name
    return plotted(
        [
            panel_rows(tables[0][columns], "left", left),
            panel_rows(tables[1][columns], "right", right),
            panel_rows(ratios, "ratio", f"{left}--{right}"),
        ]
    )
