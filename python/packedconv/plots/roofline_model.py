"""Figure 2: where the model puts the sparse convolution under a device's roofs."""

from collections.abc import Iterable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from packedconv.layer import Layer
from packedconv.plots.roofline import (
    draw_roofs,
    label_roofs,
    logarithmic,
    sparsity_entries,
)
from packedconv.plots.series import side_legend
from packedconv.plots.style import (
    GREY,
    ROOF_COLOUR,
    new_figure,
    sparsity_colours,
    write_caption,
    write_title,
)
from packedconv.roofline import Device, attainable, bound, sparse_arithmetic_intensity

# Number of output channels of the paper's figure 2.
PAPER_CHANNELS = 64


def model_table(
    device: Device, layers: Iterable[Layer], sparsities: Iterable[float]
) -> pd.DataFrame:
    """The model's point of each (layer, sparsity).

    Columns layer, out_channels, sparsity, arithmetic_intensity (FLOP/byte), gflops
    (attainable GFLOP/s), bound ("memory" or "compute"), and the device's ridge_point,
    peak_flops and bandwidth.
    """
    records = []
    sparsities = list(sparsities)
    for layer in layers:
        for sparsity in sparsities:
            intensity = sparse_arithmetic_intensity(layer, sparsity)
            records.append(
                {
                    "layer": layer.name,
                    "out_channels": layer.out_channels,
                    "sparsity": sparsity,
                    "arithmetic_intensity": intensity,
                    "gflops": attainable(intensity, device) / 1e9,
                    "bound": bound(intensity, device),
                    "ridge_point": device.ridge_point,
                    "peak_flops": device.peak_flops,
                    "bandwidth": device.bandwidth,
                }
            )
    return pd.DataFrame(records)


def shown_channels(channels: Iterable[int]) -> int:
    """The number of output channels whose points lie on the roof: the paper's, else the median."""
    channels = sorted(channels)
    return PAPER_CHANNELS if PAPER_CHANNELS in channels else channels[(len(channels) - 1) // 2]


def draw_model(title: str, device: Device, data: pd.DataFrame, lines: list[str]) -> Figure:
    """Draw the roofs and the points of `model_table`; `lines` are the caption.

    With several layers the roof carries the points of one (the paper's OC, else the
    median), and a strip below shows how far every layer's points reach.
    """
    channels = sorted(data["out_channels"].unique())
    shown = shown_channels(channels)
    strip = len(channels) > 1
    figure = new_figure(5.4, 3.6 + (0.5 + 0.14 * len(channels) if strip else 0))
    if strip:
        axes, below = figure.subplots(
            2, sharex=True, height_ratios=(3, 0.45 + 0.14 * len(channels))
        )
    else:
        axes, below = figure.add_subplot(), None

    peak = device.peak_flops / 1e9
    intensities = [*data["arithmetic_intensity"], device.ridge_point]
    limits = logarithmic(axes, intensities, [*data["gflops"], peak])
    write_title(axes, title)
    draw_roofs(axes, device, limits)
    points = data[data["out_channels"] == shown]
    colours = sparsity_colours(data["sparsity"])
    draw_points(axes, points["arithmetic_intensity"], points["gflops"], points["sparsity"], colours)
    if below is not None:
        axes.set_xlabel("")
        _draw_strip(below, device, data, channels, colours)
        write_title(axes, f"{title}, points for OC = {shown}")
    side_legend(figure, sparsity_entries(colours))
    write_caption(figure, lines)
    label_roofs(axes, device, limits)
    _point_to_higher_sparsity(axes, points, device.ridge_point)
    return figure


def draw_points(axes: Axes, x: Iterable, y: Iterable, sparsities: Iterable, colours: dict) -> None:
    """Scatter points of the model, each in the colour of its sparsity."""
    axes.scatter(
        x,
        y,
        s=24,
        c=[colours[value] for value in sparsities],
        edgecolors="white",
        linewidths=0.4,
        zorder=4,
        label="model",
    )


def _draw_strip(
    axes: Axes, device: Device, data: pd.DataFrame, channels: list[int], colours: dict
) -> None:
    rank = {value: index for index, value in enumerate(channels)}
    y = [rank[value] for value in data["out_channels"]]
    draw_points(axes, data["arithmetic_intensity"], y, data["sparsity"], colours)
    axes.axvline(device.ridge_point, color=ROOF_COLOUR, linewidth=0.7, linestyle=":", zorder=1)
    axes.set_yticks(range(len(channels)), [str(value) for value in channels])
    axes.set_ylim(-0.6, len(channels) - 0.4)
    axes.set(xlabel="Arithmetic intensity (FLOP/byte)", ylabel="OC")


def _point_to_higher_sparsity(axes: Axes, points: pd.DataFrame, ridge: float) -> None:
    ends = points.sort_values("sparsity")
    first, last = ends.iloc[0], ends.iloc[-1]
    if first["arithmetic_intensity"] == last["arithmetic_intensity"]:
        return
    axes.annotate(
        "higher\nsparsity",
        (last["arithmetic_intensity"], last["gflops"]),
        # Clear of the line at the ridge point.
        xytext=(1.15 * max(first["arithmetic_intensity"], ridge), last["gflops"]),
        fontsize=6,
        color=GREY,
        ha="left",
        va="center",
        arrowprops={"arrowstyle": "->", "color": GREY, "lw": 0.8, "shrinkB": 6},
    )
