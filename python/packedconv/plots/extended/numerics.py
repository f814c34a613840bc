"""Drawing errors by cause, and what figure 8 would show against other dense baselines."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from packedconv.bench.extended.numerics_rows import BASELINES, STORED, Comparison
from packedconv.evidence.audit import CLEARLY
from packedconv.evidence.extended.numerics import (
    BYTES,
    COMPARISON,
    EXCLUDED,
    FITS,
    OPEN,
    Numerics,
    tick_factor,
    verdicts,
)
from packedconv.plots.style import GREY, PRINTED, legend_entry, new_figure, write_caption

BASELINE_COLOURS = {
    "dense": "#CC6677",
    "winograd2": "#44AA99",
    "winograd4": "#117733",
    "tf32": "#882255",
}
BASELINE_TITLES = {
    "dense": "PyTorch, FP32",
    "winograd2": "Winograd F(2×2, 3×3)",
    "winograd4": "Winograd F(4×4, 3×3)",
    "tf32": "TF32",
}
# Causes of error of the sparse convolution: comparison, colour, marker, legend text.
CAUSES: list[tuple[Comparison, str, str, str]] = [
    (("float64", "bf16", "float64", "original"), "#999933", "X", "weights rounded to BF16"),
    (("float64", "fp16", "float64", "original"), "#88CCEE", "s", "weights rounded to FP16"),
    (("sparse", "fp16", "float64", "stored"), "#332288", "o", "summation in FP32"),
]
BASELINE_MARKERS = {"dense": "v", "winograd2": "^", "winograd4": "D", "tf32": "p"}
WEIGHT_LINES = ("-", "--", ":")
READINGS = {"stored": ("-", "the same rounded weights"), "original": ("--", "unrounded weights")}
INPUT_MARKERS = ("o", "s", "^", "D")
STORED_TITLES = {"fp16": "FP16", "bf16": "BF16", "fp32": "FP32"}
INPUT_TITLES = {
    "uniform": "inputs uniform",
    "normal": "inputs normal",
    "relu_normal": "inputs normal, ReLU",
    "log_uniform": "inputs log-uniform",
}
WEIGHT_TITLES = {"uniform": "weights uniform", "he_normal": "weights He normal"}


def numerics_figure(found: Numerics, table: pd.DataFrame) -> Figure:
    """A row of panels per layer, by distribution of the inputs; below them what figure 8 would
    show in each layer's panel, what a stored weight costs, and the legend."""
    names = list(found.panels)
    inputs, weights = (list(found.distributions(kind)) for kind in ("inputs", "weights"))
    columns = max(len(inputs), len(names) + 2)
    figure = new_figure(2.6 * columns, 2.0 * len(names) + 5.1)
    grid = figure.add_gridspec(
        len(names) + 1, columns, height_ratios=[1] * len(names) + [1.15], hspace=0.06
    )
    first: Axes | None = None
    for row, name in enumerate(names):
        for column, input_name in enumerate(inputs):
            axes = figure.add_subplot(grid[row, column], sharex=first, sharey=first)
            first = first or axes
            _draw_causes(axes, _of(table, layer=name, input_distribution=input_name), weights)
            axes.set_title(f"{_label(found, name)}\n{INPUT_TITLES[input_name]}", fontsize=8)
            axes.tick_params(labelbottom=row == len(names) - 1, labelleft=column == 0)
            if column == 0:
                axes.set_ylabel("Error / largest output")
            if row == len(names) - 1:
                axes.set_xlabel("Sparsity")
    shared: Axes | None = None
    for column, name in enumerate(names):
        axes = figure.add_subplot(grid[-1, column], sharey=shared)
        shared = shared or axes
        drawn = {"layer": name, "input_distribution": inputs[0], "weight_distribution": weights[0]}
        _draw_figure_8(axes, _of(table, **drawn), found.ticks(name))
        axes.set_title(
            f"Fig. 8{found.panels[name]}, if its baseline were\n({_label(found, name)})",
            fontsize=8,
        )
        axes.set_xlabel("Sparsity")
        if column == 0:
            axes.set_ylabel("Maximum absolute error")
    if shared is not None:
        # Room under the lowest band for its label.
        shared.set_ylim(bottom=min(found.ticks(name)[0] for name in names) / 2.5)
    stored_axes = figure.add_subplot(grid[-1, len(names)])
    _draw_stored(stored_axes, table, names[0], inputs, weights)
    legend_axes = figure.add_subplot(grid[-1, len(names) + 1])
    legend_axes.set_axis_off()
    legend_axes.legend(
        handles=_legend(inputs, weights), loc="center left", fontsize=6.2, labelspacing=0.32
    )
    write_caption(figure, _caption(found, table, names[0]))
    return figure


