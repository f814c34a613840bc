"""The AD/AE appendix: what it says comes from the run, in both formats."""

import json
import pathlib
import re
import runpy
import shutil
import sys

import pandas as pd
import pytest
import synthetic

from packedconv.evidence import NOT_MEASURED, appendix, claims, published
from packedconv.evidence.samples import Results

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAPER = str(ROOT / "config" / "paper.yaml")
STEPS = {"setup": 60, "compilation": 90, "benchmark": 618, "analysis": 36}
# The headings that SC asks for, of the whole and of every artifact.
PARTS = [
    "Part 1: Overview of contributions and artifacts",
    "A. The paper's main contributions",
    "B. Computational artifacts",
    "Part 2: Artifact identification",
]
OF_EACH = [
    "Relation to contributions",
    "Expected results",
    "Expected reproduction time (in minutes)",
    "Artifact execution",
    "Artifact analysis (incl. outputs)",
]
MACHINE = {
    "cpu": "Some_CPU & 50% more",
    "usable_cores": 2,
    "memory_bytes": 8 * 2**30,
    "torch": "2.13.0",
    "extension": {"compiler": "GNU 12.2.0", "flags": " -O3"},
    "commit": {"id": "0123abc", "modified": True},
    "gpus": [],
}


@pytest.fixture(scope="module")
def paper():
    return published.load(PAPER)


@pytest.fixture(scope="module")
def run(paper, tmp_path_factory):
    """A run's folder with steps.csv and claims.csv."""
    folder = synthetic.write_results(tmp_path_factory.mktemp("results"))
    for path in (folder / "bench").glob("*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "machine": MACHINE}))
    write_steps(folder, STEPS)
    table = claims.claims(paper, [Results.load(folder)], "cpu")
    table.to_csv(folder / "claims.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def table(run):
    return pd.read_csv(run / "claims.csv", dtype="str", keep_default_na=False)


def write_steps(folder, seconds):
    rows = "".join(f"{step},{value}\n" for step, value in seconds.items())
    (folder / "steps.csv").write_text(f"step,seconds\n{rows}")


def written(paper, run, out, steps=True, figures="figures"):
    given = [str(run / "steps.csv")] if steps else []
    results = Results.load(run)
    return [
        pathlib.Path(path)
        for path in appendix.write(
            paper, results, given, str(run / "claims.csv"), str(out), figures
        )
    ]


@pytest.fixture(scope="module")
def texts(paper, run, tmp_path_factory):
    out = tmp_path_factory.mktemp("appendix") / "appendix.md"
    return [path.read_text(encoding="utf-8") for path in written(paper, run, out)]


def test_has_the_structure_of_sc(texts):
    for text in texts:
        positions = [text.index(part) for part in PARTS]
        assert positions == sorted(positions)
        described = text.partition("Part 2")[2]
        for number in range(1, 5):
            assert f"A{number}: " in described
        for heading in OF_EACH[:3]:
            assert described.count(heading) == 4
        # Three chapters of the evaluation: two artifacts are run by one command.
        for heading in OF_EACH[3:]:
            named = re.findall(rf"(?:#### |paragraph\*\{{){re.escape(heading)}", described)
            assert len(named) == 4 + 3
        for heading in ("Hardware.", "Software.", "Datasets and inputs.", "Installation and"):
            assert described.count(heading) == 1


def test_is_no_claim_to_be_the_authors(texts):
    for text in texts:
        assert "independent reproduction" in text
        assert "not the authors' artifact" in text


def test_times_are_those_of_the_run_beside_the_printed(texts, paper, run, tmp_path):
    rows = dict(re.findall(r"^\| ([\w: ]+) \| [\d–]+ \| (\S+) \|$", texts[0], re.MULTILINE))
    assert rows == {
        "Artifact setup: environment": "1.0",
        "Artifact setup: compilation": "1.5",
        "Artifact execution": "10.3",
        "Artifact analysis": "0.6",
        "Total": "13.4",
    }
    assert "| Total | 40–70 | 13.4 |" in texts[0]
    assert "Total & 40--70 & 13.4" in texts[1]
    markdown, _ = written(paper, run, tmp_path / "a.md", steps=False)
    assert f"| Total | 40–70 | {NOT_MEASURED} |" in markdown.read_text(encoding="utf-8")


def test_another_time_changes_it(paper, run, tmp_path):
    other = tmp_path / "cpu" / "paper"
    shutil.copytree(run, other)
    write_steps(other, {**STEPS, "benchmark": 6000})
    markdown, latex = written(paper, other, tmp_path / "a.md")
    assert "Execution 100.0, checks included" in markdown.read_text(encoding="utf-8")
    assert "Artifact execution & 2--15 & 100.0" in latex.read_text(encoding="utf-8")


def test_counts_are_those_of_the_claims(texts, paper, table):
    counts = claims.counts(table)
    expected = (
        f"each of the {len(paper.statements)} statements",
        f"{counts['replicated']} replicated, {counts['not replicated']} not replicated, "
        f"{counts['inconclusive']} inconclusive, {counts['not testable here']} not testable here",
    )
    for text in texts:
        for part in expected:
            assert part in text


def test_says_what_was_compared_and_measured(texts):
    layers, sparsities = 2, 9
    for text in texts:
        assert f"{layers * sparsities} comparisons" in text
        assert "OC 48, 64" in text
        assert "10 rounds of 4 executions" in text
    assert "the largest error at 10 % of its bound" in texts[0]
    assert r"the largest error at 10 \% of its bound" in texts[1]


def test_facts_of_the_machine_are_escaped(texts):
    assert "| processor | Some_CPU & 50% more |" in texts[0]
    assert r"processor & Some\_CPU \& 50\% more" in texts[1]
    assert "| commit | 0123abc (modified) |" in texts[0]
    assert "GPU |" not in texts[0]  # nothing was recorded


def test_rules_and_targets_that_it_names_exist(texts):
    rules = set(re.findall(r"^(?:use )?rule (\w+)", (ROOT / "Snakefile").read_text(), re.MULTILINE))
    tasks = re.findall(r"^- T\d .*$", texts[0], re.MULTILINE)
    named = {name for task in tasks for name in re.findall(r"`(\w+)`", task)}
    assert len(tasks) == 8
    assert len(named) > 8
    assert named <= rules
    readme = (ROOT / "figures" / "README.md").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bfigures/([\w/]+\.(?:pdf|csv))", texts[0])):
        assert f"| `{target}` |" in readme.replace("<device>", "cpu"), target


def test_same_bytes_from_the_same_results(paper, run, tmp_path):
    first = [path.read_bytes() for path in written(paper, run, tmp_path / "a.md")]
    assert [path.read_bytes() for path in written(paper, run, tmp_path / "a.md")] == first


def test_another_run_names_its_own_folders(paper, table, tmp_path):
    folder = synthetic.write_results(tmp_path, run="smoke", out_channels=(24,))
    table.to_csv(folder / "claims.csv", index=False)
    out = tmp_path / "a.md"
    markdown, _ = written(paper, folder, out, steps=False, figures="figures/smoke")
    text = markdown.read_text(encoding="utf-8")
    assert "`figures/smoke/claims.md`" in text
    assert "`results/cpu/smoke/samples.csv`" in text
    description = text.partition("## Artifact evaluation")[0]
    assert "`figures/smoke/fig5a.pdf`" in description
    assert "`figures/fig5a.pdf`" not in description


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,verdict\na,replicated\n", "expected columns"),
        ("id,verdict,analogue_verdict\na,proved,\n", "expected verdict: one of .* got .'proved'."),
    ],
)
def test_other_claims_are_refused(paper, run, tmp_path, text, message):
    path = tmp_path / "claims.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        appendix.verdicts(str(path))


