"""The artifact description and evaluation (AD/AE) of this reproduction, in the structure of SC.

It describes this artifact, not the authors'. What it says of a run comes from the run's results
and claims, so that the same results give the same bytes on any machine.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

import packedconv
from packedconv.evidence import NOT_MEASURED, tables
from packedconv.evidence.claims import VERDICTS
from packedconv.evidence.claims_report import shapes
from packedconv.evidence.published import Published
from packedconv.evidence.samples import Results
from packedconv.evidence.tabular import escape_latex
from packedconv.files import atomic_write

TEMPLATES = Path(__file__).parent / "templates"
CLAIM_COLUMNS = ("id", "verdict", "analogue_verdict")


def write(
    published: Published,
    results: Results,
    steps: Sequence[str],
    claims: str,
    path: str,
    figures: str = "figures",
) -> list[str]:
    """Write the appendix to `path` (.md) and, as LaTeX to be read in by a document, to .tex.

    results: the run that it describes. steps: its steps.csv, or none where nobody timed them.
    claims: claims.csv of the same run. figures: how the text names the folder that the run is
    rendered into. LaTeX needs booktabs and array. Returns both paths.
    Raises ValueError when `path` does not end in .md or a file has another form.
    """
    path = os.fspath(path)
    stem, suffix = os.path.splitext(path)
    if suffix != ".md":
        raise ValueError(f"path: expected a name that ends in .md, got {path!r}")
    found = content(published, results, steps, claims, figures)
    texts = {path: render("markdown", found), f"{stem}.tex": render("latex", found)}
    for name, text in texts.items():
        with atomic_write(name) as temporary, open(
            temporary, "w", encoding="utf-8", newline=""
        ) as file:
            file.write(text)
    return list(texts)


def render(markup: str, found: Mapping[str, Any]) -> str:
    """The appendix in "markdown" or "latex"."""
    inline = {"markdown": inline_markdown, "latex": inline_latex}[markup]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.filters["inline"] = inline
    environment.filters["listed"] = lambda text: [inline(item) for item in list_items(text)]
    text = environment.get_template("appendix.j2").render(found, markup=f"{markup}.j2")
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def list_items(text: str) -> list[str]:
    """The items of a list whose lines begin with "- "; other lines go on with an item."""
    return [item for item in re.split(r"^\s*- ", text, flags=re.MULTILINE) if item.strip()]


def inline_markdown(text: str) -> str:
    """A paragraph, item or cell on one line; `code` stays as it is."""
    parts = " ".join(str(text).split()).split("`")
    # What lies between backquotes is printed as it stands, all but the mark of a table's cell.
    parts[::2] = [part.replace("*", r"\*") for part in parts[::2]]
    return "`".join(parts).replace("|", r"\|")


def inline_latex(text: str) -> str:
    """The same for LaTeX; code may break after a slash or an underscore."""
    parts = " ".join(str(text).split()).split("`")
    for index, part in enumerate(parts):
        escaped = escape_latex(part)
        if index % 2:
            broken = escaped.replace("/", r"/\allowbreak{}").replace(r"\_", r"\_\allowbreak{}")
            escaped = rf"\texttt{{{broken}}}"
        parts[index] = escaped
    return "".join(parts)


def content(
    published: Published, results: Results, steps: Sequence[str], claims: str, figures: str
) -> dict[str, Any]:
    """What the templates are filled with."""
    contributions = {
        entry["number"]: entry["title"] for entry in published.tables["table4"]["contributions"]
    }
    return {
        "paper": published.source,
        "version": packedconv.__version__,
        "device": results.device,
        "title": results.title,
        "run": results.run,
        "on_cpu": results.settings["device"]["kind"] == "cpu",
        "figures": figures,
        "contributions": contributions,
        "artifacts": artifacts(tables.table4(published), figures),
        "cells": {
            name: tables.agreement(published, name) for name in ("table1", "table2", "table3")
        },
        "minutes": minutes(published, steps),
        "claims": verdicts(claims),
        "checks": checks(results),
        "workload": workload(results),
        "machine": machine(results),
        "software": software(results),
    }


def artifacts(table4: pd.DataFrame, figures: str) -> list[dict[str, Any]]:
    """The artifacts of Table 4, A1 and so on, with elements of the paper and targets here.

    figures: the folder that the run is rendered into.
    """
    rows = []
    for number, (title, part) in enumerate(table4.groupby("artifact", sort=False), 1):
        targets = [
            re.sub("^figures/", f"{figures}/", target)
            for cell in part["targets"]
            for target in cell.split(", ")
        ]
        rows.append(
            {
                "id": f"A{number}",
                "title": title,
                "contribution": f"C{part['contribution'].iloc[0]}",
                "elements": ", ".join(part["paper_element"]),
                "targets": list(dict.fromkeys(targets)),
            }
        )
    return rows


def minutes(published: Published, steps: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Minutes of the steps of Table 5, by step, and "total": printed, and measured."""
    frame = tables.table5(published, steps)
    names = [step["step"] for step in published.times_table["steps"]] + ["total"]
    found = {}
    for name, row in zip(names, frame.to_dict("records"), strict=True):
        printed = f"{row['printed_low']:g}–{row['printed_high']:g}"
        found[name] = (printed, row["minutes"] or NOT_MEASURED)
    return found


