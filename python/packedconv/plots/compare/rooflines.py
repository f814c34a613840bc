"""Figures 2 and 7 of two sides: rooflines with the same scales, and what compares them."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from packedconv.evidence import statistics
from packedconv.evidence.compare.ratios import Comparison
from packedconv.evidence.compare.side import Side
from packedconv.evidence.compare.words import chance, interval_text, ratio_text
from packedconv.evidence.statistics import CONFIDENCE
from packedconv.layer import Layer
from packedconv.plots.compare.frame import (
    SIDES,
    Frame,
    draw_ratios,
    ends,
    finish,
    finish_ratios,
    in_both,
    measured_rows,
    new_frame,
    panel_rows,
    plotted,
)
from packedconv.plots.measured_roofline import LINES, MARKERS, draw_throughputs
from packedconv.plots.roofline import (
    draw_roofs,
    label_roofs,
    logarithmic,
    measured_device,
    sparsity_entries,
)
from packedconv.plots.roofline_model import draw_points, model_table, shown_channels
from packedconv.plots.series import sparsity_axis
from packedconv.plots.style import (
    GREY,
    IMPLEMENTATIONS,
    ROOF_COLOUR,
    legend_entry,
    sparsity_colours,
)
from packedconv.roofline import Device, attainable

_OTHER = "#aaaaaa"
_STYLES = {"sparse": ("#222222", "o"), "dense": ("#999999", "s")}


def draw_models(comparison: Comparison) -> tuple[Figure, pd.DataFrame]:
    """Figure 2 of two sides: the model under measured roofs, and the ratio of the roofs."""
    sides = (comparison.left, comparison.right)
    devices = [measured_device(side.results) for side in sides]
    layers = _shown(comparison, largest=False)
    tables = [
        model_table(device, [layer], side.results.settings["sparsities"])
        for device, layer, side in zip(devices, layers, sides, strict=True)
    ]
    frame = new_frame(comparison)
    limits = _draw_roofs(frame, devices, pd.concat(tables))
    colours = sparsity_colours(pd.concat(tables)["sparsity"])
    for panel, table in zip((frame.left, frame.right), tables, strict=True):
        points = (table["arithmetic_intensity"], table["gflops"], table["sparsity"])
        draw_points(panel, *points, colours)
    below = frame.below[0]
    curve = _roof_ratio(devices, limits)
    below.plot(curve["arithmetic_intensity"], curve["ratio"], color=ROOF_COLOUR, linewidth=1.2)
    ratios = _model_ratios(tables) if _same(layers) else pd.DataFrame()
    if len(ratios):
        points = (ratios["arithmetic_intensity"], ratios["ratio"], ratios["sparsity"])
        draw_points(below, *points, colours)
    below.set(xscale="log", xlim=limits, xlabel="Arithmetic intensity (FLOP/byte)")
    rates = _rates(comparison, devices)
    bandwidth, peak = rates["bandwidth"], rates["peak"]
    title = (
        f"Ridge points: {devices[0].ridge_point:.3g} FLOP/byte on the left, "
        f"{devices[1].ridge_point:.3g} on the right"
    )
    finish_ratios(
        below, comparison, curve["ratio"], None, title, "Attainable, right / left", "larger"
    )
    _finish(
        frame,
        comparison,
        devices,
        limits,
        f"roofs, right / left: bandwidth {bandwidth} times, peak {peak} times",
        [_roof_entries(), sparsity_entries(colours)],
        [
            f"Roofs measured in each run. Model: {_channels(layers)}; equations\u00a07\u00a0and"
            f"\u00a08; nothing is timed. Brackets: {100 * CONFIDENCE:g} % intervals of what roofs "
            "move by from run to run."
        ],
        timed=False,
    )
    left, right = comparison.left.name, comparison.right.name
    both = f"{left}--{right}"
    return frame.figure, plotted(
        [
            panel_rows(tables[0], "left", left),
            panel_rows(tables[1], "right", right),
            panel_rows(ratios, "ratio", both),
            panel_rows(curve, "roofs", both),
        ]
    )


def draw_measured_rooflines(comparison: Comparison) -> tuple[Figure, pd.DataFrame]:
    """Figure 7 of two sides: throughput under each side's roofs, the share that it reaches of
    them, and its ratio."""
    sides = (comparison.left, comparison.right)
    devices = [measured_device(side.results) for side in sides]
    layers = _shown(comparison, largest=True)
    tables = [
        _throughputs(side, layer, device)
        for side, layer, device in zip(sides, layers, devices, strict=True)
    ]
    frame = new_frame(comparison, below=2)
    limits = _draw_roofs(frame, devices, pd.concat(tables))
    frame.left.set_ylabel("Performance on nonzeros (GFLOP/s)")
    colours = sparsity_colours(pd.concat(tables)["sparsity"])
    for panel, side, table in zip((frame.left, frame.right), sides, tables, strict=True):
        draw_throughputs(panel, measured_rows(side, table), colours)
    _draw_shares(frame, tables)
    beside = frame.below[1]
    ratios = pd.DataFrame()
    if _same(layers):
        rows = in_both(comparison.table, left_layer=layers[0].name)
        ratios = rows[rows["quantity"] != "speedup"]
        draw_ratios(beside, ratios, "quantity", _STYLES)
    values = ends(ratios) if len(ratios) else []
    label = "Performance, right / left"
    title = f"Performance at OC = {layers[0].out_channels}" if len(ratios) else ""
    finish_ratios(beside, comparison, values, None, title, label, "faster")
    _finish(
        frame,
        comparison,
        devices,
        limits,
        _shares_text(tables),
        [
            [
                legend_entry(text, color=GREY, marker=MARKERS[name], linestyle=LINES[name])
                for name, text in IMPLEMENTATIONS.items()
            ],
            _roof_entries(),
            sparsity_entries(colours),
        ],
        [
            f"{_channels(layers)}. Arithmetic intensity of the sparse convolution, equations\u00a07"
            "\u00a0and\u00a08, for both implementations.",
            *([chance(comparison, len(ratios)).split(" Band")[0]] if len(ratios) else []),
        ],
    )
    left, right = comparison.left.name, comparison.right.name
    return frame.figure, plotted(
        [
            panel_rows(tables[0], "left", left),
            panel_rows(tables[1], "right", right),
            panel_rows(ratios, "ratio", f"{left}--{right}"),
        ]
    )


def _shown(comparison: Comparison, largest: bool) -> tuple[Layer, Layer]:
    """The layers that the panels show: one in both, where there is any, else one of each side.

    The largest, as in figure 7, or that of figure 2.
    """

    def chosen(layers: list[Layer]) -> Layer:
        channels = [layer.out_channels for layer in layers]
        wanted = max(channels) if largest else shown_channels(channels)
        return layers[channels.index(wanted)]

    if comparison.pairs:
        left = chosen([pair.left for pair in comparison.pairs])
        return next((pair.left, pair.right) for pair in comparison.pairs if pair.left == left)
    sides = (comparison.left, comparison.right)
    return tuple(chosen(list(side.results.layers.values())) for side in sides)


def _same(layers: tuple[Layer, Layer]) -> bool:
    """Whether the panels show one layer."""
    left, right = (layer._replace(name="", batch=0) for layer in layers)
    return left == right


def _channels(layers: tuple[Layer, Layer]) -> str:
    if _same(layers):
        return f"OC = {layers[0].out_channels} on both sides"
    channels = " | ".join(str(layer.out_channels) for layer in layers)
    return f"OC = {channels}, as no layer is in both"


def _draw_roofs(frame: Frame, devices: list[Device], data: pd.DataFrame) -> tuple[float, float]:
    """Each side's roofs in its panel, over those of the other; the limits of intensities."""
    intensities = [*data["arithmetic_intensity"], *(device.ridge_point for device in devices)]
    performances = [*data["gflops"], *(device.peak_flops / 1e9 for device in devices)]
    panels = (frame.left, frame.right)
    for panel in panels:
        limits = logarithmic(panel, intensities, performances)
    for panel, own, other in zip(panels, devices, reversed(devices), strict=True):
        draw_roofs(panel, other, limits, "other side", _OTHER, "--")
        draw_roofs(panel, own, limits)
    frame.right.set_ylabel("")
    frame.right.tick_params(labelleft=False)
    return limits


