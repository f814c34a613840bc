"""Drawing the crossover map: speedup over sparsity and layers, and where it reaches 1."""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from packedconv.evidence.cpu_experiments import (
    Experiments,
    ceilings_sentence,
    distributions_sentence,
    protocol_sentence,
    skipped_layouts,
)
from packedconv.evidence.extended.crossover import layer_titles
from packedconv.plots.style import legend_entry, new_figure, write_caption

LINE = "#222222"
# Neither side of it is drawn in a colour that is hard to tell from the other.
COLOURS = "PuOr"
_FEWEST_TIMES = 2.0
_CELL_INCHES = 0.19
_HALO = [withStroke(linewidth=1.6, foreground="white", alpha=0.8)]


def crossover_figure(experiments: Experiments, table: pd.DataFrame) -> Figure:
    """Cells of speedup, layers by kernel and size, and the break-even sparsity of each."""
    order = _order(table)
    titles = layer_titles(table)
    sparsities = sorted(table["sparsity"].unique())
    figure = new_figure(7.2, 1.6 + _CELL_INCHES * len(order))
    axes = figure.subplots()
    cells = table.set_index(["layer", "sparsity"])
    values = np.array(
        [[cells["speedup"].get((name, value), math.nan) for value in sparsities] for name in order]
    )
    most = max(_FEWEST_TIMES, float(np.nanmax(np.maximum(values, 1 / values))))
    image = axes.imshow(
        values, cmap=COLOURS, norm=LogNorm(1 / most, most), aspect="auto", interpolation="none"
    )
    for row, name in enumerate(order):
        for column, sparsity in enumerate(sparsities):
            if (name, sparsity) in cells.index:
                _draw_cell(axes, row, column, cells.loc[(name, sparsity)], most)
    _draw_break_even(axes, table, order, np.array(sparsities))
    for row, (above, below) in enumerate(zip(order, order[1:], strict=False)):
        if _kernel(table, above) != _kernel(table, below):
            axes.axhline(row + 0.5, color="white", linewidth=2.0)
    axes.set_xticks(range(len(sparsities)), [f"{value:g}" for value in sparsities])
    axes.set_yticks(range(len(order)), [titles[name] for name in order], fontsize=6.5)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.set_xlabel("Sparsity S (not to scale)", fontsize=8)
    axes.set_ylabel("Layer: kernel, channels, image, batch, stride", fontsize=8)
    bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=40)
    ticks = [step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if 1 / most <= step <= most]
    bar.ax.yaxis.set_major_locator(FixedLocator(ticks))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.set_label("Speedup over the fastest dense layout", fontsize=8)
    axes.legend(
        handles=[
            legend_entry(
                "break-even S, 95 % interval",
                color=LINE,
                marker="|",
                markersize=9.0,
                markeredgewidth=1.6,
            ),
            Rectangle((0, 0), 1, 1, fill=False, hatch="////", linewidth=0, label="inconclusive"),
        ],
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=2,
        fontsize=7,
        frameon=False,
        borderaxespad=0.2,
    )
    write_caption(figure, _lines(experiments, table, titles))
    return figure


def _draw_cell(axes: Axes, row: int, column: int, cell: pd.Series, most: float) -> None:
    if cell["inconclusive"]:
        axes.add_patch(
            Rectangle(
                (column - 0.5, row - 0.5), 1, 1, fill=False, hatch="////", linewidth=0, alpha=0.35
            )
        )
    marks = "*" * bool(cell["wide"]) + "†" * bool(cell["busy"])
    away = abs(math.log(cell["speedup"]))
    dark = away > 0.6 * math.log(most)
    axes.text(
        column,
        row,
        f"{cell['speedup']:.2g}{marks}"
        if cell["speedup"] < 10
        else f"{cell['speedup']:.0f}{marks}",
        ha="center",
        va="center",
        fontsize=6.5,
        color="white" if dark else "black",
        # Legible where the line crosses it, which is where cells are nearly white.
        path_effects=_HALO if away < math.log(1.6) else [],
        zorder=5,
    )


