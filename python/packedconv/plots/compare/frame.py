"""What the figures of a comparison share: panels, titles, ratios with intervals, captions."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from packedconv.evidence.compare.ratios import BOTH, Comparison, Overall
from packedconv.evidence.compare.side import Side
from packedconv.evidence.compare.words import nothing_in_both, warnings
from packedconv.evidence.samples import Results, clock_notes, listed
from packedconv.plots.captions import measurement
from packedconv.plots.series import sparsity_axis
from packedconv.plots.style import (
    GREY,
    caption_room,
    legend_entry,
    new_figure,
    wrap,
    write_caption,
    write_title,
)

WIDTH = 7.2
# How the sides are told apart in one pair of axes: colour, marker, line.
SIDES = (("#222222", "o", "-"), ("#D55E00", "s", "--"))
BUSY = "#B03A00"
# From this range of values on a logarithmic axis shows more.
WIDE_RANGE = 12.0
# Ratios nearer to 1 than this are not spread over the whole height.
_LEAST_RANGE = 1.12
# Ratios that all lie further from 1 than this have axes without it.
_FAR = 4.0
_BAND = {"color": "#000000", "alpha": 0.08, "linewidth": 0, "zorder": 0.5}


class Frame(NamedTuple):
    """A figure with a panel for each side, and axes below for what compares them."""

    figure: Figure
    left: Axes
    right: Axes
    legend: Axes
    below: tuple[Axes, ...]


def new_frame(comparison: Comparison, below: int = 1, heights: tuple = (2.5, 1.75)) -> Frame:
    """Panels titled by their side, with shared axes, over `below` axes in one row.

    heights: of the two rows, in inches.
    """
    figure = new_figure(WIDTH, sum(heights) + 1.1)
    lower = ["below"] * 2 if below == 1 else ["below", "beside"]
    # The legend stands in axes of no height, for which the layout makes room.
    axes = figure.subplot_mosaic(
        [["left", "right"], ["legend"] * 2, lower], height_ratios=(heights[0], 0.01, heights[1])
    )
    axes["legend"].set_axis_off()
    axes["right"].sharex(axes["left"])
    axes["right"].sharey(axes["left"])
    for side, panel in ((comparison.left, axes["left"]), (comparison.right, axes["right"])):
        _title_panel(panel, side)
    return Frame(
        figure,
        axes["left"],
        axes["right"],
        axes["legend"],
        tuple(axes[name] for name in dict.fromkeys(lower)),
    )


def finish(
    frame: Frame,
    comparison: Comparison,
    headline: str,
    groups: Sequence[Sequence[Line2D]],
    lines: Iterable[str],
    timed: bool = True,
) -> None:
    """Write the answer above, the legend and the conditions of both sides below."""
    figure = frame.figure
    height = figure.get_size_inches()[1]
    handles = [handle for group in groups for handle in group]
    columns = next(
        (count for count in range(min(len(handles), 8), 0, -1) if _fits(handles, count)), 1
    )
    frame.legend.legend(
        handles=_by_rows(handles, columns), loc="center", ncols=columns, borderaxespad=0
    )
    small = [*_measured(comparison, timed), *lines]
    strong = warnings(comparison)
    # Panels are as high whatever there is to say.
    figure.set_size_inches(WIDTH, height + caption_room([*strong, *small], WIDTH))
    write_caption(figure, small, strong)
    # Bold letters are wider than those that lines are measured by.
    title = wrap(headline[0].upper() + headline[1:], 9, 72 * 0.86 * WIDTH)
    figure.suptitle("\n".join(title), x=0.1 / WIDTH, ha="left", fontsize=9, fontweight="bold")


def channel_entries(comparison: Comparison, styles: dict[int, tuple[str, str]]) -> list[Line2D]:
    """Legend entries of the numbers of output channels, those of one side alone named as such."""
    both = {pair.out_channels for pair in comparison.pairs}
    alone: dict[int, list[str]] = {}
    for name, layers in (("left", comparison.only_left), ("right", comparison.only_right)):
        for layer in layers:
            alone.setdefault(layer.out_channels, []).append(name)
    entries = []
    for channels, (colour, marker) in sorted(styles.items()):
        text = f"OC = {channels}"
        if channels not in both:
            sides = alone[channels]
            text += f" ({sides[0]} only)" if len(sides) == 1 else " (of two shapes)"
        entries.append(legend_entry(text, color=colour, marker=marker))
    return entries


def draw_ratios(
    axes: Axes,
    rows: pd.DataFrame,
    series: str,
    styles: dict[Any, tuple[str, str]],
    names: Callable[[Any], str] = str,
) -> None:
    """Draw ratios against sparsity, the series of a sparsity side by side.

    rows: `ratios.COLUMNS` of points in both; `series` names the column that tells them apart, and
    `styles` has colour and marker of each of its values.
    """
    keys = [key for key in styles if key in set(rows[series])]
    step = _step(rows["sparsity"])
    if keys:
        sparsity_axis(axes, sorted(rows["sparsity"].unique()))
        axes.set_xlim(rows["sparsity"].min() - 0.5 * step, rows["sparsity"].max() + 0.5 * step)
    axes.set_xlabel("Sparsity")
    for rank, key in enumerate(keys):
        found = rows[rows[series] == key].sort_values("sparsity")
        colour, marker = styles[key]
        shift = (rank - (len(keys) - 1) / 2) * 0.7 * step / max(len(keys), 2)
        x = found["sparsity"] + shift
        ends = {
            name: [found["ratio"] - found[f"{name}_low"], found[f"{name}_high"] - found["ratio"]]
            for name in ("ratio", "rounds")
        }
        for name, width in (("ratio", 0.6), ("rounds", 1.8)):
            axes.errorbar(
                x,
                found["ratio"],
                yerr=[end.clip(lower=0) for end in ends[name]],
                linestyle="none",
                ecolor=colour,
                elinewidth=width,
                capsize=0,
                zorder=3,
                label=f"{name} {names(key)}",
            )
        differs = found["differs"].fillna(False).astype(bool).to_numpy()
        for chosen, face in ((differs, colour), (~differs, "white")):
            axes.plot(
                x[chosen],
                found["ratio"][chosen],
                linestyle="none",
                marker=marker,
                color=colour,
                markerfacecolor=face,
                markeredgewidth=0.9,
                zorder=4,
                label=f"{'differs' if face != 'white' else 'same'} {names(key)}",
            )


def finish_ratios(
    axes: Axes,
    comparison: Comparison,
    values: Iterable[float],
    overall: Overall | None,
    title: str,
    label: str,
    ahead: str = "",
) -> None:
    """Scale axes of ratios around 1, mark their mean, and say which way is whose.

    values: all that has to be seen, ends of intervals too. `ahead` is what the side in front is:
    "larger", "faster".
    """
    write_title(axes, title, 0.9 if len(axes.get_figure().axes) == 4 else 0.44, fontsize=8)
    axes.set_ylabel(label)
    values = [value for value in values if value > 0 and math.isfinite(value)]
    if not values:
        axes.set(xticks=[], yticks=[], xlabel="")
        axes.grid(visible=False)
        axes.text(
            0.5,
            0.5,
            nothing_in_both(comparison),
            transform=axes.transAxes,
            ha="center",
            va="center",
            color=GREY,
            bbox={"facecolor": "white", "edgecolor": "#cccccc", "boxstyle": "round,pad=0.5"},
            gid="note",
        )
        return
    if overall is not None:
        axes.axhspan(overall.low, overall.high, **_BAND)
        axes.axhline(overall.ratio, color="#222222", linewidth=0.8, linestyle="--", zorder=1)
        values += [overall.low, overall.high]
    if min(values) / _FAR < 1 < max(values) * _FAR:
        values.append(1.0)
        axes.axhline(1, color="#222222", linewidth=0.8, linestyle=":", zorder=1)
    ratio_scale(axes, values)
    if ahead:
        low, high = (math.log(end) for end in axes.get_ylim())
        for side, y, shown, mark in (
            ("right", 0.985, high > 0.15 * (high - low), "▲"),
            ("left", 0.015, -low > 0.15 * (high - low), "▼"),
        ):
            if shown:
                axes.text(
                    0.995,
                    y,
                    f"{mark} {ahead} on the {side}",
                    transform=axes.transAxes,
                    ha="right",
                    va="top" if side == "right" else "bottom",
                    fontsize=6,
                    color=GREY,
                    zorder=6,
                    bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
                )


def ratio_scale(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic vertical axis around positive ratios, ticks in plain numbers."""
    low, high = min(values), max(values)
    if high / low < _LEAST_RANGE**2:
        middle = math.sqrt(low * high)
        low, high = min(low, middle / _LEAST_RANGE), max(high, middle * _LEAST_RANGE)
    margin = (high / low) ** 0.15
    plain_log(axes, low / margin, high * margin)


