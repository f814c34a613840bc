"""What the report shows, in which order, and what its captions say."""

import pathlib
import sys

import docutils.core
import pandas as pd
import pytest
from bundled import write_run

from packedconv.evidence import claims, published
from packedconv.report import captions, contents, machine
from packedconv.report.marks import PAGES, Report

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENTRIES = contents.load(ROOT / PAGES / "contents.yaml")


@pytest.fixture
def report(tmp_path):
    """The report of a run that has claims, a figure and a table that needs another."""
    (tmp_path / "config").symlink_to(ROOT / "config")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    folder = tmp_path / "figures/tiny"
    (folder / "cpu").mkdir(parents=True)
    table = claims.claims(published.load(str(ROOT / "config/paper.yaml")), [], "cpu")
    row = table["id"] == "a100.speedup.maximum"
    table.loc[row, ["verdict", "summary"]] = ["replicated", "1.61× [1.58, 1.64]"]
    table.to_csv(folder / "claims.csv", index=False)
    pd.DataFrame({"origin": ["printed", "measured"], "speedup": [9.0, 2.5]}).to_csv(
        folder / "cpu/fig5.csv", index=False
    )
    for name in ("claims.html", "fig5a.png", "cpu/fig5.png", "cpu/claims_extended.html"):
        (folder / name).touch()
    for name in ("fig3.png", "bounds_a100.png", "instructions.html", "unknown.png"):
        (tmp_path / "figures" / name).touch()
    return Report(tmp_path, "figures/tiny", "results/cpu/tiny", "cpu")


def render(report, text):
    captions.register(report)
    return docutils.core.publish_parts(text, writer="html")["body"]


def test_entries_are_whole():
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    categories = list(dict.fromkeys(entry.category for entry in ENTRIES))
    assert categories == sorted(categories)
    assert categories[0] == "1 Claims and audit"
    for category in categories:
        places = [(e.subcategory, e.title) for e in ENTRIES if e.category == category]
        if category != "4 This device":  # in the order of the figures, then what has no number
            assert places == sorted(places)
        # An entry with a colon breaks the links that Snakemake makes of names.
        assert ":" not in category


@pytest.mark.parametrize(
    ("target", "title"),
    [
        ("fig5a", "Fig. 5a, speedup, A100"),
        ("h200/fig5", "Fig. 5 on h200, speedup"),
        ("bounds_tegra-x1", "2 Lower bounds, tegra-x1"),
    ],
)
def test_an_entry_is_found_by_its_target(target, title):
    assert contents.find(ENTRIES, target).title == title


def test_no_entry():
    assert contents.find(ENTRIES, "fig9") is None


def test_an_entry_that_is_not_whole(tmp_path):
    path = tmp_path / "contents.yaml"
    path.write_text("- category: 1\n  results: [{name: fig1, titel: x}]\n")
    with pytest.raises(ValueError, match=r"fig1: .*titel"):
        contents.load(path)


def test_a_mark_without_an_entry(report):
    with pytest.raises(ValueError, match=r"expected an entry fig9 in docs/report/contents\.yaml"):
        report.entry("figures/tiny/fig9.pdf")


def test_what_was_made_is_shown_and_what_was_not_is_named(report, capsys):
    wanted = ["figures/tiny/fig5a.png", "figures/tiny/fig5a.pdf", "figures/tiny/fig5b.png"]
    made = report.made(wanted)
    # Neither another run's figure 3, nor what is unknown, nor a table whose figures are missing.
    assert sorted(made) == [
        *("figures/bounds_a100.png", "figures/instructions.html"),
        *("figures/tiny/claims.html", "figures/tiny/cpu/fig5.png", "figures/tiny/fig5a.png"),
    ]
    assert report.missing == ["figures/tiny/fig5b.png"]
    assert "(1):\n  figures/tiny/fig5b.png\n" in capsys.readouterr().err


def test_another_device_of_the_run_is_shown_where_it_is_wanted(report):
    path = report.root / "figures/tiny/tegra-x1/machine.html"
    path.parent.mkdir()
    path.touch()
    assert "figures/tiny/tegra-x1/machine.html" not in report.made([])
    wanted = ["figures/tiny/tegra-x1/machine.html"]
    assert set(wanted) < set(report.made(wanted))
    assert report.missing == []


def test_marks_are_of_what_a_browser_shows(report):
    from snakemake.io import get_flag_value, is_flagged

    marked = report.marked(["figures/tiny/fig5a.pdf", "figures/tiny/fig5a.png"])
    assert [is_flagged(path, "report") for path in marked] == [False, True]
    mark = get_flag_value(marked[1], "report")
    assert mark.category(None, marked) == "2 Figures of the paper"
    # Of two labels Snakemake 9 makes a toggle, and an empty page.
    assert mark.labels(None, marked) == {"result": "Fig. 5a, speedup, A100"}


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["--report"], True),
        (["--cores", "1", "--report=x.html"], True),
        (["all"], False),
        (["all", "--report", "x.html", "--report-after-run"], False),
        (["--reporter", "html"], False),
    ],
)
def test_asked(report, monkeypatch, arguments, asked):
    monkeypatch.setattr(sys, "argv", ["snakemake", *arguments])
    assert report.asked is asked


def test_a_caption_has_printed_beside_obtained(report):
    text = render(report, ".. result:: figures/tiny/fig5a.pdf")
    row = text[text.index("Largest speedup") :].partition("</tr>")[0]
    places = [row.index(part) for part in ("1.65×", "± 10 %", "1.61× [1.58, 1.64]", "replicated")]
    assert places == sorted(places)
    assert "What to expect." in text
    assert "system-message" not in text


def test_a_caption_sums_up_what_was_measured(report):
    text = render(report, ".. result:: figures/tiny/cpu/fig5.pdf")
    assert "speedup: 2.5× to 2.5×, median 2.5× (1 values)" in text


def test_a_caption_without_claims(report):
    (report.root / "figures/tiny/claims.csv").unlink()
    assert "have not been made" in render(report, ".. result:: figures/tiny/fig5a.pdf")


def test_the_first_page(report):
    report.made(["figures/tiny/fig5b.png"])
    text = render(report, (ROOT / PAGES / "workflow.rst").read_text(encoding="utf-8"))
    for part in ("independent implementation", "not testable here", "cpu, tiny", "fig5b.png"):
        assert part in text.replace("<wbr>", "")
    assert "system-message" not in text


def test_counts_and_nothing():
    table = pd.DataFrame({"agrees": ["True", "False"], "x": ["", "inf"]})
    count = {"what": "cells", "count": "agrees", "value": "True"}
    assert captions.summary(table, count) == "cells: 1 of 2"
    assert captions.summary(table, {"what": "x", "column": "x"}) == ""


def test_a_machine_of_which_nothing_is_known(tmp_path):
    facts = machine.facts(tmp_path / "results" / "cpu" / "none")
    assert facts == [("device, run", "cpu, none"), ("measured", "nothing yet")]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("bench/oc12.json", "Synthetic", "Faster"), ("settings.json", '"rounds"', '"round"')],
)
def test_a_machine_of_facts_that_were_changed_is_refused(tmp_path, name, old, new):
    folder = write_run(tmp_path)
    assert ("processor", "Synthetic CPU") in machine.facts(folder)
    path = folder / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match="expected"):
        machine.facts(folder)
