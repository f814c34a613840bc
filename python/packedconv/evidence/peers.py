"""packedconv beside a peer, MNN, and PyTorch's best dense convolution on a CPU: the table."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from packedconv.evidence import statistics
from packedconv.evidence.cpu_experiments import (
    Experiments,
    distributions_sentence,
    protocol_sentence,
    skipped_layouts,
)
from packedconv.evidence.layer_table import marks
from packedconv.evidence.tabular import Group
from packedconv.layer import sparsity_key

COLUMNS = [
    *("layer", "batch", "in_channels", "out_channels", "height", "width", "kernel_size"),
    *("sparsity", "implementation", "layout", "version", "settings", "threads"),
    *("seconds", "low", "high", "ratio", "ratio_low", "ratio_high"),
    *("spread", "attempts", "wide", "busy", "rounds", "trial_seconds", "skipped"),
]
TITLES = {"sparse": "packedconv", "dense": "PyTorch", "mnn": "MNN"}
NOTES = [
    "ratio: median time of a contender over that of packedconv, so above 1 packedconv is faster; "
    "in brackets its 95 % interval from resampling the rounds; a time is the median over the "
    "medians of the rounds; *: the rounds are still too far apart after the repeats; †: the peak "
    "during the rounds says that the machine was busy",
    "timed: packedconv's conv2d of an NCHW input into an output that is there; PyTorch's conv2d in "
    "its fastest layout, into memory that is reused; MNN's runSession, whose input and output "
    "stay in MNN's own layout, which costs it no conversion",
    "all compute the same weights, those that packing has rounded; MNN's are converted ahead",
    "MNN enters the rounds with the fastest of its settings whose output is right at that "
    "sparsity; (trial): median of the trials before the rounds, which chose it",
    "right: against float64, every output within what FP32 sums are allowed for the output with "
    "the largest sum of |w x|",
]


def table(peers: Experiments) -> pd.DataFrame:
    """One row per layer, sparsity and contender, and one per other setting of MNN; `COLUMNS`.

    seconds: median over the medians of the rounds, low and high its interval; ratio: over "sparse"
    of the same rounds; spread: the widest of the contenders' interquartile ranges of round
    medians, relative, of the last of so many attempts.
    What was only tried has trial_seconds; what was left out has its reason in `skipped`.
    """
    medians, quality = peers.resampled(), peers.quality()
    rows: list[dict[str, Any]] = []
    for name, facts in peers.measured.items():
        samples = peers.samples[peers.samples["layer"] == name]
        shape = {key: facts["layer"][key] for key in COLUMNS[1:7]}
        for sparsity in sorted(samples["sparsity"].unique()):
            here = samples[samples["sparsity"] == sparsity]
            layouts = set(here[["implementation", "layout"]].itertuples(index=False, name=None))
            base = {"layer": name, **shape, "sparsity": sparsity, "threads": facts["threads"]}
            for row in _contenders(facts, sparsity_key(sparsity)):
                row = {**base, **row}
                if (row["implementation"], row.get("layout")) in layouts:
                    seconds = medians[name, sparsity, row["implementation"]]
                    ratio = seconds / medians[name, sparsity, "sparse"]
                    row.update(_interval("seconds", "", seconds))
                    row.update(_interval("ratio", "ratio_", ratio))
                    row.update(quality[name, sparsity])
                    row["rounds"] = here["round"].nunique()
                rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS).astype({"rounds": "Int64", "attempts": "Int64"})


def shown(frame: pd.DataFrame) -> list[Group]:
    """What a reader sees: a part per layer, and what the variants of MNN are."""
    groups = []
    for _, rows in frame.groupby("layer", sort=False):
        first = rows.iloc[0]
        title = (
            f"IC {first['in_channels']}, OC {first['out_channels']}, "
            f"{first['height']} × {first['width']}, N {first['batch']} ({first['layer']})"
        )
        part = pd.DataFrame(
            {
                "S": [f"{value:.2f}" for value in rows["sparsity"]],
                "Contender": [
                    f"{TITLES[row.implementation]} {row.version or ''}".strip()
                    for row in rows.itertuples()
                ],
                "Variant": rows["layout"].fillna(""),
                "ms": [_milliseconds(row) for row in rows.itertuples()],
                "Ratio": [
                    ""
                    if np.isnan(row.ratio)
                    else f"{row.ratio:.2f} [{row.ratio_low:.2f}, {row.ratio_high:.2f}]{marks(row)}"
                    for row in rows.itertuples()
                ],
            }
        )
        groups.append(Group(title, "", part))
    variants = frame[(frame["implementation"] == "mnn") & frame["settings"].notna()]
    variants = variants[["layout", "settings"]].drop_duplicates()
    variants.columns = ["Variant", "Settings"]
    return [*groups, Group("Variants of MNN", "", variants)]


def preamble(peers: Experiments, frame: pd.DataFrame) -> str:
    """What a reader has to know before the table, and what it comes to."""
    facts = list(peers.measured.values())
    bursts = [burst / 1e9 for found in facts for burst in found["peak_bursts"]]
    text = (
        f"{protocol_sentence(peers)} in one process. FP32 peak at the start of a round, which a "
        f"busy machine lowers: {min(bursts):.0f} to {max(bursts):.0f} GFLOP/s. "
        f"{distributions_sentence(peers)}."
    )
    paragraphs = [text, verdict(frame)]
    points = frame[frame["implementation"] == "sparse"].dropna(subset="spread")
    for column, words in (
        ("wide", "Spread too widely, repeated though they were"),
        ("busy", "Timed while the machine was busy"),
    ):
        found = [
            f"{point.layer} at S {point.sparsity:.2f} ({point.spread:.0%})"
            for point in points[points[column].astype(bool)].itertuples()
        ]
        if found:
            paragraphs.append(
                f"{words}: {', '.join(found)}; measure these layers again on a machine that does "
                "nothing else."
            )
    return "\n\n".join(paragraphs)


def notes(peers: Experiments) -> list[str]:
    """What the columns are, and which dense layouts are missing."""
    return [*NOTES, *skipped_layouts(peers)]


def verdict(frame: pd.DataFrame) -> str:
    """In how many points packedconv is ahead of MNN, and by how much at each sparsity."""
    points = frame[["layer", "sparsity"]].drop_duplicates()
    timed = frame[(frame["implementation"] == "mnn") & frame["ratio"].notna()]
    if timed.empty:
        return "MNN was not timed at any point; the table says why."
    ahead = int((timed["ratio"] > 1).sum())
    missing = len(points) - len(timed)
    text = f"packedconv is ahead of MNN at {ahead} of the {len(timed)} points where MNN was timed"
    text += f", and at {missing} more it was not timed" if missing else ""
    ranges = [
        f"{rows['ratio'].min():.2f} to {rows['ratio'].max():.2f} at S {sparsity:.2f}"
        for sparsity, rows in timed.groupby("sparsity")
    ]
    return f"{text}; MNN's time over packedconv's is {_enumerated(ranges)}."


def _contenders(facts: dict[str, Any], key: str) -> Iterable[dict[str, Any]]:
    """What can be said of every contender and setting before its times."""
    machine, peer = facts["machine"], facts["mnn"]
    yield {
        "implementation": "sparse",
        "layout": "packed",
        "version": machine["extension"]["version"],
        "settings": machine["isa"],
    }
    yield {
        "implementation": "dense",
        "layout": facts["dense"]["layout"],
        "version": machine["torch"],
    }
    row = {"implementation": "mnn", "version": peer["version"]}
    if peer["unavailable"] is not None:
        yield {**row, "skipped": peer["unavailable"]}
        return
    tried = peer["sparsities"][key]
    chosen = peer["chosen"].get(key)
    names = [
        *tried["settings"],
        *(name for name in tried["skipped"] if name not in tried["settings"]),
    ]
    for name in sorted(names, key=lambda name: name != chosen):
        found = tried["settings"].get(name, {})
        settings = [found[part] for part in ("described", "backend") if part in found]
        yield {
            **row,
            "layout": name,
            "settings": "; ".join(settings) or None,
            "trial_seconds": float(np.median(found["seconds"])) if found else None,
            "skipped": tried["skipped"].get(name),
        }


def _interval(name: str, prefix: str, values: np.ndarray) -> dict[str, float]:
    low, high = statistics.interval(values)
    return {name: float(values[0]), f"{prefix}low": low, f"{prefix}high": high}


def _milliseconds(row: Any) -> str:
    parts = []
    if not np.isnan(row.seconds):
        parts.append(f"{1e3 * row.seconds:.4g}")
    elif not np.isnan(row.trial_seconds):
        parts.append(f"{1e3 * row.trial_seconds:.4g} (trial)")
    if isinstance(row.skipped, str):
        parts.append(f"skipped: {row.skipped}")
    return "; ".join(parts)


def _enumerated(items: Iterable[str]) -> str:
    *head, last = items
    return f"{', '.join(head)} and {last}" if head else last
