"""A table as CSV for programs, and as Markdown, LaTeX and HTML for readers."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from packedconv.evidence.page import page
from packedconv.files import atomic_write

# What pdflatex does not read as it stands, or reads as markup.
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "±": r"$\pm$",
    "−": r"$-$",
    "≥": r"$\ge$",
    "≤": r"$\le$",
    "≈": r"$\approx$",
    "≠": r"$\ne$",
    "→": r"$\rightarrow$",
    "†": r"\textdagger{}",
    "√": r"$\surd$",
    "Σ": r"$\Sigma$",
    "–": "--",
    "—": "---",
    "…": r"\ldots{}",
    "²": r"\textsuperscript{2}",
    "⁻": r"\textsuperscript{-}",
    "µ": r"$\mu$",
    "\n": r"\newline ",
}


class Group(NamedTuple):
    """A part of a readable table under a title of its own; `intro` stands above it."""

    title: str
    intro: str
    frame: pd.DataFrame


def write_table(
    frame: pd.DataFrame,
    path: str,
    caption: str,
    label: str,
    *,
    shown: pd.DataFrame | Sequence[Group] | None = None,
    preamble: str = "",
    notes: Sequence[str] = (),
    column_format: str | Mapping[str, str] | None = None,
    long: bool = False,
) -> list[str]:
    """Write `frame` to `path` (.csv) and a readable form to .md, .tex and .html beside it.

    shown: what a reader sees instead of `frame`, whole or in parts. preamble: paragraphs before
    the table; notes: lines after it. column_format: LaTeX columns ("lrp{6cm}"), or by column
    name; by default all "l". long: a LaTeX longtable, which breaks over pages (else a table
    float); both need booktabs.
    The same input gives the same bytes. Returns the four paths.
    Raises ValueError when `path` does not end in .csv.
    """
    path = os.fspath(path)
    stem, suffix = os.path.splitext(path)
    if suffix != ".csv":
        raise ValueError(f"path: expected a name that ends in .csv, got {path!r}")
    if isinstance(shown, Sequence):
        parts = [group._replace(frame=_as_text(group.frame)) for group in shown]
    else:
        parts = [Group("", "", _as_text(frame if shown is None else shown))]
    texts = {
        path: frame.to_csv(index=False, lineterminator="\n"),
        stem + ".md": markdown(parts, caption, preamble, notes),
        stem + ".tex": latex(parts, caption, label, preamble, notes, column_format, long),
        stem + ".html": page(parts, caption, preamble, notes),
    }
    for name, text in texts.items():
        with atomic_write(name) as temporary, open(
            temporary, "w", encoding="utf-8", newline=""
        ) as file:
            file.write(text)
    return list(texts)


def markdown(
    parts: Sequence[Group], caption: str, preamble: str = "", notes: Sequence[str] = ()
) -> str:
    """A caption, the paragraphs before, a pipe table for each part, and the notes."""
    blocks = [f"**{caption}**", *_paragraphs(preamble)]
    for part in parts:
        blocks += [f"### {part.title}"] if part.title else []
        blocks += [_escape_markdown(part.intro)] if part.intro else []
        blocks.append(_pipe_table(part.frame))
    if notes:
        blocks.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(blocks) + "\n"


def latex(
    parts: Sequence[Group],
    caption: str,
    label: str,
    preamble: str = "",
    notes: Sequence[str] = (),
    column_format: str | Mapping[str, str] | None = None,
    long: bool = False,
) -> str:
    """The same for LaTeX with booktabs (and longtable when `long`), a table for each part."""
    before = [escape_latex(text) for text in _paragraphs(preamble)]
    after = [escape_latex(note) for note in notes]
    tables = []
    for number, part in enumerate(parts, 1):
        cells = part.frame.map(escape_latex)
        cells.columns = [escape_latex(name) for name in part.frame.columns]
        columns = _latex_columns(part.frame, column_format)
        styler = cells.style.hide(axis="index")
        title = escape_latex(f"{caption}: {part.title}" if part.title else caption)
        name = label if len(parts) == 1 else f"{label}:{number}"
        intro = [escape_latex(part.intro)] if part.intro else []
        if long:
            table = styler.to_latex(
                environment="longtable",
                column_format=columns,
                hrules=True,
                caption=title,
                label=name,
            ).rstrip("\n")
            tables.append("\n\n".join([*intro, table]))
            continue
        lines = [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{title}}}",
            rf"\label{{{name}}}",
            *(text + r"\par" for text in [*before, *intro]),
            styler.to_latex(column_format=columns, hrules=True).rstrip("\n"),
            *(rf"\par\footnotesize {text}" for text in after),
            r"\end{table}",
        ]
        tables.append("\n".join(lines))
    around = (before, after) if long else ([], [])
    return "\n\n".join([*around[0], *tables, *around[1]]) + "\n"


def escape_latex(text: Any) -> str:
    """Text that pdflatex prints as it stands."""
    escaped = "".join(_LATEX.get(character, character) for character in str(text))
    # At the start of a row these would be read as an argument of the line break before.
    return "{}" + escaped if escaped.startswith(("[", "*")) else escaped


def _pipe_table(frame: pd.DataFrame) -> str:
    """Cells as wide as their text: padding helps no reader of long ones."""
    rows = [frame.columns, ["---"] * len(frame.columns), *frame.to_numpy()]
    return "\n".join(
        "| " + " | ".join(_escape_markdown(cell) for cell in row) + " |" for row in rows
    )


def _latex_columns(frame: pd.DataFrame, column_format: str | Mapping[str, str] | None) -> str:
    if isinstance(column_format, Mapping):
        return "".join(column_format.get(name, "l") for name in frame.columns)
    return column_format or "l" * len(frame.columns)


def _escape_markdown(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("*", "\\*").replace("\n", "<br>")


def _paragraphs(text: str) -> Iterable[str]:
    return [paragraph for paragraph in text.split("\n\n") if paragraph]


def _as_text(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {str(name): [_cell(value) for value in frame[name]] for name in frame.columns}, dtype="str"
    )


def _cell(value: Any) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool) or type(value).__name__ == "bool":
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
