import dataclasses
import inspect
import math
import pathlib
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from synthetic import SPARSITIES, write_results

from packedconv.evidence import published
from packedconv.evidence.claims import (
    COLUMNS,
    INCONCLUSIVE,
    NOT_REPLICATED,
    NOT_TESTABLE,
    REPLICATED,
    VERDICTS,
    band,
    claims,
    counts,
    decidable,
    judge,
    needed_sparsities,
    printed_text,
    shortfall,
    tolerance_text,
)
from packedconv.evidence.claims_report import markdown_link, parts, plain_name, preamble
from packedconv.evidence.quantities import COMPUTED, MEASURED, SWEEPS, Measurement, Part
from packedconv.evidence.samples import Results

ROOT = pathlib.Path(__file__).parents[2]
PAPER = ROOT / "config" / "paper.yaml"

# One per claim of the paper; a claim with several numbers has several statements below it.
CLAIMS = [
    "theory.table1",
    "theory.table2",
    "theory.table3",
    "theory.ridge",
    "theory.dense_ai",
    "theory.ai90",
    "theory.ic1",
    "theory.winograd",
    "theory.im2col",
    "cited.csrmv",
    "a100.speedup.oc48.s90",
    "a100.speedup.oc80.s90",
    "a100.speedup.oc48.s98",
    "a100.speedup.oc80.s98",
    "a100.below1.s90",
    "a100.crossover",
    "a100.trend",
    "a100.one_block",
    "a100.throughput",
    "a100.below_roofs",
    "a100.sem",
    "nano.sem",
    "a100.error",
    "nano.error",
    "nano.speedup.oc40",
    "nano.speedup.oc48",
    "nano.speedup.oc32",
    "nano.trend",
    "nano.throughput",
    "nano.below_roofs",
    "general.harder",
    "general.inherent",
]

A100_CHANNELS = (48, 64, 80, 96, 112, 128, 256)


def a100_speedup(out_channels, sparsity):
    """What section 6.1 says, in numbers; where it has none, clear of the limits."""
    if out_channels == 48:
        return np.interp(sparsity, [0.90, 0.98], [1.07, 1.63])
    if out_channels == 80:
        return np.interp(sparsity, [0.90, 0.98], [1.03, 1.65])
    if out_channels == 64:
        return np.interp(sparsity, [0.90, 0.91, 0.98], [0.93, 1.0, 1.6])
    return np.interp(sparsity, [0.90, 0.92, 0.98], [0.91, 1.0, 1.6])


def nano_speedup(out_channels, sparsity):
    """What section 6.2 says, in numbers."""
    ends = {32: (0.76, 0.94), 40: (1.19, 1.52), 48: (1.11, 1.42)}[out_channels]
    return np.interp(sparsity, [0.90, 0.91, 0.98], [0.97 * ends[0], *ends])


def a100_results(folder, **changes):
    options = {
        "device": "a100-sxm4-40gb",
        "out_channels": A100_CHANNELS,
        "speedup": a100_speedup,
        "batch": 32,
        "dense_flops": 25.8e12,
        "peak_flops": 19.5e12,
        "bandwidth": 2.0e12,
        "rounds": 5,
        "executions": 2,
        "threads": 1,
    }
    return Results.load(write_results(folder, **{**options, **changes}))


def nano_results(folder, **changes):
    options = {
        "device": "tegra-x1",
        "out_channels": (32, 40, 48),
        "speedup": nano_speedup,
        "error": lambda oc, s: 1e-7 * (1 - s) / 0.1,
        "batch": 8,
        "in_channels": 16,
        "size": 128,
        "dense_flops": 115e9,
        "peak_flops": 0.236e12,
        "bandwidth": 25.6e9,
        "rounds": 5,
        "executions": 2,
        "threads": 1,
    }
    return Results.load(write_results(folder, **{**options, **changes}))


def cpu_results(folder, **changes):
    options = {"out_channels": (48, 64, 80, 96, 112, 128), "rounds": 5, "executions": 2}
    return Results.load(write_results(folder, **{**options, **changes}))


@pytest.fixture(scope="module")
def strict():
    """The paper with its own protocol."""
    return published.load(PAPER)


@pytest.fixture(scope="module")
def paper(strict):
    """The paper with a protocol that is quick to make up."""
    return strict._replace(protocol={**strict.protocol, "rounds": 5, "executions": 2})


@pytest.fixture(scope="module")
def on_cpu(paper, tmp_path_factory):
    results = cpu_results(tmp_path_factory.mktemp("cpu"))
    return claims(paper, [results], "cpu").set_index("id")


@pytest.fixture(scope="module")
def on_a100(paper, tmp_path_factory):
    results = a100_results(tmp_path_factory.mktemp("a100"))
    return claims(paper, [results], "a100-sxm4-40gb").set_index("id")


@pytest.fixture(scope="module")
def on_nano(paper, tmp_path_factory):
    results = nano_results(tmp_path_factory.mktemp("nano"))
    return claims(paper, [results], "tegra-x1").set_index("id")


def only(paper, *ids):
    """The paper with these statements alone."""
    chosen = [entry for entry in paper.statements if entry["id"] in ids]
    assert len(chosen) == len(ids)
    return paper._replace(statements=chosen)


def verdict(paper, name, results, device):
    return claims(only(paper, name), results, device).iloc[0]


def statement(comparator, printed=1.0, unit="×", **tolerance):
    return {
        "id": "some.statement",
        "printed": printed,
        "unit": unit,
        "comparator": comparator,
        "tolerance": tolerance,
    }


# The statements of config/paper.yaml


def test_every_claim_has_a_statement(paper):
    ids = [entry["id"] for entry in paper.statements]
    assert len(set(ids)) == len(ids)
    for claim in CLAIMS:
        assert any(name == claim or name.startswith(claim + ".") for name in ids), claim
    for name in ids:
        assert any(name == claim or name.startswith(claim + ".") for claim in CLAIMS) or (
            name.endswith("speedup.maximum")
        ), name


def test_every_statement_can_be_computed(paper):
    for entry in paper.statements:
        if entry["quantity"] is None:
            assert entry["open"]
            continue
        known = COMPUTED if entry["quantity"] in COMPUTED else MEASURED
        signature = inspect.signature(known[entry["quantity"]])
        signature.bind(None, **entry.get("parameters", {}))
        assert band(entry).low <= band(entry).high
        assert tolerance_text(entry)
        assert printed_text(entry)
        assert entry["quantity"] not in SWEEPS or needed_sparsities(paper, entry)


