"""Directives of reStructuredText that the report's pages are written with.

They read results when the report is written, so that captions say what was obtained and no rule
depends on them.
"""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from docutils import nodes
from docutils.parsers.rst import Directive, directives
from docutils.statemachine import StringList

from packedconv.evidence import claims, claims_report, published
from packedconv.evidence.page import table as html_table
from packedconv.report import machine
from packedconv.report.contents import Entry
from packedconv.report.marks import PAGES, Report

PAPER = "config/paper.yaml"


def register(report: Report) -> None:
    """Make the directives known to docutils, for one report."""
    for name, text in {
        "result": _Result,
        "verdicts": _Verdicts,
        "machine": _Machine,
        "missing": _Missing,
    }.items():
        directives.register_directive(name, type(name, (text,), {"report": report}))


class _Text(Directive):
    """A directive that stands for lines of reStructuredText and tables in HTML."""

    report: Report

    def rst(self, *paragraphs: str) -> list[nodes.Node]:
        container = nodes.container()
        lines = StringList("\n\n".join(paragraphs).split("\n"), source="report")
        self.state.nested_parse(lines, 0, container)
        return container.children

    def table(self, frame: pd.DataFrame) -> list[nodes.Node]:
        return [nodes.raw("", html_table(frame), format="html")]

    def read(self, name: str) -> pd.DataFrame | None:
        """A CSV of the run as text; None where it has not been made."""
        path = self.report.root / name
        if not path.exists():
            return None
        return pd.read_csv(path, dtype="str", keep_default_na=False)

    def style(self) -> nodes.Node:
        """What mends the look of the report, wherever a page of ours is shown."""
        text = (self.report.root / PAGES / "report.css").read_text(encoding="utf-8")
        return nodes.raw("", f"<style>\n{text}</style>", format="html")

    def claims(self) -> pd.DataFrame | None:
        return self.read(f"{self.report.figures}/claims.csv")


class _Result(_Text):
    """The caption of one figure or table: `.. result:: figures/fig5a.pdf`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = self.arguments[0]
        entry = self.report.entry(path)
        stem = path.rpartition(".")[0]
        found = self.read(f"{stem}.csv")
        return [
            self.style(),
            *self.rst(entry.shows, f"**What to expect.** {entry.expect}"),
            *self._statements(entry),
            *self._summary(entry, found),
            *self.rst(
                f"**Files.** ``{path}``; its data: ``{stem}.csv``. **Made by**"
                f" ``snakemake --cores 1 {path}`` (of a run that has options of its own, with"
                " these)."
            ),
        ]

    def _statements(self, entry: Entry) -> list[nodes.Node]:
        """Printed beside obtained, of the statements that this figure or table shows."""
        if entry.name == "claims":
            return _counts(self)
        device = self.report.device
        name = entry.name.rpartition("/")[2]
        if name in ("claims_extended", "gap", "utilisation"):
            rows = self.read(f"{self.report.figures}/{device}/claims_extended.csv")
            shown = None if rows is None else rows[_shows(rows["analogue_shown_in"], name)]
            if name == "claims_extended":
                shown = rows
            return self._compared("Printed beside obtained", shown, analogue=True)
        rows = self.claims()
        if entry.name.startswith(f"{device}/"):
            shown = None if rows is None else rows[_shows(rows["analogue_shown_in"], entry.name)]
            if shown is not None and shown.empty:
                return []
            return self._compared(
                "Printed of the paper's devices, beside the analogue obtained here",
                shown,
                analogue=True,
            )
        places = claims.places(published.load(str(self.report.root / PAPER)))
        ids = [statement for statement, stems in places.items() if entry.name in stems]
        if not ids:
            return []
        shown = None if rows is None else rows[rows["id"].isin(ids)]
        return self._compared("Printed beside obtained", shown, analogue=False)

    def _compared(
        self, title: str, rows: pd.DataFrame | None, *, analogue: bool
    ) -> list[nodes.Node]:
        if rows is None:
            return self.rst(f"**{title}.** The claims of this run have not been made.")
        if rows.empty:
            return []
        prefix = "analogue_" if analogue else ""
        verdicts = rows[f"{prefix}verdict"].str.partition(":")
        reasons = verdicts[2].str.strip() if analogue else rows["reason"]
        frame = pd.DataFrame(
            {
                "statement": rows["statement"],
                "printed (limit)": [
                    claims.joined(" ", printed, f"({limit})" if limit else "")
                    for printed, limit in zip(rows["printed"], rows["tolerance"], strict=True)
                ],
                "obtained [interval]": rows[f"{prefix}summary"].replace("", "–"),
                "verdict": verdicts[0],
            }
        )
        why = [reason for reason in dict.fromkeys(reasons) if reason]
        return [
            *self.rst(f"**{title}.**"),
            *self.table(frame),
            *([_list("Why a verdict is open or missing:", why)] if why else []),
        ]

    def _summary(self, entry: Entry, table: pd.DataFrame | None) -> list[nodes.Node]:
        """What was found, from columns of the target's CSV."""
        if table is None or not entry.found:
            return []
        texts = [text for text in (summary(table, item) for item in entry.found) if text]
        text = "; ".join(texts) if texts else "no values."
        return [nodes.paragraph("", "", nodes.strong("", "Found here. "), nodes.Text(text))]


