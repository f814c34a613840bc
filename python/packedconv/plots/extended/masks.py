"""Drawing masks: bars of time over the uniform mask's, and how the nonzeros are balanced."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from packedconv.evidence.cpu_experiments import (
    Experiments,
    ceilings_sentence,
    distributions_sentence,
    protocol_sentence,
    skipped_layouts,
)
from packedconv.evidence.extended.masks import TITLES
from packedconv.layer import Layer
from packedconv.plots.quality import quality_lines
from packedconv.plots.style import ERROR_BARS, GREY, legend_entry, new_figure, write_caption

BAR = "#88CCEE"
UNIFORM_BAR = "#BBBBBB"
TRAINED_BAR = "#332288"
# Of two sizes: both show where they are equal.
CHANNELS = {"color": "#117733", "marker": "o", "markersize": 4.6}
SLICES = {"color": "#CC6677", "marker": "D", "markersize": 2.4}


def masks_figure(experiments: Experiments, table: pd.DataFrame) -> Figure:
    """A row per layer; for each sparsity the ratios with intervals, and beside them the balance."""
    layers = list(dict.fromkeys(table["layer"]))
    sparsities = list(dict.fromkeys(table["sparsity"]))
    figure = new_figure(1.6 + 3.6 * len(sparsities), 0.8 + 2.1 * len(layers))
    places = figure.subplots(
        len(layers),
        2 * len(sparsities),
        squeeze=False,
        width_ratios=[2.2, 1.0] * len(sparsities),
    )
    # One scale for all ratios, and one for all balances. An interval may be far wider than what
    # it is about.
    most = min(float(table["ratio_high"].max()), 1.5 * float(table["ratio"].max()))
    uneven = float(table[["channel_balance", "slice_balance"]].max(axis=None))
    for name, line in zip(layers, places, strict=True):
        for column, sparsity in enumerate(sparsities):
            panel = table[(table["layer"] == name) & (table["sparsity"] == sparsity)]
            ratios, balances = line[2 * column : 2 * column + 2]
            if panel.empty:
                ratios.set_axis_off()
                balances.set_axis_off()
                continue
            _draw_ratios(ratios, panel, most)
            _draw_balances(balances, panel, uneven)
            layer = Layer(**experiments.facts[name]["experiment"]["layer"])
            ratios.set_title(f"{name}, S = {sparsity:g}\n{_shape(layer)}", fontsize=8)
            if column > 0:
                ratios.set_yticklabels([])
    for axes in places[-1][::2]:
        axes.set_xlabel("Time over that of the uniform mask")
    for axes in places[-1][1::2]:
        axes.set_xlabel("Largest over mean\nnumber of nonzeros")
    figure.legend(
        handles=[
            legend_entry("of an output channel", linestyle="none", **CHANNELS),
            legend_entry("of a thread's slice of channels", linestyle="none", **SLICES),
        ],
        loc="outside upper right",
        ncols=2,
    )
    write_caption(figure, _caption(experiments, table))
    return figure


def _draw_ratios(axes: Axes, panel: pd.DataFrame, most: float) -> None:
    for place, row in enumerate(panel.itertuples()):
        if isinstance(row.left_out, str):
            axes.annotate(
                "left out",
                (1.0, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                color=GREY,
                fontsize=6.5,
            )
            continue
        colour = {"sparse": UNIFORM_BAR, "trained": TRAINED_BAR}.get(row.mask, BAR)
        # Of the mask itself there is no interval.
        bars = [[row.ratio - row.ratio_low], [row.ratio_high - row.ratio]]
        axes.barh(
            place,
            row.ratio,
            xerr=None if row.mask == "sparse" else bars,
            color=colour,
            error_kw=ERROR_BARS,
            height=0.62,
        )
        axes.annotate(
            _text(row),
            (min(max(row.ratio_high, 1.0), most), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=6.5,
            # Legible where it crosses the line.
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
    axes.axvline(1.0, color=GREY, linewidth=0.8, zorder=1.5)
    axes.set_yticks(range(len(panel)), [TITLES[mask] for mask in panel["mask"]])
    axes.set_ylim(len(panel) - 0.4, -0.6)
    # From zero: the length of a bar is a time. Room on the right for the text.
    axes.set_xlim(0, max(most, 1.0) * 1.75)
    axes.grid(axis="y", visible=False)


def _draw_balances(axes: Axes, panel: pd.DataFrame, uneven: float) -> None:
    timed = panel.reset_index(drop=True).dropna(subset="seconds")
    for column, style in (("channel_balance", CHANNELS), ("slice_balance", SLICES)):
        axes.plot(timed[column].to_numpy(float), timed.index, linestyle="none", **style)
    axes.axvline(1.0, color=GREY, linewidth=0.8, zorder=1.5)
    axes.set_yticks(range(len(panel)), [])
    axes.set_ylim(len(panel) - 0.4, -0.6)
    axes.set_xlim(0.8, 1.08 * uneven)


def _text(row: object) -> str:
    speedup = f"{row.speedup:.2g}× dense"
    if row.mask == "sparse":
        return speedup
    mark = {"inconclusive": "?"}.get(row.verdict, "")
    return f"{row.ratio:.2f}{mark}, {speedup}"


def _shape(layer: Layer) -> str:
    return (
        f"N = {layer.batch}, IC = {layer.in_channels}, OC = {layer.out_channels}, "
        f"{layer.height}×{layer.width}"
    )


def _caption(experiments: Experiments, table: pd.DataFrame) -> list[str]:
    timed = table.dropna(subset="seconds")
    return [
        f"{protocol_sentence(experiments)}. {ceilings_sentence(experiments)}. "
        f"{distributions_sentence(experiments)}; the mask chooses which weights are not zero, and "
        "trained weights are those of the network.",
        "Bars: ratio of the medians over the medians of the rounds, with its 95 % interval; ?: the "
        "interval holds 1, inconclusive; one that leaves the axis is cut. Beside them how many "
        "times as fast as dense, PyTorch's fastest layout, chosen once per layer at its first "
        "sparsity. All are checked against float64. Another draw of the uniform mask shows what a "
        "ratio says of chance alone.",
        "Slices: output channels in order, in as many parts as threads; the kernel itself cuts by "
        "nonzeros, and its threads draw pieces of work. 1:M: one nonzero among M = 1/(1 − S) "
        "channels. Blocks: four output channels share their places. Runs: eight consecutive "
        "weights of a channel. Neighbourhoods: all nonzeros at 30 % of the pairs of channels, "
        "which lie together. Skewed: an eighth of the channels has ten times the nonzeros of the "
        "others.",
        *_source_lines(timed),
        *_count_lines(timed),
        *_plan_lines(timed),
        *_left_out_lines(table),
        *quality_lines(timed),
        *(f"{text[:1].upper()}{text[1:]}." for text in skipped_layouts(experiments)),
    ]


def _count_lines(timed: pd.DataFrame) -> list[str]:
    """The numbers of nonzeros, and the masks whose number is another one."""
    lines = []
    for (name, sparsity), panel in timed.groupby(["layer", "sparsity"], sort=False):
        usual = int(panel.loc[panel["mask"] == "sparse", "nonzeros"].iloc[0])
        others = [
            f"{TITLES[row.mask]} {row.nonzeros}"
            for row in panel.itertuples()
            if row.nonzeros != usual
        ]
        text = f"{name}, S {sparsity:g}: {usual}"
        lines.append(f"{text} ({', '.join(others)})" if others else text)
    return [f"Nonzeros: {'; '.join(lines)}."]


def _source_lines(timed: pd.DataFrame) -> list[str]:
    """Whose weights the trained ones are."""
    sources = timed.dropna(subset="source").drop_duplicates("layer")
    places = [f"{row.source} in {row.layer}" for row in sources.itertuples()]
    if not places:
        return []
    return [
        f"{TITLES['trained'].capitalize()}: convolutions of the digits network with a weight of "
        f"that shape, pruned by magnitude, whatever image it had: {', '.join(places)}."
    ]


def _plan_lines(timed: pd.DataFrame) -> list[str]:
    """Which masks have another schedule than the uniform one."""
    other = timed[~timed["same_schedule"].astype(bool)]
    if other.empty:
        return ["The plan of every mask has the same schedule as that of the uniform one."]
    places = [
        f"{name}, S {sparsity:g}: {', '.join(TITLES[mask] for mask in panel['mask'])}"
        for (name, sparsity), panel in other.groupby(["layer", "sparsity"], sort=False)
    ]
    return [f"Another schedule than the uniform mask's was chosen for {'; '.join(places)}."]


def _left_out_lines(table: pd.DataFrame) -> list[str]:
    return [
        f"Left out of {row.layer}, S {row.sparsity:g}: {TITLES[row.mask]} ({row.left_out})."
        for row in table.dropna(subset="left_out").itertuples()
    ]
