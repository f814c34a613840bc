"""Drawing the formats of a sparse weight: bytes, conversion and time over sparsity."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from packedconv.evidence.cpu_experiments import (
    Experiments,
    ceilings_sentence,
    distributions_sentence,
    protocol_sentence,
    skipped_layouts,
)
from packedconv.evidence.extended.formats import PRODUCTS, TITLES
from packedconv.layer import Layer
from packedconv.plots.captions import shapes
from packedconv.plots.quality import quality_lines
from packedconv.plots.style import GREY, legend_entry, new_figure, write_caption

# Colour and marker; dense and packed words as in the other figures.
STYLES = {
    "dense": ("#CC6677", ""),
    "coo": ("#999933", "X"),
    "csr": ("#88CCEE", "s"),
    "bsr_2x2": ("#44AA99", "^"),
    "bsr_4x4": ("#117733", "D"),
    "bitmap": ("#AA4499", "P"),
    "packed": ("#332288", "o"),
}
_CURVES = ("Bytes per nonzero", "Bytes of the layer (KiB)", "Conversion (ms)", "Time (ms)")
# Where a break-even outside of every sparsity is drawn.
_ALWAYS, _NEVER = -0.1, 1.1
# Of a quantity that breaks even: what it is called, its marker, and whether that is filled.
_QUANTITIES = {
    "bytes_fp32": ("bytes, FP32", "s", True),
    "bytes_fp16": ("bytes, FP16", "s", False),
    "bytes_fp16_of_fp32": ("bytes, FP16 against dense FP32", "D", False),
    "seconds": ("time", "o", True),
    "product_seconds": ("time without im2col", "o", False),
}


def formats_figure(
    experiments: Experiments, frame: pd.DataFrame, break_evens: pd.DataFrame
) -> Figure:
    """A row of panels per layer: bytes, conversion and time of every format over sparsity, and from
    which sparsity it needs no more than dense."""
    names = list(frame["layer"].unique())
    figure = new_figure(13.5, 2.2 + 2.5 * len(names))
    grid = figure.subplots(len(names), len(_CURVES) + 1, squeeze=False)
    for row, name in zip(grid, names, strict=True):
        here = frame[frame["layer"] == name]
        layer = Layer(**experiments.facts[name]["layer"])
        _draw_bytes(row[0], here, "bytes_per_nonzero", 1)
        _draw_bytes(row[1], here, "bytes", 2**10)
        _draw_times(row[2], here, "conversion_seconds", "conversion_low", "conversion_high", "-")
        _draw_times(row[3], here, "seconds", "low", "high", "-")
        whole = here[here["format"].isin(PRODUCTS)]
        _draw_times(row[3], whole, "whole_seconds", "whole_low", "whole_high", ":")
        for axes, title in zip(row, _CURVES, strict=False):
            _dress(axes, here["sparsity"].unique(), title)
        _draw_break_evens(row[-1], break_evens[break_evens["layer"] == name])
        row[0].set_title(f"{shapes([layer])}, OC = {layer.out_channels}", fontsize=8)
    for axes in grid[-1][:-1]:
        axes.set_xlabel("Sparsity")
    grid[-1][-1].set_xlabel("No more than dense from this sparsity")
    figure.legend(
        handles=_legend_entries(frame, break_evens),
        loc="outside upper center",
        ncols=10,
        columnspacing=1.4,
    )
    write_caption(figure, _caption(experiments, frame, break_evens))
    return figure


def _draw_bytes(axes: Axes, here: pd.DataFrame, quantity: str, unit: int) -> None:
    for form, points in here.groupby("format", sort=False):
        colour, marker = STYLES[form]
        for values, line in (("fp32", "-"), ("fp16", "--")):
            shown = points.dropna(subset=f"{quantity}_{values}")
            axes.plot(
                1 - shown["sparsity"].to_numpy(float),
                shown[f"{quantity}_{values}"].to_numpy(float) / unit,
                color=colour,
                marker=marker,
                linestyle=line,
                gid=f"{form} {values}",
            )


def _draw_times(axes: Axes, here: pd.DataFrame, value: str, low: str, high: str, line: str) -> None:
    for form, points in here.groupby("format", sort=False):
        shown = points.dropna(subset=value)
        if shown.empty:
            continue
        colour, marker = STYLES[form]
        milliseconds = 1e3 * shown[value].to_numpy(float)
        axes.errorbar(
            1 - shown["sparsity"].to_numpy(float),
            milliseconds,
            yerr=[
                milliseconds - 1e3 * shown[low].to_numpy(float),
                1e3 * shown[high].to_numpy(float) - milliseconds,
            ],
            color=colour,
            marker=marker if line == "-" else "",
            linestyle=line,
            elinewidth=0.8,
            gid=f"{form} {value}",
        )


def _draw_break_evens(axes: Axes, found: pd.DataFrame) -> None:
    """A line per format, a marker per quantity; always on the left edge and never on the right."""
    names = list(found["format"].unique())
    for row in found.itertuples():
        rank = list(_QUANTITIES).index(row.quantity)
        _, marker, filled = _QUANTITIES[row.quantity]
        colour = STYLES[row.format][0]
        ends = [min(max(value, _ALWAYS), _NEVER) for value in (row.low, row.sparsity, row.high)]
        place = names.index(row.format) + 0.16 * (rank - 2)
        axes.plot(ends[::2], [place] * 2, color=colour, linewidth=0.8, clip_on=False)
        axes.plot(
            ends[1],
            place,
            marker=marker,
            color=colour,
            markerfacecolor=colour if filled else "white",
            markersize=3.2,
            linestyle="none",
            clip_on=False,
            gid=f"{row.format} {row.quantity}",
        )
    axes.set_yticks(range(len(names)), [TITLES[name] for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(_ALWAYS, _NEVER)
    ticks = [0, 0.2, 0.4, 0.6, 0.8, 1]
    axes.set_xticks(
        [_ALWAYS, *ticks, _NEVER], ["always", *(f"{tick:g}" for tick in ticks), "never"]
    )
    for label in (axes.get_xticklabels()[0], axes.get_xticklabels()[-1]):
        label.set_rotation(90)


def _dress(axes: Axes, sparsities: list[float], title: str) -> None:
    # Even steps in the number of nonzeros, which is what bytes and times go with.
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([1 - value for value in sparsities], [f"{value:g}" for value in sparsities])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_inverted(True)
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel(title)


def _legend_entries(frame: pd.DataFrame, break_evens: pd.DataFrame) -> list[Line2D]:
    entries = [
        legend_entry(TITLES[form], color=STYLES[form][0], marker=STYLES[form][1])
        for form in frame["format"].unique()
    ]

    def plain(label: str, line: str) -> Line2D:
        return legend_entry(label, color=GREY, linestyle=line)

    return [
        *entries,
        plain("FP32 values", "-"),
        plain("FP16 values", "--"),
        plain("with im2col", ":"),
        *(
            legend_entry(
                title,
                color=GREY,
                marker=marker,
                linestyle="none",
                markerfacecolor=GREY if filled else "white",
            )
            for quantity, (title, marker, filled) in _QUANTITIES.items()
            if quantity in set(break_evens["quantity"])
        ),
    ]


def _caption(experiments: Experiments, frame: pd.DataFrame, break_evens: pd.DataFrame) -> list[str]:
    return [
        f"{protocol_sentence(experiments)}. {ceilings_sentence(experiments)}. "
        f"{distributions_sentence(experiments)}; zeros are placed uniformly.",
        "Bytes: exact, indices of 32 bits, fill-in of blocks counted; a packed word holds FP16 "
        "alone. Conversion: from the dense FP32 weight; there is none for dense. Time: of COO, CSR "
        "and BSR the product with the input's im2col matrix (dotted: with making that matrix), of "
        "a bitmap its expansion into a dense weight and PyTorch's convolution, of packed words the "
        "sparse convolution, of dense PyTorch's fastest layout. All compute the same weights. "
        "Medians over the medians of the rounds with 95 % intervals.",
        *_library_lines(frame),
        *_break_even_lines(break_evens),
        *_left_out_lines(experiments, frame),
        *quality_lines(frame[frame["format"] == "dense"]),
        *(f"{text[:1].upper()}{text[1:]}." for text in skipped_layouts(experiments)),
    ]


def _library_lines(frame: pd.DataFrame) -> list[str]:
    """Which library multiplied, where and with what."""
    lines = []
    for name, here in frame[frame["format"].isin(PRODUCTS)].groupby("layer", sort=False):
        parts = []
        for form, points in here.dropna(subset="library").groupby("format", sort=False):
            by_library = points.groupby("library", sort=False)["sparsity"].unique()
            parts += [
                f"{TITLES[form]} {library}"
                + ("" if len(by_library) == 1 else f" ({', '.join(f'{s:g}' for s in found)})")
                for library, found in by_library.items()
            ]
        lines.append(
            f"The faster library in trials, of torch.sparse (all threads) and scipy.sparse (one "
            f"thread), {name}: {', '.join(parts)}."
        )
    return lines


def _break_even_lines(break_evens: pd.DataFrame) -> list[str]:
    lines = []
    for name, here in break_evens.groupby("layer", sort=False):
        parts = []
        for quantity, (title, *_) in _QUANTITIES.items():
            found = here[here["quantity"] == quantity]
            if not found.empty:
                each = ", ".join(f"{TITLES[row.format]} {row.text}" for row in found.itertuples())
                parts.append(f"{title}: {each}")
        lines.append(
            f"No more than dense from S, {name} (times and blocks interpolated within the measured "
            f"sparsities, always and never within them): {'; '.join(parts)}."
        )
    return lines


def _left_out_lines(experiments: Experiments, frame: pd.DataFrame) -> list[str]:
    """Formats that were not timed, and libraries that failed at any sparsity, with the reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in frame.dropna(subset="left_out").itertuples():
        where = f"{row.layer}, S {row.sparsity:g}"
        reasons.setdefault((TITLES[row.format], row.left_out), []).append(where)
    for name, facts in experiments.measured.items():
        for found in facts["formats"].values():
            for form, one in found.items():
                for library, reason in one.get("failed", {}).items():
                    places = reasons.setdefault((f"{TITLES[form]} of {library}", reason), [])
                    places += [name] if name not in places else []
    return [
        f"Left out: {what} of {'; '.join(places)} ({reason})."
        for (what, reason), places in reasons.items()
    ]