class _Verdicts(_Text):
    """Statements by verdict, and analogues on this device by theirs."""

    def run(self) -> list[nodes.Node]:
        return [self.style(), *_counts(self)]


class _Machine(_Text):
    """What was measured, on which machine."""

    def run(self) -> list[nodes.Node]:
        facts = machine.facts(self.report.root / self.report.results)
        return self.table(pd.DataFrame(facts, columns=["measured", "on"], dtype="str"))


class _Missing(_Text):
    """What is not in the report."""

    def run(self) -> list[nodes.Node]:
        missing = self.report.missing
        if not missing:
            return self.rst("Everything that ``all`` makes is in this report.")
        return [_list("Not in this report, since it has not been made:", missing)]


def summary(table: pd.DataFrame, item: Mapping[str, Any]) -> str:
    """A column in words: its range and median, or how many rows have a value.

    item: an entry of `found` in docs/report/contents.yaml. Empty without any value.
    """
    rows = table
    for column, value in item.get("where", {}).items():
        rows = rows[rows[column] == value]
    if "count" in item:
        return f"{item['what']}: {(rows[item['count']] == item['value']).sum()} of {len(rows)}"
    values = pd.to_numeric(rows[item["column"]], errors="coerce")
    values = values[values.abs() < math.inf]
    if values.empty:
        return ""
    unit = item.get("unit", "")
    low, middle, high = (f"{value:.3g}{unit}" for value in values.quantile([0, 0.5, 1]))
    return f"{item['what']}: {low} to {high}, median {middle} ({len(values)} values)"


def _counts(text: _Text) -> list[nodes.Node]:
    rows = text.claims()
    if rows is None:
        return text.rst("The claims of this run have not been made.")
    device = text.report.device
    groups = claims_report.parts(rows, device, claims_report.plain_name)
    found: list[nodes.Node] = []
    for group in groups:
        if list(group.frame.columns)[1:] != list(claims.VERDICTS):
            break
        found += [nodes.paragraph("", "", nodes.strong("", group.title)), *text.table(group.frame)]
    return found


def _shows(column: pd.Series, target: str) -> pd.Series:
    """Whether `target` is among the files that a statement is shown in."""
    return column.map(
        lambda paths: any(path.rpartition(".")[0] == target for path in paths.split("; "))
    )


def _list(title: str, items: Sequence[str]) -> nodes.Node:
    listed = "".join(f"<li>{html.escape(item)}</li>" for item in items)
    return nodes.raw("", f"<p>{html.escape(title)}</p><ul>{listed}</ul>", format="html")
