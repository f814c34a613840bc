"""Drawing the baselines: speedups over sparsity, and memory, a column of panels per layer."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from packedconv.evidence.cpu_experiments import (
    Experiments,
    ceilings_sentence,
    distributions_sentence,
    protocol_sentence,
    skipped_layouts,
)
from packedconv.evidence.extended.baselines import REFERENCE, TITLES
from packedconv.evidence.layer_table import marks
from packedconv.plots.style import (
    ERROR_BARS,
    GREY,
    ROOF_COLOUR,
    legend_entry,
    new_figure,
    write_caption,
)

# Sparse and dense as in the ladder.
STYLES = {
    "sparse": ("#332288", "o"),
    "dense": ("#CC6677", ""),
    "dense_default": ("#882255", "s"),
    "im2col_csr": ("#117733", "^"),
    "im2col_csr_bands": ("#44AA99", "v"),
    "im2col_dense": ("#999933", "D"),
}

# Room for an entry of the legend.
_ENTRY_INCHES = 1.9

WHAT_EACH_IS = (
    "All compute the same weights, as packed, from the same input. packedconv is checked against "
    "float64, im2col against its output, the dense layouts against NCHW. packedconv: conv2d of an "
    "NCHW input into an output that is there. Dense, best layout: PyTorch's conv2d in the fastest "
    "of NCHW, channels last, and both with weights reordered ahead, by trials. Dense, NCHW: as one "
    "calls it. im2col + CSR: an image unfolded, by torch.nn.functional.unfold or by one copy of a "
    "strided view, then the product of the weights in CSR, by torch.sparse (32-bit indices, MKL) "
    "on all threads or by SciPy on one; the fastest pair in trials at that sparsity; a batch goes "
    "image by image. In bands: as many rows at a time as 1, 4 or 16 MiB hold, by the view. "
    "im2col + dense: the product with the zeros, by torch.mm, unfolded either way. Conversion of "
    "the weights is not timed for any."
)
WHAT_MEMORY_IS = (
    "Memory: light, what is held (input, weights in the contender's form, output); dark, how far "
    "the resident size rises above that in the contender's first execution, in a fresh process "
    "for each, after a small layer has started its threads; what the execution leaves for the "
    "next (plans, scratch) counts, pages of code and holes of the allocator do not. Numbers: the "
    "dark part in MB, and for im2col over one input image. The mark is held + one image "
    "unfolded whole, computed: K² · IC · output pixels · 4 bytes."
)


def baselines_figure(experiments: Experiments, table: pd.DataFrame) -> Figure:
    """Speedups with intervals over the best dense layout above, memory below, for each layer."""
    layers = list(table.groupby("layer", sort=False))
    figure = new_figure(1.6 + 1.75 * len(layers), 6.2)
    axes = figure.subplots(2, len(layers), squeeze=False, height_ratios=(1.5, 1))
    for (_, rows), (above, below) in zip(layers, axes.T, strict=True):
        _draw_speedups(above, rows)
        _draw_memory(below, rows)
        above.set_title(_shape(rows.iloc[0]), fontsize=7)
    _share_limits(axes[0])
    axes[0, 0].set_ylabel("Speedup over dense, best layout")
    for place in axes[1, 1:]:
        place.set_yticklabels([])
    _legend(figure)
    write_caption(figure, _caption(experiments, table))
    return figure


def _draw_speedups(axes: Axes, rows: pd.DataFrame) -> None:
    sparsities = sorted(rows["sparsity"].unique())
    for contender, group in rows.dropna(subset="speedup").groupby("contender", sort=False):
        if contender == REFERENCE:
            continue
        colour, marker = STYLES[contender]
        places = [sparsities.index(value) for value in group["sparsity"]]
        axes.errorbar(
            places,
            group["speedup"],
            # The median of an even number of rounds may lie outside a narrow interval.
            yerr=[
                (group["speedup"] - group["speedup_low"]).clip(lower=0),
                (group["speedup_high"] - group["speedup"]).clip(lower=0),
            ],
            color=colour,
            label=TITLES[contender],
            **ERROR_BARS,
        )
        for place, row in zip(places, group.itertuples(), strict=True):
            axes.plot(
                place,
                row.speedup,
                color=colour,
                marker=marker,
                markerfacecolor="white" if row.verdict == "inconclusive" else colour,
            )
    axes.axhline(1, color=STYLES[REFERENCE][0], label=TITLES[REFERENCE])
    axes.set_yscale("log")
    points = rows.dropna(subset="spread").drop_duplicates("sparsity").set_index("sparsity")
    axes.set_xticks(
        range(len(sparsities)), [f"{value:g}{marks(points.loc[value])}" for value in sparsities]
    )
    axes.set_xlim(-0.4, len(sparsities) - 0.6)
    axes.set_xlabel("Sparsity")


def _share_limits(axes: list[Axes]) -> None:
    """The same range of speedups everywhere, with every 1, 2 and 5 labelled."""
    low = min(place.get_ylim()[0] for place in axes)
    high = max(place.get_ylim()[1] for place in axes)
    for place in axes:
        place.set_ylim(low, high)
        place.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        place.yaxis.set_minor_formatter(NullFormatter())
        place.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for place in axes[1:]:
        place.yaxis.set_major_formatter(NullFormatter())


def _draw_memory(axes: Axes, rows: pd.DataFrame) -> None:
    """Bars in MB of the sparsity at which memory was measured, one place for each contender."""
    found = rows.dropna(subset="working_bytes").set_index("contender")
    for place, contender in enumerate(TITLES):
        if contender not in found.index:
            axes.annotate(
                "none",
                (0, place),
                xytext=(2, 0),
                textcoords="offset points",
                va="center",
                fontsize=6,
                color=GREY,
            )
            continue
        row, colour = found.loc[contender], STYLES[contender][0]
        text = f"+{row['working_bytes'] / 1e6:.3g}"
        held, working = row["held_bytes"] / 1e6, row["working_bytes"] / 1e6
        axes.barh(place, held, color=colour, alpha=0.35, height=0.65)
        axes.barh(place, working, left=held, color=colour, height=0.65)
        end = held + working
        if not pd.isna(row["unfolded_bytes"]):
            mark = held + row["unfolded_bytes"] / 1e6
            axes.plot([mark, mark], [place - 0.42, place + 0.42], color=ROOF_COLOUR, linewidth=1)
            end = max(end, mark)
            text += f", {row['working_per_input']:.1f}×"
        axes.annotate(
            text,
            (end, place),
            xytext=(2, 0),
            textcoords="offset points",
            va="center",
            fontsize=6,
        )
    axes.yaxis.set_major_locator(FixedLocator(range(len(TITLES))))
    axes.set_yticklabels(TITLES.values())
    axes.set_ylim(len(TITLES) - 0.4, -0.6)
    # Room for the text beside the longest bar.
    axes.set_xlim(0, 1.45 * axes.get_xlim()[1])
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("Memory (MB)")


def _shape(row: pd.Series) -> str:
    return (
        f"N {row['batch']}, {row['in_channels']}→{row['out_channels']}\n"
        f"{row['height']}×{row['width']}, K {row['kernel_size']}"
    )


def _legend(figure: Figure) -> None:
    entries = [
        legend_entry(title, color=STYLES[name][0], marker=STYLES[name][1])
        for name, title in TITLES.items()
    ]
    entries.append(
        legend_entry(
            "inconclusive: interval across 1",
            color=GREY,
            marker="o",
            markerfacecolor="white",
            linestyle="none",
        )
    )
    columns = max(2, int(figure.get_figwidth() / _ENTRY_INCHES))
    figure.legend(handles=entries, loc="outside upper center", ncols=min(columns, len(entries)))


def _caption(experiments: Experiments, table: pd.DataFrame) -> list[str]:
    sparsity = table.dropna(subset="held_bytes")["sparsity"].unique()
    at = f" Measured at S {sparsity[0]:g}." if len(sparsity) else ""
    not_timed: dict[str, str] = {}
    for facts in experiments.measured.values():
        not_timed.update(facts["not_timed"])
    return [
        f"{protocol_sentence(experiments)}. {ceilings_sentence(experiments)}. "
        f"{distributions_sentence(experiments)}.",
        "Speedup: median time of the best dense layout over that of the contender, over the "
        "medians of the rounds, with its 95 % interval from resampling the rounds. The dense "
        "layout is chosen once per layer, at its first sparsity.",
        WHAT_EACH_IS,
        WHAT_MEMORY_IS + at,
        *_left_out_lines(table),
        *(f"Not timed: {name} ({reason})." for name, reason in not_timed.items()),
        *_quality_lines(table),
        *(f"{text[:1].upper()}{text[1:]}." for text in skipped_layouts(experiments)),
    ]


def _left_out_lines(table: pd.DataFrame) -> list[str]:
    """What has no time or no memory, and why; a line for every reason."""
    lines = []
    for column, what in (("left_out", "Not timed"), ("memory_left_out", "Memory not measured")):
        for (contender, reason), rows in table.groupby(["contender", column], sort=False):
            layers = ", ".join(rows["layer"].unique())
            lines.append(f"{what}: {TITLES[contender]} of {layers} ({reason}).")
    return lines


def _quality_lines(table: pd.DataFrame) -> list[str]:
    """What was not measured well; nothing where all was."""
    points = table.dropna(subset="spread").drop_duplicates(["layer", "sparsity"])
    wide, busy = (points[points[column].astype(bool)] for column in ("wide", "busy"))
    lines = []
    if len(wide):
        places = (
            f"{row.layer}, S {row.sparsity:g} ({row.spread:.0%})" for row in wide.itertuples()
        )
        lines.append(f"*: rounds still too far apart after the repeats: {'; '.join(places)}.")
    if len(busy):
        places = (f"{row.layer}, S {row.sparsity:g}" for row in busy.itertuples())
        lines.append(f"†: timed while the machine was busy: {'; '.join(places)}.")
    return lines
