"""Figures of a GPU's experiments: the ablation over mappings, and the fixed cost."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from packedconv.evidence.experiments import Experiment
from packedconv.evidence.samples import clock_notes
from packedconv.layer import Layer
from packedconv.plots.captions import shapes
from packedconv.plots.series import side_legend
from packedconv.plots.style import (
    GREY,
    legend_entry,
    new_figure,
    out_channel_styles,
    write_caption,
)
from packedconv.settings import layers_of

ROW_MARKERS = {1: "o", 2: "s", 4: "^", 8: "D"}
SLICE_COLOURS = {1: "#332288", 2: "#44AA99", 4: "#CC6677"}
LINES = {"sparse": "-", "sparse_column": "--"}
COLUMNS_PER_WARP = (4, 8, 16, 32)
MEDIAN = "Median over executions, each the mean over a pair of events around several of them."
KERNELS = {"sparse": "the paper's kernel", "sparse_column": "column kernel"}


def ablation_figure(experiment: Experiment) -> Figure:
    """Time of every mapping: a row of axes per layer, a column per sparsity.

    Across: COL_PER_WARP, and within it rows per thread. The fastest mapping is ringed.
    """
    table = experiment.table
    channels = sorted(table["out_channels"].unique())
    sparsities = sorted(table["sparsity"].unique())
    figure = new_figure(2.0 + 2.6 * len(sparsities), 0.9 + 1.7 * len(channels))
    axes = figure.subplots(len(channels), len(sparsities), sharex=True, squeeze=False)
    for row, count in enumerate(channels):
        for column, sparsity in enumerate(sparsities):
            part = table[(table["out_channels"] == count) & (table["sparsity"] == sparsity)]
            _draw_mappings(axes[row][column], part.dropna(subset="seconds"))
            axes[row][column].set_title(f"OC = {count}, S = {sparsity:.2f}", fontsize=8)
        axes[row][0].set_ylabel("Time (ms)")
    for bottom in axes[-1]:
        bottom.set_xlabel("COL_PER_WARP")
    side_legend(
        figure,
        [
            legend_entry(f"R = {rows}", marker=marker, color=GREY, linestyle="none")
            for rows, marker in ROW_MARKERS.items()
        ],
        [
            legend_entry(
                f"{slices} slice{'s' if slices > 1 else ''}",
                marker="o",
                color=colour,
                linestyle="none",
            )
            for slices, colour in SLICE_COLOURS.items()
        ],
        [
            legend_entry(
                "fastest", marker="o", color="black", markerfacecolor="none", linestyle="none"
            )
        ],
    )
    left_out = int(table["skipped"].notna().sum())
    lines = [
        *_caption(experiment),
        "Every compiled mapping of the paper's kernel with 1, 2 and 4 slices; R: rows per thread; "
        "markers of one kind differ in warps per block. " + MEDIAN,
    ]
    if left_out:
        lines.append(f"{left_out} of {len(table)} were left out; the CSV has their reasons.")
    write_caption(figure, lines)
    return figure


def _draw_mappings(axes: Axes, part: pd.DataFrame) -> None:
    for row in part.itertuples():
        axes.plot(
            [_place(row.col_per_warp, row.rows_per_thread)],
            [1e3 * row.seconds],
            marker=ROW_MARKERS[row.rows_per_thread],
            color=SLICE_COLOURS.get(row.slices, GREY),
            markersize=3,
            alpha=0.8,
            linestyle="none",
        )
    if len(part):
        best = part.loc[part["seconds"].idxmin()]
        axes.plot(
            [_place(best["col_per_warp"], best["rows_per_thread"])],
            [1e3 * best["seconds"]],
            marker="o",
            markersize=9,
            color="black",
            markerfacecolor="none",
            linestyle="none",
        )
        axes.set_ylim(0, 1.05e3 * part["seconds"].max())
    axes.set_xticks(range(len(COLUMNS_PER_WARP)), [str(width) for width in COLUMNS_PER_WARP])
    axes.set_xlim(-0.5, len(COLUMNS_PER_WARP) - 0.5)


def _place(col_per_warp: int, rows_per_thread: int) -> float:
    """Where a mapping stands across: about the tick of its COL_PER_WARP, by its R."""
    within = sorted(ROW_MARKERS).index(rows_per_thread) - (len(ROW_MARKERS) - 1) / 2
    return COLUMNS_PER_WARP.index(col_per_warp) + 0.18 * within


def fixed_cost_figure(experiment: Experiment) -> Figure:
    """Left: time of both kernels against nonzeros, down to an empty weight. Right: what is left
    at no nonzeros, with 1 to 8 slices, beside plain kernels, for the most output channels."""
    table = experiment.table
    figure = new_figure(9.0, 3.8)
    left, right = figure.subplots(1, 2)
    styles = out_channel_styles(table["out_channels"])
    lines = table[(table["experiment"] == "nonzeros") & table["seconds"].notna()]
    for (count, implementation), part in lines.groupby(["out_channels", "implementation"]):
        colour, marker = styles[count]
        part = part.sort_values("nonzeros")
        left.plot(
            part["nonzeros"].astype(float) / 1e3,
            1e3 * part["seconds"],
            color=colour,
            marker=marker,
            linestyle=LINES[implementation],
            label=f"{implementation} {count}",
        )
    left.set(xlabel="Nonzeros (thousands)", ylabel="Time (ms)")
    left.set_xlim(left=0)
    left.set_ylim(bottom=0)
    largest = int(table["out_channels"].max())
    _draw_parts(right, table[table["out_channels"] == largest])
    right.set_title(f"No nonzeros, OC = {largest}", fontsize=8)
    side_legend(
        figure,
        [
            legend_entry(f"OC = {count}", color=colour, marker=marker)
            for count, (colour, marker) in sorted(styles.items(), reverse=True)
        ],
        [legend_entry(text, color=GREY, linestyle=LINES[name]) for name, text in KERNELS.items()],
    )
    skipped = table.dropna(subset="skipped")
    write_caption(
        figure,
        [
            *_caption(experiment),
            "Every bar and point was timed by itself, and leaves something out: an empty weight "
            "the multiply-adds (launch, tile fill and stores stay); every further slice fills the "
            "tile again; fill only stores the output; copy loads as much as it stores; launch "
            "stores one number, which is about the time of its call. None is a remainder. "
            + MEDIAN,
            *(
                f"Not timed: {row.experiment}, {row.implementation}, OC {row.out_channels}: "
                f"{row.skipped}."
                for row in skipped.drop_duplicates(["experiment", "implementation"]).itertuples()
            ),
        ],
    )
    return figure


def _draw_parts(axes: Axes, table: pd.DataFrame) -> None:
    table = table[table["seconds"].notna()]
    bars = []
    sliced = table[(table["experiment"] == "slices") & (table["nonzeros"] == 0)]
    for row in sliced.sort_values("slices").itertuples():
        bars.append((f"paper's kernel,\n{row.slices} slice{'s' if row.slices > 1 else ''}", row))
    column = table[
        (table["experiment"] == "nonzeros")
        & (table["nonzeros"] == 0)
        & (table["implementation"] == "sparse_column")
    ]
    bars += [("column kernel", row) for row in column.itertuples()]
    for experiment, implementation, label in (
        ("stores", "copy", "copy of the output"),
        ("stores", "fill", "fill of the output"),
        ("launch", "fill", "launch"),
    ):
        part = table[
            (table["experiment"] == experiment) & (table["implementation"] == implementation)
        ]
        bars += [(label, row) for row in part.itertuples()]
    places = np.arange(len(bars))
    values = np.array([row.seconds for _, row in bars])
    spread = np.array([[row.seconds - row.fastest, row.slowest - row.seconds] for _, row in bars])
    axes.barh(
        places,
        1e3 * values,
        xerr=1e3 * spread.T if len(bars) else None,
        color="#88CCEE",
        error_kw={"elinewidth": 0.8},
    )
    axes.set_yticks(places, [label for label, _ in bars], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("Time (ms), bars: fastest to slowest execution")


def _caption(experiment: Experiment) -> list[str]:
    settings = experiment.settings
    layers: list[Layer] = layers_of(settings)
    return [
        f"{experiment.title} (device {settings['device']['name']}, run {settings['run']}). "
        f"{shapes(layers)}.",
        *clock_notes(experiment.facts),
    ]