def plain_log(axes: Axes, low: float, high: float) -> None:
    """A logarithmic vertical axis from low to high, ticks in plain numbers."""
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    if high / low < 4:
        ticks = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    else:
        digits = (1, 2, 3, 5, 7) if high / low < 10 else (1, 2, 5) if high / low < 300 else (1,)
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [digit * 10.0**exponent for exponent in exponents for digit in digits]
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def scale_values(axes: Axes, values: Iterable[float], mark: float | None = None) -> None:
    """Linear from 0, or logarithmic where the values span more than a linear axis shows.

    mark: a value that is to be seen too.
    """
    values = [value for value in values if value > 0]
    low, high = min(values), max(values)
    marks = [] if mark is None else [mark]
    if high / low > WIDE_RANGE:
        plain_log(axes, min([low, *marks]) / 1.25, max([high, *marks]) * 1.25)
    else:
        axes.set_ylim(0, 1.06 * max([high, *marks]))


def in_both(table: pd.DataFrame, **fields: Any) -> pd.DataFrame:
    """Rows of points that both sides have, with these values."""
    chosen = table["side"] == BOTH
    for name, value in fields.items():
        chosen &= table[name] == value
    return table[chosen]


def ends(rows: pd.DataFrame) -> list[float]:
    """Both ends of the ratios' intervals."""
    return [*rows["ratio_low"], *rows["ratio_high"]]