def test_every_quantity_is_used(paper):
    assert {*COMPUTED, *MEASURED} == {entry["quantity"] for entry in paper.statements} - {None}


def test_tolerances_are_those_announced(paper):
    for entry in paper.statements:
        tolerance = entry.get("tolerance", {})
        if entry["family"] and entry.get("comparator") == "within":
            crossover = ".crossover." in entry["id"]
            assert tolerance.get("absolute") == (0.01 if crossover else None), entry["id"]
            assert tolerance.get("relative") == (None if crossover else 0.10), entry["id"]
        if entry["quantity"] and entry["quantity"].endswith("_trend"):
            assert tolerance["rho"] == 0.9


def test_printed_points_are_those_of_the_quantity(strict):
    """printed_from and parameters must speak of the same point."""
    panels = {"a100": "a", "tegra-x1": "b"}
    checked = 0
    for entry in strict.statements:
        if entry["quantity"] not in ("speedup", "throughput") or entry["comparator"] != "within":
            continue
        figure = 5 if entry["quantity"] == "speedup" else 7
        fields = {"panel": panels[entry["family"]], "figure": figure, **entry["parameters"]}
        assert entry["printed_from"] == {"panels": fields}
        (point,) = (p for p in strict.panels if fields.items() <= p.items())
        assert point["unit"].replace("ratio", "×") == entry["unit"]
        checked += 1
    assert checked == 18


def test_a_statement_shows_no_number_that_the_paper_does_not_print(strict):
    for entry in strict.statements:
        if isinstance(entry["printed"], str):
            assert entry["printed"] == printed_text(entry)
            continue
        assert "printed_from" in entry, entry["id"]


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("theory.dense_ai.compute_bound", "strongly compute-bound", "interval above 1×"),
        ("theory.ridge.tegra-x1-over-a100", "almost identical", "0.9× to 1.1×"),
        ("a100.below1.s90.oc96", "slightly below 1×", "interval below 1×"),
        ("a100.one_block", "highest in a single thread block", "interval above 1×"),
        ("a100.error.range.packed", "6e-08 – 2e-07", "3e-08 to 4e-07, S 0.90 to 0.98"),
        ("nano.trend.speedup", "grows", "rank correlation ≥ 0.9, S 0.91 to 0.98"),
        ("nano.throughput.trend", "falls", "rank correlation ≤ -0.9, S 0.90 to 0.98"),
    ],
)
def test_words_and_limits(paper, name, text, limit):
    (entry,) = only(paper, name).statements
    assert printed_text(entry) == text
    assert tolerance_text(entry, needed_sparsities(paper, entry)) == limit


def test_an_unknown_key_or_a_missing_tolerance_is_refused(tmp_path):
    content = yaml.safe_load(PAPER.read_text())
    schema = PAPER.parent / "schema" / "paper.schema.yaml"
    path = tmp_path / "paper.yaml"
    for change in ({"tolerence": {}}, {"comparator": "near"}, {"tolerance": {"relativ": 1}}):
        entry = {**content["statements"][0], **change}
        path.write_text(yaml.safe_dump({**content, "statements": [entry]}))
        with pytest.raises(ValueError, match="statements"):
            published.load(path, schema)
    entry = {k: v for k, v in content["statements"][0].items() if k != "tolerance"}
    path.write_text(yaml.safe_dump({**content, "statements": [entry]}))
    with pytest.raises(ValueError, match="statements"):
        published.load(path, schema)


# Verdicts


@pytest.mark.parametrize(
    ("entry", "low", "high", "expected"),
    [
        (statement("within", relative=0.1), 0.95, 1.05, REPLICATED),
        (statement("within", relative=0.1), 0.90, 1.10, REPLICATED),
        (statement("within", relative=0.1), 1.05, 1.15, INCONCLUSIVE),
        (statement("within", relative=0.1), 0.80, 1.20, INCONCLUSIVE),
        (statement("within", relative=0.1), 1.11, 1.20, NOT_REPLICATED),
        (statement("within", relative=0.1), 0.80, 0.89, NOT_REPLICATED),
        (statement("within", 0.91, absolute=0.01), 0.90, 0.92, REPLICATED),
        (statement("within", 0.91, absolute=0.01), 0.93, 0.94, NOT_REPLICATED),
        (statement("within", 25, absolute=0), 25, 25, REPLICATED),
        (statement("within", 25, absolute=0), 24, 24, NOT_REPLICATED),
        (statement("between", [6e-8, 2e-7], factor=2), 3e-8, 4e-7, REPLICATED),
        (statement("between", [6e-8, 2e-7], factor=2), 5e-7, 6e-7, NOT_REPLICATED),
        (statement("between", "nearly", low=7, high=10), 7.5, 7.5, REPLICATED),
        (statement("below"), 0.8, 0.99, REPLICATED),
        (statement("below"), 0.8, 1.0, INCONCLUSIVE),
        (statement("below"), 1.0, 1.2, NOT_REPLICATED),
        (statement("below", "well below", bound=0.5), 0.4, 0.49, REPLICATED),
        (statement("above"), 1.01, 1.2, REPLICATED),
        (statement("above"), 0.9, 1.2, INCONCLUSIVE),
        (statement("above"), 0.9, 1.0, NOT_REPLICATED),
        (statement("at_least", "small", bound=0.9), 0.9, 0.9, REPLICATED),
        (statement("at_least", "small", bound=0.9), 0.8, 0.8, NOT_REPLICATED),
        (statement("increasing", "grows", rho=0.9), 0.9, 1.0, REPLICATED),
        (statement("increasing", "grows", rho=0.9), 0.8, 1.0, INCONCLUSIVE),
        (statement("increasing", "grows", rho=0.9), -1.0, -0.9, NOT_REPLICATED),
        (statement("decreasing", "falls", rho=0.9), -1.0, -0.9, REPLICATED),
        (statement("decreasing", "falls", rho=0.9), -0.8, 0.0, NOT_REPLICATED),
        (statement("flat", "flat", ratio=1.1), 1.01, 1.09, REPLICATED),
        (statement("flat", "flat", ratio=1.1), 1.01, 1.2, INCONCLUSIVE),
        (statement("flat", "flat", ratio=1.1), 1.2, 1.3, NOT_REPLICATED),
        (statement("increasing", "grows", rho=0.9), math.nan, math.nan, INCONCLUSIVE),
    ],
)
def test_verdicts(entry, low, high, expected):
    judgement = judge(entry, Measurement([Part("", (low + high) / 2, low, high)]))
    assert judgement.verdict == expected
    assert bool(judgement.interval) == (low < high)
    assert judgement.obtained


