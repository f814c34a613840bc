"""Figure 4: the packed words and offsets of a real small weight."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from packedconv.packed import decode_word
from packedconv.plots.cells import ZERO, draw_cells, drawing, frame
from packedconv.plots.style import GREY

# Fields of a packed word (paper section 5.3): name, highest bit, lowest bit, colour.
FIELDS = (
    ("FP16 weight", 31, 16, "#fde3c8"),
    ("ic", 15, 8, "#cfe8f7"),
    ("px", 7, 4, "#d9ead3"),
    ("py", 3, 0, "#e8d9ee"),
)
_CHANNEL_COLOURS = ("#882255", "#117733", "#332288", "#CC6677")
_TINTS = ("#f0dce6", "#d9ebdd", "#dcd9ee", "#f7e1e4")

# Columns of the list of words: name, width in cells, colour (None: the channel's).
_COLUMNS = (
    ("index", 2.0, None),
    ("packed word", 5.0, None),
    ("FP16 weight", 4.4, FIELDS[0][3]),
    ("ic", 2.0, FIELDS[1][3]),
    ("px", 2.0, FIELDS[2][3]),
    ("py", 2.0, FIELDS[3][3]),
)


def packed_word_table(packed: Any) -> pd.DataFrame:
    """One row per packed word of a PackedWeight of one block.

    Columns position, out_channel, first, last (the words of the channel are
    first … last - 1), word (hexadecimal), value, value_bits (hexadecimal FP16), ic, px, py.
    """
    offsets = np.asarray(packed.offsets).reshape(-1)
    records = []
    for position, word in enumerate(np.asarray(packed.words).tolist()):
        bits, ic, px, py = decode_word(word)
        out_channel = int(np.searchsorted(offsets, position, side="right")) - 1
        first, last = int(offsets[out_channel]), int(offsets[out_channel + 1])
        value = float(np.array(bits, dtype=np.uint16).view(np.float16))
        records.append(
            (
                position,
                out_channel,
                first,
                last,
                f"0x{word:08x}",
                value,
                f"0x{bits:04x}",
                ic,
                px,
                py,
            )
        )
    columns = ["position", "out_channel", "first", "last", "word", "value", "value_bits"]
    columns += ["ic", "px", "py"]
    return pd.DataFrame.from_records(records, columns=columns)


def draw_packed_word(packed: Any) -> Figure:
    """Draw the word's fields, the filters with numbered nonzeros, the offsets and the words."""
    table = packed_word_table(packed)
    out_channels, in_channels, kernel_height, kernel_width = packed.shape
    filters_pitch = kernel_height + 2.8
    left, top = 0.8, 8.6
    offsets_left = left + in_channels * (kernel_width + 0.8) + 1.6
    words_left = offsets_left + 5.4
    width = words_left + sum(width for _, width, _ in _COLUMNS) + 0.8
    height = top + max(len(table), out_channels * filters_pitch) + 1.8
    figure, axes = drawing(width, height, 0.21)

    _draw_fields(axes, left, 3.0, width - 2 * left)
    for x, title in (
        (left, "Filters, nonzeros numbered"),
        (offsets_left - 0.9, "Offsets"),
        (words_left, "Packed words"),
    ):
        axes.text(x, top - 1.6, title, fontsize=8, fontweight="bold", va="center")
    for oc in range(out_channels):
        _draw_filters(axes, table, packed.shape, oc, left, top + oc * filters_pitch + 1.4)
    _draw_words(axes, table, words_left, top)
    _draw_offsets(axes, np.asarray(packed.offsets).reshape(-1), offsets_left, top, words_left)
    axes.text(
        left,
        height - 0.7,
        f"Weight of shape {out_channels}×{in_channels}×{kernel_height}×{kernel_width} with "
        f"{len(table)} nonzeros. The words of a channel ascend by (ic, py, px);\n"
        "those of channel oc are offsets[oc] … offsets[oc + 1] − 1.",
        fontsize=5.8,
        color=GREY,
        va="center",
    )
    return figure


