"""The gap: what the sparse convolution's time comes to with one cause of it removed."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from packedconv import roofline
from packedconv.evidence.cpu_experiments import Experiments
from packedconv.evidence.statistics import interval, resampled_median
from packedconv.layer import Layer, sparsity_key

COUNTERS = [
    *("cycles", "instructions", "stalled_cycles_frontend", "stalled_cycles_backend"),
    *("l1d_read_misses", "last_level_read_misses"),
]
COLUMNS = [
    *("layer", "sparsity", "experiment", "kind", "seconds", "low", "high"),
    *("factor", "factor_low", "factor_high", "bound_seconds"),
    *("over_bound", "over_bound_low", "over_bound_high", "share", "share_low", "share_high"),
    *("verdict", "ideal", "bound_speedup", "speedup", "speedup_low", "speedup_high"),
    *(
        "dense_layout",
        "lanes_used",
        *COUNTERS,
        "counters_left_out",
        "spread",
        "attempts",
        "wide",
        "busy",
        "left_out",
    ),
]

# What was removed, in the order of the figure.
TITLES = {
    "rows_equalised": "rows equalised",
    "indices_contiguous": "indices contiguous",
    "few_channels": "few input channels read",
    "input_in_cache": "input in cache",
    "no_fill": "no fill",
    "no_stores": "no stores",
    "no_front_end": "no Python front end",
    "whole_tiles": "no idle lanes",
    "one_thread": "threads scale perfectly",
    "regular_pattern": "the pattern's causes",
    "only_pattern": "all but the pattern's",
    "all_removed": "all at once",
    "dense": "dense at its bound",
}
SPARSE, FIXED, DECISIVE = "sparse", "no_nonzeros", "only_pattern"
# The paper's statement that the last row is about, and what is said of it.
STATEMENT = "general.inherent"
INHERENT, NOT_INHERENT = "inherent", "not inherent"
MIXED, OPEN, NO_GAP = "depends on the layer", "inconclusive", "no gap"
# Of the gap, what has to vanish for it not to be inherent.
MOST = 0.5


def gap(experiments: Experiments) -> pd.DataFrame:
    """One row per layer, sparsity and experiment with `COLUMNS`, and one about `STATEMENT`.

    seconds: median over the medians of the rounds, of the layer's pixels on all threads (what ran
    on one thread is divided by their number), low and high its 95 % interval from resampling
    rounds. factor: how many times as long the sparse convolution takes; of dense, how many times
    as long as its bound dense takes. bound_seconds: no execution that does what this experiment
    still does stays below it. over_bound: seconds over bound_seconds. share: of the gap, the
    sparse convolution's time above its bound, what is not there in the experiment's time above
    its own; not defined where the gap may be zero. verdict: of DECISIVE, by `judge_point`.
    ideal: 1 / (1 - S); bound_speedup, speedup: dense over the bound and over the sparse time.
    Counters: of one execution on one thread. An experiment that was left out has its reason in
    `left_out`. Last row: range of DECISIVE's shares, their median, `judge`'s verdict.
    """
    rows: list[dict[str, Any]] = []
    for name, facts in experiments.measured.items():
        for sparsity in facts["experiment"]["sparsities"]:
            rows += _Point(experiments, name, round(sparsity, 6)).rows()
    return pd.DataFrame([*rows, _statement(rows)], columns=COLUMNS).astype({"attempts": "Int64"})


def judge_point(share: np.ndarray | None, noisy: bool) -> str:
    """Whether most of a gap is inherent to the pattern of the nonzeros.

    share: of the gap, what vanishes without all causes but the pattern, and its resamples; None
    where there may be no gap. noisy: rounds too far apart, or a busy machine.
    """
    if noisy:
        return OPEN
    if share is None:
        return NO_GAP
    low, high = interval(share)
    if low > MOST:
        return NOT_INHERENT
    return INHERENT if high < MOST else OPEN


def judge(verdicts: Iterable[str]) -> str:
    """Of all points: what they agree on, those without a gap left aside."""
    found = set(verdicts) - {NO_GAP}
    if {INHERENT, NOT_INHERENT} <= found:
        return MIXED
    if OPEN in found:
        return OPEN
    return found.pop() if found else NO_GAP


class _Point:
    """A layer at a sparsity."""

    def __init__(self, experiments: Experiments, name: str, sparsity: float) -> None:
        self._name, self._sparsity = name, sparsity
        self._facts, self._key = experiments.facts[name], sparsity_key(sparsity)
        self._layer = Layer(**self._facts["experiment"]["layer"])
        self._quality = experiments.quality()[name, sparsity]
        peaks, alone = experiments.peaks, self._facts["one_thread"]
        threads = self._facts["threads"]
        self._device = roofline.Device("measured", peaks["peak_flops"], peaks["bandwidth"])
        # As many such threads as there are; no more is known of one than of its share of all.
        self._scaled = roofline.Device(
            "threads that scale",
            max(threads * alone["peak_flops"], peaks["peak_flops"]),
            max(threads * alone["bandwidth"], peaks["bandwidth"]),
        )
        samples = experiments.samples
        mine = samples[(samples["layer"] == name) & (samples["sparsity"] == sparsity)]
        self._nonzeros = int(mine["nonzeros"].iloc[0])
        resampled = experiments.resampled()
        self._seconds = {
            implementation: resampled[name, sparsity, implementation]
            for implementation in mine["implementation"].unique()
        }
        self._seconds[FIXED] = resampled_median(
            np.array(self._facts["no_nonzeros_seconds"][self._key])
        )
        self._sparse, self._dense = self._seconds[SPARSE], self._seconds["dense"]
        self._bound = float(roofline.execution_bound(self._layer, self._nonzeros, self._device))

    def rows(self) -> list[dict[str, Any]]:
        removals = self._facts["removals"][self._key]
        left_out = self._facts["left_out"][self._key]
        rows = [{**self._row(SPARSE, "measured", self._sparse, self._bound), **self._counters()}]
        for name in [*TITLES, FIXED]:
            if name == "dense":
                rows.append(self._dense_row())
            elif name in left_out:
                rows.append({**self._base(name, None), "left_out": left_out[name]})
            else:
                removal = removals[name]
                seconds = removal["scale"] * self._seconds[name]
                row = self._row(name, removal["kind"], seconds, self._bound_without(removal))
                if name == DECISIVE:
                    noisy = self._quality["wide"] or self._quality["busy"]
                    row["verdict"] = judge_point(self._share(seconds, row["bound_seconds"]), noisy)
                rows.append(row)
        return rows

    def _base(self, experiment: str, kind: str | None) -> dict[str, Any]:
        speedup = self._dense / self._sparse
        return {
            "layer": self._name,
            "sparsity": self._sparsity,
            "experiment": experiment,
            "kind": kind,
            "ideal": 1 / (1 - self._sparsity),
            "bound_speedup": self._dense[0] / self._bound,
            **_with_interval("speedup", speedup),
            "dense_layout": self._facts["dense"]["layout"],
            "lanes_used": self._facts["plans"][self._key]["facts"]["lanes_used"],
            **self._quality,
        }

    def _row(self, experiment: str, kind: str, seconds: np.ndarray, bound: float) -> dict[str, Any]:
        low, high = interval(seconds)
        share = None if kind in ("measured", "fixed") else self._share(seconds, bound)
        return {
            **self._base(experiment, kind),
            **{"seconds": seconds[0], "low": low, "high": high, "bound_seconds": bound},
            **_with_interval("factor", self._sparse / seconds),
            **_with_interval("over_bound", seconds / bound),
            **({} if share is None else _with_interval("share", share)),
        }

    def _dense_row(self) -> dict[str, Any]:
        bound = float(
            roofline.roofline_time(
                roofline.dense_flops(self._layer), roofline.dense_bytes(self._layer), self._device
            )
        )
        return {
            **self._row("dense", "dense", self._dense, bound),
            **_with_interval("factor", self._dense / bound),
            **dict.fromkeys(("share", "share_low", "share_high")),
        }

    def _share(self, seconds: np.ndarray, bound: float) -> np.ndarray | None:
        """Of the gap, what vanishes; None where a resample has no gap."""
        whole = self._sparse - self._bound
        return None if whole.min() <= 0 else 1 - (seconds - bound) / whole

    def _bound_without(self, removal: dict[str, Any]) -> float:
        """As `roofline.execution_bound`, for what an experiment still does."""
        layer = self._layer
        nonzeros = 0 if removal["pattern"] == "empty" else self._nonzeros
        device = self._scaled if removal["one_thread"] else self._device
        free = device._replace(peak_flops=float("inf"))
        moved = float(roofline.execution_bound(layer, nonzeros, free)) * device.bandwidth
        pixels = layer.batch * layer.out_height * layer.out_width
        if removal["one_row"] or not removal["fill"]:
            moved -= 4 * layer.batch * layer.in_channels * layer.height * layer.width
        if not removal["stores"]:
            moved -= 4 * layer.out_channels * pixels
        return float(roofline.roofline_time(2 * nonzeros * pixels, moved, device))

    def _counters(self) -> dict[str, Any]:
        counted = self._facts["counters"][self._key]
        reasons: dict[str, list[str]] = {}
        for name, reason in counted["left_out"].items():
            reasons.setdefault(reason, []).append(name)
        text = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
        return {**counted["values"], "counters_left_out": text or None}


def _statement(rows: list[dict[str, Any]]) -> dict[str, Any]:
    decisive = [row for row in rows if row["experiment"] == DECISIVE]
    known = [row for row in decisive if row.get("share") is not None]
    verdicts = [row.get("verdict", OPEN) for row in decisive]
    found = {"experiment": STATEMENT, "kind": "statement", "verdict": judge(verdicts)}
    if known:
        found["share"] = float(np.median([row["share"] for row in known]))
        found["share_low"] = min(row["share_low"] for row in known)
        found["share_high"] = max(row["share_high"] for row in known)
    return found


def _with_interval(name: str, values: np.ndarray) -> dict[str, float]:
    low, high = interval(values)
    return {name: float(values[0]), f"{name}_low": low, f"{name}_high": high}