@given(st.floats(-3, 3), st.floats(0, 2), st.sampled_from(["below", "above", "at_least"]))
def test_a_verdict_needs_the_whole_interval(low, width, comparator):
    part = Part("", low, low, low + width)
    limits = band(statement(comparator))
    assert not (limits.holds(part) and limits.excludes(part))
    either = judge(statement(comparator), Measurement([part])).verdict
    if low < 1 < low + width:
        assert either == INCONCLUSIVE


def test_every_part_counts():
    entry = statement("increasing", "grows", rho=0.9)
    good, bad = Part("OC 48", 1.0, 1.0, 1.0), Part("OC 64", 0.2, 0.1, 0.3)
    unsure = Part("OC 80", 0.9, 0.8, 1.0)
    assert judge(entry, Measurement([good, good])).verdict == REPLICATED
    failed = judge(entry, Measurement([good, bad, unsure]))
    assert (failed.verdict, failed.reason) == (NOT_REPLICATED, "outside: OC 64")
    open_ = judge(entry, Measurement([good, unsure]))
    assert (open_.verdict, open_.reason) == (INCONCLUSIVE, "the interval crosses the limit: OC 80")
    assert open_.obtained == "OC 48 1×; OC 80 0.9×"
    assert open_.interval == "OC 80 0.8× – 1×"


def test_an_undefined_correlation_is_named():
    entry = statement("increasing", "grows", rho=0.9)
    parts = [Part("OC 48", 1.0, 1.0, 1.0), Part("OC 64", math.nan, math.nan, math.nan)]
    judgement = judge(entry, Measurement(parts))
    assert (judgement.verdict, judgement.reason) == (INCONCLUSIVE, "not defined: OC 64")


def test_numbers_come_in_the_printed_unit(on_a100):
    row = on_a100.loc["a100.throughput.sparse.s90"]
    assert row["printed"] == "2.4 TFLOP/s"
    value, unit = row["obtained"].split()
    assert (float(value), unit) == (pytest.approx(0.91 * 2.58, rel=0.005), "TFLOP/s")
    low, high = (float(end.split()[0]) for end in row["interval"].split(" – "))
    # Rounds hardly differ here; runs may, by 1 % (config/paper.yaml).
    assert 0.96 * float(value) < low < 0.98 * float(value)
    assert 1.02 * float(value) < high < 1.04 * float(value)


def test_stated_roofs_come_before_measured_ones(paper, tmp_path):
    results = a100_results(tmp_path)
    assert verdict(paper, "a100.below_roofs", [results], "cpu")["verdict"] == REPLICATED
    results.settings["device"].update(peak_flops=19.5e12, bandwidth=0.2e12)
    assert verdict(paper, "a100.below_roofs", [results], "cpu")["verdict"] == NOT_REPLICATED


def test_an_unknown_comparator_is_named():
    with pytest.raises(ValueError, match=r"some\.statement: comparator: .* got 'near'"):
        band(statement("near"))


@pytest.mark.parametrize(
    ("value", "sparsities", "expected"),
    [
        (-math.inf, (0.90, 0.98), NOT_REPLICATED),
        (math.inf, (0.90, 0.98), NOT_REPLICATED),
        (-math.inf, (0.95, 0.98), INCONCLUSIVE),
        (math.inf, (0.80, 0.91), INCONCLUSIVE),
    ],
)
def test_a_crossover_beyond_the_measured_sparsities(value, sparsities, expected):
    entry = statement("within", 0.91, absolute=0.01)
    judgement = judge(entry, Measurement([Part("", value, value, value)], sparsities))
    assert judgement.verdict == expected
    assert "the measured sparsities" in judgement.obtained


# Statements that need no device


@pytest.mark.parametrize(
    ("name", "obtained", "expected"),
    [
        ("theory.table1", "8 cells", NOT_REPLICATED),
        ("theory.table2", "5 cells", NOT_REPLICATED),
        ("theory.table3", "5 cells", NOT_REPLICATED),
        ("theory.ridge.a100", "9.75 FLOP/byte", REPLICATED),
        ("theory.ridge.agx-orin", "25.98 FLOP/byte", REPLICATED),
        ("theory.ridge.orin-nano", "73.53 FLOP/byte", REPLICATED),
        ("theory.ridge.tegra-x1", "9.219 FLOP/byte", REPLICATED),
        ("theory.ridge.agx-orin-over-a100", "2.664×", REPLICATED),
        ("theory.ridge.orin-nano-over-a100", "7.541×", REPLICATED),
        ("theory.ridge.tegra-x1-over-a100", "0.9455×", REPLICATED),
        ("theory.ridge.a100-peak-over-tegra-x1", "82.63×", REPLICATED),
        ("theory.dense_ai.value", "95.99 FLOP/byte", REPLICATED),
        ("theory.dense_ai.ratio", "9.999×", REPLICATED),
        ("theory.dense_ai.compute_bound", "9.845×", REPLICATED),
        ("theory.ai90.at_ridge", "0.9846×", REPLICATED),
        ("theory.ai90.abstract", "9.6 FLOP/byte", REPLICATED),
        ("theory.ic1.speedup", None, REPLICATED),
        ("theory.ic1.memory_bound", None, REPLICATED),
        ("theory.ic1.speedup.nano", None, REPLICATED),
        ("theory.ic1.memory_bound.nano", None, REPLICATED),
        ("theory.winograd.practical", "smallest 6.667×; largest 6.667×", NOT_REPLICATED),
        ("theory.winograd.savings", "2.25×", REPLICATED),
        ("theory.winograd.roughly", "2.25×", REPLICATED),
        ("theory.winograd.assumed", "2×", NOT_REPLICATED),
        ("theory.im2col.k3", "9×", REPLICATED),
        ("theory.im2col.k5", "25×", REPLICATED),
        ("cited.csrmv.sparse", "", NOT_TESTABLE),
    ],
)
def test_model_statements(paper, name, obtained, expected):
    row = verdict(paper, name, [], "cpu")
    assert row["verdict"] == expected
    if obtained is not None:
        assert row["obtained"] == obtained
    assert row["analogue_obtained"] == ""


