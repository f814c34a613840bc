"""The claim matrix: what a run here can decide of every statement of the paper, in which time.

Needs the environment, and neither torch nor the built extension.
"""

import csv
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from packedconv import announce
from packedconv.evidence import claims, claims_report, published
from packedconv.evidence.published import Published
from packedconv.files import atomic_write

ANSWERS = {"decidable": "decidable", "analogue": "analogue only", "not": "not"}


class Row(NamedTuple):
    """A statement. here: one of the texts of ANSWERS, and reason why no more than that.

    minutes: about how long until its verdict or analogue stands, by a run that starts from
    nothing but what is built; None for "not". measured: whether that takes measurements.
    """

    group: str
    id: str
    section: str
    statement: str
    printed: str
    tolerance: str
    here: str
    reason: str
    minutes: float | None
    measured: bool


class Matrix(NamedTuple):
    """rows: of all statements, in the order of config/paper.yaml.

    elsewhere: statements that the paper's own devices decide, by their title.
    """

    plan: announce.Plan
    rows: Sequence[Row]
    elsewhere: Mapping[str, int]


def matrix(arguments: Sequence[str], root: str = ".") -> Matrix:
    """The matrix of `scripts/artifact all` with these further arguments.

    Raises ValueError for a configuration that the workflow would refuse.
    """
    plan = announce.plan([], arguments, root)
    paper = published.load(os.path.join(root, "config/paper.yaml"))
    family = plan.settings["device"]["family"]
    prospects = claims.prospects(paper, family, plan.settings)
    return Matrix(
        plan,
        [
            _row(paper, statement, prospects[statement["id"]], plan)
            for statement in paper.statements
        ],
        {
            paper.devices[name]["title"]: _decided(claims.decidable(paper, name))
            for name in paper.workloads
            if name != family
        },
    )


def _decided(answers: Mapping[str, str]) -> int:
    return sum(answer == "decidable" for answer in answers.values())


def _row(
    paper: Published, statement: Mapping, prospect: claims.Prospect, plan: announce.Plan
) -> Row:
    minutes = None
    if prospect.answer != "not":
        seconds = sum(plan.steps.values()) if prospect.measured else plan.steps["analysis"]
        minutes = round(seconds / 60, 1)
    needed = claims.needed_sparsities(paper, statement)
    return Row(
        next(
            title
            for prefixes, title in claims_report.GROUPS
            if statement["id"].startswith(prefixes)
        ),
        statement["id"],
        ", ".join(statement[key] for key in ("section", "figure") if key in statement),
        statement["statement"],
        claims.printed_text(statement),
        claims.tolerance_text(statement, needed),
        ANSWERS[prospect.answer],
        prospect.reason,
        minutes,
        prospect.measured,
    )


def write(found: Matrix, path: str) -> None:
    """The rows as CSV, one per statement; minutes are empty for those that are not decidable."""
    with atomic_write(path) as temporary, open(temporary, "w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(found.rows)


def describe(found: Matrix, width: int) -> str:
    """The matrix as text: a table for each group, the reasons as numbered notes, the totals."""
    device = found.plan.settings["device"]["name"]
    notes: list[str] = []
    lines = [
        f"What run {found.plan.run} on device {device} can decide of the"
        " paper, statement by statement:"
    ]
    for title in dict.fromkeys(row.group for row in found.rows):
        rows = [row for row in found.rows if row.group == title]
        lines += ["", f"{title}: {_counted(rows)}"]
        lines += _table(rows, notes, width)
    lines += ["", "Why no more than that:"]
    for number, note in enumerate(notes, 1):
        lines += _wrapped(f"  ({number}) {note}", width, "      ")
    return "\n".join([*lines, "", *_totals(found, width)])


def _counted(rows: Sequence[Row]) -> str:
    counts = {answer: sum(row.here == answer for row in rows) for answer in ANSWERS.values()}
    return ", ".join(f"{count} {answer}" for answer, count in counts.items() if count)


def _table(rows: Sequence[Row], notes: list[str], width: int) -> list[str]:
    """Lines of a table; reasons go to the notes, each once."""
    records = [("statement", "what it says (tolerance)", "here", "min")]
    for row in rows:
        here = row.here
        if row.reason:
            if row.reason not in notes:
                notes.append(row.reason)
            here += f" ({notes.index(row.reason) + 1})"
        # A number stays with its sign and unit.
        tolerance = f" ({row.tolerance})".replace("± ", "±\N{NBSP}").replace(" %", "\N{NBSP}%")
        tolerance = tolerance if row.tolerance else ""
        minutes = "" if row.minutes is None else f"{max(1, round(row.minutes))}"
        records.append((row.id, row.statement + tolerance, here, minutes))
    widths = [max(len(record[index]) for record in records) for index in range(4)]
    widths[1] = max(24, width - 2 - sum(widths[:1] + widths[2:]) - 3 * 2)
    lines = []
    for identity, text, here, minutes in records:
        first, *others = (
            part.replace("\N{NBSP}", " ")
            for part in textwrap.wrap(text, widths[1], break_on_hyphens=False)
        )
        lines.append(
            f"  {identity:<{widths[0]}}  {first:<{widths[1]}}  {here:<{widths[2]}}"
            f"  {minutes:>{widths[3]}}".rstrip()
        )
        lines += [" " * (widths[0] + 4) + other for other in others]
    return lines


def _totals(found: Matrix, width: int) -> list[str]:
    plan, rows = found.plan, found.rows
    computed = [row for row in rows if not row.measured and row.minutes is not None]
    measured = [row for row in rows if row.measured and row.minutes is not None]
    analysis, whole = plan.steps["analysis"], sum(plan.steps.values())
    source = "by an earlier run here" if plan.measured else "by a rough guess"
    texts = [
        f"{len(rows)} statements: {_counted(rows)}.",
        f"Without measuring: {_counted(computed) or 'none'} ({announce.about(analysis)}).",
    ]
    if measured:
        texts.append(
            f"By one measurement for all of them: {_counted(measured)} ({announce.about(whole)},"
            f" {source}; finished steps are not repeated)."
        )
    if any(row.here == ANSWERS["analogue"] for row in rows):
        texts.append(
            "An analogue is the same quantity for the same layers, batch aside, on this device; it"
            " decides nothing about the paper."
        )
    if found.elsewhere:
        listed = "; ".join(f"{title}: {count}" for title, count in found.elsewhere.items())
        texts.append(f"Decidable on the paper's own devices: {listed}.")
    return [line for text in texts for line in _wrapped(text, width, "  ")]


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)
