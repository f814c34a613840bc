"""Bandwidth utilisation of matrix times vector on a CPU, sparse and dense, and what is cited."""

from typing import Any

import numpy as np
import pandas as pd

from packedconv.evidence.cpu_experiments import Experiments
from packedconv.evidence.published import Published
from packedconv.evidence.statistics import interval
from packedconv.layer import sparsity_key

MEASURED, PRINTED = "measured", "printed"
TITLES = {
    "scipy_csr": "CSR, scipy.sparse (one thread)",
    "torch_csr": "CSR, torch.sparse",
    "sparse": "packed word, packedconv",
    "dense": "dense, torch.mv",
    "dense_linear": "dense, linear",
    "csrmv": "cuSPARSE csrmv",
    "gemv": "dense GEMV",
}
# Of those measured, in the order of the bars.
IMPLEMENTATIONS = ("scipy_csr", "torch_csr", "sparse", "dense", "dense_linear")
_DENSE = ("dense", "dense_linear")

COLUMNS = [
    *("origin", "device", "run", "layer", "rows", "columns", "sparsity", "nonzeros"),
    *("implementation", "threads", "bytes", "copies", "set_bytes", "cache_bytes", "past_caches"),
    *("seconds", "low", "high", "bytes_per_second"),
    *("utilisation", "utilisation_low", "utilisation_high"),
    *("speedup", "speedup_low", "speedup_high", "beyond_copy"),
    *("spread", "attempts", "wide", "busy", "where", "left_out"),
]


def table(experiments: Experiments, published: Published) -> pd.DataFrame:
    """One row per layer, sparsity and implementation, those past the caches first, and one per
    cited figure, with `COLUMNS`.

    bytes: of one execution by the usual formula, the matrix as stored, vector and product, each
    once. utilisation: bytes over time over the measured bandwidth of a copy, a fraction, with
    its 95 % interval from resampling the rounds; beyond_copy: whether all of that interval lies
    above 1, so that not all can have come from memory as a copy's bytes do. speedup: of the faster
    dense one. Printed figures are ranges and have no estimate. What was not timed has its reason
    in `left_out`.
    """
    resampled, quality = experiments.resampled(), experiments.quality()
    bandwidth = experiments.peaks["bandwidth"]
    samples = experiments.samples
    threads = samples.groupby("implementation")["threads"].first()
    rows: list[dict[str, Any]] = []
    ordered = sorted(
        experiments.facts.items(), key=lambda item: not item[1].get("past_caches", False)
    )
    for name, facts in ordered:
        shape = facts["experiment"]["layer"]
        base = {
            "origin": MEASURED,
            "device": experiments.settings["device"]["name"],
            "run": experiments.settings["run"],
            "layer": name,
            "rows": shape["out_channels"],
            "columns": shape["in_channels"],
        }
        if "skipped" in facts:
            rows.append({**base, "left_out": facts["skipped"]})
            continue
        for sparsity in facts["experiment"]["sparsities"]:
            key, sparsity = sparsity_key(sparsity), round(sparsity, 6)
            here = samples[(samples["layer"] == name) & (samples["sparsity"].round(6) == sparsity)]
            timed = [one for one in IMPLEMENTATIONS if (name, sparsity, one) in resampled]
            dense = [resampled[name, sparsity, one] for one in _DENSE if one in timed]
            fastest = min(dense, key=lambda seconds: seconds[0]) if dense else None
            for implementation in IMPLEMENTATIONS:
                moved = facts["bytes"][key][implementation]
                row = {
                    **base,
                    "sparsity": sparsity,
                    "nonzeros": int(here["nonzeros"].iloc[0]),
                    "implementation": implementation,
                    "bytes": moved,
                    "cache_bytes": facts["cache_bytes"],
                    "past_caches": facts["past_caches"],
                }
                if implementation not in timed:
                    rows.append({**row, "left_out": facts["left_out"][key][implementation]})
                    continue
                seconds = resampled[name, sparsity, implementation]
                copies = facts["copies"][key][implementation]
                row.update(
                    _intervals(seconds, moved, bandwidth),
                    threads=int(threads[implementation]),
                    copies=copies,
                    set_bytes=copies * moved,
                    **quality[name, sparsity],
                )
                if fastest is not None:
                    low, high = interval(fastest / seconds)
                    row["speedup"] = fastest[0] / seconds[0]
                    row.update(speedup_low=low, speedup_high=high)
                rows.append(row)
    rows += _cited(published)
    whole = ("rows", "columns", "nonzeros", "threads", "bytes", "copies", "set_bytes")
    return pd.DataFrame(rows, columns=COLUMNS).astype(
        dict.fromkeys((*whole, "cache_bytes", "attempts"), "Int64")
    )


def _intervals(seconds: np.ndarray, moved: int, bandwidth: float) -> dict[str, Any]:
    rate = moved / seconds
    low, high = interval(seconds)
    least, most = interval(rate / bandwidth)
    return {
        "seconds": seconds[0],
        "low": low,
        "high": high,
        "bytes_per_second": rate[0],
        "utilisation": rate[0] / bandwidth,
        "utilisation_low": least,
        "utilisation_high": most,
        "beyond_copy": least > 1,
    }


def _cited(published: Published) -> list[dict[str, Any]]:
    """The figures that the paper cites, in percent of an A100's bandwidth, as fractions."""
    return [
        {
            "origin": PRINTED,
            "device": "a100",
            "implementation": name,
            # Percent with two digits.
            "utilisation_low": round(published.cited[name]["low"] / 100, 4),
            "utilisation_high": round(published.cited[name]["high"] / 100, 4),
            "where": published.cited[name]["where"],
        }
        for name in ("csrmv", "gemv")
    ]