def test_a_table_that_does_not_come_out_says_what_reconciles_it(paper):
    reason = verdict(paper, "theory.table2", [], "cpu")["reason"]
    assert "25" in reason
    assert "13" in reason
    assert "22" in verdict(paper, "theory.table3", [], "cpu")["reason"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("theory.ridge.a100", lambda copy: copy.devices["a100"].update(bandwidth=1.5e12)),
        ("theory.ai90.at_ridge", lambda copy: copy.devices["a100"].update(bandwidth=1.5e12)),
        (
            "theory.dense_ai.value",
            lambda copy: copy.tables["table1"]["layer"].update(in_channels=8),
        ),
        ("theory.ic1.memory_bound", lambda copy: copy.devices["a100"].update(peak_flops=2e12)),
    ],
)
def test_model_verdicts_follow_the_printed_inputs(paper, name, change):
    assert verdict(paper, name, [], "cpu")["verdict"] == REPLICATED
    copy = paper.copy()
    change(copy)
    assert verdict(copy, name, [], "cpu")["verdict"] == NOT_REPLICATED


def test_ai90_names_the_channel_counts_it_does_not_hold_for(paper):
    reason = verdict(paper, "theory.ai90.at_ridge", [], "cpu")["reason"]
    assert "OC 80, 96, 112, 128, 256 lie above" in reason


# Measured statements on their own device


def test_results_of_the_a100_decide_its_statements(on_a100):
    mine = on_a100[on_a100.index.str.startswith("a100.")]
    expected = {
        # Quantising the weights gives errors of another size than those printed.
        "a100.error.range.original": NOT_REPLICATED,
        # The split along grid z is not in these facts.
        "a100.one_block": NOT_TESTABLE,
    }
    got = {name: row["verdict"] for name, row in mine.iterrows()}
    assert got == {name: expected.get(name, REPLICATED) for name in got}
    assert mine["reason"].str.contains("a100-sxm4-40gb, run paper").all()
    assert (mine["analogue_verdict"] == "").all()
    nano = on_a100[on_a100.index.str.startswith("nano.")]
    assert (nano["verdict"] == NOT_TESTABLE).all()
    assert nano["analogue_device"].str.startswith("a100-sxm4-40gb (N 32, IC 32, 256×256").all()
    assert nano["analogue_verdict"].str.endswith("the statement is about IC 16, 128×128, K 3").all()


def test_results_of_the_nano_decide_its_statements(on_nano):
    mine = on_nano[on_nano.index.str.startswith("nano.")]
    failed = mine.index[mine["verdict"] != REPLICATED]
    assert list(failed) == ["nano.error.range.original"]


@pytest.mark.parametrize(
    ("change", "flipped"),
    [
        (
            {"speedup": lambda oc, s: 1.2 * a100_speedup(oc, s)},
            {
                "a100.speedup.oc48.s90",
                "a100.speedup.oc80.s98",
                "a100.speedup.maximum",
                "a100.below1.s90.oc96",
                "a100.below1.s90.oc256",
                "a100.crossover.oc64",
                "a100.crossover.oc128",
                "a100.throughput.sparse.s90",
            },
        ),
        (
            {"speedup": lambda oc, s: 1 / a100_speedup(oc, s)},
            {"a100.trend.speedup", "a100.speedup.oc48.s98"},
        ),
        (
            {"speedup": lambda oc, s: 1.0, "dense_seconds": lambda oc, s: s},
            {"a100.trend.sparse_time"},
        ),
        (
            {"dense_seconds": lambda oc, s: 1e-3 * oc * (1 + 2 * (s - 0.9))},
            {"a100.trend.dense_time"},
        ),
        (
            {"speedup": lambda oc, s: 1 / (1 - s)},
            {"a100.throughput.trend"},
        ),
        ({"bandwidth": 0.2e12}, {"a100.below_roofs"}),
        ({"noise": 0.5}, {"a100.sem"}),
        ({"error": lambda oc, s: 1e-7 * s}, {"a100.error.trend.packed"}),
        ({"error": lambda oc, s: 1e-5 * (1 - s)}, {"a100.error.range.packed"}),
    ],
)
def test_verdicts_flip_with_the_data(paper, on_a100, tmp_path, change, flipped):
    chosen = only(paper, *flipped)
    table = claims(chosen, [a100_results(tmp_path, **change)], "cpu").set_index("id")
    assert (table["obtained"] != "").all()
    assert (on_a100.loc[sorted(flipped), "verdict"] == REPLICATED).all()
    if "speedup" in change and "a100.throughput.trend" in flipped:
        assert (table["verdict"] != REPLICATED).all()
    else:
        assert (table["verdict"] == NOT_REPLICATED).all()


def test_noise_leaves_a_verdict_open(paper, tmp_path):
    results = a100_results(tmp_path, out_channels=(96,), speedup=lambda oc, s: 0.999, noise=0.2)
    row = verdict(paper, "a100.below1.s90.oc96", [results], "cpu")
    assert row["verdict"] == INCONCLUSIVE
    assert "crosses the limit" in row["reason"]
    assert row["interval"]


def test_one_block_reads_the_split_from_the_facts(paper, tmp_path):
    results = a100_results(
        tmp_path, speedup=lambda oc, s: a100_speedup(oc, s) * (1 if oc in (48, 80) else 0.9)
    )
    for name in results.facts:
        # The paper's statement is about S .98; elsewhere the split may be another.
        split = 1 if name in ("oc48", "oc80") else 2
        results.facts[name]["mapping"] = {"s98": {"slices": split}, "s90": {"slices": 3 - split}}
    row = verdict(paper, "a100.one_block", [results], "cpu")
    assert row["verdict"] == REPLICATED
    for name in results.facts:
        split = 2 if name in ("oc48", "oc80") else 1
        results.facts[name]["mapping"] = {"s98": {"slices": split}, "s90": {"slices": 3 - split}}
    assert verdict(paper, "a100.one_block", [results], "cpu")["verdict"] == NOT_REPLICATED
    for name in results.facts:
        results.facts[name]["mapping"] = {"s98": {"slices": 1}, "s90": {"slices": 2}}
    row = verdict(paper, "a100.one_block", [results], "cpu")
    assert row["verdict"] == NOT_TESTABLE
    assert "both split and in one block" in row["reason"]
    for name in results.facts:
        results.facts[name]["mapping"] = {"s90": {"slices": 1}}
    row = verdict(paper, "a100.one_block", [results], "cpu")
    assert "no split of the channels" in row["reason"]


