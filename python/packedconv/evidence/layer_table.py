"""Tables of layers on a CPU: speedup over dense, fraction of the bound, plan; warm and cold."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from packedconv import roofline
from packedconv.evidence.cpu_experiments import (
    Experiments,
    ceilings_sentence,
    distributions_sentence,
    protocol_sentence,
    range_text,
    skipped_layouts,
)
from packedconv.evidence.statistics import interval
from packedconv.evidence.tabular import Group
from packedconv.layer import Layer, sparsity_key
from packedconv.schedule import FIELDS

COLUMNS = [
    *("title", "layer", *Layer._fields[1:], "sparsity", "nonzeros", "isa", "threads"),
    *("sparse_seconds", "dense_seconds", "dense_layout"),
    *("speedup", "speedup_low", "speedup_high"),
    *("bound_seconds", "bound_by", "bound_fraction"),
    *("one_thread_seconds", "threads_ratio", "threads_ratio_low", "threads_ratio_high"),
    *("bias_relu_seconds", "bias_relu_ratio", "bias_relu_ratio_low", "bias_relu_ratio_high"),
    *("subnormal_seconds", "subnormal_ratio", "subnormal_ratio_low", "subnormal_ratio_high"),
    *("spread", "attempts", "wide", "busy", *FIELDS, "skipped"),
]
NOTES = [
    "speedup: median time of PyTorch's fastest layout (NCHW, channels last, and both with weights "
    "reordered once, by trials) over that of the sparse convolution; in brackets its 95 % "
    "interval from resampling the rounds; a time is the median over the medians of the rounds; the "
    "layout is chosen once per layer, at its first sparsity",
    "bound: max(FLOP / measured peak, bytes / measured bandwidth) over the sparse time; FLOP are "
    "2 per nonzero and output pixel, borders counted in full; bytes are input, output and packed "
    "weight, each once, the input whole even where a stride skips part of it. Peak and bandwidth "
    "(of copying what no cache holds) are those of the processor, whatever instruction set a row "
    "uses; what stays in a cache can be read faster, so that a fraction may exceed 1",
    "both sides reuse memory; PyTorch has no output to write into, so that it allocates one",
    "all/one: time on all threads over time on one; bias+ReLU: time with both over time without; "
    "subnormal: time of an input of which every value is subnormal over that of the usual one",
    "spread: the widest interquartile range of round medians over their median, of all "
    "contenders; *: still too wide after the repeats; †: the peak during the rounds says that "
    "the machine was busy",
    "plan: path, rows × vectors in registers, input channels summed at a time, tiles of a strip",
]


def layer_table(experiments: Experiments, titles: Mapping[str, str]) -> pd.DataFrame:
    """One row per layer and sparsity with `COLUMNS`, in the order of the layers.

    titles: of the part of the table that a layer is in, by its name. Of what was not timed the
    columns are empty. A layer that was left out has its reason in `skipped`, and one row.
    """
    resampled = experiments.resampled()
    quality = experiments.quality()
    device = roofline.Device(
        "measured", experiments.peaks["peak_flops"], experiments.peaks["bandwidth"]
    )
    rows = []
    for name, facts in experiments.facts.items():
        layer = Layer(**facts["experiment"]["layer"])
        fields = {"layer": name, **layer._asdict()}
        base = {"title": titles[name], **fields}
        if "skipped" in facts:
            rows.append({**base, "skipped": facts["skipped"]})
            continue
        samples = experiments.samples[experiments.samples["layer"] == name]
        for sparsity, point in samples.groupby("sparsity"):
            seconds = {
                implementation: resampled[name, sparsity, implementation]
                for implementation in point["implementation"].unique()
            }
            sparse = seconds["sparse"]
            nonzeros = int(point["nonzeros"].iloc[0])
            rows.append(
                {
                    **base,
                    "sparsity": sparsity,
                    "nonzeros": nonzeros,
                    "isa": facts["comparable"]["isa"],
                    "threads": facts["threads"],
                    "sparse_seconds": sparse[0],
                    "dense_seconds": _first(seconds.get("dense")),
                    "dense_layout": _layout(point),
                    **_ratio("speedup", seconds.get("dense"), sparse),
                    **_bound(layer, nonzeros, device, sparse[0]),
                    "one_thread_seconds": _first(seconds.get("sparse_one_thread")),
                    **_ratio("threads_ratio", sparse, seconds.get("sparse_one_thread")),
                    "bias_relu_seconds": _first(seconds.get("sparse_bias_relu")),
                    **_ratio("bias_relu_ratio", seconds.get("sparse_bias_relu"), sparse),
                    "subnormal_seconds": _first(seconds.get("sparse_subnormal")),
                    **_ratio("subnormal_ratio", seconds.get("sparse_subnormal"), sparse),
                    **quality[name, sparsity],
                    **facts["plans"][sparsity_key(sparsity)]["schedule"],
                }
            )
    table = pd.DataFrame(rows, columns=COLUMNS)
    whole = ("nonzeros", "threads", "attempts", "rows", "vectors", "block_channels", "strip")
    return table.astype(dict.fromkeys(whole, "Int64"))


def shown(table: pd.DataFrame) -> list[Group]:
    """What a reader sees: a part per title, without the columns that nothing was timed for."""
    groups = []
    for title, rows in table.groupby("title", sort=False):
        left_out = rows["skipped"].dropna().unique()
        timed = rows[rows["skipped"].isna()]
        frame = pd.DataFrame(
            {
                "Layer": [layer_text(row) for row in timed.itertuples()],
                "S": [f"{value:g}" for value in timed["sparsity"]],
                "Sparse (ms)": [_milliseconds(value) for value in timed["sparse_seconds"]],
                "Dense (ms)": [_milliseconds(value) for value in timed["dense_seconds"]],
                "Layout": timed["dense_layout"].fillna(""),
                "Speedup": _brackets(timed, "speedup"),
                "Bound": [
                    f"{row.bound_fraction:.2f} ({row.bound_by})" for row in timed.itertuples()
                ],
                "All/one": _brackets(timed, "threads_ratio"),
                "Bias+ReLU": _brackets(timed, "bias_relu_ratio", 3),
                "Subnormal": _brackets(timed, "subnormal_ratio"),
                "Plan": [plan_text(row) for row in timed.itertuples()],
                "Spread": [f"{row.spread:.0%}{marks(row)}" for row in timed.itertuples()],
            }
        )
        empty = [column for column in frame if (frame[column] == "").all() and len(frame)]
        intro = "".join(f"Not measured: {reason}." for reason in left_out)
        groups.append(Group(title, intro, frame.drop(columns=empty)))
    return groups


def findings(table: pd.DataFrame) -> list[str]:
    """What the table comes to: least speedup by part and sparsity, and what should not grow."""
    lines = []
    for (title, sparsity), rows in table.dropna(subset="speedup").groupby(
        ["title", "sparsity"], sort=False
    ):
        least = rows.loc[rows["speedup"].idxmin()]
        slowest = rows.loc[rows["bound_fraction"].idxmin()]
        lines.append(
            f"{title}, S {sparsity:g}: least speedup {least['speedup']:.2f} "
            f"({least['layer']}{marks(least)}), least fraction of the bound "
            f"{slowest['bound_fraction']:.2f} ({slowest['layer']}{marks(slowest)}), "
            f"{len(rows)} layer{'s' * (len(rows) != 1)}"
        )
    for column, text in (
        ("threads_ratio", "longest time on all threads, in times on one"),
        ("bias_relu_ratio", "longest time with bias and ReLU, in times without"),
        ("subnormal_ratio", "longest time of subnormal input, in times of the usual one"),
    ):
        rows = table.dropna(subset=column)
        if len(rows):
            worst = rows.loc[rows[column].idxmax()]
            lines.append(
                f"{text}: {worst[column]:.3f} "
                f"[{worst[f'{column}_low']:.3f}, {worst[f'{column}_high']:.3f}] "
                f"({worst['layer']}{marks(worst)}, S {worst['sparsity']:g})"
            )
    for name, rows in table.dropna(subset="sparsity").groupby("layer", sort=False):
        if len(rows) > 2:
            falls = rows.sort_values("sparsity")["sparse_seconds"].is_monotonic_decreasing
            where = f"from S {rows['sparsity'].min():g} to {rows['sparsity'].max():g}"
            lines.append(f"{name}: its time {'falls' if falls else 'does not always fall'} {where}")
    for column, text in (
        ("wide", "are still too wide (*)"),
        ("busy", "were timed while the machine was busy (†)"),
    ):
        found = int(table[column].fillna(False).astype(bool).sum())
        if found:
            lines.append(f"{found} of {table['sparsity'].count()} points {text}")
    return lines


def notes(experiments: Experiments) -> list[str]:
    """What the columns are, and which dense layouts are missing."""
    return [*NOTES, *skipped_layouts(experiments)]


def marks(row: Any) -> str:
    """What a row's times are to be taken with: * too wide, † on a busy machine."""
    return "*" * bool(row.wide) + "†" * bool(row.busy)


