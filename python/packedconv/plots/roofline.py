"""Rooflines on logarithmic axes (figures 2 and 7)."""

import math
from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from packedconv.evidence.samples import Results
from packedconv.plots.style import GREY, ROOF_COLOUR, legend_entry, sparsity_colours, sparsity_label
from packedconv.roofline import Device, attainable

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def measured_device(results: Results) -> Device:
    """The measured ceilings of a device as its two roofs."""
    peaks = results.peaks
    return Device(results.device, peaks["peak_flops"], peaks["bandwidth"])


def draw_roofs(
    axes: Axes,
    device: Device,
    limits: tuple[float, float],
    name: str = "",
    colour: str = ROOF_COLOUR,
    style: str = "-",
) -> Line2D:
    """Draw both roofs and the ridge point over `limits` (FLOP/byte); return a legend entry.

    Performance is in GFLOP/s. `name` tells apart the roofs of several devices.
    """
    low, high = limits
    ridge = device.ridge_point
    for roof, ends in (("bandwidth", (low, ridge)), ("peak", (ridge, high))):
        axes.plot(
            ends,
            [attainable(intensity, device) / 1e9 for intensity in ends],
            color=colour,
            linestyle=style,
            linewidth=1.4,
            zorder=2,
            label=f"{roof} roof {name}".strip(),
        )
    axes.axvline(
        ridge,
        color=colour,
        linewidth=0.7,
        linestyle=":",
        zorder=1,
        label=f"ridge point {name}".strip(),
    )
    text = f"{name}:\n" if name else ""
    text += f"{quantity(device.peak_flops, 'FLOP/s')}, {quantity(device.bandwidth, 'B/s')}"
    return legend_entry(text, color=colour, linestyle=style)


def label_roofs(axes: Axes, device: Device, limits: tuple[float, float]) -> None:
    """Write the height of the roofs along them and the ridge point at the lower end."""
    low, high = limits
    ridge = device.ridge_point
    peak = device.peak_flops / 1e9
    axes.annotate(
        f"{quantity(device.peak_flops, 'FLOP/s')} FP32",
        ((ridge * high) ** 0.5, peak),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=7,
    )
    start = max(low, 1e9 * axes.get_ylim()[0] / device.bandwidth)
    middle = start * (ridge / start) ** 0.3
    axes.annotate(
        quantity(device.bandwidth, "B/s"),
        (middle, attainable(middle, device) / 1e9),
        xytext=(-4, 3),
        textcoords="offset points",
        rotation=_slope(axes),
        rotation_mode="anchor",
        ha="center",
        va="bottom",
        fontsize=7,
    )
    axes.annotate(
        f"ridge point {ridge:.3g} FLOP/byte",
        (ridge, axes.get_ylim()[0]),
        xytext=(3, 4),
        textcoords="offset points",
        fontsize=6,
        color=GREY,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
    )


def logarithmic(
    axes: Axes, intensities: Iterable[float], performances: Iterable[float]
) -> tuple[float, float]:
    """Set both axes logarithmic around the values (FLOP/byte, GFLOP/s); return the x limits."""
    intensities, performances = list(intensities), list(performances)
    x = (min(intensities) / 6, max(intensities) * 8)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=x,
        # At least two labelled ticks.
        ylim=(10 ** math.floor(math.log10(min(performances) / 2)), max(performances) * 2.5),
        xlabel="Arithmetic intensity (FLOP/byte)",
        ylabel="Performance (GFLOP/s)",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(10))
        axis.set_minor_formatter(NullFormatter())
    return x


def sparsity_entries(sparsities: Iterable[float]) -> list[Line2D]:
    """Legend entries of the sparsity colours, densest first."""
    return [
        legend_entry(f"S = {sparsity_label(value)}", linestyle="none", marker="o", color=colour)
        for value, colour in sparsity_colours(sparsities).items()
    ]


def quantity(value: float, unit: str) -> str:
    """A rate with its prefix and three digits: `19.5 TFLOP/s`."""
    for factor, prefix in _PREFIXES:
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _slope(axes: Axes) -> float:
    """Angle in degrees on the page of a line of slope 1 on the logarithmic axes."""
    figure = axes.get_figure()
    figure.draw_without_rendering()
    (x0, y0), (x1, y1) = axes.transData.transform([(1, 1), (10, 10)])
    return math.degrees(math.atan2(y1 - y0, x1 - x0))
