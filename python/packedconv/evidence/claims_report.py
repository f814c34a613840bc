"""The table of verdicts as a report: a first page, then one line for each statement."""

import os
import re
from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from packedconv.evidence import tabular
from packedconv.evidence.claims import (
    INCONCLUSIVE,
    NOT_REPLICATED,
    NOT_TESTABLE,
    REPLICATED,
    VERDICTS,
    fitting,
    joined,
    shapes,
    shortfall,
)
from packedconv.evidence.page import page
from packedconv.evidence.published import Published
from packedconv.evidence.quantities import NotMeasuredError
from packedconv.evidence.samples import Results
from packedconv.evidence.tabular import Group
from packedconv.files import atomic_write

CAPTION = "Statements of the paper and what became of them"

# Parts of the report: ids that start with these, and a title.
GROUPS = (
    (("theory.", "cited."), "Theory (sections 2 to 4)"),
    (("a100.",), "NVIDIA A100 (section 6.1)"),
    (("nano.",), "NVIDIA Jetson Nano, Tegra X1 (section 6.2)"),
    (("general.",), "In general (section 7)"),
)

# What a reader of the report and of the LaTeX table calls the columns.
OBTAINED, SHOWN_IN = "obtained [interval]", "shown in"
ANALOGUE_VERDICT, ANALOGUE_SHOWN_IN = "its verdict", "its figure"

# Columns in LaTeX, on a landscape page.
COLUMN_FORMATS = {
    "id": "p{2.6cm}",
    "statement": "p{4.2cm}",
    "printed (limit)": "p{2.4cm}",
    OBTAINED: "p{2.6cm}",
    "verdict": "p{2cm}",
    SHOWN_IN: "p{1.4cm}",
    ANALOGUE_VERDICT: "p{2cm}",
    ANALOGUE_SHOWN_IN: "p{1.4cm}",
    "note": "p{20cm}",
}

# Characters from which the reason of a verdict stands in a note.
LONG = 30

Link = Callable[[str], str]


def preamble(
    published: Published, table: pd.DataFrame, results: Sequence[Results], device: str
) -> str:
    """The first page, in paragraphs: who, what was measured, how a verdict comes about."""
    source = published.source
    paragraphs = [
        f'The statements are those of "{source["title"]}" by {", ".join(source["authors"])}'
        f" (arXiv {source['arxiv']}). They are judged by an independent implementation, written"
        " from the text of the paper; the authors' code was not available to it. Replicated means"
        " that an independent implementation shows the same. Not replicated says something about"
        " this implementation and the machine at hand; what is not replicated here is not refuted.",
        _list(
            f"{len(table)} statements: {_counted(table['verdict'])}.",
            *([_analogues(published, table, results, device)] if _has_analogues(table) else []),
        ),
        "What was measured:\n\n" + _list(*(_measurement(entry) for entry in results))
        if results
        else "Nothing was measured.",
    ]
    if all(entry.settings["device"]["kind"] != "cuda" for entry in results):
        paragraphs.append(
            "No GPU was measured: the CUDA kernels were compiled and emulated, and no statement"
            " on their speed is decided here."
        )
    for entry in results:
        short = shortfall(published, entry.settings["protocol"])
        if short:
            paragraphs.append(
                f"The run {entry.run} on {entry.device} has {short}: its values are shown"
                " and decide nothing."
            )
    if any(entry.device == device and entry.family == "cpu" for entry in results):
        paragraphs.append(
            "Experiments beyond the paper (snakemake extended) bear on general.inherent and"
            f" cited.csrmv; they have a report of their own, claims_extended.md in {device}/."
        )
    paragraphs.append("How a verdict comes about:\n\n" + _list(*_rules(published)))
    return "\n\n".join(paragraphs)


def parts(table: pd.DataFrame, device: str, link: Link) -> list[Group]:
    """Counts by part, the statements of each part, and the notes that they refer to.

    link: how a figure or table is named, from its path.
    """
    groups = [_counts("Verdicts", table, table["verdict"])]
    if _has_analogues(table):
        groups.append(_counts(f"Analogues on {device}", table, _verdicts(table)))
    return [*groups, *statements(table, device, link)]


def statements(table: pd.DataFrame, device: str, link: Link) -> list[Group]:
    """`parts` without the counts."""
    notes = _Notes()
    groups = [_part(title, rows, device, link, notes) for title, rows in _split(table)]
    if notes.texts:
        frame = pd.DataFrame(
            [(f"({number})", text) for text, number in notes.texts.items()],
            columns=["", "note"],
        )
        groups.append(Group("Notes", "", frame))
    return groups


