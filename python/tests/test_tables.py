import fractions
import pathlib
import re
import sys
import xml.etree.ElementTree

import pandas as pd
import pytest

from packedconv.evidence import published, tables, tabular
from packedconv.evidence.page import page
from packedconv.roofline import exact, sparse_arithmetic_intensity, winograd_speedup

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAPER = str(ROOT / "config" / "paper.yaml")
SCRIPTS = {
    "table1": "table1_arithmetic_intensity",
    "table2": "table2_winograd_a100",
    "table3": "table3_winograd_jetson_nano",
    "table4": "table4_artifacts",
    "table5": "table5_times",
    "table6": "table6_versions",
    "audit": "audit",
}


@pytest.fixture(scope="module")
def paper():
    return published.load(PAPER)


@pytest.mark.parametrize(
    ("table", "assumption", "agreeing", "cells"),
    [
        ("table1", 0, 8, 9),
        ("table2", 0, 5, 25),
        ("table2", 1, 25, 25),
        ("table2", 2, 14, 25),
        ("table3", 0, 5, 25),
        ("table3", 1, 22, 25),
        ("table3", 2, 22, 25),
    ],
)
def test_agreement_counts(paper, table, assumption, agreeing, cells):
    names = list(dict.fromkeys(tables.recomputed(paper, table)["assumption"]))
    assert tables.agreement(paper, table, names[assumption])[:2] == (agreeing, cells)


def test_what_the_assumptions_are(paper):
    stated, reconciled, small = tables.assumptions(paper, "table2")
    assert (stated.reduction, stated.device.ridge_point) == (exact(1.5), exact(9.75))
    assert (reconciled.reduction, reconciled.device.ridge_point) == (2, 13)
    assert reconciled.device.bandwidth == 1.5e12
    assert small.device.bandwidth == 1.555e12
    stated, reduced, slower = tables.assumptions(paper, "table3")
    assert (reduced.reduction, reduced.device.bandwidth) == (2, 25.6e9)
    assert (slower.reduction, float(slower.device.bandwidth)) == (exact(1.5), 19.2e9)


def test_the_agreeing_cells_as_stated_are_those_of_one_input_channel(paper):
    for table in ("table2", "table3"):
        frame = tables.winograd_table(paper, table)
        agreeing = frame[(frame["assumption"] == tables.AS_STATED) & frame["agrees"]]
        assert set(agreeing["in_channels"]) == {1}


def test_a_changed_cell_changes_the_count(paper):
    copy = paper.copy()
    copy.tables["table1"]["cells"][4] = 5.8
    assert tables.agreement(copy, "table1").agreeing == 9
    copy.tables["table2"]["cells"][4][4] = 6.7
    assert tables.agreement(copy, "table2").agreeing == 6
    copy.tables["table2"]["reduction"] = 2.0
    copy.devices["a100"]["bandwidth"] = 1.5e12
    assert tables.agreement(copy, "table2").agreeing == 24


def test_no_exact_value_is_a_tie(paper):
    # So the direction in which ties are rounded decides no cell.
    layer = paper.table1_layer()
    values = [
        sparse_arithmetic_intensity(layer, exact(sparsity))
        for sparsity in paper.tables["table1"]["sparsities"]
    ]
    for table in ("table2", "table3"):
        for assumption in tables.assumptions(paper, table):
            for cell, _ in tables.winograd_cells(paper, table):
                values.append(
                    winograd_speedup(cell, exact(0.9), assumption.device, assumption.reduction)
                )
    assert len(values) == 9 + 6 * 25
    assert all((value * 10) % 1 != fractions.Fraction(1, 2) for value in values)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        ("5.75", 1, "5.8"),
        ("5.749999999999999999", 1, "5.7"),
        ("0.05", 1, "0.1"),
        ("0.04", 1, "0.0"),
        ("9.995", 2, "10.00"),
        ("2.5", 0, "3"),
    ],
)
def test_rounding_is_exact_and_half_up(value, digits, text):
    assert tables.decimals(fractions.Fraction(value), digits) == text


def test_shown_tables_have_every_cell(paper):
    shown = tables.shown_winograd_table(paper, "table2")
    assert list(shown.columns) == ["IC", "", "OC 32", "OC 64", "OC 128", "OC 256", "OC 512"]
    assert len(shown) == 5 * 4
    assert shown.loc[4:6, "OC 32"].tolist() == ["1.8", "3.3*", "1.8"]
    assert shown.map(lambda text: str(text).endswith("*")).sum().sum() == 20 + 0 + 11
    row = tables.shown_table1(paper)["S 0.94"].tolist()
    assert row == ["5.7", "5.8", "no"]


def test_unknown_tables_and_assumptions(paper):
    with pytest.raises(ValueError, match="table: expected table2 or table3, got 'table4'"):
        tables.assumptions(paper, "table4")
    with pytest.raises(ValueError, match="assumption: expected one of"):
        tables.agreement(paper, "table2", "reduction 3")