def preamble(experiments: Experiments) -> str:
    """What a reader has to know before the table."""
    facts = list(experiments.measured.values())
    parts = [
        f"{protocol_sentence(experiments)}. {ceilings_sentence(experiments)}.",
        f"{distributions_sentence(experiments)}.",
        *_rotation_sentences(facts),
    ]
    return "\n\n".join(parts)


def _rotation_sentences(facts: Iterable[dict[str, Any]]) -> list[str]:
    rotated = [found["rotated"] for found in facts if found["rotated"]]
    if not rotated:
        return ["Warm caches: every execution reads the same input."]
    copies = range_text([one["copies"] for one in rotated])
    megabytes = range_text([round(one["set_bytes"] / 1e6) for one in rotated], "MB")
    text = (
        f"Cold caches: every execution takes the next of {copies} inputs and outputs, together "
        f"{megabytes} for each side. The weight is always the same. "
    )
    if not all(one["cache_bytes"] for one in rotated):
        return [text + "The size of the last-level cache is not known."]
    cache = range_text([round(one["cache_bytes"] / 1e6) for one in rotated], "MB")
    text += (
        f"The last-level cache that the system reports, shared with whatever else runs, has {cache}"
    )
    small = sum(one["set_bytes"] <= one["cache_bytes"] for one in rotated)
    if small:
        text += (
            f", which the set does not exceed for {small} of {len(rotated)} layers, so that it "
            "may hold theirs"
        )
    return [text + "."]


