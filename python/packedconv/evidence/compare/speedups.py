"""The table of two sides: speedups and times of every point, ratios with intervals."""

import pandas as pd

from packedconv.evidence.compare.ratios import BOTH, LEFT, QUANTITIES, RIGHT, Comparison
from packedconv.evidence.compare.side import differing
from packedconv.evidence.compare.words import (
    SUBJECTS,
    answer,
    counts,
    interval_text,
    nothing_in_both,
    ratio_text,
    warnings,
)
from packedconv.evidence.statistics import CONFIDENCE
from packedconv.evidence.tabular import Group

NOTES = [
    "speedup: median dense time over median sparse time; speedup ratio: right over left; sparse "
    "and dense ratio: time of the left over that of the right, so above 1 the right is ahead in "
    "all of them",
    f"in brackets: {100 * CONFIDENCE:g} % intervals; of ratios they cover the rounds and what a "
    "layer's times move by from run to run, as the verdicts have it (config/paper.yaml: "
    "between_runs); the CSV has those of the rounds alone too (rounds_low, rounds_high)",
    "*: the interval of the ratio leaves out 1",
    "overall: geometric mean over all points in both",
]


def caption(comparison: Comparison) -> str:
    return f"{comparison.left.name} (left) and {comparison.right.name} (right)"


def preamble(comparison: Comparison) -> str:
    """The answer, and what keeps the sides from being compared like for like, in paragraphs."""
    found = [f"{answer(name, one)}." for name, one in comparison.overall.items()]
    answers = " ".join(text[0].upper() + text[1:] for text in found)
    first = answers or f"{nothing_in_both(comparison).capitalize()}."
    return "\n\n".join([first, *warnings(comparison)])


def shown(comparison: Comparison) -> list[Group]:
    """What a reader sees: overall, a part per layer, and the conditions of both sides."""
    table = comparison.table
    unit = "ms per image" if comparison.per_image else "ms"
    groups = []
    if comparison.overall:
        rows = [
            {
                "Quantity": SUBJECTS[name],
                "Ratio": f"{ratio_text(one.ratio)} [{interval_text(one.low, one.high)}]",
                "Points": counts(one),
            }
            for name, one in comparison.overall.items()
        ]
        groups.append(Group("Overall", "", pd.DataFrame(rows)))
    for side, title in ((BOTH, ""), (LEFT, comparison.left.name), (RIGHT, comparison.right.name)):
        found = table[table["side"] == side]
        for _, rows in found.groupby(["left_layer", "right_layer"], sort=False, dropna=False):
            channels = rows["out_channels"].iloc[0]
            where = f", only in {title}" if title else ""
            groups.append(Group(f"OC {channels}{where}", "", _layer(rows, side, unit)))
    ours, theirs = comparison.left.conditions, comparison.right.conditions
    others = differing(comparison.left, comparison.right)
    conditions = [
        {
            "Condition": name,
            "Left": ours.get(name, "not recorded"),
            "Right": theirs.get(name, "not recorded"),
            "Differs": "yes" if any(other.startswith(name) for other in others) else "",
        }
        for name in dict.fromkeys((*ours, *theirs))
    ]
    return [*groups, Group("Conditions", "", pd.DataFrame(conditions))]


def _layer(rows: pd.DataFrame, side: str, unit: str) -> pd.DataFrame:
    found = {name: rows[rows["quantity"] == name] for name in QUANTITIES}
    speedup = found["speedup"]
    columns = {"S": [f"{value:.2f}" for value in speedup["sparsity"]]}
    if side != BOTH:
        columns["Speedup"] = _bracketed(speedup, side)
        for name in ("sparse", "dense"):
            columns[f"{name.capitalize()}, {unit}"] = [
                f"{1e3 * value:.3g}" for value in found[name][side]
            ]
        return pd.DataFrame(columns)
    for position in (LEFT, RIGHT):
        columns[f"Speedup, {position}"] = _bracketed(speedup, position)
    for name, title in (
        ("speedup", "Speedup, right / left"),
        ("sparse", "Sparse, left / right"),
        ("dense", "Dense, left / right"),
    ):
        columns[title] = [
            f"{ratio_text(row.ratio)} [{interval_text(row.ratio_low, row.ratio_high)}]"
            + "*" * bool(row.differs)
            for row in found[name].itertuples()
        ]
    return pd.DataFrame(columns)


def _bracketed(rows: pd.DataFrame, side: str) -> list[str]:
    columns = rows[[side, f"{side}_low", f"{side}_high"]]
    return [
        f"{value:.3g} [{low:.3g}, {high:.3g}]"
        for value, low, high in columns.itertuples(index=False)
    ]