def test_table_4_names_files_that_exist(paper):
    frame = tables.table4(paper)
    listed = [row["figures"] + row["tables"] for row in paper.tables["table4"]["rows"]]
    assert len(frame) == sum(map(len, listed)) + 2
    missing = [
        name for files in frame["files"] for name in files.split(", ") if not (ROOT / name).exists()
    ]
    assert missing == []


def write_steps(folder, rows):
    folder.mkdir(parents=True)
    path = folder / "steps.csv"
    path.write_text("step,seconds\n" + "".join(f"{step},{value}\n" for step, value in rows))
    return str(path)


def test_table_5_with_and_without_measurements(paper, tmp_path):
    nothing = tables.shown_table5(tables.table5(paper, []))
    assert set(nothing["Measured (minutes)"]) == {tables.NOT_MEASURED}
    whole = write_steps(
        tmp_path / "results/cpu/paper",
        [("setup", 60), ("compilation", 90), ("benchmark", 600), ("analysis", 30)],
    )
    part = write_steps(tmp_path / "results/cpu/smoke", [("benchmark", 60)])
    frame = tables.table5(paper, [whole, part])
    shown = tables.shown_table5(frame)
    assert shown["Printed (minutes)"].tolist() == ["15–20", "3–5", "2–15", "2–3", "40–70"]
    assert shown["Measured on cpu, run paper (minutes)"].tolist() == [
        "1.0",
        "1.5",
        "10.0",
        "0.5",
        "13.0",
    ]
    assert shown["Measured on cpu, run smoke (minutes)"].tolist() == [
        tables.NOT_MEASURED,
        tables.NOT_MEASURED,
        "1.0",
        tables.NOT_MEASURED,
        tables.NOT_MEASURED,
    ]
    assert "22–43 minutes" in tables.table5_notes(frame)[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step,minutes\n", "expected columns step,seconds"),
        ("step,seconds\nother,1\n", "step: expected each of .* got 'other'"),
        ("step,seconds\nsetup,1\nsetup,2\n", "step: expected each of .* once"),
        ("step,seconds\nsetup,soon\n", "seconds of setup: expected a number, got 'soon'"),
    ],
)
def test_table_5_refuses_other_files(paper, tmp_path, text, message):
    path = write_steps(tmp_path / "results/cpu/paper", [])
    pathlib.Path(path).write_text(text)
    with pytest.raises(ValueError, match=message):
        tables.table5(paper, [path])


def test_table_6_beside_given_versions(paper):
    found = {
        "CUDA Toolkit": None,
        "Python": "3.11.7",
        "PyTorch": "2.13.0+cpu",
        "pybind11": "3.1.0",
        "CMake": "3.9.1",
        "GCC": "12.2.0",
    }
    frame = tables.table6(paper, found).set_index("software")
    assert frame["met"].to_dict() == {
        "CUDA Toolkit": "no",
        "Python": "yes",
        "PyTorch": "no",
        "pybind11": "not checked",
        "CMake": "no",
        "GCC": "yes",
    }
    assert frame.loc["CUDA Toolkit", "found"] == "not found"
    assert frame.loc["CUDA Toolkit", "needed_on_cpu"] == "not needed"


@pytest.mark.parametrize(
    ("found", "comparator", "version", "met"),
    [
        ("3.20", ">=", "3.20", True),
        ("3.9", ">=", "3.20", False),
        ("12", ">=", "11", True),
        ("2.9.1+cu126", "==", "2.9", True),
        ("2.90", "==", "2.9", False),
        ("12", "==", "12.2", False),
        (None, "latest", None, False),
        ("3.0", "latest", None, None),
    ],
)
def test_versions(found, comparator, version, met):
    assert tables.version_meets(found, comparator, version) is met


def test_found_versions_of_this_python():
    found = tables.found_versions()
    assert found["Python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}")
    assert tables._program_version(["no-such-program-here"], "x") is None
    assert tables._package_version("no-such-package-here") is None


def test_written_tables_are_escaped_and_the_same_each_time(tmp_path):
    frame = pd.DataFrame(
        {"a_b": ["50 % & more", "x|y", "[1] *"], "ok": [True, False, True], "v": [1.5, None, 2.0]}
    )
    paths = tabular.write_table(frame, tmp_path / "t.csv", "A & B", "tab:t", notes=["≥ 1 × #"])
    first = [pathlib.Path(path).read_bytes() for path in paths]
    tabular.write_table(frame, tmp_path / "t.csv", "A & B", "tab:t", notes=["≥ 1 × #"])
    assert first == [pathlib.Path(path).read_bytes() for path in paths]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "t.csv",
        "t.html",
        "t.md",
        "t.tex",
    ]
    markdown, tex, shown = (path.decode() for path in first[1:])
    assert '<td class="word">50 % &amp; more</td>' in shown
    assert "<li>≥ 1 × #</li>" in shown
    assert "x\\|y" in markdown
    assert "| no " in markdown
    assert r"50 \% \& more & yes & 1.5 \\" in tex
    assert r"{}[1] * & yes & 2 \\" in tex
    assert r"a\_b & ok & v \\" in tex
    assert r"\caption{A \& B}" in tex
    assert r"$\ge$ 1 $\times$ \#" in tex
    assert pd.read_csv(tmp_path / "t.csv")["a_b"].tolist() == frame["a_b"].tolist()


