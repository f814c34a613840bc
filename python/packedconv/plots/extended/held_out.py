"""Drawing predicted against measured speedup of layers that the calibration has not seen."""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from packedconv.calibration import Calibration
from packedconv.evidence.cpu_experiments import (
    Experiments,
    ceilings_sentence,
    distributions_sentence,
    protocol_sentence,
    skipped_layouts,
)
from packedconv.evidence.extended.crossover import layer_titles
from packedconv.evidence.extended.held_out import (
    BAND,
    WANTED_LAYERS,
    WANTED_PER_SIDE,
    WANTED_SHARE,
    Score,
)
from packedconv.plots.style import GREY, new_figure, write_caption

# By kernel size; colours of the paper's figures, told apart with colour blindness.
STYLES = {1: ("#88CCEE", "s"), 3: ("#332288", "o"), 5: ("#44AA99", "^")}
OTHER = ("#999933", "D")
WRONG = "#CC6677"
_TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
# Layers named in the caption.
_MOST_NAMED = 8


def held_out_figure(
    experiments: Experiments, calibration: Calibration, table: pd.DataFrame, score: Score
) -> Figure:
    """A point per layer with both intervals; wrong advice outside the band ringed."""
    figure = new_figure(5.6, 5.6)
    axes = figure.subplots()
    # By the points: an interval may reach far beyond them.
    columns = ["predicted", "speedup"]
    low = min(0.8, 0.75 * float(table[columns].min().min()))
    high = max(1.25, 1.3 * float(table[columns].max().max()))
    _draw_band(axes, low, high)
    for size, rows in table.groupby("kernel_size"):
        _draw_layers(axes, int(size), rows)
    wrong = table[table["outside_band"] & ~table["right"]]
    axes.plot(
        wrong["speedup"],
        wrong["predicted"],
        linestyle="none",
        marker="o",
        markersize=9,
        markerfacecolor="none",
        markeredgecolor=WRONG,
        markeredgewidth=1.4,
        label="wrong outside the band",
    )
    for scale, locate, limit in (
        (axes.set_xscale, axes.xaxis, axes.set_xlim),
        (axes.set_yscale, axes.yaxis, axes.set_ylim),
    ):
        scale("log")
        limit(low, high)
        locate.set_major_locator(FixedLocator([tick for tick in _TICKS if low <= tick <= high]))
        locate.set_minor_locator(NullLocator())
        locate.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_aspect("equal")
    axes.set_xlabel("Measured speedup over the fastest dense layout")
    axes.set_ylabel("Speedup that advise expects")
    axes.set_title(_title(score), fontsize=8)
    axes.legend(loc="upper left", fontsize=7)
    write_caption(figure, _lines(experiments, calibration, table, score))
    return figure


def _draw_band(axes: Axes, low: float, high: float) -> None:
    axes.axvspan(1 / BAND, BAND, color=GREY, alpha=0.18, linewidth=0, zorder=0)
    axes.axhline(1, color=GREY, linewidth=0.8, zorder=0.5)
    axes.axvline(1, color=GREY, linewidth=0.8, zorder=0.5)
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.8, linestyle="--", zorder=0.5)


def _draw_layers(axes: Axes, size: int, rows: pd.DataFrame) -> None:
    colour, marker = STYLES.get(size, OTHER)
    measured = rows["speedup"].to_numpy()
    predicted = rows["predicted"].to_numpy()
    axes.errorbar(
        measured,
        predicted,
        xerr=[measured - rows["speedup_low"], rows["speedup_high"] - measured],
        linestyle="none",
        marker=marker,
        markersize=4,
        color=colour,
        elinewidth=0.7,
        capsize=0,
        label=f"{size}×{size}, {len(rows)} layers",
    )


def _title(score: Score) -> str:
    return (
        f"advise is right on {score.right} of {score.outside} layers outside the band "
        f"({score.share:.1%}),\nthe best threshold on S ({_threshold(score)}) on "
        f"{score.threshold_right}"
        if score.outside
        else "no layer lies outside the band"
    )


def _threshold(score: Score) -> str:
    if math.isinf(score.threshold):
        return "always sparse" if score.threshold < 0 else "always dense"
    return f"S ≥ {score.threshold:.3g}"


def _lines(
    experiments: Experiments, calibration: Calibration, table: pd.DataFrame, score: Score
) -> list[str]:
    error = np.log(table["predicted"] / table["speedup"])
    within = (table["predicted_low"] <= table["speedup"]) & (
        table["speedup"] <= table["predicted_high"]
    )
    inside = score.layers - score.outside
    lines = [
        f"{protocol_sentence(experiments)}. {ceilings_sentence(experiments)}. "
        f"{distributions_sentence(experiments)}.",
        f"{score.layers} layers drawn by a seed, none of them in the crossover map, to which "
        f"advise is fitted ({calibration.source}); one sparsity each. Sparse is faster on "
        f"{score.sparse_faster} of them, dense on {score.layers - score.sparse_faster}; {inside} "
        f"lie inside the band of ± 10 % around break-even (grey), where either is as good. "
        "Horizontal bars: 95 % interval from resampling the rounds.",
        f"Outside the band advise is right on {score.right} of {score.outside}, the best single "
        f"threshold on S, chosen with hindsight on the same layers ({_threshold(score)}), on "
        f"{score.threshold_right}. Asked for: at least {WANTED_SHARE:.0%}, and more than the "
        f"threshold, on {WANTED_LAYERS} layers or more, {WANTED_PER_SIDE} or more on each side: "
        f"{'reached' if score.reached else 'not reached'}.",
        f"Expected over measured speedup: within a factor of {math.exp(error.abs().median()):.2f} "
        f"for half of the layers, {math.exp(error.abs().max()):.2f} for all; the 95 % interval "
        f"that advise gives has the measured one in it for {int(within.sum())} of {score.layers}.",
    ]
    wrong = table[table["outside_band"] & ~table["right"]]
    if len(wrong):
        titles = layer_titles(wrong)
        named = [
            f"{titles[row.layer]}, S {row.sparsity:g} ({row.predicted:.2f} expected, "
            f"{row.speedup:.2f} measured)"
            for row in wrong.head(_MOST_NAMED).itertuples()
        ]
        more = len(wrong) - len(named)
        lines.append(f"Wrong: {'; '.join(named)}{f'; and {more} more' if more else ''}.")
    unsure = int(table["inconclusive"].sum())
    lines.append(f"Inconclusive, with 1 in the measured interval: {unsure} of {score.layers}.")
    for column, text in (
        ("wide", "Rounds still too far apart after the repeats"),
        ("busy", "Timed while the machine was busy"),
    ):
        found = list(table.loc[table[column].astype(bool), "layer"])
        if found:
            named = ", ".join(found[:_MOST_NAMED])
            more = len(found) - _MOST_NAMED
            lines.append(f"{text}: {named}{f' and {more} more' if more > 0 else ''}.")
    left = [
        f"{name} ({facts['skipped']})"
        for name, facts in experiments.facts.items()
        if "skipped" in facts
    ]
    if left:
        lines.append(f"Left out: {'; '.join(left)}.")
    lines += [f"{text[:1].upper()}{text[1:]}." for text in skipped_layouts(experiments)]
    return lines
