"""Grids of cells, from which the drawings (figures 1, 3 and 4) are made."""

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from packedconv.plots.style import new_figure

EDGE = "#999999"
ZERO = "#f4f4f4"


def drawing(width: float, height: float, unit: float) -> tuple[Figure, Axes]:
    """A figure whose one axes counts cells: `unit` inches a cell, y downwards, no frame.

    width, height: size in cells.
    """
    figure = new_figure(width * unit, height * unit)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_aspect("equal")
    axes.set_axis_off()
    return figure, axes


def draw_cells(
    axes: Axes,
    left: float,
    top: float,
    rows: int,
    columns: int,
    fill: Callable[[int, int], str],
    text: Callable[[int, int], str] | None = None,
    text_colour: Callable[[int, int], str] | None = None,
    width: float = 1.0,
    height: float = 1.0,
    fontsize: float = 6.0,
) -> None:
    """Draw rows × columns cells from an upper left corner; `fill`, `text` take (row, column)."""
    for row in range(rows):
        for column in range(columns):
            x, y = left + column * width, top + row * height
            axes.add_patch(
                Rectangle((x, y), width, height, facecolor=fill(row, column), edgecolor=EDGE)
            )
            label = text(row, column) if text else ""
            if label:
                axes.text(
                    x + width / 2,
                    y + height / 2,
                    label,
                    ha="center",
                    va="center_baseline",
                    fontsize=fontsize,
                    color=text_colour(row, column) if text_colour else "#111111",
                )


def frame(axes: Axes, left: float, top: float, width: float, height: float, colour: str) -> None:
    """Draw a thick outline around some cells."""
    axes.add_patch(
        Rectangle((left, top), width, height, fill=False, edgecolor=colour, linewidth=1.6, zorder=5)
    )