def _roof_entries() -> list:
    return [
        legend_entry("measured roofs", color=ROOF_COLOUR),
        legend_entry("roofs of the other side", color=_OTHER, linestyle="--"),
    ]


def _roof_ratio(devices: list[Device], limits: tuple[float, float]) -> pd.DataFrame:
    """Right over left of the roofs; its corners lie at the ridge points."""
    corners = sorted(device.ridge_point for device in devices)
    intensities = np.unique([*np.geomspace(*limits, 121), *corners])
    left, right = (
        np.array([attainable(intensity, device) for intensity in intensities]) for device in devices
    )
    return pd.DataFrame({"arithmetic_intensity": intensities, "ratio": right / left})


def _model_ratios(tables: list[pd.DataFrame]) -> pd.DataFrame:
    left, right = (table.set_index("sparsity") for table in tables)
    both = left.index.intersection(right.index)
    return pd.DataFrame(
        {
            "out_channels": left.loc[both, "out_channels"],
            "sparsity": both,
            "arithmetic_intensity": left.loc[both, "arithmetic_intensity"],
            "ratio": right.loc[both, "gflops"] / left.loc[both, "gflops"],
        }
    ).reset_index(drop=True)


def _rates(comparison: Comparison, devices: list[Device]) -> dict[str, str]:
    """Ratios of both roofs with the interval that another run would move them by."""
    left, right = devices
    factors = [
        statistics.run_factors(f"{name} roofs", spread)
        for name, spread in zip(("left", "right"), comparison.between_runs, strict=True)
    ]
    texts = {}
    for name, ratio in (
        ("bandwidth", right.bandwidth / left.bandwidth),
        ("peak", right.peak_flops / left.peak_flops),
    ):
        low, high = statistics.interval(ratio * factors[1] / factors[0])
        texts[name] = f"{ratio_text(ratio)} [{interval_text(low, high)}]"
    return texts


