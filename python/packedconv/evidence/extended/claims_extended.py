"""What the experiments beyond the paper say on statements that the paper's own cannot decide."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from packedconv.evidence.claims import (
    COLUMNS,
    INCONCLUSIVE,
    NOT_REPLICATED,
    NOT_TESTABLE,
    Judgement,
    printed_text,
)
from packedconv.evidence.extended import gap, utilisation
from packedconv.evidence.published import Published

CAPTION = "Statements of the paper that experiments beyond it bear on"

# Of the rows past the caches, what stands beside a cited figure.
SPARSE = ("scipy_csr", "torch_csr")
DENSE = ("dense", "dense_linear")

# One device can contradict that a gap is inherent; none can confirm it.
OF_GAP = {
    gap.NOT_INHERENT: (NOT_REPLICATED, ""),
    gap.INHERENT: (INCONCLUSIVE, "agrees, which does not confirm it"),
    gap.MIXED: (INCONCLUSIVE, "depends on the layer"),
    gap.OPEN: (INCONCLUSIVE, "an interval crosses the limit, or the machine was noisy"),
    gap.NO_GAP: (INCONCLUSIVE, "no gap to explain on this device"),
}


def claims_extended(
    published: Published, gaps: pd.DataFrame, used: pd.DataFrame, device: str
) -> pd.DataFrame:
    """One row per statement with the columns of `claims`, all text; only analogues are filled.

    gaps, used: gap.csv and utilisation.csv of a CPU.
    Raises ValueError when they do not hold what a statement is about.
    """
    found = {
        gap.STATEMENT: (_inherent(gaps), "gap"),
        "cited.csrmv.sparse": (_utilisation(used, SPARSE), "utilisation"),
        "cited.csrmv.dense": (_utilisation(used, DENSE), "utilisation"),
    }
    rows = []
    for statement in published.statements:
        if statement["id"] not in found:
            continue
        judgement, figure = found[statement["id"]]
        row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
        row.update(
            {key: statement[key] for key in ("id", "section", "kind", "statement")},
            printed=printed_text(statement),
            verdict=NOT_TESTABLE,
            reason=statement["open"],
            analogue_device=device,
            analogue_obtained=judgement.obtained,
            analogue_interval=judgement.interval,
            analogue_verdict=": ".join(filter(None, (judgement.verdict, judgement.reason))),
            analogue_summary=judgement.summary,
            # Beside this table, which lies in the folder of its device.
            analogue_shown_in=f"{figure}.png",
        )
        rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS), dtype="str")


def preamble(published: Published, device: str) -> str:
    """What a reader has to know before the table."""
    source = published.source
    return (
        f'Statements of "{source["title"]}" (arXiv {source["arxiv"]}) that no measurement of the'
        f" paper's kind decides, with what experiments beyond the paper found on {device}. They are"
        " the work of an independent implementation; the authors' code was not available to it,"
        " and nothing here refutes theirs. Values are shares; intervals are of 95 %, from"
        " resampling rounds, and of several values the widest. All other statements are in"
        " claims.md."
    )


def _inherent(gaps: pd.DataFrame) -> Judgement:
    rows = gaps[gaps["experiment"] == gap.STATEMENT]
    if len(rows) != 1 or rows["verdict"].iloc[0] not in OF_GAP:
        raise ValueError(
            f"gap.csv: expected one row of {gap.STATEMENT} with a verdict, got {len(rows)};"
            " render figures/<device>/gap.pdf again"
        )
    row = rows.iloc[0]
    verdict, reason = OF_GAP[row["verdict"]]
    if pd.isna(row["share"]):
        return Judgement(verdict, reason)
    value, interval = f"{row['share']:.3g}", f"{row['share_low']:.3g} – {row['share_high']:.3g}"
    what = "of the gap vanishes with all but the pattern of the nonzeros"
    return Judgement(verdict, reason, f"{value} {what}", interval, f"{value} [{interval}] {what}")


def _utilisation(used: pd.DataFrame, implementations: Sequence[str]) -> Judgement:
    rows = used[
        (used["origin"] == utilisation.MEASURED)
        & used["implementation"].isin(implementations)
        & used["past_caches"].eq(True)
        & used["utilisation"].notna()
    ]
    reason = "another library on another device"
    if rows.empty:
        return Judgement(NOT_TESTABLE, "nothing was measured past the caches")
    noisy = rows["wide"].eq(True) | rows["busy"].eq(True)
    if noisy.any():
        reason += f"; {noisy.sum()} of {len(rows)} values are noisy"
    texts = [
        f"{utilisation.TITLES[row.implementation]}, S {row.sparsity:.2f}:"
        f" {100 * row.utilisation:.3g} %"
        for row in rows.itertuples()
    ]
    low, high = 100 * rows["utilisation_low"].min(), 100 * rows["utilisation_high"].max()
    values = 100 * rows["utilisation"]
    summary = f"{values.min():.3g} % to {values.max():.3g} %" if len(rows) > 1 else texts[0]
    interval = f"{low:.3g} % – {high:.3g} %"
    return Judgement(NOT_TESTABLE, reason, "; ".join(texts), interval, f"{summary} [{interval}]")
