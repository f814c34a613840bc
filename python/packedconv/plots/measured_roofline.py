"""Figure 7: measured and printed throughput under the roofs of a device."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from packedconv.evidence.samples import Results
from packedconv.plots.captions import caption
from packedconv.plots.roofline import (
    draw_roofs,
    label_roofs,
    logarithmic,
    measured_device,
    sparsity_entries,
)
from packedconv.plots.series import (
    add_note,
    device_fills,
    printed_entry,
    series_label,
    side_legend,
)
from packedconv.plots.source import Source
from packedconv.plots.style import (
    ERROR_BARS,
    GREY,
    HOLLOW,
    IMPLEMENTATIONS,
    PRINTED,
    legend_entry,
    new_figure,
    sparsity_colours,
    write_caption,
    write_title,
)
from packedconv.roofline import sparse_arithmetic_intensity

MARKERS = {"sparse": "o", "dense": "s"}
LINES = {"sparse": "-", "dense": "--"}
_MEASURED_ROOFS = ("--", "-.", (0, (1, 1)))


def shown_channels(source: Source) -> int:
    """The number of output channels that the figure is about.

    That of the panel's printed values, else the largest that was measured.
    """
    printed = [point["out_channels"] for point in source.printed()]
    measured = [layer.out_channels for given in source.results for layer in given.layers.values()]
    return max(printed or measured)


def with_intensities(source: Source, data: pd.DataFrame) -> pd.DataFrame:
    """The table with its printed rows in GFLOP/s and at their arithmetic intensity.

    A printed throughput gets the arithmetic intensity of equations 7 and 8 for its layer;
    what the text prints as intensity goes into a column of its own.
    """
    if source.panel is None:
        return data
    data = data.copy()
    printed = data["origin"] == "printed"
    data["printed_arithmetic_intensity"] = data["arithmetic_intensity"].where(printed)
    data.loc[printed, "gflops"] /= 1e9
    data.loc[printed, "arithmetic_intensity"] = [
        sparse_arithmetic_intensity(
            source.published.layer(source.family, row.out_channels), row.sparsity
        )
        for row in data[printed].itertuples()
    ]
    return data


def draw_measured_roofline(source: Source, data: pd.DataFrame) -> Figure:
    """Draw the table of `with_intensities` under the printed or the measured roofs."""
    figure = new_figure(5.6, 4.0)
    axes = figure.add_subplot()
    if source.panel is None:
        device = measured_device(source.results[0])
    else:
        device = source.published.device(source.family)
    peak = device.peak_flops / 1e9
    limits = logarithmic(
        axes, [*data["arithmetic_intensity"], device.ridge_point], [*data["gflops"], peak]
    )
    axes.set_ylabel("Performance on nonzeros (GFLOP/s)")
    out_channels = int(data["out_channels"].iloc[0])
    write_title(axes, f"{source.title}, OC = {out_channels}")
    printed_roofs = draw_roofs(axes, device, limits)
    roofs = []
    if source.panel is not None and source.results:
        printed_roofs.set_label("roofs printed in the paper")
        roofs.append(printed_roofs)
        for results, style in zip(source.results, _MEASURED_ROOFS * len(source.results)):
            name = f"measured, {results.device}"
            roofs.append(draw_roofs(axes, measured_device(results), limits, name, GREY, style))
    colours = sparsity_colours(data["sparsity"])
    draw_throughputs(axes, data[data["origin"] == "measured"], colours)
    printed = data[data["origin"] == "printed"]
    for implementation, series in printed.groupby("implementation"):
        _draw_printed(axes, series, colours, implementation)
    add_note(axes, source.note, corner=True)

    implementations = [
        legend_entry(
            text if source.results else f"{text},\n{PRINTED}",
            color=GREY,
            marker=MARKERS[name],
            **({"linestyle": LINES[name]} if source.results else HOLLOW),
        )
        for name, text in IMPLEMENTATIONS.items()
    ]
    if len(printed) and source.results:
        implementations.append(printed_entry())
    side_legend(figure, roofs, implementations, sparsity_entries(colours))
    peaks = [f"Peak: {entry.peaks['peak_of']}." for entry in source.results if _bounded(entry)]
    write_caption(figure, caption(source) + peaks + _intensity_lines(data))
    label_roofs(axes, device, limits)
    return figure


def draw_throughputs(axes: Axes, data: pd.DataFrame, colours: dict[float, str]) -> None:
    """Draw measured rows (device, run, implementation, sparsity, arithmetic_intensity, gflops,
    sem) onto logarithmic axes, each sparsity in its colour."""
    fills = device_fills(data)
    for key, series in data.groupby(["device", "run", "implementation"]):
        _draw_series(axes, series.sort_values("sparsity"), colours, key, fills[key[:2]])


def _draw_series(
    axes: Axes, series: pd.DataFrame, colours: dict[float, str], key: tuple, fill: str
) -> None:
    device, run, implementation = key
    axes.plot(
        series["arithmetic_intensity"],
        series["gflops"],
        color=GREY,
        linestyle=LINES[implementation],
        linewidth=0.8,
        zorder=2,
        label=series_label("measured", device, run, kind=implementation),
    )
    for row in series.itertuples():
        axes.errorbar(
            row.arithmetic_intensity,
            row.gflops,
            yerr=row.sem,
            color=colours[row.sparsity],
            marker=MARKERS[implementation],
            fillstyle=fill,
            markerfacecoloralt="white",
            zorder=4,
            # Error bars are short on logarithmic axes.
            markersize=3.0,
            **ERROR_BARS,
        )


def _draw_printed(
    axes: Axes, series: pd.DataFrame, colours: dict[float, str], implementation: str
) -> None:
    for row in series.itertuples():
        axes.plot(
            [row.arithmetic_intensity],
            [row.gflops],
            marker=MARKERS[implementation],
            color=colours[row.sparsity],
            markersize=7,
            markeredgewidth=1.3,
            zorder=3,
            label=series_label("printed", kind=implementation),
            **HOLLOW,
        )


def _bounded(results: Results) -> bool:
    """Whether the measured peak is a lower bound, as on a GPU."""
    return "peak_of" in results.peaks


def _intensity_lines(data: pd.DataFrame) -> list[str]:
    lines = [
        "Arithmetic intensity of the sparse convolution, equations\u00a07\u00a0and\u00a08, "
        "for both."
    ]
    if "printed_arithmetic_intensity" in data:
        printed = data.dropna(subset="printed_arithmetic_intensity").sort_values("sparsity")
        if len(printed):
            values = " and ".join(f"{value:g}" for value in printed["printed_arithmetic_intensity"])
            lines[0] += f" The paper's text gives {values} FLOP/byte."
    return lines
