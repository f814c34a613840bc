"""Drawing the schedules of a CPU's plans: a panel per layer, and what each plan's choice misses."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from packedconv.evidence.cpu_experiments import (
    Experiments,
    ceilings_sentence,
    distributions_sentence,
    protocol_sentence,
)
from packedconv.evidence.extended.schedules import (
    ALONE,
    CHANGED,
    CONTROL,
    INCONCLUSIVE,
    LISTED,
    PLAN,
    SAME,
)
from packedconv.layer import Layer
from packedconv.plots.series import side_legend
from packedconv.plots.style import ERROR_BARS, GREY, legend_entry, new_figure, write_caption

COLOURS = {PLAN: "#332288", LISTED: "#88CCEE", ALONE: "#44AA99", CONTROL: GREY}
LEFT_OUT = "#CC6677"
COLUMNS = 4
PLACES = ("all listed", *(field.replace("_channels", "") for field in CHANGED), "again")
# Of the axes in times of the plan's own.
_LOWEST, _HIGHEST = 0.8, 4.0
_MOST_MISSED = 2.0
_TICKS = (0.8, 1, 1.25, 1.5, 2, 3)
_SHORT = {"halved": "½", "doubled": "2", "whole": "all", "1": "1"}


def schedules_figure(
    experiments: Experiments, table: pd.DataFrame, regrets: pd.DataFrame
) -> Figure:
    """A panel per layer and sparsity: times over the plan's own choice; the last one: regrets."""
    points = list(table.groupby(["layer", "sparsity"], sort=False))
    count = len(points) + 1
    rows = -(-count // min(COLUMNS, count))
    figure = new_figure(11.6, 2.1 + 2.4 * rows)
    grid = figure.subplots(rows, min(COLUMNS, count), squeeze=False)
    for axes, ((name, sparsity), panel) in zip(grid.flat, points, strict=False):
        layer = Layer(**experiments.facts[name]["experiment"]["layer"])
        _draw(axes, panel)
        axes.set_title(f"{_short(name)}, S = {sparsity:g}\n{_shape(layer)}", fontsize=7.5)
        if axes in grid[:, 0]:
            axes.set_ylabel("Time over that of the plan's own")
    _draw_regrets(grid.flat[len(points)], regrets)
    for axes in grid.flat[count:]:
        axes.remove()
    side_legend(figure, _entries())
    write_caption(figure, list(_caption(experiments, table, regrets)))
    return figure


def _draw(axes: Axes, panel: pd.DataFrame) -> None:
    timed = panel[panel["ratio"].notna()]
    listed = timed[timed["rank"].notna()].sort_values("rank")
    # Of the listed ones by their rank, from left to right.
    places = _spread(0, len(listed))
    for place, row in zip(places, listed.itertuples(), strict=True):
        _mark(axes, place, row)
    for index, field in enumerate(CHANGED, start=1):
        rows = timed[timed["field"] == field].sort_values("ratio")
        for place, row in zip(_spread(index, len(rows)), rows.itertuples(), strict=True):
            _mark(axes, place, row)
            _label(axes, place, row)
        slow = panel[(panel["field"] == field) & panel["trial_ratio"].notna()]
        _mark_slow(axes, index, len(slow))
    slow = panel[panel["rank"].notna() & panel["trial_ratio"].notna()]
    _mark_slow(axes, 0, len(slow))
    for row in timed[timed["role"] == CONTROL].itertuples():
        _mark(axes, len(CHANGED) + 1, row)
    axes.axhline(1, color=COLOURS[PLAN], linewidth=0.8, zorder=1)
    _ratio_axis(axes)
    axes.set_ylim(_LOWEST, _HIGHEST)
    axes.set_xlim(-0.6, len(PLACES) - 0.4)
    axes.set_xticks(range(len(PLACES)), PLACES, rotation=40, ha="right", rotation_mode="anchor")
    axes.grid(axis="x", visible=False)


def _spread(centre: int, count: int) -> np.ndarray:
    """Places of so many marks about a tick."""
    return centre + (np.linspace(-0.36, 0.36, count) if count > 1 else np.zeros(count))


def _mark(axes: Axes, place: float, row) -> None:
    axes.errorbar(
        [place],
        [row.ratio],
        yerr=[[row.ratio - row.ratio_low], [row.ratio_high - row.ratio]],
        marker="o",
        markersize=3.2,
        color=COLOURS[row.role],
        markerfacecolor="white" if row.wide else COLOURS[row.role],
        linestyle="none",
        label=f"{row.role} {row.field} {row.change}".strip(),
        zorder=3 if row.role == PLAN else 2,
        **{**ERROR_BARS, "elinewidth": 0.6},
    )


def _label(axes: Axes, place: float, row) -> None:
    words = [_SHORT[word] for word in row.change.split(", ") if word in _SHORT]
    if words:
        axes.annotate(
            "=".join(words),
            (place, min(row.ratio_high, 0.9 * _HIGHEST)),
            xytext=(0, 1),
            textcoords="offset points",
            fontsize=5.5,
            ha="center",
            va="bottom",
            color=GREY,
        )


def _mark_slow(axes: Axes, place: int, count: int) -> None:
    """How many were left out for their time, at the top."""
    if count:
        axes.annotate(
            f"▲{count}",
            (place, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, -1),
            textcoords="offset points",
            fontsize=6.5,
            ha="center",
            va="top",
            color=LEFT_OUT,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            zorder=5,
        )


def _draw_regrets(axes: Axes, regrets: pd.DataFrame) -> None:
    for place, row in enumerate(regrets.itertuples()):
        for shift, value, low, high, style in (
            (
                *(-0.2, row.regret, row.regret_low, row.regret_high),
                {"marker": "o", "color": COLOURS[LISTED]},
            ),
            (
                *(0.0, row.held_out, row.held_out_low, row.held_out_high),
                {"marker": "s", "color": COLOURS[PLAN]},
            ),
            (
                *(0.2, row.regret_any, row.regret_any_low, row.regret_any_high),
                {"marker": "D", "color": COLOURS[ALONE]},
            ),
        ):
            axes.errorbar(
                [value],
                [place + shift],
                xerr=[[value - low], [high - value]],
                linestyle="none",
                markersize=3.2,
                **style,
                **ERROR_BARS,
            )
    axes.axvline(1, color=COLOURS[PLAN], linewidth=0.8, zorder=1)
    names = [f"{_short(row.layer)}, {row.sparsity:g}" for row in regrets.itertuples()]
    axes.set_yticks(range(len(regrets)), names)
    axes.set_ylim(len(regrets) - 0.4, -0.6)
    low, high = axes.get_xlim()
    # What noise stretches further is in the caption.
    axes.set_xlim(max(low, _LOWEST), min(high, _MOST_MISSED))
    axes.set_xlabel("Plan's own over the best")
    axes.grid(axis="y", visible=False)
    axes.set_title("What the choice misses", fontsize=7.5)


def _ratio_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(_TICKS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _short(name: str) -> str:
    """The name of a layer without what its title says: `r14` of `schedule_r14_oc256_n1`."""
    return name.removeprefix("schedule_").split("_")[0]


def _shape(layer: Layer) -> str:
    return (
        f"N {layer.batch}, IC {layer.in_channels}, OC {layer.out_channels}, "
        f"{layer.height}×{layer.width}"
    )


def _entries() -> list:
    def mark(label: str, role: str, **style) -> object:
        style = {"marker": "o", "color": COLOURS[role], "linestyle": "none", **style}
        return legend_entry(label, **style)

    return [
        mark("the plan's own", PLAN),
        mark("listed: what the\nplan may choose", LISTED),
        mark("one field changed,\nnot listed", ALONE),
        mark("the plan's own again", CONTROL),
        mark("rounds far apart", CONTROL, markerfacecolor="white"),
        legend_entry(
            "over 3 in all trials:\nhow many", marker="^", color=LEFT_OUT, linestyle="none"
        ),
        legend_entry(" ", linestyle="none"),
        legend_entry("Last panel:", linestyle="none"),
        mark("best listed", LISTED),
        mark("best listed, of\nthe other rounds", PLAN, marker="s"),
        mark("best of all", ALONE, marker="D"),
    ]


def _caption(experiments: Experiments, table: pd.DataFrame, regrets: pd.DataFrame) -> Iterator[str]:
    warm = next(iter(experiments.measured.values()))["warmup_seconds"]
    yield (
        f"{protocol_sentence(experiments)} and each warmed for at least {1e3 * warm:g} ms. "
        f"{ceilings_sentence(experiments)}. "
        f"{distributions_sentence(experiments)}."
    )
    yield (
        "Marks: ratio of medians over the medians of the rounds, with the 95 % interval from "
        "resampling the rounds. All listed: in the order of the plan's estimate, from the left. "
        "Other columns: the plan's own schedule with that field alone changed (tile: rows × "
        "vectors; ½, 2, all: block or strip halved, doubled, whole). Again: the plan's own, timed "
        "as if it were another. Each is checked against float64 first."
    )
    yield (
        "Last panel: best listed and best of all are picked in the rounds that they are timed in, "
        "which flatters them; of the other rounds: in each round the one that is best without it."
    )
    for row in regrets.itertuples():
        yield _regret_line(row)
    yield from _quality_lines(table)
    yield from _left_out_lines(table)


def _regret_line(row) -> str:
    held_out = _interval(row.held_out, row.held_out_low, row.held_out_high)
    listed = f"the plan's own is the fastest of {row.listed} listed"
    if row.regret > 1:
        listed = (
            f"own over the best of {row.listed} listed "
            f"{_interval(row.regret, row.regret_low, row.regret_high)}"
            f"{_inconclusive(row.verdict)}, of the other rounds {held_out}"
        )
    choice = f"{listed}, and of {row.timed} timed"
    if row.regret_any > row.regret:
        choice = (
            f"{listed}; over the best of {row.timed} timed "
            f"{_interval(row.regret_any, row.regret_any_low, row.regret_any_high)}"
            f"{_inconclusive(row.verdict_any)}"
        )
    line = f"{row.layer}, S {row.sparsity:g}: {choice}"
    if isinstance(row.most_field, str):
        if row.most_in_trial:
            loss = f"{row.most_loss:.2f} in trials"
        else:
            loss = _interval(row.most_loss, row.most_low, row.most_high)
        line += (
            f"; costliest change alone: {row.most_field.replace('_', ' ')} "
            f"{row.most_change.replace('x', '×')}, {loss}"
        )
    return line + "."


def _interval(value: float, low: float, high: float) -> str:
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _inconclusive(verdict: str) -> str:
    return ", inconclusive" if verdict == INCONCLUSIVE else ""


def _quality_lines(table: pd.DataFrame) -> Iterator[str]:
    """What was not measured well; nothing where all was."""
    timed = table[table["ratio"].notna()]
    wide = []
    for (name, sparsity), rows in timed.groupby(["layer", "sparsity"], sort=False):
        count = int(rows["wide"].sum())
        if count:
            times = int(rows["attempts"].iloc[0])
            wide.append(
                f"{name}, S {sparsity:g}: {count} of {len(rows)} (measured {times} "
                f"time{'s' * (times != 1)})"
            )
    if wide:
        yield f"Rounds too far apart, drawn hollow: {'; '.join(wide)}."
    busy = timed.loc[timed["busy"].astype(bool), ["layer", "sparsity"]].drop_duplicates()
    if len(busy):
        places = "; ".join(f"{name}, S {sparsity:g}" for name, sparsity in busy.to_numpy())
        yield f"Timed while the machine was busy: {places}."
    outside = timed[(timed["ratio"] > _HIGHEST) | (timed["ratio"] < _LOWEST)]
    if len(outside):
        yield f"{len(outside)} marks lie outside of the axes; the CSV has them."


def _left_out_lines(table: pd.DataFrame) -> Iterator[str]:
    rows = table[table["left_out"].notna()]
    # What a plan says of a schedule that a layer does not have, differs from one to the next.
    refused = ~rows["left_out"].eq(SAME) & rows["trial_ratio"].isna()
    reasons = rows["left_out"].mask(refused, "the layer has no such schedule; the CSV says why")
    for reason, part in rows.groupby(reasons, sort=False):
        counts = part.groupby(["layer", "sparsity"], sort=False).size()
        places = "; ".join(
            f"{count} of {name}, S {sparsity:g}" for (name, sparsity), count in counts.items()
        )
        yield f"Left out: {places} ({reason})."