def layer_text(row: Any) -> str:
    """A layer as a reader sees it: `N 1, 32→64, 256×256, K 3`, with what is not usual."""
    text = f"N {row.batch}, {row.in_channels}→{row.out_channels}, {row.height}×{row.width}, "
    text += f"K {row.kernel_size}"
    for name in ("stride", "dilation", "groups"):
        if getattr(row, name) != 1:
            text += f", {name} {getattr(row, name)}"
    if row.padding != row.dilation * (row.kernel_size - 1) // 2:
        text += f", padding {row.padding}"
    return text


def plan_text(row: Any) -> str:
    """A schedule as a reader sees it: `aligned 3×4, block 32, strip 8, prefetch, stream`."""
    flags = "".join(f", {name}" for name in ("prefetch", "stream") if getattr(row, name))
    tile = f"{row.path} {row.rows}×{row.vectors}"
    return f"{tile}, block {row.block_channels}, strip {row.strip}{flags}"


def _bound(layer: Layer, nonzeros: int, device: roofline.Device, seconds: float) -> dict[str, Any]:
    bound = float(roofline.execution_bound(layer, nonzeros, device))
    # The same device with no limit on bandwidth tells which side it is.
    compute = float(
        roofline.execution_bound(layer, nonzeros, device._replace(bandwidth=float("inf")))
    )
    return {
        "bound_seconds": bound,
        "bound_by": "compute" if compute == bound else "memory",
        "bound_fraction": bound / seconds,
    }


def _first(values: np.ndarray | None) -> float | None:
    return None if values is None else float(values[0])


def _layout(point: pd.DataFrame) -> str | None:
    layouts = point.loc[point["implementation"] == "dense", "layout"].unique()
    return layouts[0] if len(layouts) else None


def _ratio(
    name: str, numerator: np.ndarray | None, denominator: np.ndarray | None
) -> dict[str, float]:
    """A ratio with its interval, as columns; nothing without both."""
    if numerator is None or denominator is None:
        return {}
    ratio = numerator / denominator
    low, high = interval(ratio)
    return {name: ratio[0], f"{name}_low": low, f"{name}_high": high}


def _milliseconds(seconds: Any) -> str:
    return "" if pd.isna(seconds) else f"{1e3 * seconds:.4g}"


def _brackets(rows: pd.DataFrame, name: str, digits: int = 2) -> list[str]:
    columns = rows[[name, f"{name}_low", f"{name}_high"]].astype(float)
    return [
        "" if np.isnan(value) else f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
        for value, low, high in columns.itertuples(index=False)
    ]
