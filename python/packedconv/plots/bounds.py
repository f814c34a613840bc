"""Lower bounds of the sparse convolution's time on a GPU, a panel per number of output channels.

A page of its own: a bound is never drawn among measurements.
"""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from packedconv.evidence.bounds import COLUMN, FIXED, IMPLIED, MEMORY, SHARED
from packedconv.plots.series import side_legend
from packedconv.plots.style import (
    GREY,
    HOLLOW,
    ROOF_COLOUR,
    legend_entry,
    new_figure,
    write_caption,
)

TITLE = "lower bounds, nothing measured"

# Colours of Paul Tol's "muted" set that no number of output channels has next to it here.
KERNELS = {
    COLUMN: "#882255",
    "paper, COL_PER_WARP 32": "#332288",
    "paper, COL_PER_WARP 16": "#44AA99",
    "paper, COL_PER_WARP 8": "#DDAA33",
}
FLOORS = {
    MEMORY: {"color": GREY, "linestyle": "-", "linewidth": 0.9},
    SHARED: {"color": ROOF_COLOUR, "linestyle": (0, (5, 2)), "linewidth": 0.9},
}
SLOWEST = {"color": GREY, "linestyle": (0, (7, 2, 1.5, 2)), "linewidth": 0.9}
ISSUE = {"linestyle": (0, (1, 1)), "linewidth": 0.9}
PRINTED_COLOUR = "#CC6677"
FIXED_LINE = {"color": PRINTED_COLOUR, "linestyle": (0, (6, 2, 1, 2)), "linewidth": 0.9}


def draw_bounds(title: str, data: pd.DataFrame, lines: Sequence[str]) -> Figure:
    """Draw the table of `evidence.bounds.bounds_table`; `lines` are the caption.

    Solid: bounds of kernels; dotted in their colour: their issue floor alone.
    """
    model = data[data["origin"] == "model"]
    channels = sorted(model["out_channels"].unique())
    columns = min(3, len(channels))
    rows = -(-len(channels) // columns)
    figure = new_figure(8.2, 1.6 + 1.95 * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    figure.suptitle(f"{title}: {TITLE}", fontsize=9, x=0.01, ha="left")
    slowest = _slowest_memory(model)
    for axes, count in zip(grid.flat, channels):
        _draw_channels(axes, model[model["out_channels"] == count], slowest)
        _draw_printed(axes, data[(data["origin"] == "printed") & (data["out_channels"] == count)])
        axes.set_title(f"OC = {count}")
    for axes in list(grid.flat)[len(channels) :]:
        axes.remove()
    _set_axes(grid, data)
    side_legend(figure, *_entries(data, slowest))
    write_caption(figure, lines)
    return figure


def _draw_channels(axes: Axes, data: pd.DataFrame, slowest: str | None) -> None:
    floors = {**FLOORS, **({slowest: SLOWEST} if slowest else {})}
    for series, style in floors.items():
        rows = data[data["series"] == series]
        axes.plot(rows["sparsity"], rows["milliseconds"], label=f"floor {series}", **style)
    for series, colour in KERNELS.items():
        rows = data[data["series"] == series]
        axes.plot(
            rows["sparsity"],
            rows["milliseconds"],
            color=colour,
            label=f"bound {series}",
            **_bound_style(series),
        )
        if rows["issue_ms"].notna().any():
            axes.plot(
                rows["sparsity"], rows["issue_ms"], color=colour, label=f"issue {series}", **ISSUE
            )


def _draw_printed(axes: Axes, data: pd.DataFrame) -> None:
    implied = data[data["quantity"] == IMPLIED]
    if len(implied):
        axes.plot(
            implied["sparsity"],
            implied["milliseconds"],
            marker="o",
            color=PRINTED_COLOUR,
            markersize=6,
            markeredgewidth=1.2,
            label=IMPLIED,
            **HOLLOW,
        )
    for value in data.loc[data["quantity"] == FIXED, "milliseconds"]:
        axes.axhline(value, label=FIXED, **FIXED_LINE)


def _set_axes(grid, data: pd.DataFrame) -> None:
    sparsities = sorted(data["sparsity"].dropna().unique())
    low, high = sparsities[0], sparsities[-1]
    margin = 0.05 * (high - low)
    drawn = pd.concat([data["milliseconds"], data["issue_ms"]]).dropna()
    drawn = drawn[data["series"].reindex(drawn.index) != "FP32"]
    for axes in grid.flat:
        axes.set(yscale="log", ylim=(0.75 * drawn.min(), 1.35 * drawn.max()))
        axes.set_xlim(low - margin, high + margin)
        axes.set_xticks(sparsities[::2], [f"{value:.2f}" for value in sparsities[::2]])
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    for axes in grid[-1]:
        axes.set_xlabel("Sparsity")
    for axes in grid[:, 0]:
        axes.set_ylabel("Time (ms)")


def _bound_style(series: str) -> dict[str, float]:
    """Thin and on top for the column kernel, so that both show where another coincides."""
    if series == COLUMN:
        return {"linewidth": 1.1, "zorder": 4}
    return {"linewidth": 2.2, "zorder": 3}


def _slowest_memory(model: pd.DataFrame) -> str | None:
    """The memory floor of the variant with the least bandwidth, where one is below the first."""
    floors = model[model["series"].str.startswith(MEMORY)].groupby("series")["milliseconds"].max()
    slowest = floors.idxmax()
    return None if slowest == MEMORY else slowest


def _entries(data: pd.DataFrame, slowest: str | None) -> list[list]:
    floors = [
        legend_entry("memory", **FLOORS[MEMORY]),
        *([legend_entry(slowest, **SLOWEST)] if slowest else []),
        legend_entry("one shared load\nper FMA", **FLOORS[SHARED]),
    ]
    kernels = [
        legend_entry(series.replace("paper, ", "paper,\n"), color=colour, **_bound_style(series))
        for series, colour in KERNELS.items()
    ]
    if data["issue_ms"].notna().any():
        kernels.append(legend_entry("issue floor alone", color=GREY, **ISSUE))
    printed = []
    if (data["origin"] == "printed").any():
        printed = [
            legend_entry(
                "implied by printed\nthroughputs", marker="o", color=PRINTED_COLOUR, **HOLLOW
            ),
            legend_entry("fixed part that\nthey imply", **FIXED_LINE),
        ]
    return [kernels, floors, printed]