def test_a_long_table_breaks_over_pages(tmp_path):
    frame = pd.DataFrame({"a": range(3)})
    paths = tabular.write_table(
        frame, tmp_path / "t.csv", "A", "tab:t", preamble="One.\n\nTwo.", long=True
    )
    tex = pathlib.Path(paths[2]).read_text()
    assert tex.startswith("One.\n\nTwo.\n\n\\begin{longtable}{l}")
    assert tex.count(r"\caption") == 2


def test_a_table_in_parts(tmp_path):
    parts = [
        tabular.Group("First", "All of *them*.", pd.DataFrame({"a": ["x"], "b": ["long | text"]})),
        tabular.Group("Second", "", pd.DataFrame({"a": [1.5]})),
    ]
    paths = tabular.write_table(
        pd.DataFrame({"a": ["x", 1.5]}),
        tmp_path / "t.csv",
        "A",
        "tab:t",
        shown=parts,
        column_format={"b": "p{2cm}"},
        long=True,
    )
    markdown, tex, shown = (pathlib.Path(path).read_text() for path in paths[1:])
    assert shown.index("<h2>First</h2>") < shown.index("long | text") < shown.index("Second</h2>")
    assert markdown.splitlines()[2:] == [
        "### First",
        "",
        r"All of \*them\*.",
        "",
        "| a | b |",
        "| --- | --- |",
        r"| x | long \| text |",
        "",
        "### Second",
        "",
        "| a |",
        "| --- |",
        "| 1.5 |",
    ]
    assert r"\begin{longtable}{lp{2cm}}" in tex
    assert r"\begin{longtable}{l}" in tex
    assert [tex.count(f"tab:t:{number}") for number in (1, 2)] == [1, 1]
    assert "A: Second" in tex


def test_a_page_stands_alone_and_shows_text_as_it_is():
    frame = pd.DataFrame({"id": ["a<b>", "c\nd"], "text": ["x " * 20, "figures/fig5a.png"]})
    text = page([tabular.Group("", "", frame)], "A & <B>", "One.\n\n- two\n- <three>")
    parsed = xml.etree.ElementTree.fromstring(
        text.replace("<!doctype html>", "")
        .replace("<wbr>", "")
        .replace("<br>", "<br/>")
        .replace('<meta charset="utf-8">', "")
    )
    assert parsed.findtext("head/title") == "A & <B>"
    assert [item.text for item in parsed.iter("li")] == ["two", "<three>"]
    assert ["".join(cell.itertext()) for cell in parsed.iter("td")] == [
        *("a<b>", "x " * 20, "cd", "figures/fig5a.png"),
    ]
    # A page that fetches something would not open offline.
    assert not re.search(r"https?:|src=|href=|@import|url\(", text)


def test_a_table_needs_a_csv_name(tmp_path):
    with pytest.raises(ValueError, match=r"path: expected a name that ends in \.csv"):
        tabular.write_table(pd.DataFrame({"a": [1]}), tmp_path / "t.md", "A", "tab:t")


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_scripts_write_four_files(name, tmp_path, run_script):
    out = tmp_path / f"{name}.csv"
    assert run_script(SCRIPTS[name], "--paper", PAPER, "--out", str(out)) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{name}.csv",
        f"{name}.html",
        f"{name}.md",
        f"{name}.tex",
    ]
    for path in tmp_path.iterdir():
        text = path.read_text(encoding="utf-8")
        assert text
        assert str(tmp_path) not in text


def test_a_script_says_what_is_wrong(tmp_path, run_script):
    paper = tmp_path / "paper.yaml"
    paper.write_text("source: {}\n")
    (tmp_path / "schema").mkdir()
    schema = ROOT / "config/schema/paper.schema.yaml"
    (tmp_path / "schema/paper.schema.yaml").write_bytes(schema.read_bytes())
    message = run_script("table1_arithmetic_intensity", "--paper", str(paper), "--out", "t.csv")
    assert message.startswith(f"error: {paper}: ")


@pytest.fixture
def run_script(monkeypatch):
    """Run a script in this process; returns its exit message, None when it succeeds."""
    import runpy

    def run(name, *arguments):
        path = str(ROOT / "scripts" / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as stop:
            return stop.code
        return None

    return run