def test_every_channel_count_of_the_paper_is_needed_on_its_device(paper, tmp_path):
    results = a100_results(tmp_path, out_channels=(48, 64))
    row = verdict(paper, "a100.trend.speedup", [results], "cpu")
    assert row["verdict"] == NOT_TESTABLE
    assert "not measured in this run: 80 output channels" in row["reason"]


@pytest.mark.parametrize("change", [{"batch": 1}, {"in_channels": 16}, {"size": 128}])
def test_another_workload_does_not_decide(paper, tmp_path, change):
    results = a100_results(tmp_path, out_channels=(48,), **change)
    row = verdict(paper, "a100.speedup.oc48.s90", [results], "a100-sxm4-40gb")
    assert row["verdict"] == NOT_TESTABLE
    assert "the statement is about N 32, IC 32, 256×256, K 3" in row["reason"]


def test_a_foreign_layer_is_left_out(paper, tmp_path):
    """One layer of another shape says nothing against the others."""
    results = a100_results(tmp_path)
    layer = results.layers["oc64"]
    results.layers["oc64"] = layer._replace(height=128, width=128)
    table = claims(paper, [results], "cpu").set_index("id")
    assert table.loc["a100.speedup.oc48.s90", "verdict"] == REPLICATED
    assert "not measured in this run: 64 output" in table.loc["a100.crossover.oc64", "reason"]


def test_any_variant_of_the_device_counts(paper, tmp_path):
    wrong = a100_results(tmp_path, out_channels=(64,))
    right = a100_results(tmp_path, device="a100-80gb-pcie", out_channels=(48,))
    row = verdict(paper, "a100.speedup.oc48.s90", [wrong, right], "cpu")
    assert row["verdict"] == REPLICATED
    assert "on a100-80gb-pcie" in row["reason"]


@pytest.mark.parametrize(
    ("second", "expected"), [(1.07, REPLICATED), (1.4, INCONCLUSIVE), (1.18, INCONCLUSIVE)]
)
def test_devices_of_one_family_have_to_agree(paper, tmp_path, second, expected):
    results = [
        a100_results(tmp_path, device=name, out_channels=(48,), speedup=lambda oc, s, r=ratio: r)
        for name, ratio in (("a100-sxm4-40gb", 1.07), ("a100-sxm4-80gb", second))
    ]
    for order in (results, results[::-1]):
        row = verdict(paper, "a100.speedup.oc48.s90", order, "cpu")
        assert row["verdict"] == expected
        assert ("the devices disagree" in row["reason"]) == (second != 1.07)
        assert "on a100-sxm4-40gb, run paper: replicated" in row["reason"]
        assert "on a100-sxm4-80gb, run paper: " in row["reason"]
        assert "a100-sxm4-40gb: 1.07×" in row["obtained"]
        assert f"a100-sxm4-80gb: {second:g}" in row["obtained"]


def test_two_runs_of_one_device_are_refused(paper, tmp_path):
    results = [cpu_results(tmp_path, run=run, out_channels=(48,)) for run in ("paper", "seed2")]
    with pytest.raises(ValueError, match="one run per device, got 2 of cpu"):
        claims(paper, results, "cpu")


# Analogues


def test_another_device_gives_analogues_only(on_cpu):
    measured = on_cpu[on_cpu.index.str.match("a100|nano")]
    assert (measured["verdict"] == NOT_TESTABLE).all()
    assert (measured["obtained"] == "").all()
    assert measured["reason"].str.startswith("about the NVIDIA ").all()
    assert (measured["analogue_device"] == "cpu (N 1, IC 32, 256×256, K 3)").all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a100.trend.speedup", "replicated"),
        ("nano.trend.speedup", "not testable here: this device's run has IC 32, 256×256, K 3;"),
        ("a100.speedup.oc48.s90", "not replicated"),
        ("a100.below1.s90.oc96", "not replicated"),
        ("a100.below1.s90.oc256", "not testable here: not measured in this run: 256 output"),
        ("nano.speedup.oc40.s91", "not testable here: this device's run has IC 32"),
        ("a100.crossover.oc64", "not replicated"),
        ("a100.one_block", "not testable here: a CPU kernel"),
        ("a100.throughput.sparse.s90", "not testable here: an absolute throughput"),
        ("general.inherent", "inconclusive: agrees"),
        ("general.harder", "not testable here"),
    ],
)
def test_analogues(on_cpu, name, expected):
    row = on_cpu.loc[name]
    assert row["analogue_verdict"].startswith(expected)
    judged = expected in ("replicated", "not replicated") or "throughput" in expected
    assert not judged or row["analogue_obtained"]


def test_an_analogue_can_refute_inherence_but_not_confirm_it(paper, tmp_path):
    row = verdict(paper, "general.inherent", [cpu_results(tmp_path, bandwidth=5e9)], "cpu")
    assert row["verdict"] == NOT_TESTABLE
    assert row["analogue_verdict"] == NOT_REPLICATED


def test_without_results_nothing_measured_is_judged(paper):
    table = claims(paper, [], "cpu").set_index("id")
    row = table.loc["a100.speedup.oc48.s90"]
    assert (row["verdict"], row["analogue_device"]) == (NOT_TESTABLE, "cpu")
    assert row["analogue_verdict"] == "not testable here: not measured"


def test_an_analogue_has_the_shapes_of_the_statement(paper, tmp_path):
    """The Nano's layers with one image on a CPU: an analogue of its statements alone."""
    results = cpu_results(tmp_path, out_channels=(32, 40, 48), in_channels=16, size=128)
    table = claims(paper, [results], "cpu").set_index("id")
    row = table.loc["nano.trend.speedup"]
    assert row["analogue_verdict"] == REPLICATED
    assert row["analogue_device"] == "cpu (N 1, IC 16, 128×128, K 3)"
    row = table.loc["a100.speedup.oc48.s90"]
    assert row["analogue_verdict"] == (
        "not testable here: this device's run has IC 16, 128×128, K 3;"
        " the statement is about IC 32, 256×256, K 3"
    )
    assert row["analogue_obtained"] == ""


