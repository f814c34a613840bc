"""Formats of a sparse weight on a CPU: bytes, conversion, time, and where each breaks even."""

import math
from typing import Any

import numpy as np
import pandas as pd

from packedconv import formats
from packedconv.evidence.cpu_experiments import Experiments
from packedconv.evidence.statistics import crossover, interval, resampled_median
from packedconv.layer import Layer, sparsity_key

TITLES = {
    "dense": "dense",
    "coo": "COO",
    "csr": "CSR",
    "bsr_2x2": "BSR 2×2",
    "bsr_4x4": "BSR 4×4",
    "bitmap": "bitmap",
    "packed": "packed word",
}
VALUES = {"fp32": formats.FP32_BYTES, "fp16": formats.FP16_BYTES}
# Formats whose time is that of a product with the im2col matrix alone.
PRODUCTS = ("coo", "csr", *formats.BLOCKS)
# Under what name a format was timed, where it has another.
_TIMED_AS = {"packed": "sparse"}

COLUMNS = [
    *("layer", "sparsity", "format", "library", "nonzeros", "blocks", "stored_per_nonzero"),
    *("bytes_fp32", "bytes_fp16", "bytes_per_nonzero_fp32", "bytes_per_nonzero_fp16"),
    "object_bytes",
    *("conversion_seconds", "conversion_low", "conversion_high"),
    *("seconds", "low", "high", "whole_seconds", "whole_low", "whole_high"),
    *("speedup", "speedup_low", "speedup_high"),
    *("spread", "attempts", "wide", "busy", "left_out"),
]
BREAK_EVEN_COLUMNS = ["layer", "format", "quantity", "sparsity", "low", "high", "text"]


def table(experiments: Experiments) -> pd.DataFrame:
    """One row per layer, sparsity and format, "dense" first, with `COLUMNS`.

    bytes_fp32, bytes_fp16: of the layer's weight with values of that width, by
    formats.stored_bytes; object_bytes: what the measured object held. stored_per_nonzero: values
    stored, with the zeros in blocks. seconds: median over the medians of the rounds, low and
    high its 95 % interval: of the whole convolution, but of the product alone for PRODUCTS, whose
    whole_seconds have the im2col matrix too. speedup: of dense over whole_seconds. A format that
    was not timed has its reason in `left_out`.
    """
    resampled, quality = experiments.resampled(), experiments.quality()
    rows: list[dict[str, Any]] = []
    for name, facts in experiments.measured.items():
        layer = Layer(**facts["layer"])
        im2col = resampled_median(np.array(facts["im2col_seconds"]))
        for sparsity in facts["experiment"]["sparsities"]:
            key, sparsity = sparsity_key(sparsity), round(sparsity, 6)
            dense = resampled[name, sparsity, "dense"]
            nonzeros = _nonzeros(experiments, name, sparsity)
            base = {"layer": name, "sparsity": sparsity, "nonzeros": nonzeros}
            rows.append(
                {
                    **base,
                    "format": "dense",
                    "library": f"torch, {facts['dense']['layout']}",
                    **{
                        f"bytes_{text}": formats.dense_bytes(layer, width)
                        for text, width in VALUES.items()
                    },
                    **_times(dense, dense, dense),
                    **quality[name, sparsity],
                }
            )
            for form in formats.FORMATS:
                found = facts["formats"][key].get(form)
                row = {**base, "format": form}
                if found is None:
                    reason = facts["left_out"][key][form]
                    rows.append({**row, **_bytes(form, layer, nonzeros, None), "left_out": reason})
                    continue
                seconds = resampled[name, sparsity, _TIMED_AS.get(form, form)]
                whole = seconds + im2col if form in PRODUCTS else seconds
                conversion = resampled_median(np.array(found["conversion_seconds"]))
                rows.append(
                    {
                        **row,
                        "library": found["library"],
                        **_bytes(form, layer, nonzeros, found.get("blocks")),
                        "object_bytes": found["bytes"],
                        "conversion_seconds": conversion[0],
                        **_interval("conversion", conversion),
                        **_times(seconds, whole, dense),
                        **quality[name, sparsity],
                    }
                )
    for row in rows:
        for text in VALUES:
            if f"bytes_{text}" in row and row["nonzeros"]:
                row[f"bytes_per_nonzero_{text}"] = row[f"bytes_{text}"] / row["nonzeros"]
    whole_numbers = ("blocks", "bytes_fp32", "bytes_fp16", "object_bytes", "attempts")
    return pd.DataFrame(rows, columns=COLUMNS).astype(dict.fromkeys(whole_numbers, "Int64"))