def verdicts(claims: str) -> dict[str, dict[str, int]]:
    """How many statements ("total" of them) and how many analogues have which verdict.

    Raises ValueError for a file of another form.
    """
    table = pd.read_csv(claims, dtype="str", keep_default_na=False)
    missing = [name for name in CLAIM_COLUMNS if name not in table]
    unknown = set() if missing else set(table["verdict"]) - set(VERDICTS)
    if missing or unknown:
        expected = f"verdict: one of {VERDICTS}" if unknown else f"columns {CLAIM_COLUMNS}"
        got = sorted(unknown) if unknown else list(table.columns)
        raise ValueError(f"{claims}: expected {expected}, got {got}; make the claims again")
    analogues = table["analogue_verdict"].str.partition(":")[0]
    found = {}
    for name, column in (("statements", table["verdict"]), ("analogues", analogues)):
        found[name] = {verdict: int((column == verdict).sum()) for verdict in VERDICTS}
    found["statements"]["total"] = len(table)
    return found


def checks(results: Results) -> dict[str, Any]:
    """How many results were compared with float64, and the largest share of the bound (percent)."""
    errors = results.errors
    against = errors[(errors["reference"] == "float64") & (errors["implementation"] != "dense")]
    share = against["bound_fraction"].max()
    return {
        "count": len(against),
        "share": "" if pd.isna(share) else f"{100 * share:.0f} %",
    }


def workload(results: Results) -> dict[str, Any]:
    """What was measured, in words."""
    settings = results.settings
    layers = list(results.layers.values())
    threads = sorted({int(count) for count in results.samples["threads"].unique()})
    return {
        "shape": shapes(layers),
        "out_channels": ", ".join(str(layer.out_channels) for layer in layers),
        "sparsities": ", ".join(f"{value:.2f}" for value in settings["sparsities"]),
        "rounds": settings["protocol"]["rounds"],
        "executions": settings["protocol"]["executions"],
        "seed": settings["seed"],
        "threads": threads[-1],
        "weights": f"{settings['weights']['distribution']}, bound {settings['weights']['bound']}",
        "inputs": f"{settings['inputs']['distribution']} on [{settings['inputs']['low']:g}, "
        f"{settings['inputs']['high']:g})",
    }


def machine(results: Results) -> list[tuple[str, str]]:
    """Facts of the machine that was measured; what was not recorded is left out."""
    facts = _facts(results)
    memory = facts.get("memory_bytes")
    commit = facts.get("commit") or {}
    rows = [
        ("processor", facts.get("cpu")),
        ("physical cores", facts.get("usable_cores")),
        ("memory", f"{memory / 2**30:.0f} GiB" if memory else None),
        ("GPU", ", ".join(gpu.get("name", "unknown") for gpu in facts.get("gpus") or [])),
        ("system", facts.get("system")),
        ("Linux", facts.get("kernel")),
        ("clock governor", facts.get("governor")),
        ("instruction set of the kernels", facts.get("isa")),
        (
            "commit",
            commit.get("id") and commit["id"] + (" (modified)" if commit.get("modified") else ""),
        ),
    ]
    return [(name, str(value)) for name, value in rows if value]


def software(results: Results) -> list[tuple[str, str]]:
    """Software that the run was measured with; what was not recorded is left out."""
    facts = _facts(results)
    extension = facts.get("extension") or {}
    rows = [
        ("Python", facts.get("python")),
        ("PyTorch", facts.get("torch")),
        ("NumPy", facts.get("numpy")),
        ("C++ compiler", extension.get("compiler")),
        ("flags", (extension.get("flags") or "").strip()),
        ("CUDA compiler", extension.get("cuda")),
        ("C library", facts.get("libc")),
    ]
    return [(name, str(value)) for name, value in rows if value]


def _facts(results: Results) -> Mapping[str, Any]:
    return next((facts.get("machine", {}) for facts in results.facts.values()), {})