def write(
    table: pd.DataFrame,
    path: str,
    caption: str,
    label: str,
    parts_with: Callable[[Link], Sequence[Group]],
    before: str,
    formats: Mapping[str, str],
) -> None:
    """Write `table` to `path` (.csv) and the report to .md, with links, .tex and .html beside it.

    parts_with(link): the parts of the report. before: paragraphs before them. formats: columns in
    LaTeX, by name.
    Raises ValueError when `path` does not end in .csv.
    """
    stem, suffix = os.path.splitext(path)
    if suffix != ".csv":
        raise ValueError(f"path: expected a name that ends in .csv, got {path!r}")
    texts = {
        path: table.to_csv(index=False, lineterminator="\n"),
        f"{stem}.md": tabular.markdown(parts_with(markdown_link), caption, before),
        f"{stem}.tex": tabular.latex(
            parts_with(plain_name), caption, label, before, column_format=formats, long=True
        ),
        f"{stem}.html": page(parts_with(plain_name), caption, before),
    }
    for name, text in texts.items():
        with atomic_write(name) as temporary, open(
            temporary, "w", encoding="utf-8", newline=""
        ) as file:
            file.write(text)


def markdown_link(path: str) -> str:
    return f"[{plain_name(path)}]({path})"


def plain_name(path: str) -> str:
    """`fig5a.png` is Fig. 5a, `cpu/fig5.png` Fig. 5, and `table2.md` Table 2."""
    stem = path.rpartition("/")[2].rpartition(".")[0]
    found = re.fullmatch(r"(fig|table)(\d.*)", stem)
    if not found:
        return stem
    return f"{'Fig.' if found[1] == 'fig' else 'Table'} {found[2]}"


def column_formats(device: str) -> Mapping[str, str]:
    """LaTeX columns of `parts`, by name."""
    return {**COLUMN_FORMATS, _analogue_column(device): "p{2.6cm}"}