def _throughputs(side: Side, layer: Layer, device: Device) -> pd.DataFrame:
    """Throughput of a layer, and the share of the roofs that it reaches."""
    found = statistics.throughputs(side.results.samples)
    found = found[found["layer"] == layer.name].rename(columns={"mean": "gflops"})
    roof = [attainable(intensity, device) / 1e9 for intensity in found["arithmetic_intensity"]]
    columns = [
        *("layer", "out_channels", "sparsity", "implementation", "arithmetic_intensity"),
        *("gflops", "sem", "rounds"),
    ]
    return found[columns].assign(roof_gflops=roof, share=found["gflops"] / roof)


def _draw_shares(frame: Frame, tables: list[pd.DataFrame]) -> None:
    axes = frame.below[0]
    entries = []
    for name, table, (colour, marker, line) in zip(("left", "right"), tables, SIDES, strict=True):
        sparse = table[table["implementation"] == "sparse"].sort_values("sparsity")
        axes.errorbar(
            sparse["sparsity"],
            sparse["share"],
            yerr=sparse["sem"] / sparse["roof_gflops"],
            color=colour,
            marker=marker,
            linestyle=line,
            elinewidth=0.8,
            label=f"share {name}",
        )
        entries.append(legend_entry(name, color=colour, marker=marker, linestyle=line))
    axes.legend(handles=entries, loc="best", ncols=2)
    axes.set_ylim(0, max(1.0, 1.05 * max(table["share"].max() for table in tables)))
    axes.set(xlabel="Sparsity", ylabel="Share of its own roofs")
    axes.set_title("Sparse, share of its side's roofs", fontsize=8)
    sparsity_axis(axes, sorted({*tables[0]["sparsity"], *tables[1]["sparsity"]}))


def _shares_text(tables: list[pd.DataFrame]) -> str:
    texts = []
    for name, table in zip(("left", "right"), tables, strict=True):
        share = table.loc[table["implementation"] == "sparse", "share"]
        texts.append(f"{100 * share.min():.0f} to {100 * share.max():.0f} % on the {name}")
    return f"of what its roofs allow, the sparse convolution reaches {', '.join(texts)}"


def _finish(
    frame: Frame,
    comparison: Comparison,
    devices: list[Device],
    limits: tuple[float, float],
    headline: str,
    groups: list,
    lines: list[str],
    timed: bool = True,
) -> None:
    finish(frame, comparison, headline, groups, lines, timed)
    for panel, device in zip((frame.left, frame.right), devices, strict=True):
        label_roofs(panel, device, limits)