def panel_rows(frame: pd.DataFrame, panel: str, name: str) -> pd.DataFrame:
    """Plotted data of a panel, named for the CSV."""
    return frame.drop(columns=["device", "run"], errors="ignore").assign(panel=panel, results=name)


def plotted(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """All plotted data of a figure, `panel` (left, right, ratio) and `results` first."""
    data = pd.concat([part for part in parts if len(part)], ignore_index=True)
    front = ["panel", "results"]
    return data[[*front, *(column for column in data if column not in front)]]


def measured_rows(side: Side, frame: pd.DataFrame) -> pd.DataFrame:
    """A table of one side as the drawing of a device takes it."""
    return frame.assign(origin="measured", device=side.results.device, run=side.results.run)


def _title_panel(axes: Axes, side: Side) -> None:
    hardware = "" if side.hardware == side.name else side.hardware
    busy = f"machine busy: OC {listed(side.busy)}" if side.busy else ""
    write_title(
        axes,
        "  ".join(filter(None, [side.name, hardware])),
        0.41,
        fontsize=8,
        pad=15 if busy else None,
    )
    if busy:
        axes.text(
            0,
            1.02,
            busy,
            transform=axes.transAxes,
            fontsize=7,
            color=BUSY,
            va="bottom",
            gid="busy",
        )


def _measured(comparison: Comparison, timed: bool) -> list[str]:
    left, right = comparison.left.results, comparison.right.results
    first, second = (_quiet(measurement(results, timed), results) for results in (left, right))
    if second.replace(f"run {right.run})", f"run {left.run})") == first:
        second = "the same, as far as this line goes."
    return [f"Left: {first}", f"Right: {second}"]


def _quiet(text: str, results: Results) -> str:
    """A caption's line without what the warnings above it say."""
    for note in clock_notes(results.facts):
        text = text.replace(f" {note}", "")
    return text


def _step(sparsities: Iterable[float]) -> float:
    values = np.unique(list(sparsities))
    return float(np.diff(values).min()) if len(values) > 1 else 0.01


def _fits(handles: Sequence[Line2D], columns: int) -> bool:
    rows = [handles[start : start + columns] for start in range(0, len(handles), columns)]
    widest = [
        max(len(str(row[column].get_label())) for row in rows if column < len(row))
        for column in range(min(columns, len(handles)))
    ]
    # Inches of a letter and of a handle with its gaps, at the size of legends.
    return sum(0.055 * letters + 0.52 for letters in widest) < WIDTH - 0.3


def _by_rows(handles: Sequence[Line2D], columns: int) -> list[Line2D]:
    """Entries in the order in which a legend, which fills columns, shows them row by row."""
    rows = -(-len(handles) // columns)
    padded = [*handles, *(legend_entry(" ", linestyle="none") for _ in range(rows * columns))]
    return [padded[row * columns + column] for column in range(columns) for row in range(rows)]
