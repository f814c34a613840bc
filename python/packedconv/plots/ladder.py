"""Drawing the ladder: a bar per rung, a panel per layer and sparsity."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from packedconv.bench.rungs import SLOW_SECONDS
from packedconv.evidence.cpu_experiments import (
    Experiments,
    ceilings_sentence,
    distributions_sentence,
    protocol_sentence,
    skipped_layouts,
)
from packedconv.evidence.ladder import TITLES
from packedconv.evidence.layer_table import plan_text
from packedconv.layer import Layer
from packedconv.plots.quality import quality_lines
from packedconv.plots.style import new_figure, write_caption

BAR = "#88CCEE"
PLAN_BAR = "#332288"
DENSE = "#CC6677"


def ladder_figure(experiments: Experiments, table: pd.DataFrame) -> Figure:
    """Bars of median time with intervals and speedups over dense, whose time is a line."""
    panels = list(table.groupby(["layer", "sparsity"], sort=False))
    most = max(int(panel["seconds"].notna().sum()) for _, panel in panels)
    figure = new_figure(1.0 + 3.3 * len(panels), 1.6 + 0.28 * most)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for place, ((name, sparsity), panel) in zip(axes, panels, strict=True):
        layer = Layer(**experiments.facts[name]["experiment"]["layer"])
        _draw(place, panel.dropna(subset="seconds"), most)
        place.set_title(f"{_shape(layer)}\nS = {sparsity:g}", fontsize=8)
    lines = [
        f"{protocol_sentence(experiments)}. {ceilings_sentence(experiments)}. "
        f"{distributions_sentence(experiments)}.",
        "Bars: median over the medians of the rounds, with its 95 % interval; beside them the "
        "time and how many times as fast as dense (line), PyTorch's fastest layout. Each rung "
        "adds to the one above it, and the last, dark, is the plan; all are checked against "
        f"float64. What takes more than {1e3 * SLOW_SECONDS:g} ms is executed once a round. The "
        "dense layout is chosen once per layer, at its first sparsity.",
        *_plan_lines(experiments, panels),
        *_left_out_lines(experiments, panels),
        *quality_lines(table.dropna(subset="seconds")),
        *(f"{text[:1].upper()}{text[1:]}." for text in skipped_layouts(experiments)),
    ]
    write_caption(figure, lines)
    return figure


def _draw(axes: Axes, panel: pd.DataFrame, most: int) -> None:
    milliseconds = 1e3 * panel["seconds"].to_numpy(float)
    low, high = 1e3 * panel["low"].to_numpy(float), 1e3 * panel["high"].to_numpy(float)
    dense = 1e3 * float(panel["dense_seconds"].iloc[0])
    places = range(len(panel))
    axes.barh(
        places,
        milliseconds,
        xerr=[milliseconds - low, high - milliseconds],
        color=[BAR] * (len(panel) - 1) + [PLAN_BAR],
        error_kw={"elinewidth": 0.8},
        height=0.62,
        log=True,
    )
    for place, value, end, speedup in zip(
        places, milliseconds, high, panel["speedup"], strict=True
    ):
        axes.annotate(
            f"{value:.3g} ms, {speedup:.2g}×",
            (end, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=6.5,
            # Legible where it crosses the line.
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
    axes.axvline(dense, color=DENSE, linewidth=1.2, zorder=1.5, label="dense")
    axes.annotate(
        f"dense {dense:.3g} ms",
        (dense, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(3, -2),
        textcoords="offset points",
        color=DENSE,
        fontsize=6.5,
        va="top",
        ha="left",
    )
    axes.set_yticks(places, [TITLES[rung] for rung in panel["rung"]])
    # Room above the first bar for the label of the line; bars as thick in every panel.
    axes.set_ylim(most - 0.4, -1.1)
    smallest, largest = min(*low, dense), max(*high, dense)
    # Room on the right for the text beside the longest bar.
    axes.set_xlim(smallest / 2, largest * (largest / (smallest / 2)) ** 0.45)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_locator(LogLocator(10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("Time (ms)")


def _shape(layer: Layer) -> str:
    return (
        f"N = {layer.batch}, IC = {layer.in_channels}, OC = {layer.out_channels}, "
        f"{layer.height}×{layer.width}"
    )


def _plan_lines(experiments: Experiments, panels: list) -> list[str]:
    lines = []
    for (name, sparsity), panel in panels:
        row = next(panel.dropna(subset="seconds").iloc[-1:].itertuples())
        isa = experiments.facts[name]["comparable"]["isa"]
        lines.append(
            f"Plan of {name}, S {sparsity:g}: {plan_text(row)} ({isa}); dense: {row.dense_layout}."
        )
    return lines


def _left_out_lines(experiments: Experiments, panels: list) -> list[str]:
    lines = []
    for (name, sparsity), panel in panels:
        reasons: dict[str, list[str]] = {}
        for row in panel.dropna(subset="left_out").itertuples():
            reasons.setdefault(row.left_out, []).append(TITLES[row.rung])
        for reason, rungs in reasons.items():
            lines.append(f"Left out of {name}, S {sparsity:g}: {', '.join(rungs)} ({reason}).")
    return lines
