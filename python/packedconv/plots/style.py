"""The look that all figures share: style sheet, palettes, markers, captions."""

import pathlib
from collections.abc import Iterable
from typing import Any

from matplotlib import colormaps, colors, rcParams, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import text_to_path

STYLE_FILE = pathlib.Path(__file__).resolve().parents[3] / "figures" / "packedconv.mplstyle"

# Paul Tol's "muted" colours, told apart with every common colour blindness. The
# paper's OC keep theirs in every figure; other OC take what is left over.
_OUT_CHANNEL_STYLES = {
    32: ("#999933", "X"),
    40: ("#AA4499", "P"),
    48: ("#332288", "o"),
    64: ("#88CCEE", "s"),
    80: ("#44AA99", "^"),
    96: ("#117733", "D"),
    112: ("#CC6677", "v"),
    128: ("#882255", "p"),
}
_SPARE_MARKERS = "oPX*<>hdsD"

PRINTED = "printed in the paper"
# How a printed value is drawn.
HOLLOW = {"linestyle": "none", "markerfacecolor": "none"}
# Thin, so that bars of neighbouring series stay apart.
ERROR_BARS = {"elinewidth": 0.8, "capthick": 0.8}
IMPLEMENTATIONS = {"sparse": "sparse", "dense": "dense (PyTorch)"}
ROOF_COLOUR = "#222222"
GREY = "#666666"
# Points, and inches from line to line.
_CAPTION_SIZE = 5.8
_CAPTION_LINE = _CAPTION_SIZE * 1.35 / 72


def use_style() -> None:
    """Apply figures/packedconv.mplstyle of this checkout; FileNotFoundError without it."""
    if not STYLE_FILE.is_file():
        raise FileNotFoundError(
            f"{STYLE_FILE} is missing: the figures are drawn from a checkout of the project"
        )
    style.use(STYLE_FILE)


def out_channel_styles(out_channels: Iterable[int]) -> dict[int, tuple[str, str]]:
    """Colour and marker of each number of output channels, no two alike."""
    values = sorted({int(value) for value in out_channels})
    taken = {value: _OUT_CHANNEL_STYLES[value] for value in values if value in _OUT_CHANNEL_STYLES}
    free = [style for value, style in _OUT_CHANNEL_STYLES.items() if value not in taken]
    others = [value for value in values if value not in taken]
    for rank, value in enumerate(others):
        if rank < len(free):
            taken[value] = free[rank]
        else:
            shade = (rank - len(free) + 0.5) / (len(others) - len(free))
            colour = colors.to_hex(colormaps["viridis"](shade))
            taken[value] = (colour, _SPARE_MARKERS[rank % len(_SPARE_MARKERS)])
    return {value: taken[value] for value in values}


def sparsity_colours(sparsities: Iterable[float]) -> dict[float, str]:
    """Colour of each sparsity: dark is dense, light is sparse, over the paper's 0.90 to 0.98."""
    values = sorted({float(value) for value in sparsities})
    low, high = min([0.90] + values), max([0.98] + values)
    palette = colormaps["plasma"]
    return {value: colors.to_hex(palette(0.88 * (value - low) / (high - low))) for value in values}


def sparsity_label(sparsity: float) -> str:
    """A sparsity as the paper's legends write it: `90%`."""
    return f"{100 * sparsity:g}%"


def new_figure(width: float = 5.2, height: float = 3.4) -> Figure:
    """An empty figure in the project's style; width and height in inches."""
    use_style()
    return Figure(figsize=(width, height))


def legend_entry(label: str, **style: Any) -> Line2D:
    """An entry for a legend, drawn nowhere else; `style` as for a line."""
    return Line2D([], [], label=label, **style)


def write_title(axes: Axes, text: str, share: float = 0.6, **style: Any) -> None:
    """Title the axes in as many lines as keep it within this share of the figure's width.

    By default that keeps it clear of a legend beside the axes. `style` as for a text.
    """
    width = 72 * share * axes.get_figure().get_size_inches()[0]
    size = style.get("fontsize", rcParams["axes.titlesize"])
    axes.set_title("\n".join(wrap(text, size, width)), **style)


def write_caption(figure: Figure, lines: Iterable[str], warnings: Iterable[str] = ()) -> None:
    """Write small lines under everything else and keep their room free.

    Lines wrap at the width of the figure. `warnings` come first, dark.
    """
    width, height = figure.get_size_inches()
    dark, light = (_caption_lines(some, width) for some in (warnings, lines))
    if not dark and not light:
        return
    room = caption_room([*dark, *light], width) / height
    figure.get_layout_engine().set(rect=(0, room, 1, 1 - room))
    above = (0.06 + len(light) * _CAPTION_LINE) / height
    for wrapped, y, colour, name in (
        (light, 0.06 / height, GREY, "caption"),
        (dark, above, ROOF_COLOUR, "warnings"),
    ):
        if wrapped:
            figure.text(
                0.1 / width,
                y,
                "\n".join(wrapped),
                fontsize=_CAPTION_SIZE,
                color=colour,
                va="bottom",
                ha="left",
                linespacing=1.3,
                gid=name,
            )


def caption_room(lines: Iterable[str], width: float) -> float:
    """Inches of height that `write_caption` takes for lines under a figure of that width."""
    return len(_caption_lines(lines, width)) * _CAPTION_LINE + 0.1


def _caption_lines(lines: Iterable[str], width: float) -> list[str]:
    return [part for line in lines for part in wrap(line, _CAPTION_SIZE, 72 * (width - 0.2))]


def wrap(line: str, size: float, width: float) -> list[str]:
    """Break a line at plain spaces so that no part is wider than `width` points."""
    font = FontProperties(size=size)
    parts: list[str] = []
    for word in line.split(" "):
        longer = f"{parts[-1]} {word}" if parts else word
        if parts and text_to_path.get_text_width_height_descent(longer, font, False)[0] <= width:
            parts[-1] = longer
        else:
            parts.append(word)
    return parts