def _draw_causes(axes: Axes, table: pd.DataFrame, weights: list[str]) -> None:
    """Errors against float64, by cause, and of the dense methods."""
    dense = [
        (
            (name, "fp32", "float64", "original"),
            BASELINE_COLOURS[name],
            BASELINE_MARKERS[name],
            "",
        )
        for name in BASELINES
    ]
    for comparison, colour, marker, _ in [*CAUSES, *dense]:
        for weight, line in zip(weights, WEIGHT_LINES, strict=False):
            part = _of(table, weight_distribution=weight, **_named(comparison))
            axes.plot(
                part["sparsity"],
                part["relative_error"],
                color=colour,
                marker=marker,
                linestyle=line,
                linewidth=1.0,
                markersize=2.8,
            )
    axes.set_yscale("log")


def _draw_figure_8(axes: Axes, table: pd.DataFrame, ticks: list[float]) -> None:
    axes.axhspan(ticks[0], ticks[-1], color="#DDCC77", alpha=0.45, linewidth=0)
    axes.annotate(
        f"ticks {PRINTED}",
        (0.02, ticks[0]),
        xycoords=("axes fraction", "data"),
        xytext=(0, -2),
        textcoords="offset points",
        fontsize=6,
        ha="left",
        va="top",
        color=GREY,
    )
    for baseline in BASELINES:
        for reading, (line, _) in READINGS.items():
            part = _of(table, **_named(("sparse", "fp16", baseline, reading)))
            axes.plot(
                part["sparsity"],
                # A logarithmic axis has no zero.
                part["max_abs_error"].where(part["max_abs_error"] > 0),
                color=BASELINE_COLOURS[baseline],
                marker=BASELINE_MARKERS[baseline],
                linestyle=line,
                linewidth=1.0,
                markersize=3.2,
                markerfacecolor="none" if reading == "original" else None,
            )
    axes.set_yscale("log")


def _draw_stored(
    axes: Axes, table: pd.DataFrame, name: str, inputs: list[str], weights: list[str]
) -> None:
    """What a weight stored otherwise costs, in bytes and errors, at the lowest sparsity."""
    lowest = table["sparsity"].min()
    for place, stored in enumerate(STORED):
        for number, (input_name, marker) in enumerate(zip(inputs, INPUT_MARKERS, strict=False)):
            part = _of(
                table,
                layer=name,
                sparsity=lowest,
                input_distribution=input_name,
                **_named(("word_order", stored, "float64", "original")),
            )
            for weight, fill in zip(weights, (GREY, "none"), strict=False):
                error = _of(part, weight_distribution=weight)["relative_error"]
                axes.plot(
                    [place + 0.16 * (number - (len(inputs) - 1) / 2)] * len(error),
                    error,
                    marker=marker,
                    color=GREY,
                    markerfacecolor=fill,
                    linestyle="none",
                    markersize=4,
                )
    axes.set_yscale("log")
    axes.set_xlim(-0.5, len(STORED) - 0.5)
    axes.set_xticks(
        range(len(STORED)), [f"{STORED_TITLES[stored]}\n{BYTES[stored]}" for stored in STORED]
    )
    axes.set_xlabel("Stored weight, bytes per nonzero")
    axes.set_ylabel("Error / largest output")
    axes.set_title(f"Weights stored otherwise\nS = {lowest:.2f}", fontsize=8)


def _legend(inputs: list[str], weights: list[str]) -> list:
    gap = legend_entry(" ", linestyle="none")
    return [
        *(
            legend_entry(text, color=colour, marker=marker, linestyle="none")
            for _, colour, marker, text in CAUSES
        ),
        gap,
        *(
            legend_entry(
                BASELINE_TITLES[name],
                color=BASELINE_COLOURS[name],
                marker=BASELINE_MARKERS[name],
                linestyle="none",
            )
            for name in BASELINES
        ),
        gap,
        *(
            legend_entry(WEIGHT_TITLES[name], color=GREY, linestyle=line)
            for name, line in zip(weights, WEIGHT_LINES, strict=False)
        ),
        gap,
        *(
            legend_entry(f"Fig. 8: {text}", color=GREY, linestyle=line)
            for line, text in READINGS.values()
        ),
        gap,
        *(
            legend_entry(INPUT_TITLES[name], color=GREY, marker=marker, linestyle="none")
            for name, marker in zip(inputs, INPUT_MARKERS, strict=False)
        ),
        *(
            legend_entry(
                f"hollow: {WEIGHT_TITLES[name]}",
                color=GREY,
                marker="o",
                markerfacecolor="none",
                linestyle="none",
            )
            for name in weights[1:2]
        ),
    ]