def _draw_fields(axes: Axes, left: float, top: float, width: float) -> None:
    axes.text(left, 0.9, "Packed word, 32 bits", fontsize=8, fontweight="bold", va="center")
    bit = width / 32
    for name, high, low, colour in FIELDS:
        x, size = left + (31 - high) * bit, (high - low + 1) * bit
        draw_cells(
            axes,
            x,
            top,
            1,
            1,
            fill=lambda r, c, colour=colour: colour,
            text=lambda r, c, name=name: name,
            width=size,
            height=1.5,
            fontsize=7,
        )
        _label(axes, x + size / 2, top - 0.5, f"[{high}:{low}]")


def _draw_filters(axes: Axes, table: pd.DataFrame, shape, oc: int, left: float, top: float) -> None:
    _, in_channels, kernel_height, kernel_width = shape
    mine = table[table["out_channel"] == oc]
    numbers = {(row.ic, row.py, row.px): row.position for row in mine.itertuples(index=False)}
    axes.text(left, top - 1.3, f"OC = {oc}", fontsize=7, color=_channel_colour(oc), va="center")
    for ic in range(in_channels):
        x = left + ic * (kernel_width + 0.8)
        axes.text(x, top - 0.45, f"ic = {ic}", fontsize=5.5, color=GREY, va="center")
        draw_cells(
            axes,
            x,
            top,
            kernel_height,
            kernel_width,
            fill=lambda py, px, ic=ic: _tint(oc) if (ic, py, px) in numbers else ZERO,
            text=lambda py, px, ic=ic: str(numbers.get((ic, py, px), "")),
        )
        frame(axes, x, top, kernel_width, kernel_height, _channel_colour(oc))


def _draw_words(axes: Axes, table: pd.DataFrame, left: float, top: float) -> None:
    rows = list(table.itertuples(index=False))
    texts = {
        "index": [str(row.position) for row in rows],
        "packed word": [row.word for row in rows],
        "FP16 weight": [f"{row.value:.4f}".replace("-", "−") for row in rows],
        "ic": [str(row.ic) for row in rows],
        "px": [str(row.px) for row in rows],
        "py": [str(row.py) for row in rows],
    }
    x = left
    for name, width, colour in _COLUMNS:
        _label(axes, x + width / 2, top - 0.5, name)
        draw_cells(
            axes,
            x,
            top,
            len(rows),
            1,
            fill=lambda r, c, colour=colour: colour or _tint(rows[r].out_channel),
            text=lambda r, c, name=name: texts[name][r],
            width=width,
        )
        x += width


def _draw_offsets(
    axes: Axes, offsets: np.ndarray, left: float, top: float, words_left: float
) -> None:
    # The array stands as one column, centred beside the words that it points into.
    start = top + (int(offsets[-1]) - len(offsets) * 1.5) / 2
    for entry, offset in enumerate(offsets.tolist()):
        y = start + entry * 1.5
        colour = _channel_colour(entry) if entry + 1 < len(offsets) else GREY
        _label(axes, left - 0.8, y + 0.75, f"[{entry}]")
        draw_cells(
            axes,
            left,
            y,
            1,
            1,
            fill=lambda r, c: "#ffffff",
            text=lambda r, c, offset=offset: str(offset),
            width=1.6,
            height=1.5,
            fontsize=6.5,
        )
        axes.annotate(
            "",
            (words_left, top + offset),
            (left + 1.7, y + 0.75),
            arrowprops={
                "arrowstyle": "-|>",
                "color": colour,
                "lw": 1.0,
                "shrinkA": 0,
                "shrinkB": 1,
            },
        )


def _label(axes: Axes, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, fontsize=6, ha="center", va="center", color=GREY)


def _channel_colour(out_channel: int) -> str:
    return _CHANNEL_COLOURS[out_channel % len(_CHANNEL_COLOURS)]


def _tint(out_channel: int) -> str:
    return _TINTS[out_channel % len(_TINTS)]
