"""Quantities against sparsity, one series per number of output channels (figures 5, 6, 8)."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from packedconv.plots.captions import caption
from packedconv.plots.source import Source
from packedconv.plots.style import (
    ERROR_BARS,
    GREY,
    HOLLOW,
    PRINTED,
    legend_entry,
    new_figure,
    out_channel_styles,
    write_caption,
    write_title,
)

# How the markers of several measured devices in one panel are told apart; a hollow
# marker is a printed value.
_FILLS = ("full", "left", "top", "right", "bottom")

TICKS_ONLY = "the paper prints no values here,\nonly the ticks of the vertical axis"

# A way to draw one kind of series: value of the kind's column, legend text, line style.
Kind = tuple[str, str, str]


def series_figure(
    source: Source,
    data: pd.DataFrame,
    value: str,
    label: str,
    kinds: Sequence[Kind] = (),
    kind_column: str = "implementation",
    error_bars: bool = True,
    lines: Sequence[str] = (),
) -> tuple[Figure, Axes]:
    """Draw `data[value]` against sparsity, measured as lines and printed as hollow markers.

    data: columns origin, device, run, out_channels, sparsity, `value`, and `sem` (same unit)
    where error bars are drawn. `kinds` are the values of `kind_column` with their legend
    text and line style; without any, a series is told by its output channels alone.
    `lines` go into the caption where something was measured.
    """
    figure = new_figure(5.4, 3.6)
    axes = figure.add_subplot()
    axes.set(xlabel="Sparsity", ylabel=label)
    write_title(axes, source.title)
    styles = out_channel_styles(data["out_channels"])
    measured = data[data["origin"] == "measured"]
    devices = draw_measured(axes, measured, value, styles, kinds, kind_column, error_bars)
    _draw_printed(axes, data[data["origin"] == "printed"], value, styles)
    sparsity_axis(axes, _drawn_sparsities(source, data))
    add_note(axes, source.note)
    _legends(figure, data, styles, kinds if len(measured) else (), devices)
    measured_lines = list(lines) if source.results else []
    write_caption(figure, caption(source, error_bars) + measured_lines)
    return figure, axes


def add_note(axes: Axes, note: str, corner: bool = False) -> None:
    """Say why nothing measured is there, in the middle of the axes or the upper left corner.

    Nothing is drawn for an empty note.
    """
    if note:
        axes.text(
            0.03 if corner else 0.5,
            0.95 if corner else 0.5,
            note,
            transform=axes.transAxes,
            ha="left" if corner else "center",
            va="top" if corner else "center",
            fontsize=8,
            color=GREY,
            bbox={"facecolor": "white", "edgecolor": "#cccccc", "boxstyle": "round,pad=0.5"},
            gid="note",
        )


def printed_ticks(axes: Axes, source: Source, factor: float = 1.0) -> None:
    """The labelled ticks that the paper prints on the panel's vertical axis, and no values.

    `factor` takes base units to the unit of the axis. Raises ValueError where config/paper.yaml
    keeps no ticks of the panel.
    """
    ticks = [factor * tick for tick in source.published.ticks(source.panel, source.figure)]
    if not ticks:
        raise ValueError(
            f"config/paper.yaml: axis_ticks: expected those of figure {source.figure}, panel "
            f"{source.panel}, got none; add them"
        )
    if axes.get_yscale() == "log":
        limits = 0.8 * ticks[0], 1.25 * ticks[-1]
        labels = [_power(tick) for tick in ticks]
    else:
        margin = 0.05 * (ticks[-1] - ticks[0])
        limits = ticks[0] - margin, ticks[-1] + margin
        labels = [f"{tick:g}" for tick in ticks]
    axes.set_ylim(limits)
    axes.set_yticks(ticks, labels)
    axes.minorticks_off()
    for text in axes.texts:
        if text.get_gid() == "note":
            text.set_text(f"{text.get_text()}\n{TICKS_ONLY}")


def device_fills(data: pd.DataFrame) -> dict[tuple[str, str], str]:
    """Marker fill of each measured (device, run), in order of appearance."""
    measured = data[data["origin"] == "measured"]
    keys = list(dict.fromkeys(zip(measured["device"], measured["run"])))
    return {key: _FILLS[index % len(_FILLS)] for index, key in enumerate(keys)}


def side_legend(figure: Figure, *groups: list[Line2D]) -> None:
    """One legend to the right of the axes, its groups set apart; nothing without entries."""
    handles: list[Line2D] = []
    for group in groups:
        if handles and group:
            handles.append(legend_entry(" ", linestyle="none"))
        handles.extend(group)
    if handles:
        figure.legend(handles=handles, loc="outside right upper")


def printed_entry() -> Line2D:
    """Legend entry of hollow markers."""
    return legend_entry(PRINTED, marker="o", color=GREY, **HOLLOW)


def draw_measured(
    axes: Axes,
    data: pd.DataFrame,
    value: str,
    styles: dict[int, tuple[str, str]],
    kinds: Sequence[Kind] = (),
    kind_column: str = "implementation",
    error_bars: bool = True,
) -> dict[tuple[str, str], str]:
    """Draw the lines of measured rows, as `series_figure` takes them, onto axes.

    styles: of `out_channel_styles`. Returns the marker fill of each (device, run).
    """
    fills = device_fills(data)
    line_styles = {kind: line for kind, _, line in kinds}
    keys = ["device", "run", "out_channels", *([kind_column] if kinds else [])]
    for key, series in data.groupby(keys, sort=True):
        device, run, out_channels = key[:3]
        kind = key[3] if kinds else ""
        series = series.sort_values("sparsity")
        colour, marker = styles[out_channels]
        axes.errorbar(
            series["sparsity"],
            series[value],
            yerr=series["sem"] if error_bars else None,
            color=colour,
            marker=marker,
            fillstyle=fills[device, run],
            markerfacecoloralt="white",
            linestyle=line_styles.get(kind, "-"),
            label=series_label("measured", device, run, out_channels, kind),
            **ERROR_BARS,
        )
    return fills


def _draw_printed(
    axes: Axes, data: pd.DataFrame, value: str, styles: dict[int, tuple[str, str]]
) -> None:
    for out_channels, series in data.groupby("out_channels", sort=True):
        colour, marker = styles[out_channels]
        axes.plot(
            series["sparsity"],
            series[value],
            marker=marker,
            color=colour,
            markersize=6.5,
            markeredgewidth=1.2,
            zorder=3,
            label=series_label("printed", out_channels=out_channels),
            **HOLLOW,
        )


def series_label(
    origin: str, device: str = "", run: str = "", out_channels: int | None = None, kind: str = ""
) -> str:
    """Name of a drawn series, by which tests find it: `measured cpu paper 64 sparse`."""
    parts = (origin, device, run, "" if out_channels is None else str(out_channels), kind)
    return " ".join(part for part in parts if part)


def _drawn_sparsities(source: Source, data: pd.DataFrame) -> list[float]:
    values = sorted(data["sparsity"].unique())
    if not values and source.panel is not None:
        values = source.published.sparsities(source.family, (source.figure,))
    return values


def sparsity_axis(axes: Axes, values: Iterable[float]) -> None:
    """Set the horizontal axis around these sparsities, ticks at whole hundredths."""
    values = list(values)
    if len(values) < 2:
        values = [*values, 0.90, 0.98]
    low, high = min(values), max(values)
    ticks = np.arange(round(100 * low), round(100 * high) + 1) / 100
    margin = 0.04 * (high - low)
    axes.set_xlim(low - margin, high + margin)
    step = -(-len(ticks) // 10)
    axes.set_xticks(ticks[::step], [f"{tick:.2f}" for tick in ticks[::step]])


def _legends(
    figure: Figure,
    data: pd.DataFrame,
    styles: dict[int, tuple[str, str]],
    kinds: Iterable[Kind],
    devices: dict[tuple[str, str], str],
) -> None:
    # Largest OC first, as in the paper's legends.
    measured = set(data.loc[data["origin"] == "measured", "out_channels"])
    channels = [
        legend_entry(
            f"OC = {value}",
            color=colour,
            marker=marker,
            **({} if value in measured else HOLLOW),
        )
        for value, (colour, marker) in sorted(styles.items(), reverse=True)
    ]
    others: list[Line2D] = [
        legend_entry(text, color=GREY, linestyle=line) for _, text, line in kinds
    ]
    if len(devices) > 1:
        for (device, run), fill in devices.items():
            others.append(
                legend_entry(
                    f"{device}, {run}",
                    linestyle="none",
                    marker="o",
                    color=GREY,
                    fillstyle=fill,
                    markerfacecoloralt="white",
                )
            )
    if (data["origin"] == "printed").any():
        others.append(printed_entry())
    side_legend(figure, channels, others)


def _power(value: float) -> str:
    mantissa, exponent = f"{value:e}".split("e")
    factor = "" if float(mantissa) == 1 else rf"{float(mantissa):g}\times "
    return rf"${factor}10^{{{int(exponent)}}}$"