def two_workloads(folder):
    """A CPU's run with the layers of both workloads, the Nano's named apart."""
    a = cpu_results(folder / "a")
    b = cpu_results(folder / "b", out_channels=(32, 40, 48), in_channels=16, size=128, batch=8)
    named = {
        field: getattr(b, field).assign(layer="nano_" + getattr(b, field)["layer"])
        for field in ("samples", "errors")
    }
    both = {
        field: pd.concat([getattr(a, field), frame], ignore_index=True)
        for field, frame in named.items()
    }
    facts = {**a.facts, **{f"nano_{name}": facts for name, facts in b.facts.items()}}
    return a, b, dataclasses.replace(a, facts=facts, every_sample=both["samples"], **both)


def test_a_run_with_both_workloads_has_analogues_of_both(paper, tmp_path):
    a, b, both = two_workloads(tmp_path)
    table, first, second = (
        claims(paper, [results], "cpu").set_index("id") for results in (both, a, b)
    )
    names = [column for column in COLUMNS if column.startswith("analogue")]
    assert table.loc["nano.sem", "analogue_shown_in"] == "cpu/fig5_nano.png; cpu/fig6_nano.png"
    names.remove("analogue_shown_in")
    mine = table.index.str.startswith("a100.")
    assert (table.loc[mine, names] == first.loc[mine, names]).all(axis=None)
    nano = table.index.str.startswith("nano.")
    assert (table.loc[nano, "analogue_device"] == "cpu (N 8, IC 16, 128×128, K 3)").all()
    # The draws of another run's times are those of another layer's name.
    names.remove("analogue_interval")
    names.remove("analogue_summary")
    assert (table.loc[nano, names] == second.loc[nano, names]).all(axis=None)
    assert table.loc["a100.sem", "analogue_shown_in"] == "cpu/fig5.png; cpu/fig6.png"
    inherent = table.loc["general.inherent"]
    assert inherent["analogue_obtained"]
    assert inherent["analogue_shown_in"] == "cpu/fig7.png; cpu/fig7_nano.png"
    assert "not clear" not in "".join(table["analogue_verdict"])


# Too little measured


def measured_rows(table):
    """Rows of measured quantities that have a value, own or in analogy."""
    mine = table[table["obtained"].ne("") & table["id"].str.match("a100|nano")]
    other = table[table["analogue_obtained"].ne("")]
    return mine["verdict"], other["analogue_verdict"]


@pytest.mark.parametrize(("rounds", "executions"), [(1, 1), (3, 5), (1, 40), (10, 39), (9, 40)])
def test_a_run_below_the_protocol_decides_nothing(strict, tmp_path, rounds, executions):
    few = {"rounds": rounds, "executions": executions, "out_channels": (48, 80)}
    own = a100_results(tmp_path, **few)
    other = cpu_results(tmp_path, **few)
    reason = f"{rounds} of 10 rounds of {executions} of 40 executions"
    chosen = only(strict, "a100.speedup.oc48.s90", "a100.speedup.oc80.s98", "general.inherent")
    table = claims(chosen, [own], "a100-sxm4-40gb")
    assert list(table["verdict"]) == [INCONCLUSIVE, INCONCLUSIVE, NOT_TESTABLE]
    assert table["obtained"][0].startswith("1.0")
    assert table["reason"][0].endswith(f"run paper; {reason}")
    table = claims(chosen, [other], "cpu")
    assert (table["analogue_verdict"] == f"inconclusive: {reason}").all()
    assert (table["analogue_obtained"] != "").all()
    assert set(decidable(chosen, "cpu", other.settings).values()) == {"not"}
    assert f"has {reason}: its values are shown" in preamble(chosen, table, [other], "cpu")


def test_a_layer_timed_on_a_busy_machine_decides_nothing(strict, tmp_path):
    results = a100_results(tmp_path, rounds=10, executions=40, out_channels=(48, 80))
    ids = ("a100.speedup.oc48.s90", "a100.speedup.oc80.s90")
    chosen = only(strict, *ids)
    steady = claims(chosen, [results], "a100-sxm4-40gb")
    assert INCONCLUSIVE not in list(steady["verdict"])
    results.peaks["busy_layers"].append("oc48")
    table = claims(chosen, [results], "a100-sxm4-40gb")
    assert list(table["verdict"]) == [INCONCLUSIVE, steady["verdict"][1]]
    assert "the machine was busy while oc48 was timed" in table["reason"][0]


def test_the_papers_protocol_is_enough(strict, tmp_path):
    results = cpu_results(tmp_path, out_channels=(48,), rounds=10, executions=40)
    row = verdict(strict, "a100.speedup.oc48.s90", [results], "cpu")
    assert row["analogue_verdict"] == NOT_REPLICATED
    assert shortfall(strict, results.settings["protocol"]) == ""


@pytest.mark.parametrize("rounds", [1, 3])
def test_every_measured_quantity_heeds_the_protocol(strict, tmp_path, rounds):
    results = [a100_results(tmp_path, rounds=rounds), nano_results(tmp_path, rounds=rounds)]
    own, _ = measured_rows(claims(strict, results, "cpu"))
    assert set(own) == {INCONCLUSIVE}
    assert len(own) == 27 + 22 - 1  # the split along grid z is not in these facts


def test_a_smoke_run_gives_no_analogue_that_says_anything(strict, tmp_path):
    results = cpu_results(
        tmp_path,
        run="smoke",
        out_channels=(24, 32),
        sparsities=(0.90, 0.94, 0.98),
        in_channels=16,
        size=64,
        rounds=3,
    )
    table = claims(strict, [results], "cpu").set_index("id")
    own, analogues = measured_rows(table.reset_index())
    assert own.empty
    assert len(analogues) == 1
    assert table.loc["general.inherent", "analogue_verdict"].startswith("inconclusive: 3 of 10")
    missing = table.loc["a100.speedup.oc48.s90", "analogue_verdict"]
    assert "this device's run has IC 16, 64×64, K 3" in missing


OTHER_NINE = (0.86, 0.87, 0.88, 0.89, 0.90, 0.95, 0.96, 0.97, 0.98)


