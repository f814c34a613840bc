"""A table as CSV for programs, and as Markdown and LaTeX for readers."""

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

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


def write_table(
    frame: pd.DataFrame,
    path: str,
    caption: str,
    label: str,
    *,
    shown: pd.DataFrame | None = None,
    preamble: str = "",
    notes: Sequence[str] = (),
    column_format: str | None = None,
    long: bool = False,
) -> list[str]:
    """Write `frame` to `path` (.csv) and a readable form to .md and .tex beside it.

    shown: what a reader sees instead of `frame`. preamble: paragraphs before the table;
    notes: lines after it. column_format: LaTeX columns ("lrp{6cm}"), by default all "l".
    long: a LaTeX longtable, which breaks over pages (else a table float); both need booktabs.
    The same input gives the same bytes. Returns the three paths.
    Raises ValueError when `path` does not end in .csv.
    """
    path = os.fspath(path)
    stem, suffix = os.path.splitext(path)
    if suffix != ".csv":
        raise ValueError(f"path: expected a name that ends in .csv, got {path!r}")
    readable = _as_text(frame if shown is None else shown)
    texts = {
        path: frame.to_csv(index=False, lineterminator="\n"),
        stem + ".md": markdown(readable, caption, preamble, notes),
        stem + ".tex": latex(readable, caption, label, preamble, notes, column_format, long),
    }
    for name, text in texts.items():
        with atomic_write(name) as temporary, open(
            temporary, "w", encoding="utf-8", newline=""
        ) as file:
            file.write(text)
    return list(texts)


def markdown(
    frame: pd.DataFrame, caption: str, preamble: str = "", notes: Sequence[str] = ()
) -> str:
    """A caption, the paragraphs before, a pipe table and the notes."""
    cells = frame.map(_escape_markdown)
    cells.columns = [_escape_markdown(name) for name in frame.columns]
    # Numbers stay as they are written.
    table = cells.to_markdown(index=False, disable_numparse=True, tablefmt="pipe")
    parts = [f"**{caption}**", *_paragraphs(preamble), table]
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


def latex(
    frame: pd.DataFrame,
    caption: str,
    label: str,
    preamble: str = "",
    notes: Sequence[str] = (),
    column_format: str | None = None,
    long: bool = False,
) -> str:
    """The same for LaTeX with booktabs (and longtable when `long`)."""
    cells = frame.map(escape_latex)
    cells.columns = [escape_latex(name) for name in frame.columns]
    styler = cells.style.hide(axis="index")
    columns = column_format or "l" * len(cells.columns)
    before = [escape_latex(text) for text in _paragraphs(preamble)]
    after = [escape_latex(note) for note in notes]
    if long:
        table = styler.to_latex(
            environment="longtable",
            column_format=columns,
            hrules=True,
            caption=escape_latex(caption),
            label=label,
        ).rstrip("\n")
        return "\n\n".join([*before, table, *after]) + "\n"
    table = styler.to_latex(column_format=columns, hrules=True).rstrip("\n")
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape_latex(caption)}}}",
        rf"\label{{{label}}}",
        *(text + r"\par" for text in before),
        table,
        *(rf"\par\footnotesize {text}" for text in after),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def escape_latex(text: Any) -> str:
    """Text that pdflatex prints as it stands."""
    escaped = "".join(_LATEX.get(character, character) for character in str(text))
    # At the start of a row these would be read as an argument of the line break before.
    return "{}" + escaped if escaped.startswith(("[", "*")) else escaped


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