def _caption(found: Numerics, table: pd.DataFrame, stored_layer: str) -> list[str]:
    settings, facts = found.settings, found.facts
    threads = facts["threads"]
    inputs, weights = found.distributions("inputs"), found.distributions("weights")
    return [
        f"{facts['comparable']['cpu']} (device {settings['device']['name']}, run "
        f"{settings['run']}), {threads} thread{'s' * (threads != 1)}, seed {settings['seed']}; "
        "nothing is timed. One input a point; errors are maxima over all outputs. "
        + " ".join(_cropped(found, name) for name in found.panels),
        f"Inputs: {_listed(inputs)}. Weights: {_listed(weights)}.",
        "Top: error against float64 over the largest output. The three causes stand apart: "
        "rounding alone is summed in float64, summation alone has the same rounded weights on "
        "both sides, in this library's kernel. The dense methods have unrounded weights; "
        "PyTorch's is its own, TF32 (operands rounded to 10 mantissa bits, ties to even, summed "
        "in FP32) and Winograd (in FP32) are emulated.",
        "Bottom, Fig. 8: this library's kernel against each baseline, with inputs "
        f"{INPUT_TITLES[next(iter(inputs))].removeprefix('inputs ')} and weights "
        f"{WEIGHT_TITLES[next(iter(weights))].removeprefix('weights ')}. TF32 has FP16's mantissa "
        "and rounds ordinary weights alike, so its two readings coincide. The paper states no "
        "distributions, and all errors grow with the size of inputs and weights.",
        *_zero_lines(found, table),
        *_verdict_lines(found, table),
        f"Weights stored otherwise ({_label(found, stored_layer)}): summed in FP32 in the order of "
        "the packed words, against float64 with unrounded weights. A nonzero has its value and a "
        "16-bit index: 4 bytes with FP16 or BF16; with FP32 6 bytes in two arrays, or 8 in one "
        "aligned word.",
    ]


def _verdict_lines(found: Numerics, table: pd.DataFrame) -> list[str]:
    """Which baselines figure 8's ticks leave, if it shares its baseline with figure 5."""
    judged = verdicts(table)
    inputs, weights = (next(iter(found.distributions(kind))) for kind in ("inputs", "weights"))
    factors = {tick_factor(found.published, panel) for panel in found.panels.values()}
    lines = [
        "Whether figure 8's ticks allow a baseline, and with it figure 5's if both share it, by "
        "rule: on the ticks, where its largest error is within a factor of "
        f"{' or '.join(f'{factor:g}' for factor in sorted(factors))} of their range; excluded, "
        f"where it is more than {CLEARLY}× the largest tick; else open. In brackets the largest "
        "error over the largest tick, so how much smaller values would have to be, and how many of "
        "all pairs of distributions say the same. What the printed throughputs exclude is in the "
        "audit."
    ]
    for name, panel in found.panels.items():
        for reading, (_, text) in READINGS.items():
            curves = _of(judged, layer=name, reference_weights=reading)
            chosen = _of(curves, input_distribution=inputs, weight_distribution=weights)
            parts = []
            for state in (FITS, OPEN, EXCLUDED):
                said = []
                for row in chosen[chosen["verdict"] == state].itertuples():
                    same = _of(curves, reference=row.reference)["verdict"] == state
                    said.append(
                        f"{BASELINE_TITLES[row.reference]} ({_times(row.over_largest_tick)}; "
                        f"{same.sum()} of {len(same)})"
                    )
                if said:
                    parts.append(f"{state}: {', '.join(said)}")
            lines.append(f"Fig. 8{panel} with {text}: {'; '.join(parts)}.")
    return lines


def _zero_lines(found: Numerics, table: pd.DataFrame) -> list[str]:
    """Errors of exactly zero, which a logarithmic axis cannot show; nothing without any."""
    zero = table[(table["max_abs_error"] == 0) & table["verdict"].notna()]
    inputs, weights = (next(iter(found.distributions(kind))) for kind in ("inputs", "weights"))
    zero = _of(zero, input_distribution=inputs, weight_distribution=weights)
    places = [
        f"Fig. 8{found.panels[name]}, {BASELINE_TITLES[reference]} with {READINGS[reading][1]}, S "
        + ", ".join(f"{sparsity:.2f}" for sparsity in part["sparsity"])
        for (name, reference, reading), part in zero.groupby(
            ["layer", "reference", "reference_weights"], sort=False
        )
    ]
    if not places:
        return []
    return [f"Not drawn, since both sides are the same to the last bit: {'; '.join(places)}."]


def _times(ratio: float) -> str:
    """A ratio in two digits, without an exponent."""
    return f"{float(f'{ratio:.2g}'):,g}×"


def _cropped(found: Numerics, name: str) -> str:
    """How a layer compares with the paper's."""
    layer = found.paper_layer(name)
    row = _of(found.rows, layer=name).iloc[0]
    size, whole = (row["height"], row["width"]), (layer.height, layer.width)
    cut = f", cropped from {whole[0]}×{whole[1]}" if size != whole else ""
    return (
        f"{_label(found, name)}: one image of {size[0]}×{size[1]}{cut}, where the paper has "
        f"{layer.batch}."
    )


def _label(found: Numerics, name: str) -> str:
    row = _of(found.rows, layer=name).iloc[0]
    return f"IC {row['in_channels']}, OC {row['out_channels']}"


def _listed(words: dict[str, str]) -> str:
    return "; ".join(words.values())


def _named(comparison: Comparison) -> dict[str, str]:
    return dict(zip(COMPARISON, comparison, strict=True))


def _of(table: pd.DataFrame, **values: object) -> pd.DataFrame:
    """The rows with these values."""
    for column, value in values.items():
        table = table[table[column] == value]
    return table