@pytest.mark.parametrize("sparsities", [OTHER_NINE, (0.90, 0.98), SPARSITIES[1:]])
def test_a_sweep_needs_the_papers_sparsities(paper, on_a100, tmp_path, sparsities):
    sweeps = [
        entry["id"]
        for entry in paper.statements
        if entry["quantity"] in SWEEPS and entry["family"] == "a100"
    ]
    assert {"a100.speedup.maximum", "a100.below_roofs", "a100.sem"} < set(sweeps)
    assert {"a100.error.range.packed", "a100.crossover.oc64"} < set(sweeps)
    table = claims(only(paper, *sweeps), [a100_results(tmp_path, sparsities=sparsities)], "cpu")
    assert set(table["verdict"]) == {INCONCLUSIVE}
    present = len(set(sparsities) & set(SPARSITIES))
    assert table["reason"].str.contains(f"{present} of 9 sparsities measured").all()
    assert (table["obtained"] != "").all()


def test_more_sparsities_than_the_papers_change_nothing(paper, on_a100, tmp_path):
    results = a100_results(
        tmp_path,
        sparsities=(0.5, *SPARSITIES, 0.99),
        speedup=lambda oc, s: a100_speedup(oc, s) if s in SPARSITIES else 9.0,
    )
    table = claims(paper, [results], "a100-sxm4-40gb").set_index("id")
    changed = [name for name in table.index if (table.loc[name] != on_a100.loc[name]).any()]
    # Its statement has no workload; analogues are of the same device.
    assert set(changed) <= {"general.inherent"}


def test_the_nano_needs_eight_sparsities_and_nine_for_figures_7_and_8(paper, on_nano, tmp_path):
    results = nano_results(tmp_path, sparsities=SPARSITIES[1:])
    table = claims(paper, [results], "tegra-x1").set_index("id")
    for name in ("nano.speedup.maximum", "nano.trend.dense_time", "nano.speedup.oc32.below1"):
        assert table.loc[name, "obtained"] == on_nano.loc[name, "obtained"]
        assert table.loc[name, "verdict"] == REPLICATED
    for name in ("nano.throughput.trend", "nano.below_roofs", "nano.error.range.packed"):
        assert table.loc[name, "verdict"] == INCONCLUSIVE
        assert "8 of 9 sparsities measured, not S 0.90" in table.loc[name, "reason"]


def test_one_round_has_no_error_bar(paper, tmp_path):
    results = a100_results(tmp_path, rounds=1)
    row = verdict(paper, "a100.sem", [results], "cpu")
    assert (row["verdict"], row["obtained"]) == (INCONCLUSIVE, "not defined")
    assert "a standard error needs two rounds" in row["reason"]


# Before anything is measured


def test_decidable(paper):
    cpu, a100, nano = (decidable(paper, family) for family in ("cpu", "a100", "tegra-x1"))
    other = decidable(paper, "h200")
    assert list(cpu) == [entry["id"] for entry in paper.statements]
    assert set(cpu.values()) == {"decidable", "analogue", "not"}
    assert cpu["theory.table2"] == nano["theory.table2"] == "decidable"
    assert (cpu["a100.trend.speedup"], a100["a100.trend.speedup"]) == ("analogue", "decidable")
    assert (a100["nano.sem"], nano["nano.sem"]) == ("analogue", "decidable")
    assert (cpu["a100.one_block"], other["a100.one_block"]) == ("not", "analogue")
    assert (cpu["a100.throughput.dense.s90"], a100["a100.throughput.dense.s90"]) == (
        "not",
        "decidable",
    )
    assert cpu["cited.csrmv.sparse"] == a100["cited.csrmv.sparse"] == "not"
    assert cpu["general.inherent"] == a100["general.inherent"] == "analogue"


@pytest.mark.parametrize(
    ("family", "write", "changes"),
    [
        ("cpu", cpu_results, {}),
        ("cpu", cpu_results, {"out_channels": (24, 32), "sparsities": (0.90, 0.94, 0.98)}),
        ("cpu", cpu_results, {"out_channels": (40, 128), "sparsities": (0.91, 0.98)}),
        ("cpu", cpu_results, {"in_channels": 16, "size": 128, "out_channels": (32, 40, 48)}),
        ("cpu", cpu_results, {"rounds": 4}),
        ("cpu", cpu_results, {"sparsities": OTHER_NINE}),
        ("a100", a100_results, {}),
        ("a100", a100_results, {"out_channels": (48, 64, 80, 96, 112, 128)}),
        ("a100", a100_results, {"out_channels": (48, 256), "batch": 1}),
        ("tegra-x1", nano_results, {}),
        ("tegra-x1", nano_results, {"out_channels": (48,), "sparsities": (0.90, 0.98)}),
        ("tegra-x1", nano_results, {"sparsities": SPARSITIES[1:]}),
        ("tegra-x1", nano_results, {"executions": 1}),
    ],
)
def test_what_was_announced_is_what_comes_out(paper, tmp_path, family, write, changes):
    results = write(tmp_path, **changes)
    announced = decidable(paper, family, results.settings)
    table = claims(paper, [results], results.device).set_index("id")
    for name, row in table.iterrows():
        if name == "a100.one_block":
            continue  # needs facts that only a measurement knows
        little = any(
            text in row["reason"] + row["analogue_verdict"]
            for text in ("sparsities measured", " of 5 rounds of ")
        )
        own = row["verdict"] != NOT_TESTABLE
        assert (announced[name] == "decidable") == (own and not little), name
        analogue = row["analogue_verdict"].split(":")[0] in VERDICTS[:3]
        assert (announced[name] == "analogue") == (analogue and not little), name


# Files


def test_the_table_is_text_and_whole(paper, on_cpu):
    table = on_cpu.reset_index()
    assert tuple(table.columns) == COLUMNS
    assert len(table) == len(paper.statements)
    assert table.notna().all(axis=None)
    assert set(table["verdict"]) <= set(VERDICTS)
    assert sum(counts(table).values()) == len(table)
    assert (
        not table.astype("str")
        .apply(lambda column: column.str.contains(r"\b(?:nan|inf)\b"))
        .any(axis=None)
    )


