"""Figure 1: a sparse convolution, drawn with the values of a real one."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from packedconv.plots.cells import ZERO, draw_cells, drawing, frame
from packedconv.plots.example import convolve
from packedconv.plots.style import GREY

# One colour per input channel, the same in the image and in the filters.
_CHANNEL_COLOURS = ("#cfe8f7", "#d9ead3", "#fde3c8", "#e8d9ee", "#f6d5d8", "#e3e3e3")
_OUTPUT_COLOURS = ("#882255", "#117733", "#332288", "#CC6677")
_GAP = 1.0


def convolution_table(image: np.ndarray, weight: np.ndarray, padding: int) -> pd.DataFrame:
    """Every value of the drawing: tensor, out_channel, in_channel, row, column, value."""
    records = []
    for (ic, row, column), value in np.ndenumerate(image):
        records.append(("input", "", ic, row, column, float(value)))
    for (oc, ic, row, column), value in np.ndenumerate(weight):
        records.append(("weight", oc, ic, row, column, float(value)))
    for (oc, row, column), value in np.ndenumerate(convolve(image, weight, padding)):
        records.append(("output", oc, "", row, column, float(value)))
    columns = ["tensor", "out_channel", "in_channel", "row", "column", "value"]
    return pd.DataFrame.from_records(records, columns=columns)


def draw_convolution(
    image: np.ndarray, weight: np.ndarray, padding: int = 1, marked: tuple[int, int] = (1, 3)
) -> Figure:
    """Draw input channels, the filters of each output channel and the output channels.

    image (IC, H, W), weight (OC, IC, K, K); `marked` is the output (row, column)
    whose inputs are outlined.
    """
    output = convolve(image, weight, padding)
    in_channels, height, width = image.shape
    out_channels, _, kernel, _ = weight.shape
    out_height, out_width = output.shape[1:]
    row, column = marked

    pitch = max(kernel, height) + 1.3
    total_height = 2.2 + in_channels * pitch + 0.2
    filters_left = width + 3.6
    outputs_left = filters_left + in_channels * (kernel + _GAP) + 2.2
    total_width = outputs_left + out_width + 0.8
    figure, axes = drawing(total_width, total_height, 0.285)

    def title(x: float, text: str) -> None:
        axes.text(x, 0.75, text, fontsize=8, fontweight="bold", ha="left", va="center")

    title(0.8, f"Input, {in_channels} channels")
    title(filters_left, f"Sparse filters, one {kernel}×{kernel} per OC and IC")
    title(outputs_left, f"Output, {out_channels} channels")

    def channel_colour(ic: int) -> str:
        return _CHANNEL_COLOURS[ic % len(_CHANNEL_COLOURS)]

    for ic in range(in_channels):
        top = 2.2 + ic * pitch
        axes.text(0.8, top - 0.4, f"IC = {ic}", fontsize=7, va="center")
        draw_cells(
            axes,
            0.8,
            top,
            height,
            width,
            fill=lambda r, c, ic=ic: channel_colour(ic),
            text=lambda r, c, ic=ic: _number(image[ic, r, c], 0),
        )
        first_row, last_row = max(row - padding, 0), min(row - padding + kernel, height)
        first, last = max(column - padding, 0), min(column - padding + kernel, width)
        frame(axes, 0.8 + first, top + first_row, last - first, last_row - first_row, "#111111")

    block = (total_height - 2.2) / out_channels
    for oc in range(out_channels):
        colour = _OUTPUT_COLOURS[oc % len(_OUTPUT_COLOURS)]
        middle = 2.2 + block * (oc + 0.5) - 0.4
        top = middle - kernel / 2
        nonzeros = int(np.count_nonzero(weight[oc]))
        axes.text(
            filters_left,
            top - 1.35,
            f"OC = {oc}: {nonzeros} of {weight[oc].size} weights nonzero",
            fontsize=7,
            color=colour,
            va="center",
        )
        for ic in range(in_channels):
            left = filters_left + ic * (kernel + _GAP)
            axes.text(left, top - 0.42, f"IC = {ic}", fontsize=6, va="center", color=GREY)
            draw_cells(
                axes,
                left,
                top,
                kernel,
                kernel,
                fill=lambda r, c, oc=oc, ic=ic: (
                    channel_colour(ic) if weight[oc, ic, r, c] else ZERO
                ),
                text=lambda r, c, oc=oc, ic=ic: (
                    _number(weight[oc, ic, r, c], 2) if weight[oc, ic, r, c] else "0"
                ),
                text_colour=lambda r, c, oc=oc, ic=ic: (
                    "#111111" if weight[oc, ic, r, c] else "#bbbbbb"
                ),
                fontsize=5.2,
            )
            frame(axes, left, top, kernel, kernel, colour)
            if ic + 1 < in_channels:
                axes.text(left + kernel + _GAP / 2, middle, "+", ha="center", va="center")
        arrow_from = filters_left + in_channels * (kernel + _GAP) - _GAP + 0.3
        _arrow(axes, arrow_from, outputs_left - 0.3, middle, colour)

        out_top = middle - out_height / 2
        axes.text(outputs_left, out_top - 0.42, f"OC = {oc}", fontsize=7, va="center", color=colour)
        draw_cells(
            axes,
            outputs_left,
            out_top,
            out_height,
            out_width,
            fill=lambda r, c: "#ffffff",
            text=lambda r, c, oc=oc: _number(output[oc, r, c], 2),
            fontsize=5.2,
        )
        frame(axes, outputs_left, out_top, out_width, out_height, colour)
        frame(axes, outputs_left + column, out_top + row, 1, 1, "#111111")

    _arrow(axes, 0.8 + width + 0.4, filters_left - 0.5, 2.2 + block * out_channels / 2 - 0.4, GREY)
    axes.text(
        0.8,
        total_height - 0.55,
        "The outlined outputs are the sums over the outlined inputs; only nonzero weights "
        f"are multiplied. Padding {padding}, stride 1.",
        fontsize=5.8,
        color=GREY,
        va="center",
    )
    return figure


def _arrow(axes, left: float, right: float, y: float, colour: str) -> None:
    axes.annotate(
        "", (right, y), (left, y), arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.2}
    )


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("-", "−")
