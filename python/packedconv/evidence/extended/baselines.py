"""Every way to compute a layer on a CPU: times, speedups over the best dense one, and memory."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from packedconv.evidence.cpu_experiments import Experiments
from packedconv.evidence.statistics import interval
from packedconv.layer import Layer, sparsity_key

COLUMNS = [
    *("layer", *Layer._fields[1:], "sparsity", "nonzeros", "contender", "variant", "threads"),
    *("seconds", "low", "high", "speedup", "speedup_low", "speedup_high", "verdict"),
    *("rounds", "spread", "attempts", "wide", "busy", "left_out"),
    *("held_bytes", "working_bytes", "working_per_input", "memory_left_out"),
    *("unfolded_bytes", "unfolded_per_input"),
]

TITLES = {
    "sparse": "packedconv",
    "dense": "dense, best layout",
    "dense_default": "dense, NCHW",
    "im2col_csr": "im2col + CSR",
    "im2col_csr_bands": "im2col + CSR in bands",
    "im2col_dense": "im2col + dense",
}
REFERENCE = "dense"


def baselines(experiments: Experiments) -> pd.DataFrame:
    """One row per layer, sparsity and contender, with `COLUMNS`, in the order of `TITLES`.

    seconds: median over the medians of the rounds, low and high its 95 % interval; speedup: the
    seconds of the best dense layout over these, with its interval; verdict: `faster`, `slower`,
    or `inconclusive` where that interval holds 1. spread: the widest of all contenders, after so
    many attempts. What was not timed has its reason in `left_out`.
    held_bytes: input, weights and output; working_bytes: what an execution took beside them, and
    per byte of one input image; both at one sparsity only, with the reason in `memory_left_out`
    where there is no number. unfolded_bytes: of one image unfolded whole, per byte of it too.
    """
    resampled, quality = experiments.resampled(), experiments.quality()
    rows = []
    for name, facts in experiments.measured.items():
        layer = Layer(**facts["layer"])
        samples = experiments.samples[experiments.samples["layer"] == name]
        shape = {"layer": name, **{key: facts["layer"][key] for key in Layer._fields[1:]}}
        for sparsity in facts["experiment"]["sparsities"]:
            sparsity = round(sparsity, 6)
            here = samples[samples["sparsity"] == sparsity]
            point = {
                **shape,
                "sparsity": sparsity,
                "nonzeros": here["nonzeros"].iloc[0],
                "threads": facts["threads"],
            }
            dense = resampled[name, sparsity, REFERENCE]
            for contender, variant in _contenders(facts, sparsity, here):
                row = {**point, "contender": contender, "variant": variant}
                if (name, sparsity, contender) in resampled:
                    seconds = resampled[name, sparsity, contender]
                    row["seconds"] = seconds[0]
                    row["low"], row["high"] = interval(seconds)
                    row["speedup"] = dense[0] / seconds[0]
                    row["speedup_low"], row["speedup_high"] = interval(dense / seconds)
                    if contender != REFERENCE:
                        row["verdict"] = verdict(row["speedup_low"], row["speedup_high"])
                    row["rounds"] = here["round"].nunique()
                    row.update(quality[name, sparsity])
                else:
                    row["left_out"] = _left_out(facts, sparsity, contender)
                row.update(_memory(facts, layer, sparsity, contender))
                rows.append(row)
    table = pd.DataFrame(rows, columns=COLUMNS)
    whole = ("rounds", "attempts", "held_bytes", "working_bytes", "unfolded_bytes")
    return table.astype(dict.fromkeys(whole, "Int64"))


def verdict(low: float, high: float) -> str:
    """What an interval of a speedup says."""
    if low > 1:
        return "faster"
    return "slower" if high < 1 else "inconclusive"


def _contenders(
    facts: dict[str, Any], sparsity: float, samples: pd.DataFrame
) -> Iterator[tuple[str, str | None]]:
    """Contenders of a point with the variants that were timed, those left out included."""
    timed = dict(zip(samples["implementation"], samples["layout"], strict=True))
    for contender in TITLES:
        if contender in timed or contender in facts["im2col"][sparsity_key(sparsity)]:
            yield contender, timed.get(contender)


def _left_out(facts: dict[str, Any], sparsity: float, contender: str) -> str:
    """Why no variant of a contender was timed."""
    skipped = facts["im2col"][sparsity_key(sparsity)][contender]["skipped"]
    by_reason: dict[str, list[str]] = {}
    for variant, reason in skipped.items():
        by_reason.setdefault(reason, []).append(variant)
    if len(by_reason) == 1:
        return next(iter(by_reason))
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())


def _memory(facts: dict[str, Any], layer: Layer, sparsity: float, contender: str) -> dict[str, Any]:
    """The columns of memory of a row."""
    image = 4 * layer.in_channels * layer.height * layer.width
    columns: dict[str, Any] = {}
    # What the bands take is theirs to choose.
    if contender in ("im2col_csr", "im2col_dense"):
        columns["unfolded_bytes"] = facts["unfolded_bytes"]
        columns["unfolded_per_input"] = facts["unfolded_bytes"] / image
    found = facts["memory"]["contenders"].get(contender)
    if found is None or round(facts["memory"]["sparsity"], 6) != sparsity:
        return columns
    if "skipped" in found:
        return {**columns, "memory_left_out": found["skipped"]}
    columns["held_bytes"], columns["working_bytes"] = found["held_bytes"], found["working_bytes"]
    columns["working_per_input"] = found["working_bytes"] / image
    return columns