def test_the_preamble_says_what_the_verdicts_are_worth(paper, on_cpu, tmp_path):
    results = [cpu_results(tmp_path)]
    text = preamble(paper, on_cpu.reset_index(), results, "cpu")
    assert "No GPU was measured" in text
    assert "independent implementation" in text
    assert "not refuted" in text
    assert "Keshvi Tuteja" in text
    for verdict_, number in counts(on_cpu.reset_index()).items():
        assert f"{number} {verdict_}" in text
    assert "about: a CPU and its kernel, N 1 instead of 32 (NVIDIA A100). It is no" in text
    assert "decide nothing" not in text
    assert "interval of 99 %" in text
    assert "4 % on a CPU and 1 % on a GPU" in text
    assert "- cpu, run paper: " in text
    assert "5 rounds of 2 executions; N 1, IC 32, 256×256, K 3, OC 48, 64" in text


def test_the_preamble_names_only_what_differs(paper, on_cpu, tmp_path):
    results = [cpu_results(tmp_path, device="h200", batch=32)]
    table = claims(paper, results, "h200")
    text = preamble(paper, table, results, "h200")
    assert "No GPU was measured" not in text
    assert text.count("\n- h200, run paper: Synthetic h200") == 1
    assert "statement is about: another GPU. It is no" in text


def titled(groups, title):
    (found,) = (group for group in groups if group.title.startswith(title))
    return found


def test_one_line_a_statement(paper, on_cpu):
    groups = parts(on_cpu.reset_index(), "cpu", markdown_link)
    titles = [
        "Verdicts",
        "Analogues on cpu",
        "Theory",
        "NVIDIA A100",
        "NVIDIA Jetson",
        "In general",
    ]
    titles = [*titles, "Notes"]
    for group, title in zip(groups, titles, strict=True):
        assert group.title.startswith(title)
    listed = pd.concat([group.frame for group in groups[2:-1]])
    assert list(listed["id"]) == [entry["id"] for entry in paper.statements]
    assert not listed.astype("str").apply(lambda column: column.str.contains("\n")).any(axis=None)
    a100 = titled(groups, "NVIDIA A100")
    assert a100.intro == "Analogues are of cpu (N 1, IC 32, 256×256, K 3)."
    assert list(a100.frame) == [
        *("id", "statement", "printed (limit)", "verdict"),
        *("analogue: cpu", "its verdict", "its figure"),
    ]
    row = a100.frame.set_index("id").loc["a100.speedup.oc48.s90"]
    assert row["statement"] == "Speedup at OC 48, S 0.90 (6.1, Fig. 5a)"
    assert row["printed (limit)"] == "1.07× (± 10 %)"
    assert re.fullmatch(r"2\.0\d× \[1\.\d+ – 2\.\d+\]", row["analogue: cpu"])
    assert row["its verdict"] == NOT_REPLICATED
    assert row["its figure"] == "[Fig. 5](cpu/fig5.png)"
    notes = titled(groups, "Notes").frame.set_index("")["note"]
    assert notes[re.search(r"\(\d+\)", row["verdict"])[0]].startswith("about the NVIDIA A100; no")
    theory = titled(groups, "Theory").frame.set_index("id")
    assert theory.loc["theory.table2", "shown in"] == "[Table 2](table2.md)"
    assert "its verdict" not in theory


def test_values_of_several_parts_fit_on_a_line(on_a100):
    several = on_a100.loc["a100.trend.dense_time"]
    assert several["obtained"].count("OC ") == 6
    assert re.fullmatch(r"1(\.0\d)?( to 1\.0\d)? \[.* – .*\], 6 values", several["summary"])
    groups = parts(on_a100.reset_index(), "a100-sxm4-40gb", plain_name)
    frame = titled(groups, "NVIDIA A100").frame.set_index("id")
    assert frame.loc["a100.trend.dense_time", "obtained [interval]"] == several["summary"]
    assert frame.loc["a100.sem", "shown in"] == "Fig. 5a, Fig. 6a"
    assert "its verdict" not in frame


def test_counts_are_those_of_the_table(paper, on_cpu):
    table = on_cpu.reset_index()
    groups = parts(table, "cpu", plain_name)
    together = titled(groups, "Verdicts").frame.set_index("part").loc["together"]
    assert dict(together) == counts(table)
    # What is defined nowhere has no analogue: counted are those that name a device.
    together = titled(groups, "Analogues").frame.set_index("part").loc["together"]
    assert together.sum() == (table["analogue_device"] != "").sum()
    assert "Analogues" not in [
        group.title.split()[0]
        for group in parts(claims(only(paper, "theory.table1"), [], "cpu"), "cpu", plain_name)
    ]


def test_every_link_leads_to_what_is_rendered(paper, on_cpu, on_a100, on_nano):
    panels = [f"fig{n}{panel}.png" for n in (2, 5, 6, 7, 8) for panel in "ab"]
    known = {*panels, "audit.md", "table1.md", "table2.md", "table3.md"}
    for table in (on_cpu, on_a100, on_nano):
        for paths in table["shown_in"]:
            assert set(filter(None, paths.split("; "))) <= known
        for device, paths in zip(table["analogue_device"], table["analogue_shown_in"], strict=True):
            folder = device.partition(" ")[0]
            for path in filter(None, paths.split("; ")):
                assert re.fullmatch(rf"{folder}/fig[5-8]\.png", path)
    assert (on_a100.loc["a100.throughput.trend", "shown_in"]) == "fig7a.png"
    assert (on_nano.loc["nano.error.trend.packed", "shown_in"]) == "fig8b.png"
    assert (on_cpu.loc["a100.throughput.trend", "shown_in"]) == ""


def run_script(*arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "claims.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_script_writes_the_same_bytes_again(tmp_path):
    folder = write_results(tmp_path, out_channels=(48,), rounds=3, executions=2)
    written = []
    for name in ("first", "second"):
        out = tmp_path / name / "claims.csv"
        done = run_script("--paper", PAPER, "--results", folder, "--device", "cpu", "--out", out)
        assert done.returncode == 0, done.stderr
        written.append([out.with_suffix(end).read_bytes() for end in (".csv", ".md", ".tex")])
    assert written[0] == written[1]
    assert b"independent implementation" in written[0][1]
    assert str(tmp_path).encode() not in b"".join(written[0])


def test_the_script_names_what_is_missing(tmp_path):
    out = tmp_path / "claims.csv"
    folder = tmp_path / "cpu" / "paper"
    done = run_script("--paper", PAPER, "--results", folder, "--device", "cpu", "--out", out)
    assert done.returncode == 1
    assert "settings.json: not found; measure first" in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_judging_imports_no_torch():
    code = "import sys, packedconv.evidence.claims; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
