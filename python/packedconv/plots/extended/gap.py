"""Drawing the gap: a bar per removed cause, a panel per layer and sparsity."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from packedconv.evidence.cpu_experiments import (
    Experiments,
    ceilings_sentence,
    distributions_sentence,
    protocol_sentence,
    skipped_layouts,
)
from packedconv.evidence.extended.gap import (
    COUNTERS,
    DECISIVE,
    FIXED,
    MOST,
    SPARSE,
    STATEMENT,
    TITLES,
)
from packedconv.layer import Layer
from packedconv.plots.quality import quality_lines
from packedconv.plots.style import ERROR_BARS, GREY, legend_entry, new_figure, write_caption

COLOURS = {"pattern": "#88CCEE", "other": "#DDCC77", "together": "#332288", "dense": "#CC6677"}
KINDS = {
    "pattern": "a cause in the pattern of the nonzeros",
    "other": "another cause",
    "together": "several at once",
    "dense": "of dense: time over its own bound",
}
# What the sparse convolution would be faster by: line styles.
MEASURED, BOUND, IDEAL = "-", "--", ":"
_DARK = "#222222"
# Seen on dark bars too.
_DIAMOND = {"color": _DARK, "markersize": 4, "markeredgecolor": "white", "markeredgewidth": 0.5}
# How many times as far as the bars reach, whiskers are shown.
_REACH = 1.6


def gap_figure(experiments: Experiments, table: pd.DataFrame) -> Figure:
    """Bars of how many times as long the convolution takes with a cause as without it."""
    panels = list(table.dropna(subset="layer").groupby(["layer", "sparsity"], sort=False))
    layers = list(dict.fromkeys(name for (name, _), _ in panels))
    columns = max(sum(name == layer for (name, _), _ in panels) for layer in layers)
    figure = new_figure(1.8 + 3.0 * columns, 2.5 + 2.3 * len(layers))
    grid = figure.subplots(len(layers), columns, squeeze=False, sharey=True, sharex="row")
    drawn = set()
    for (name, sparsity), panel in panels:
        row = layers.index(name)
        place = grid[row][sum(seen[0] == name for seen in drawn)]
        drawn.add((name, sparsity))
        layer = Layer(**experiments.facts[name]["experiment"]["layer"])
        _draw(place, panel, _title(layer, sparsity))
    for place in grid.flat:
        if not place.has_data():
            place.set_axis_off()
    for places, name in zip(grid, layers, strict=True):
        _scale_axis(places[0], table[table["layer"] == name])
    for place in grid[-1]:
        place.set_xlabel("Time with the cause over time without it")
    figure.legend(handles=_legend(), loc="outside upper left", ncols=4, fontsize=6.5)
    write_caption(figure, _caption(experiments, table, panels))
    return figure


def _draw(axes: Axes, panel: pd.DataFrame, title: str) -> None:
    rows = panel.set_index("experiment")
    sparse = rows.loc[SPARSE]
    speedup = sparse["speedup"]
    for place, name in enumerate(TITLES):
        row = rows.loc[name]
        if pd.isna(row["factor"]):
            axes.annotate(
                f"left out: {row['left_out']}",
                (1, place),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=5.8,
                color=GREY,
            )
            continue
        value, low, high = row["factor"], row["factor_low"], row["factor_high"]
        axes.barh(
            place,
            value - 1,
            left=1,
            xerr=[[value - low], [high - value]],
            color=COLOURS[row["kind"]],
            error_kw=ERROR_BARS,
            height=0.62,
        )
        if row["kind"] != "dense":
            axes.plot(
                [sparse["seconds"] / row["bound_seconds"]],
                [place],
                marker="d",
                linestyle="none",
                **_DIAMOND,
            )
        axes.annotate(
            f"{value:.2f}",
            (min(max(high, 1), value * _REACH), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=5.8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
        )
    for value, line in (
        (1.0, MEASURED),
        (sparse["over_bound"], BOUND),
        (sparse["ideal"] / speedup, IDEAL),
    ):
        axes.axvline(value, color=_DARK, linestyle=line, linewidth=0.9, zorder=1.5)
    axes.set_yticks(range(len(TITLES)), TITLES.values())
    axes.set_ylim(len(TITLES) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(
        f"{title}\nspeedup {speedup:.1f}×, bound {sparse['bound_speedup']:.1f}×, "
        f"ideal {sparse['ideal']:.0f}×",
        fontsize=7.5,
    )


def _scale_axis(axes: Axes, table: pd.DataFrame) -> None:
    """Ratios on a logarithmic axis, which all panels of a layer share; whiskers may leave it."""
    sparse = table[table["experiment"] == SPARSE]
    bars = table[table["experiment"].isin(TITLES)]
    lines = [1.0, *sparse["over_bound"], *(sparse["ideal"] / sparse["speedup"])]
    shown = [*lines, *bars["factor"].dropna()]
    low = min([*shown, *bars["factor_low"].dropna().clip(lower=min(shown) / _REACH)])
    high = max([*shown, *bars["factor_high"].dropna().clip(upper=max(shown) * _REACH)])
    axes.set_xscale("log")
    axes.set_xlim(low / 1.08, high * 1.25)
    fine = [0.25, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64]
    axes.xaxis.set_major_locator(FixedLocator(fine) if high / low < 80 else LogLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _legend() -> list:
    return [
        *(Patch(color=COLOURS[kind], label=text) for kind, text in KINDS.items()),
        legend_entry("measured", color=_DARK, linestyle=MEASURED, linewidth=0.9),
        legend_entry("at the bound", color=_DARK, linestyle=BOUND, linewidth=0.9),
        legend_entry("ideal, 1 / (1 − S)", color=_DARK, linestyle=IDEAL, linewidth=0.9),
        legend_entry("at the bound of what is left", marker="d", linestyle="none", **_DIAMOND),
    ]


def _title(layer: Layer, sparsity: float) -> str:
    return (
        f"N = {layer.batch}, IC = {layer.in_channels}, OC = {layer.out_channels}, "
        f"{layer.height}×{layer.width}, S = {sparsity:g}"
    )


def _caption(experiments: Experiments, table: pd.DataFrame, panels: list) -> list[str]:
    return [
        f"{protocol_sentence(experiments)}. {ceilings_sentence(experiments)}. "
        f"{distributions_sentence(experiments)}.",
        "Each bar is an experiment of its own, timed in the same rounds as the others with the "
        "same schedule: parts need not add up, and none is what others leave over. Whiskers: 95 % "
        "intervals of ratios of medians over the medians of the rounds; one that meets the frame "
        "goes on (CSV). What no removal explains is from the end of the bar 'all at once' to its "
        "diamond.",
        "Rows equalised: every output channel has as many nonzeros. Indices contiguous: those of "
        "a channel follow each other. Few input channels: those of all are in the first ones. "
        "The pattern's causes: these three. Input in cache: strides of zero, so that all reads "
        "fall into one row. No fill: threads copy input into tiles once and never again. No "
        "stores: sums go to one tile of the thread. No idle lanes: an image that whole tiles "
        "cover, time by pixel; it has pixels beside its tiles to compute, which else are in those "
        "lanes, so that those of several causes keep them. Threads scale perfectly: one thread's "
        "time over their number. All but the pattern's: no fill, stores nor front end, on one "
        "thread. All at once: that, and the pattern's. Dense: what its distance to its own bound "
        "adds to the speedup.",
        *_share_lines(table),
        *_fixed_lines(table),
        *_counter_lines(table),
        *quality_lines(table.dropna(subset="layer")),
        *(f"{text[:1].upper()}{text[1:]}." for text in skipped_layouts(experiments)),
    ]


def _share_lines(table: pd.DataFrame) -> list[str]:
    """What is said of the statement that the gap is inherent."""
    rows = table[table["experiment"] == DECISIVE]
    shares = [
        f"{row.layer}, S {row.sparsity:g}: "
        + (
            row.verdict
            if pd.isna(row.share)
            else f"{row.share:.0%} [{row.share_low:.0%}, {row.share_high:.0%}], {row.verdict}"
        )
        for row in rows.dropna(subset="verdict").itertuples()
    ]
    verdict = table.loc[table["experiment"] == STATEMENT, "verdict"].iloc[0]
    return [
        "Of the time above the bound, what vanishes without all causes but the pattern (over "
        f"{MOST:.0%}: not inherent to sparsity): {'; '.join(shares)}. Together: {verdict}."
    ]


def _fixed_lines(table: pd.DataFrame) -> list[str]:
    parts = [
        f"{row.layer}, S {row.sparsity:g}: {1 / row.factor:.0%}"
        for row in table[table["experiment"] == FIXED].dropna(subset="factor").itertuples()
    ]
    return [f"Of the time, what an empty weight takes too: {'; '.join(parts)}."] if parts else []


def _counter_lines(table: pd.DataFrame) -> list[str]:
    rows = table[table["experiment"] == SPARSE]
    missing = rows["counters_left_out"].dropna().unique()
    lines = [f"Hardware counters that were left out: {text}." for text in missing]
    if rows[COUNTERS].notna().any(axis=None):
        lines.append("Hardware counters of one thread are in the CSV.")
    return lines
