"""A table as an HTML page of its own, which opens offline and in Snakemake's report."""

import html
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from packedconv.evidence.tabular import Group

# Fetches nothing: fonts are the reader's.
STYLE = """\
body { margin: 1rem; font: 14px/1.4 system-ui, sans-serif; color: #1e293b; background: #fff; }
h1 { font-size: 1.25rem; } h2 { font-size: 1.05rem; margin-top: 1.6rem; }
p, ul { max-width: 60rem; }
table { border-collapse: collapse; }
th, td { padding: .25rem .6rem .25rem 0; text-align: left; vertical-align: top; }
th { position: sticky; top: 0; background: #fff; border-bottom: 2px solid #1e293b; }
td { border-bottom: 1px solid #e2e8f0; overflow-wrap: break-word; }
td { max-width: 28rem; font-variant-numeric: tabular-nums; }
td.word { white-space: nowrap; }
"""

# Up to this many characters a cell stays on one line, where its whole column is as short.
SHORT = 18


def page(
    parts: Sequence["Group"], caption: str, preamble: str = "", notes: Sequence[str] = ()
) -> str:
    """A caption, the paragraphs before, a table for each part, and the notes, as one page.

    Cells of parts are text. A paragraph whose lines begin with "- " is a list. The same input
    gives the same text.
    """
    body = [f"<h1>{html.escape(caption)}</h1>", *_paragraphs(preamble)]
    for part in parts:
        body += [f"<h2>{html.escape(part.title)}</h2>"] if part.title else []
        body += [f"<p>{html.escape(part.intro)}</p>"] if part.intro else []
        body.append(table(part.frame))
    body += [_list(notes)] if notes else []
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            f'<head><meta charset="utf-8"><title>{html.escape(caption)}</title>',
            f"<style>\n{STYLE}</style></head>",
            "<body>",
            *body,
            "</body>",
            "</html>",
            "",
        ]
    )


def table(frame: "pd.DataFrame") -> str:
    """A frame of text as an HTML table, without its index."""
    short = [
        all(len(line) <= SHORT for cell in frame[name] for line in str(cell).split("\n"))
        for name in frame.columns
    ]
    head = "".join(f"<th>{_cell(name)}</th>" for name in frame.columns)
    rows = [
        "".join(
            f'<td class="word">{_cell(cell)}</td>' if whole else f"<td>{_cell(cell)}</td>"
            for cell, whole in zip(row, short, strict=True)
        )
        for row in frame.to_numpy()
    ]
    lines = [
        f"<thead><tr>{head}</tr></thead>",
        "<tbody>",
        *(f"<tr>{row}</tr>" for row in rows),
        "</tbody>",
    ]
    return "\n".join(["<table>", *lines, "</table>"])


def _cell(text: Any) -> str:
    # Long words of a path or an id may break behind their parts.
    escaped = html.escape(str(text)).replace("\n", "<br>")
    return re.sub(r"([/_])(?=\w)", r"\1<wbr>", escaped)


def _paragraphs(text: str) -> Iterable[str]:
    for paragraph in filter(None, text.split("\n\n")):
        lines = paragraph.split("\n")
        if all(line.startswith("- ") for line in lines):
            yield _list([line[2:] for line in lines])
        else:
            yield f"<p>{html.escape(paragraph)}</p>"


def _list(items: Iterable[str]) -> str:
    return "\n".join(["<ul>", *(f"<li>{html.escape(item)}</li>" for item in items), "</ul>"])