def _draw_break_even(
    axes: Axes, table: pd.DataFrame, order: list[str], sparsities: np.ndarray
) -> None:
    """A mark per layer, joined; at the edge where break-even lies beyond what was measured."""
    places = np.arange(len(sparsities))
    ends = (-0.5, len(sparsities) - 0.5)

    def place(value: float) -> float:
        if math.isinf(value):
            return ends[int(value > 0)]
        return float(np.interp(value, sparsities, places))

    layers = table.drop_duplicates("layer").set_index("layer")
    columns = ("break_even", "break_even_low", "break_even_high")
    for rows in _runs(table, order):
        found = [[place(layers.loc[order[row], name]) for name in columns] for row in rows]
        middle, low, high = np.array(found).T
        inside = [math.isfinite(layers.loc[order[row], "break_even"]) for row in rows]
        axes.plot(middle, rows, color=LINE, linewidth=1.0, zorder=3)
        axes.hlines(rows, low, high, color=LINE, linewidth=2.2, alpha=0.6, zorder=3)
        axes.plot(
            middle[inside],
            np.array(rows)[inside],
            linestyle="none",
            marker="|",
            markersize=9.0,
            markeredgewidth=1.6,
            color=LINE,
            zorder=4,
        )
    axes.set_xlim(*ends)


def _runs(table: pd.DataFrame, order: list[str]) -> list[list[int]]:
    """Rows of one kernel and stride, one list each."""
    runs: list[list[int]] = []
    for row, name in enumerate(order):
        if row and _kernel(table, name) == _kernel(table, order[row - 1]):
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _order(table: pd.DataFrame) -> list[str]:
    """Layers by kernel, stride, then size of the output, the largest first."""
    layers = table.drop_duplicates("layer")
    pixels = (layers["height"] // layers["stride"]) * (layers["width"] // layers["stride"])
    layers = layers.assign(pixels=pixels).sort_values(
        ["kernel_size", "stride", "pixels", "batch", "out_channels"],
        ascending=[True, True, False, True, True],
    )
    return list(layers["layer"])


def _kernel(table: pd.DataFrame, name: str) -> tuple[int, int]:
    row = table[table["layer"] == name].iloc[0]
    return int(row["kernel_size"]), int(row["stride"])


def _lines(experiments: Experiments, table: pd.DataFrame, titles: dict[str, str]) -> list[str]:
    layers = table.drop_duplicates("layer")
    finite = layers.loc[np.isfinite(layers["break_even"]), "break_even"]
    reached = (
        f"Break-even is reached between S {finite.min():.2f} and {finite.max():.2f} in "
        f"{len(finite)} of {len(layers)} layers, is below the lowest S in "
        f"{int((layers['break_even'] == -math.inf).sum())}, and is not reached in "
        f"{int((layers['break_even'] == math.inf).sum())}."
        if len(finite)
        else f"No layer of {len(layers)} has its break-even among the sparsities."
    )
    wide, busy = int(table["wide"].sum()), int(table["busy"].sum())
    limit = next(iter(experiments.measured.values()))["experiment"]["widest_spread"]
    lines = [
        f"{protocol_sentence(experiments)}. {ceilings_sentence(experiments)}. "
        f"{distributions_sentence(experiments)}.",
        "Cells: median time of PyTorch's fastest dense layout (chosen once per layer, at its "
        "lowest sparsity) over that of the sparse convolution, each over the medians of the "
        "rounds; above 1 sparse is faster. Hatched: the 95 % interval from resampling the rounds "
        "has 1 in it. Line: the sparsity at which the ratio reaches 1, linear between two "
        "measured ones; at the edge where it lies beyond them. Image sizes are those of the input.",
        f"{reached} Inconclusive: {int(table['inconclusive'].sum())} of {len(table)} cells.",
    ]
    if wide:
        lines.append(
            f"*: rounds still further apart than {limit:.0%} after the repeats, in {wide} of "
            f"{len(table)} cells."
        )
    if busy:
        lines.append(f"†: timed while the machine was busy, {busy} of {len(table)} cells.")
    left = [
        f"{name} ({facts['skipped']})"
        for name, facts in experiments.facts.items()
        if "skipped" in facts
    ]
    if left:
        lines.append(f"Left out: {'; '.join(left)}.")
    lines += [f"{text[:1].upper()}{text[1:]}." for text in skipped_layouts(experiments)]
    return lines
