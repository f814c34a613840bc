"""Figure 3: which thread of a warp computes which outputs, from a kernel's configuration."""

import itertools
from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from packedconv.plots.cells import draw_cells, drawing, frame
from packedconv.plots.style import GREY

WARP = 32
OUT_CHANNELS = 32
_COLUMN_COLOURS = ("#cfe8f7", "#fde3c8", "#d9ead3", "#e8d9ee")
_FRAME_COLOURS = ("#3b7ea1", "#c77d2b", "#4d8a3d", "#80589a")
_LEFT = 4.6


def mapping_shape(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(columns, channel lanes, rows) of a warp: COL_PER_WARP, 32 / COL_PER_WARP and R.

    Raises ValueError for a configuration that does not divide a warp.
    """
    columns, rows = config["col_per_warp"], config["rows_per_thread"]
    if columns < 1 or WARP % columns:
        raise ValueError(f"col_per_warp: expected a divisor of {WARP}, got {columns}")
    if rows < 1:
        raise ValueError(f"rows_per_thread: expected at least 1, got {rows}")
    return columns, WARP // columns, rows


def lanes(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(column, channel lane) of each lane of a warp.

    As the kernel's own tables `column_of_lane` and `channel_lane_of_lane` say; without
    them lane = column · (32 / COL_PER_WARP) + channel lane (paper section 5.2).
    """
    _, channel_lanes, _ = mapping_shape(config)
    if "column_of_lane" not in config:
        return [divmod(lane, channel_lanes) for lane in range(WARP)]
    pairs = list(zip(config["column_of_lane"], config["channel_lane_of_lane"], strict=True))
    if len(set(pairs)) != WARP:
        raise ValueError(f"column_of_lane: expected {WARP} different lanes, got {len(set(pairs))}")
    return pairs


def mapping_table(config: Mapping[str, Any], out_channels: int = OUT_CHANNELS) -> pd.DataFrame:
    """One row per (row, step, lane): who computes which output channel of which pixel.

    A thread steps over output channels by 32 / COL_PER_WARP (paper section 5.2).
    """
    _, channel_lanes, rows = mapping_shape(config)
    steps = -(-out_channels // channel_lanes)
    records = []
    for row in range(rows):
        for step in range(steps):
            for lane, (column, channel_lane) in enumerate(lanes(config)):
                out_channel = channel_lane + step * channel_lanes
                if out_channel < out_channels:
                    records.append((row, step, lane, column, channel_lane, out_channel))
    columns = ["row", "step", "lane", "column", "channel_lane", "out_channel"]
    return pd.DataFrame.from_records(records, columns=columns)


def draw_mapping(config: Mapping[str, Any], out_channels: int = OUT_CHANNELS) -> Figure:
    """Draw the output tile of a warp and, per row, the lanes over the steps."""
    columns, channel_lanes, rows = mapping_shape(config)
    table = mapping_table(config, out_channels)
    steps = int(table["step"].max()) + 1
    column_of = [column for column, _ in lanes(config)]
    computed = {
        (entry.row, entry.step, entry.lane): entry.out_channel for entry in table.itertuples()
    }

    tile_top, tile_side = 2.6, 1.6
    first_block = tile_top + rows * tile_side + 3.0
    block = steps + 2.6
    width, height = _LEFT + WARP + 0.8, first_block + rows * block + 0.6
    figure, axes = drawing(width, height, 0.19)

    def colour(column: int) -> str:
        return _COLUMN_COLOURS[column % len(_COLUMN_COLOURS)]

    def outline(column: int) -> str:
        return _FRAME_COLOURS[column % len(_FRAME_COLOURS)]

    tile_left = _LEFT + (WARP - columns * tile_side) / 2
    axes.text(
        _LEFT,
        0.8,
        f"Output tile of one warp: {_count(columns, 'column')} × {_count(rows, 'row')} "
        f"× {_count(out_channels, 'channel')}",
        fontsize=8,
        fontweight="bold",
        va="center",
    )
    for column in range(columns):
        axes.text(
            tile_left + (column + 0.5) * tile_side,
            tile_top - 0.5,
            f"ow$_{{{column}}}$",
            fontsize=7 if columns <= 8 else 5,
            ha="center",
            va="center",
            color=outline(column),
        )
    for row in range(rows):
        axes.text(
            tile_left - 0.4,
            tile_top + (row + 0.5) * tile_side,
            f"h = {row}",
            fontsize=7,
            ha="right",
            va="center",
        )
    draw_cells(
        axes,
        tile_left,
        tile_top,
        rows,
        columns,
        fill=lambda row, column: colour(column),
        width=tile_side,
        height=tile_side,
    )

    for row in range(rows):
        top = first_block + row * block
        axes.text(0.3, top + steps / 2, f"h = {row}", fontsize=8, fontweight="bold", va="center")
        if row == 0:
            for column, first, last in _groups(column_of):
                threads = f"{first}–{last}" if last > first else str(first)
                if columns <= 8:
                    threads = ("threads " if channel_lanes > 2 else "") + threads
                _heading(axes, first, last, top - 0.6, threads, outline(column), columns)
                if columns <= 8:
                    name = f"column {column}"
                    _heading(axes, first, last, top - 1.6, name, outline(column), columns)
        draw_cells(
            axes,
            _LEFT,
            top,
            steps,
            WARP,
            fill=lambda step, lane, row=row: (
                colour(column_of[lane]) if (row, step, lane) in computed else "#ffffff"
            ),
            text=lambda step, lane, row=row: str(computed.get((row, step, lane), "")),
            fontsize=5.5,
        )
        for column, first, last in _groups(column_of):
            frame(axes, _LEFT + first, top, last + 1 - first, steps, outline(column))
        for step in range(steps):
            axes.text(
                _LEFT - 0.3, top + step + 0.5, f"step {step}", fontsize=5.5, ha="right", va="center"
            )
        for lane in range(WARP):
            axes.text(
                _LEFT + lane + 0.5,
                top + steps + 0.5,
                str(lane),
                fontsize=4.2,
                ha="center",
                va="center",
                color=GREY,
            )
        axes.text(
            _LEFT - 0.3, top + steps + 0.5, "lane", fontsize=5, ha="right", va="center", color=GREY
        )
    axes.text(
        0.3,
        height - 0.6,
        "The number in a cell is the output channel (OC) that the thread computes in that step; "
        f"a thread holds one accumulator per row, here {rows}.",
        fontsize=5.8,
        color=GREY,
        va="center",
    )
    return figure


def _groups(column_of: list[int]) -> list[tuple[int, int, int]]:
    """(column, first lane, last lane) of neighbouring lanes of one column."""
    groups = []
    for column, members in itertools.groupby(range(WARP), key=lambda lane: column_of[lane]):
        lane_list = list(members)
        groups.append((column, lane_list[0], lane_list[-1]))
    return groups


def _heading(
    axes: Axes, first: int, last: int, y: float, text: str, colour: str, columns: int
) -> None:
    axes.text(
        _LEFT + (first + last + 1) / 2,
        y,
        text,
        fontsize=6 if columns <= 8 else 5,
        ha="center",
        va="center",
        color=colour,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