def break_evens(experiments: Experiments, frame: pd.DataFrame) -> pd.DataFrame:
    """The least sparsity from which each format needs no more than dense, `BREAK_EVEN_COLUMNS`.

    quantity: bytes_fp32 and bytes_fp16, against dense values of the same width; for the packed
    word bytes_fp16 and bytes_fp16_of_fp32, against dense FP32, which it stands in for; seconds,
    the whole convolution; product_seconds, for PRODUCTS, without the im2col matrix. Times and the
    bytes of blocks are interpolated linearly between the measured sparsities, -inf where the
    lowest of them already does, inf where none does; other bytes follow from the number of
    nonzeros. low, high: 95 % interval of times, from resampling the rounds.
    """
    resampled = experiments.resampled()
    rows = []
    for name, facts in experiments.measured.items():
        layer = Layer(**facts["layer"])
        im2col = resampled_median(np.array(facts["im2col_seconds"]))
        here = frame[frame["layer"] == name]
        for form in formats.FORMATS:
            points = here[here["format"] == form].sort_values("sparsity")
            base = {"layer": name, "format": form}
            for quantity, width, dense_width in _compared_bytes(form):
                value = _bytes_break_even(form, layer, points, width, dense_width)
                if value is not None:
                    text = break_even_text(value, value, value)
                    rows.append({**base, "quantity": quantity, "sparsity": value, "text": text})
            timed = points[points["left_out"].isna()]["sparsity"].to_numpy(float)
            if not len(timed):
                continue
            dense = np.array([resampled[name, value, "dense"] for value in timed])
            seconds = np.array(
                [resampled[name, value, _TIMED_AS.get(form, form)] for value in timed]
            )
            alone = {"seconds": seconds}
            if form in PRODUCTS:
                alone = {"seconds": seconds + im2col, "product_seconds": seconds}
            for quantity, values in alone.items():
                found = crossover(timed, (dense / values).T)
                low, high = interval(found)
                text = break_even_text(found[0], low, high)
                rows.append(
                    {
                        **base,
                        "quantity": quantity,
                        "sparsity": found[0],
                        "low": low,
                        "high": high,
                        "text": text,
                    }
                )
    return pd.DataFrame(rows, columns=BREAK_EVEN_COLUMNS)


def with_break_evens(frame: pd.DataFrame, found: pd.DataFrame) -> pd.DataFrame:
    """A table with the break-evens of its layer and format in every row, as break_even_<quantity>
    and, of times, break_even_<quantity>_low and _high."""
    wide = found.pivot(
        index=["layer", "format"], columns="quantity", values=["sparsity", "low", "high"]
    ).astype(float)
    wide.columns = [
        f"break_even_{quantity}" + ("" if value == "sparsity" else f"_{value}")
        for value, quantity in wide.columns
    ]
    wide = wide.dropna(axis="columns", how="all")
    return frame.merge(wide.reset_index(), on=["layer", "format"], how="left")


def break_even_text(value: float, low: float, high: float) -> str:
    """`0.934 [0.931, 0.940]`, with always for -inf and never for inf; one word where all agree."""
    if low == high:
        return _sparsity(value)
    return f"{_sparsity(value)} [{_sparsity(low)}, {_sparsity(high)}]"


def _sparsity(value: float) -> str:
    if math.isinf(value):
        return "never" if value > 0 else "always"
    return f"{value:.3f}"


def _compared_bytes(form: str) -> list[tuple[str, int, int]]:
    """Name, width of the format's values and of dense ones, of every comparison of bytes."""
    half, single = formats.FP16_BYTES, formats.FP32_BYTES
    if form == "packed":
        return [("bytes_fp16", half, half), ("bytes_fp16_of_fp32", half, single)]
    return [("bytes_fp32", single, single), ("bytes_fp16", half, half)]


def _bytes_break_even(
    form: str, layer: Layer, points: pd.DataFrame, width: int, dense_width: int
) -> float | None:
    """As in `break_evens`; None where blocks were not counted at any sparsity."""
    limit = formats.dense_bytes(layer, dense_width)
    if form not in formats.BLOCKS:
        most = formats.break_even_nonzeros(form, layer, width, limit)
        return math.inf if most is None else 1 - most / layer.weight_count
    points = points.dropna(subset="blocks")
    if points.empty:
        return None
    column = "bytes_fp32" if width == formats.FP32_BYTES else "bytes_fp16"
    bytes_ = points[column].to_numpy(float)
    # Linear in the bytes, as they are in the blocks: what is left of the limit, on a scale of 1.
    return float(crossover(points["sparsity"].to_numpy(float), 1 + (limit - bytes_) / limit))


def _nonzeros(experiments: Experiments, name: str, sparsity: float) -> int:
    samples = experiments.samples
    here = samples[(samples["layer"] == name) & (samples["sparsity"].round(6) == sparsity)]
    return int(here["nonzeros"].iloc[0])


def _bytes(form: str, layer: Layer, nonzeros: int, blocks: int | None) -> dict[str, Any]:
    """Bytes with every width of values that the format has, none where blocks are not counted."""
    if form in formats.BLOCKS and blocks is None:
        return {}
    widths = {"fp16": formats.FP16_BYTES} if form == "packed" else VALUES
    found: dict[str, Any] = {
        f"bytes_{text}": formats.stored_bytes(form, layer, nonzeros, width, blocks)
        for text, width in widths.items()
    }
    if nonzeros:
        found["stored_per_nonzero"] = formats.stored_values(form, nonzeros, blocks) / nonzeros
    return dict(found, blocks=blocks)


def _times(seconds: np.ndarray, whole: np.ndarray, dense: np.ndarray) -> dict[str, float]:
    return {
        "seconds": seconds[0],
        **_interval("", seconds),
        "whole_seconds": whole[0],
        **_interval("whole", whole),
        "speedup": dense[0] / whole[0],
        **_interval("speedup", dense / whole),
    }


def _interval(prefix: str, values: np.ndarray) -> dict[str, float]:
    low, high = interval(values)
    prefix = f"{prefix}_" if prefix else ""
    return {f"{prefix}low": low, f"{prefix}high": high}
