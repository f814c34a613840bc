import pathlib
import subprocess
import sys

import pandas as pd
import pytest

from packedconv.evidence import published
from packedconv.evidence.claims import COLUMNS, INCONCLUSIVE, NOT_REPLICATED, NOT_TESTABLE
from packedconv.evidence.extended import gap, utilisation
from packedconv.evidence.extended.claims_extended import claims_extended

ROOT = pathlib.Path(__file__).parents[2]
PAPER = ROOT / "config" / "paper.yaml"


@pytest.fixture(scope="module")
def paper():
    return published.load(PAPER)


def gaps(verdict=gap.NOT_INHERENT, share=0.7):
    rows = [
        {"layer": "gap_a", "experiment": gap.DECISIVE, "verdict": verdict},
        {
            "experiment": gap.STATEMENT,
            "verdict": verdict,
            "share": share,
            "share_low": share - 0.1,
            "share_high": share + 0.2,
        },
    ]
    return pd.DataFrame(rows, columns=gap.COLUMNS)


def used(**changes):
    rows = [
        {
            "origin": utilisation.MEASURED,
            "layer": "vector",
            "sparsity": sparsity,
            "implementation": name,
            "past_caches": past_caches,
            "utilisation": value,
            "utilisation_low": 0.9 * value,
            "utilisation_high": 1.1 * value,
            "wide": False,
            "busy": False,
            **changes,
        }
        for sparsity, past_caches, factor in ((0.9, True, 1), (0.99, True, 0.5), (0.9, False, 9))
        for name, value in (("scipy_csr", 0.2), ("torch_csr", 0.3), ("dense", 0.8), ("sparse", 0.4))
        for value in (factor * value,)
    ]
    cited = {"origin": utilisation.PRINTED, "implementation": "csrmv", "utilisation_low": 0.029}
    return pd.DataFrame([*rows, cited], columns=utilisation.COLUMNS)


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (gap.NOT_INHERENT, NOT_REPLICATED),
        (gap.INHERENT, f"{INCONCLUSIVE}: agrees, which does not confirm it"),
        (gap.MIXED, f"{INCONCLUSIVE}: depends on the layer"),
        (gap.OPEN, f"{INCONCLUSIVE}: an interval crosses"),
        (gap.NO_GAP, f"{INCONCLUSIVE}: no gap"),
    ],
)
def test_the_gap_can_contradict_but_not_confirm(paper, verdict, expected):
    table = claims_extended(paper, gaps(verdict), used(), "cpu").set_index("id")
    row = table.loc[gap.STATEMENT]
    assert row["analogue_verdict"].startswith(expected)
    assert row["verdict"] == NOT_TESTABLE
    assert row["analogue_summary"].startswith("0.7 [0.6 – 0.9] of the gap")
    assert row["analogue_shown_in"] == "gap.png"


def test_no_share_is_no_value(paper):
    table = claims_extended(paper, gaps(gap.NO_GAP, float("nan")), used(), "cpu").set_index("id")
    assert table.loc[gap.STATEMENT, "analogue_obtained"] == ""


def test_utilisation_is_that_past_the_caches(paper):
    table = claims_extended(paper, gaps(), used(), "cpu").set_index("id")
    sparse, dense = table.loc["cited.csrmv.sparse"], table.loc["cited.csrmv.dense"]
    assert sparse["printed"] == "2.9 % – 11.34 %"
    assert sparse["analogue_summary"] == "10 % to 30 % [9 % – 33 %]"
    assert dense["analogue_summary"] == "40 % to 80 % [36 % – 88 %]"
    assert "S 0.99: 15 %" in sparse["analogue_obtained"]
    assert sparse["analogue_verdict"].startswith(NOT_TESTABLE)


def test_noise_and_what_is_missing_are_said(paper):
    table = claims_extended(paper, gaps(), used(wide=True), "cpu").set_index("id")
    assert "4 of 4 values are noisy" in table.loc["cited.csrmv.sparse", "analogue_verdict"]
    table = claims_extended(paper, gaps(), used(past_caches=False), "cpu").set_index("id")
    assert "nothing was measured" in table.loc["cited.csrmv.dense", "analogue_verdict"]
    with pytest.raises(ValueError, match=r"gap\.csv: expected one row of general\.inherent"):
        claims_extended(paper, gaps().iloc[:1], used(), "cpu")


def test_the_script_reads_what_the_figures_wrote(tmp_path):
    gaps().to_csv(tmp_path / "gap.csv", index=False)
    used().to_csv(tmp_path / "utilisation.csv", index=False)
    out = tmp_path / "claims_extended.csv"
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "scripts" / "claims_extended.py")),
            *("--paper", str(PAPER), "--device", "cpu", "--out", str(out)),
            *("--gap", str(tmp_path / "gap.csv")),
            *("--utilisation", str(tmp_path / "utilisation.csv")),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert tuple(pd.read_csv(out).columns) == COLUMNS
    text = out.with_suffix(".md").read_text()
    assert "[gap](gap.png)" in text
    assert "10 % to 30 %" in text
    assert "nothing here refutes theirs" in text
    assert out.with_suffix(".tex").exists()