class _Notes:
    """Reasons that do not fit into a cell, numbered in the order in which they are met."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}

    def with_reason(self, verdict: str, reason: str) -> str:
        if not reason:
            return verdict
        if len(reason) < LONG:
            return f"{verdict} – {reason}"
        return f"{verdict} ({self.texts.setdefault(reason, len(self.texts) + 1)})"


def _part(title: str, rows: pd.DataFrame, device: str, link: Link, notes: _Notes) -> Group:
    analogue = _analogue_column(device)
    records = []
    for row in rows.to_dict("records"):
        verdict, _, reason = row["analogue_verdict"].partition(": ")
        # A quantity that is not defined anywhere has no analogue to speak of.
        verdict = verdict if row["analogue_device"] else ""
        records.append(
            {
                "id": row["id"],
                "statement": f"{row['statement']} ({row['section']})",
                "printed (limit)": joined(
                    " ", row["printed"], f"({row['tolerance']})" if row["tolerance"] else ""
                ),
                OBTAINED: row["summary"],
                "verdict": notes.with_reason(row["verdict"], row["reason"]),
                SHOWN_IN: _links(row["shown_in"], link),
                analogue: row["analogue_summary"],
                ANALOGUE_VERDICT: notes.with_reason(verdict, reason),
                ANALOGUE_SHOWN_IN: _links(row["analogue_shown_in"], link),
            }
        )
    frame = pd.DataFrame(records)
    empty = [name for name in frame if (frame[name] == "").all()]
    names = sorted(set(rows["analogue_device"]) - {"", device})
    intro = f"Analogues are of {' and of '.join(names)}." if names else ""
    return Group(title, intro, frame.drop(columns=empty))


def _analogue_column(device: str) -> str:
    return f"analogue: {device}"


def _links(paths: str, link: Link) -> str:
    return ", ".join(link(path) for path in paths.split("; ") if path)


def _split(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    found = [(title, table[table["id"].str.startswith(prefixes)]) for prefixes, title in GROUPS]
    return [(title, rows) for title, rows in found if len(rows)]


def _verdicts(table: pd.DataFrame) -> pd.Series:
    """Verdicts of the analogues, without their reasons; empty where there is none."""
    return table["analogue_verdict"].str.partition(":")[0].where(table["analogue_device"] != "", "")


def _has_analogues(table: pd.DataFrame) -> bool:
    return bool(_verdicts(table).isin(VERDICTS[:3]).any())


def _counts(title: str, table: pd.DataFrame, verdicts: pd.Series) -> Group:
    rows = [
        [name, *(int((verdicts[part.index] == verdict).sum()) for verdict in VERDICTS)]
        for name, part in _split(table)
    ]
    frame = pd.DataFrame(rows, columns=["part", *VERDICTS])
    total = ["together", *(int(frame[verdict].sum()) for verdict in VERDICTS)]
    frame.loc[len(frame)] = total
    return Group(title, "", frame)


def _counted(verdicts: pd.Series) -> str:
    return ", ".join(f"{(verdicts == verdict).sum()} {verdict}" for verdict in VERDICTS)


def _list(*items: str) -> str:
    return "\n".join(f"- {item}" for item in items)


def _measurement(results: Results) -> str:
    settings = results.settings
    protocol, peaks = settings["protocol"], results.peaks
    machine = next((facts.get("machine", {}) for facts in results.facts.values()), {})
    threads = sorted(results.samples["threads"].unique())
    on_cpu = settings["device"]["kind"] == "cpu"
    layers = results.layers.values()
    channels = ", ".join(str(layer.out_channels) for layer in layers)
    return joined(
        "; ",
        f"{results.device}, run {results.run}: "
        + (machine.get("cpu") or results.title if on_cpu else results.title),
        f"{threads[-1]} thread{'s' if threads[-1] > 1 else ''}" if on_cpu else "",
        f"PyTorch {machine['torch']}" if machine.get("torch") else "",
        f"{protocol['rounds']} rounds of {protocol['executions']} executions",
        f"{shapes(layers)}, OC {channels}",
        f"measured roofs {peaks['peak_flops'] / 1e9:.3g} GFLOP/s and"
        f" {peaks['bandwidth'] / 1e9:.3g} GB/s",
    )


def _rules(published: Published) -> list[str]:
    judging = published.judging
    runs = judging["between_runs"]
    return [
        "Beside what is printed stands the limit, in brackets. A statement of a device is decided"
        " by measurements of that device only.",
        f"Beside what is obtained stands its interval of {100 * judging['confidence']:g} %, in"
        " brackets. Rounds are resampled, and all times of a layer and implementation are taken"
        f" to differ from one run to another by {100 * runs['cpu']:g} % on a CPU and"
        f" {100 * runs['cuda']:g} % on a GPU (standard deviation). What is computed from the"
        " paper's numbers, and a rounding error, is the same in every run and has no interval.",
        f"{REPLICATED}: the whole interval lies inside the limit. {NOT_REPLICATED}: all of it lies"
        f" outside. {INCONCLUSIVE}: it crosses the limit, or too little was measured, or on a busy"
        f" machine. {NOT_TESTABLE}: nothing here speaks of it. Of several values every one has to"
        " lie inside, and one that lies outside is enough.",
        "Numbers in brackets behind a verdict refer to the notes at the end; claims.csv, beside"
        " this file, has every value by itself. What is computed and shown in no figure or table"
        " of the paper has no link.",
    ]


def _analogues(
    published: Published, table: pd.DataFrame, results: Sequence[Results], device: str
) -> str:
    at_hand = next(entry for entry in results if entry.device == device)
    judged = _verdicts(table)
    counted = ", ".join(f"{(judged == verdict).sum()} {verdict}" for verdict in VERDICTS[:3])
    return (
        f"An analogue is the same quantity on {device}, which is not the device that the"
        f" statement is about: {_differences(published, at_hand)}. It is no verdict on the"
        f" paper. Of the analogues: {counted}."
    )


def _differences(published: Published, results: Results) -> str:
    """In what the analogues on a device differ from the statements, in words."""
    texts = ["a CPU and its kernel" if results.family == "cpu" else "another GPU"]
    for family in published.workloads:
        try:
            layers = fitting(published, family, results.layers.values(), any_batch=True)
        except NotMeasuredError:
            continue
        batches = sorted({layer.batch for layer in layers.values()})
        paper = published.layer(family, 1).batch
        if family != results.family and batches != [paper]:
            listed = ", ".join(str(batch) for batch in batches)
            title = published.devices[family]["title"]
            texts.append(f"N {listed} instead of {paper} ({title})")
    return ", ".join(texts)
