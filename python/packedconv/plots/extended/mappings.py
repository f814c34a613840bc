"""Drawing the counts of every mapping of the paper's kernel: a row of panels per device."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd
import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from packedconv.evidence import instructions
from packedconv.evidence.extended.mappings import MAPPING, MOST_WARPS, SEED, Device, ranks
from packedconv.plots.captions import shapes
from packedconv.plots.style import new_figure, write_caption

TITLE = "Mappings of the paper's kernel by counts: nothing here is a time"
# Output channels that are drawn, where the device has them; the CSV has all.
DRAWN = {"a100": 64, "tegra-x1": 48}
FRAME = "#882255"
_CELLS = {"fontsize": 5.8}


class Panel(NamedTuple):
    """A quantity: a column of the table, at the lowest or highest sparsity or at any."""

    title: str
    column: str
    sparsity: str = "any"
    text: str = ".2f"
    factor: float = 1.0
    less_is_better: bool = True


PANELS = (
    Panel("instructions\nper FMA", "instructions_per_fma"),
    Panel("transactions\nper load, S {}", "transactions_per_load", "lowest"),
    Panel("transactions\nper load, S {}", "transactions_per_load", "highest"),
    Panel("imbalance in\na warp, S {}", "warp_imbalance", "lowest"),
    Panel("imbalance in\na warp, S {}", "warp_imbalance", "highest"),
    Panel("elements filled\nper input element", "filled_per_input"),
    Panel("shared memory\nof a block, KiB", "shared_bytes", text=".1f", factor=1 / 1024),
    Panel(
        f"resident warps,\nat most, of {MOST_WARPS}",
        *("resident_warps", "any", ".0f", 1.0, False),
    ),
)


def mappings_figure(
    table: pd.DataFrame, counts: pd.DataFrame, devices: Mapping[str, Device]
) -> Figure:
    """Heat maps of the table of `evidence.extended.mappings`: mappings with one slice, and in the
    last panel what slices do to the balance. counts: the table of instructions."""
    families = list(dict.fromkeys(table["device"]))
    figure = new_figure(14.2, 1.3 + 2.75 * len(families))
    figure.suptitle(TITLE, fontsize=9, x=0.01, ha="left")
    grid = figure.subplots(len(families), len(PANELS) + 1, squeeze=False)
    for row, family in zip(grid, families, strict=True):
        drawn = _drawn(table, family)
        one = drawn[drawn["slices"] == drawn["slices"].min()]
        for place, panel in zip(row, PANELS, strict=False):
            _draw(place, panel, one)
        _draw_slices(row[-1], drawn)
        row[0].set_ylabel(
            f"{devices[family].title}, OC = {drawn['out_channels'].iloc[0]}", fontsize=7.5
        )
        row[0].set_yticks(*_mapping_ticks(one), rotation=0, fontsize=6)
    for place in grid[-1]:
        place.set_xlabel("COL_PER_WARP", fontsize=6.5)
    write_caption(figure, list(_caption(table, counts, devices)))
    return figure


def _drawn(table: pd.DataFrame, family: str) -> pd.DataFrame:
    """The rows of one device and one number of output channels."""
    rows = table[table["device"] == family]
    found = sorted(rows["out_channels"].unique())
    return rows[rows["out_channels"] == (DRAWN[family] if DRAWN[family] in found else found[-1])]


def _draw(axes: Axes, panel: Panel, rows: pd.DataFrame) -> None:
    sparsities = sorted(rows["sparsity"].unique())
    sparsity = sparsities[-1] if panel.sparsity == "highest" else sparsities[0]
    values = rows[rows["sparsity"] == sparsity].pivot(
        index=["rows_per_thread", "warps_per_block"], columns="col_per_warp", values=panel.column
    )
    values = values.astype(float) * panel.factor
    _heat(axes, values, panel.text, panel.less_is_better)
    default = rows[rows["default"] & (rows["sparsity"] == sparsity)]
    for row in default.itertuples():
        _frame(
            axes,
            values.columns.get_loc(row.col_per_warp),
            values.index.get_loc((row.rows_per_thread, row.warps_per_block)),
        )
    axes.set_title(panel.title.format(f"{sparsity:g}"), fontsize=7)
    axes.set_yticks([])


def _draw_slices(axes: Axes, rows: pd.DataFrame) -> None:
    """Both imbalances together, of the tile of the default, by slices and sparsity."""
    default = rows[rows["default"]].iloc[0]
    for name in ("rows_per_thread", "warps_per_block"):
        rows = rows[rows[name] == default[name]]
    values = rows.assign(imbalance=rows["warp_imbalance"] * rows["slice_imbalance"]).pivot(
        index=["sparsity", "slices"], columns="col_per_warp", values="imbalance"
    )
    _heat(axes, values.astype(float), ".2f", less_is_better=True)
    _frame(
        axes,
        values.columns.get_loc(default["col_per_warp"]),
        values.index.get_loc((default["sparsity"], default["slices"])),
    )
    axes.set_title("imbalance in warp\n× across slices", fontsize=7)
    names = [
        f"S {sparsity:g},\n{slices} slice{'s' * (slices > 1)}" for sparsity, slices in values.index
    ]
    axes.set_yticks(np.arange(len(names)) + 0.5, names, rotation=0, fontsize=6)


def _heat(axes: Axes, values: pd.DataFrame, text: str, less_is_better: bool) -> None:
    counted = values.notna().to_numpy().any()
    if not counted:
        axes.set_facecolor("#eeeeee")
    low, high = (values.min().min(), values.max().max()) if counted else (0.0, 1.0)
    seaborn.heatmap(
        values,
        ax=axes,
        annot=True,
        fmt=text,
        cbar=False,
        cmap="Blues" if less_is_better else "Blues_r",
        vmin=low,
        # So that the darkest stays legible, and equal values stay light.
        vmax=max(high + 0.3 * (high - low), low + 1e-9),
        annot_kws=_CELLS,
        linewidths=0.4,
        linecolor="white",
    )
    axes.set(xlabel="", ylabel="")
    axes.tick_params(length=0, labelsize=6)
    axes.grid(visible=False)
    axes.set_xticks(np.arange(len(values.columns)) + 0.5, values.columns, rotation=0)


def _frame(axes: Axes, column: int, row: int) -> None:
    axes.add_patch(
        Rectangle(
            *((column, row), 1, 1),
            **{"fill": False, "edgecolor": FRAME, "linewidth": 1.4, "clip_on": False, "zorder": 5},
        )
    )


def _mapping_ticks(rows: pd.DataFrame) -> tuple[np.ndarray, list[str]]:
    pairs = sorted(set(zip(rows["rows_per_thread"], rows["warps_per_block"], strict=True)))
    return np.arange(len(pairs)) + 0.5, [f"R {row}, {warps} warps" for row, warps in pairs]


def _caption(
    table: pd.DataFrame, counts: pd.DataFrame, devices: Mapping[str, Device]
) -> Iterator[str]:
    places = "; ".join(f"{device.title}: {shapes(device.layers)}" for device in devices.values())
    yield (
        f"{places}. Weights of seed {SEED}, positions uniform. Nothing here is a time: no GPU ran, "
        "and how these counts weigh against each other is not in them. Darker: more, of resident "
        "warps fewer. Framed: the project's default mapping. One slice, but for the last panel, "
        "which has the default's R and warps, and 1, 2 and 4 slices. The CSV has all OC and slices."
    )
    yield (
        "Instructions: of the loop over nonzeros in the machine code (figures/instructions.csv). "
        "Transactions: of a warp's load of the input from shared memory, the most words that one "
        "of 32 banks has to serve at the addresses of the kernel, over all nonzeros; 1 is no "
        "conflict. Imbalance in a warp: its steps over those of equally long lists, as its lanes "
        "walk the lists of 32 / COL_PER_WARP output channels side by side, four words at a time; "
        "across slices: steps of the longest over their mean. Filled: into shared memory, halo and "
        "padding included. Resident: by shared memory, warps and blocks of a multiprocessor, and "
        "registers where they were counted."
    )
    for family, device in devices.items():
        rows = _drawn(table, family)
        yield from _default_lines(device.title, rows)
        yield from _wasted_lines(device.title, rows)
        missing = instructions.is_missing(counts, device.architecture)
        if missing:
            what = (
                "instructions" if rows["registers"].notna().any() else "instructions or registers"
            )
            yield f"{device.title}: no {what} counted: {missing}."
    left_out = table[table["left_out"].notna()]
    for reason, rows in left_out.groupby("left_out"):
        yield f"Left out: {len(rows)} ({reason})."


def _default_lines(title: str, rows: pd.DataFrame) -> Iterator[str]:
    """Where the default stands among the mappings with as many slices."""
    for sparsity, found in rows.groupby("sparsity"):
        default = found[found["default"]].iloc[0]
        one = found[(found["slices"] == default["slices"]) & found["left_out"].isna()]
        parts = []
        for name, column in (
            ("instructions", "issued_per_fma"),
            ("transactions", "transactions_per_fma"),
        ):
            if one[column].isna().all():
                continue
            place = ranks(one, column)
            text = f"{default[column]:.2f} {name}, rank {place[default.name]:.0f} of {len(one)}"
            if place[default.name] > 1:
                best = one.loc[one[column].idxmin()]
                text += f" (fewest {best[column]:.2f}: {_mapping_text(best)})"
            parts.append(text)
        yield (
            f"{title}, OC {default['out_channels']}, S {sparsity:g}: the default "
            f"{_mapping_text(default)} takes, for 32 FMAs that count, imbalance in a warp and "
            f"pixels outside of the output included, {'; '.join(parts)}."
        )


def _mapping_text(row: pd.Series) -> str:
    columns, rows, warps, _ = (row[name] for name in MAPPING)
    return f"COL_PER_WARP {columns}, R {rows}, {warps} warps"


def _wasted_lines(title: str, rows: pd.DataFrame) -> Iterator[str]:
    """Which mappings compute pixels outside of the output, or pass input channels in blocks."""
    one = rows[(rows["slices"] == 1) & (rows["sparsity"] == rows["sparsity"].min())]
    outside = one[one["computed_per_pixel"] > 1]
    if len(outside):
        yield (
            f"{title}: {len(outside)} of {len(one)} mappings compute pixels outside of the output, "
            f"up to {outside['computed_per_pixel'].max():g} times as many as it has."
        )
    blocks = one[one["in_channel_blocks"] > 1]
    if len(blocks):
        yield (
            f"{title}: in {len(blocks)} of {len(one)} mappings the input channels pass through "
            f"shared memory in up to {blocks['in_channel_blocks'].max()} blocks, since all of them "
            "do not fit; each block has lists of its own, which are shorter and less alike."
        )