def test_name_has_to_be_markdown(paper, run):
    with pytest.raises(ValueError, match=r"path: expected a name that ends in \.md"):
        written(paper, run, "appendix.tex")


@pytest.mark.parametrize(
    ("text", "markdown", "latex"),
    [
        ("a  b\n c", "a b c", "a b c"),
        ("5 % of a_b", "5 % of a_b", r"5 \% of a\_b"),
        ("`a_b/c` * d", r"`a_b/c` \* d", r"\texttt{a\_\allowbreak{}b/\allowbreak{}c} * d"),
        ("x | y", r"x \| y", r"x \textbar{} y"),
        ("`K * K`", "`K * K`", r"\texttt{K * K}"),
        ("2 × 3 → 6", "2 × 3 → 6", r"2 $\times$ 3 $\rightarrow$ 6"),
    ],
)
def test_a_line_in_both_formats(text, markdown, latex):
    assert appendix.inline_markdown(text) == markdown
    assert appendix.inline_latex(text) == latex


def test_script(run, tmp_path, monkeypatch):
    out = tmp_path / "figures" / "appendix.md"
    arguments = ["--paper", PAPER, "--results", str(run), "--steps", str(run / "steps.csv")]
    arguments += ["--claims", str(run / "claims.csv"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["appendix.py", *arguments])
    runpy.run_path(str(ROOT / "scripts" / "appendix.py"), run_name="__main__")
    assert out.is_file()
    assert out.with_suffix(".tex").is_file()
