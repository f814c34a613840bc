"""Drawing bandwidth utilisation of matrix times vector, beside the cited figures."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from packedconv.evidence.cpu_experiments import (
    Experiments,
    ceilings_sentence,
    distributions_sentence,
    protocol_sentence,
)
from packedconv.evidence.extended.utilisation import IMPLEMENTATIONS, MEASURED, PRINTED, TITLES
from packedconv.plots.quality import quality_lines
from packedconv.plots.style import PRINTED as PRINTED_LABEL
from packedconv.plots.style import ROOF_COLOUR, new_figure, sparsity_label, write_caption

# CSR, packed words and dense as in the other figures, dense in two shades.
COLOURS = {
    "scipy_csr": "#DDCC77",
    "torch_csr": "#88CCEE",
    "sparse": "#332288",
    "dense": "#CC6677",
    "dense_linear": "#882255",
}
_WIDTH = 0.8 / len(IMPLEMENTATIONS)
# Colour of the sides that the paper cites, as drawn hollow.
_CITED = {"csrmv": "#88CCEE", "gemv": "#CC6677"}


def utilisation_figure(experiments: Experiments, frame: pd.DataFrame) -> Figure:
    """Bars per sparsity, a panel per layer, and hollow bars of what the paper cites."""
    measured = frame[(frame["origin"] == MEASURED) & frame["utilisation"].notna()]
    layers = list(measured.groupby("layer", sort=False))
    figure = new_figure(2.4 + 3.0 * len(layers), 4.6)
    panels = figure.subplots(
        1, len(layers) + 1, gridspec_kw={"width_ratios": [3] * len(layers) + [1.3]}
    )
    for axes, (_, here) in zip(panels, layers, strict=False):
        _draw(axes, here)
    _draw_cited(panels[-1], frame[frame["origin"] == PRINTED])
    # What is read from memory, measured or cited, on one scale.
    past = [
        axes for axes, (_, here) in zip(panels, layers, strict=False) if here["past_caches"].all()
    ]
    top = max([1.05, *(axes.get_ylim()[1] for axes in past)])
    for axes in [*past, panels[-1]]:
        axes.set_ylim(0, top)
    panels[0].set_ylabel("Bytes moved / time / bandwidth of a copy")
    timed = [name for name in IMPLEMENTATIONS if name in set(measured["implementation"])]
    handles = [Patch(color=COLOURS[name], label=TITLES[name]) for name in timed]
    handles.append(Patch(facecolor="none", edgecolor=ROOF_COLOUR, label=PRINTED_LABEL))
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    write_caption(figure, _caption(experiments, frame, measured))
    return figure


def _draw(axes: Axes, here: pd.DataFrame) -> None:
    sparsities = sorted(here["sparsity"].unique())
    for rank, name in enumerate(IMPLEMENTATIONS):
        bars = here[here["implementation"] == name].sort_values("sparsity")
        if bars.empty:
            continue
        values = bars["utilisation"].to_numpy(float)
        low, high = (bars[f"utilisation_{end}"].to_numpy(float) for end in ("low", "high"))
        offset = (rank - (len(IMPLEMENTATIONS) - 1) / 2) * _WIDTH
        places = [sparsities.index(value) + offset for value in bars["sparsity"]]
        axes.bar(
            places,
            values,
            _WIDTH,
            yerr=[values - low, high - values],
            color=COLOURS[name],
            error_kw={"elinewidth": 0.8},
            gid=name,
        )
        for place, value, end in zip(places, values, high, strict=True):
            axes.annotate(
                f"{value:.0%}" if value >= 0.1 else f"{value:.1%}",
                (place, end),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                rotation=90,
                fontsize=5.5,
            )
    axes.set_xticks(range(len(sparsities)), [sparsity_label(value) for value in sparsities])
    axes.set_xlabel("Sparsity")
    axes.margins(y=0.16)
    _dress(axes)
    first = here.iloc[0]
    where = "from memory" if first["past_caches"] else "from the caches"
    axes.set_title(f"{first['rows']}×{first['columns']}, {where}")


def _draw_cited(axes: Axes, cited: pd.DataFrame) -> None:
    """Each range from its least to its largest value, as they are no measurements of bars."""
    for place, row in enumerate(cited.itertuples()):
        axes.bar(
            place,
            row.utilisation_high - row.utilisation_low,
            0.6,
            bottom=row.utilisation_low,
            facecolor="none",
            edgecolor=_CITED[row.implementation],
            linewidth=1.2,
            gid=row.implementation,
        )
        axes.annotate(
            f"{100 * row.utilisation_low:g}–{100 * row.utilisation_high:g}%",
            (place, row.utilisation_high),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=5.5,
        )
    titles = [TITLES[name].replace(" ", "\n") for name in cited["implementation"]]
    axes.set_xticks(range(len(titles)), titles)
    axes.set_xlim(-0.6, len(titles) - 0.4)
    _dress(axes)
    axes.set_title("A100, cited")


def _dress(axes: Axes) -> None:
    axes.axhline(1, color=ROOF_COLOUR, linewidth=0.8, linestyle="--", zorder=0.9)
    axes.grid(axis="x", visible=False)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylim(bottom=0)


def _caption(experiments: Experiments, frame: pd.DataFrame, measured: pd.DataFrame) -> list[str]:
    places = sorted({f"section {value}" for value in frame["where"].dropna()})
    return [
        f"{protocol_sentence(experiments)}. {ceilings_sentence(experiments)}. "
        f"{distributions_sentence(experiments)}; zeros are placed uniformly, by NumPy.",
        "Bytes moved: the matrix as it is stored (FP32 values and 32-bit indices for CSR, words of "
        "32 bits for packedconv), the vector and the product, each once. Bandwidth: that of a "
        "copy, which reads and writes; what only reads can exceed it. Bars: medians over the "
        "medians of the rounds with 95 % intervals, the bandwidth taken as exact. All products are "
        "checked against float64.",
        _memory_line(measured),
        f"Hollow: ranges {PRINTED_LABEL} ({', '.join(places)}), which cites them for an A100; "
        "nothing of it was measured here.",
        *_left_out_lines(frame),
        *quality_lines(measured.drop_duplicates(["layer", "sparsity"])),
    ]


def _memory_line(measured: pd.DataFrame) -> str:
    cache = measured["cache_bytes"].iloc[0] / 2**20
    past = measured[measured["past_caches"].astype(bool)]
    if past.empty:
        return f"No dense matrix exceeds the last-level cache ({cache:.0f} MiB)."
    least = past["set_bytes"].min() / 2**20
    return (
        f"From memory: the dense matrix exceeds the last-level cache ({cache:.0f} MiB), and every "
        f"contender takes copies of its matrix in turn, {least:.0f} MiB of them at least. From the "
        "caches: one matrix, again and again; its share of the memory's bandwidth may exceed 100%."
    )


def _left_out_lines(frame: pd.DataFrame) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for row in frame.dropna(subset="left_out").itertuples():
        place = row.layer
        if isinstance(row.implementation, str):
            place = f"{TITLES[row.implementation]} of {row.layer}, S {row.sparsity:g}"
        reasons.setdefault(row.left_out, []).append(place)
    return [f"Left out: {'; '.join(places)} ({reason})." for reason, places in reasons.items()]
