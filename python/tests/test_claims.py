import inspect
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from synthetic import write_results

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
    preamble,
    printed_text,
    tolerance_text,
)
from packedconv.evidence.quantities import COMPUTED, MEASURED, Measurement, Part
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
    """What section 6.1 says, in numbers."""
    if out_channels == 48:
        return np.interp(sparsity, [0.90, 0.98], [1.07, 1.63])
    if out_channels == 80:
        return np.interp(sparsity, [0.90, 0.98], [1.03, 1.65])
    if out_channels == 64:
        return np.interp(sparsity, [0.90, 0.91, 0.98], [0.99, 1.0, 1.6])
    return np.interp(sparsity, [0.90, 0.92, 0.98], [0.96, 1.0, 1.6])


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
        "dense_flops": 25e12,
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
def paper():
    return published.load(PAPER)


@pytest.fixture(scope="module")
def on_cpu(paper, tmp_path_factory):
    results = cpu_results(tmp_path_factory.mktemp("cpu"))
    return claims(paper, [results], "cpu").set_index("id")


@pytest.fixture(scope="module")
def on_a100(paper, tmp_path_factory):
    results = a100_results(tmp_path_factory.mktemp("a100"))
    return claims(paper, [results], "a100-sxm4-40gb").set_index("id")


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
            assert (tolerance["rho"], tolerance["sparsities"]) == (0.9, 9)


def test_statements_agree_with_the_printed_points(paper):
    """The same number stands in two places of the file: they must not drift apart."""
    panels = {"a100": "a", "tegra-x1": "b"}
    checked = 0
    for entry in paper.statements:
        if entry["quantity"] not in ("speedup", "throughput") or entry["comparator"] != "within":
            continue
        asked = entry["parameters"]
        point = paper.point(
            panels[entry["family"]],
            5 if entry["quantity"] == "speedup" else 7,
            asked["out_channels"],
            asked["sparsity"],
            asked.get("implementation"),
        )
        scale = {"×": 1.0, "GFLOP/s": 1e9, "TFLOP/s": 1e12}[entry["unit"]]
        assert point["value"] == pytest.approx(entry["printed"] * scale)
        checked += 1
    assert checked == 18


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
    assert (float(value), unit) == (pytest.approx(2.4, rel=0.005), "TFLOP/s")
    low, high = (float(end.split()[0]) for end in row["interval"].split(" – "))
    assert 2.39 < low <= high < 2.42


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
        ("theory.ridge.orin-nano-over-a100", "7.541", REPLICATED),
        ("theory.ridge.tegra-x1-over-a100", "0.9455×", REPLICATED),
        ("theory.ridge.a100-peak-over-tegra-x1", "82.63×", REPLICATED),
        ("theory.dense_ai.value", "95.99 FLOP/byte", REPLICATED),
        ("theory.dense_ai.ratio", "9.999×", REPLICATED),
        ("theory.dense_ai.compute_bound", "9.845×", REPLICATED),
        ("theory.ai90.at_ridge", "0.9846×", REPLICATED),
        ("theory.ic1.speedup", None, REPLICATED),
        ("theory.ic1.memory_bound", None, REPLICATED),
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


def test_results_of_the_nano_decide_its_statements(paper, tmp_path):
    table = claims(paper, [nano_results(tmp_path)], "tegra-x1").set_index("id")
    mine = table[table.index.str.startswith("nano.")]
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
    results = a100_results(tmp_path, out_channels=(48, 80, 128))
    for name, slices in (("oc48", 1), ("oc80", 1), ("oc128", 2)):
        results.facts[name]["mapping"] = {"slices": slices}
    row = verdict(paper, "a100.one_block", [results], "cpu")
    assert row["verdict"] == REPLICATED
    for name, slices in (("oc48", 2), ("oc80", 2), ("oc128", 1)):
        results.facts[name]["mapping"] = {"slices": slices}
    assert verdict(paper, "a100.one_block", [results], "cpu")["verdict"] == NOT_REPLICATED
    for name in results.facts:
        results.facts[name]["mapping"] = {"slices": 1}
    row = verdict(paper, "a100.one_block", [results], "cpu")
    assert row["verdict"] == NOT_TESTABLE
    assert "both split and in one block" in row["reason"]


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
    assert "not the paper's workload (N 32, IC 32, 256×256, K 3)" in row["reason"]


def test_any_variant_of_the_device_counts(paper, tmp_path):
    wrong = a100_results(tmp_path, out_channels=(64,))
    right = a100_results(tmp_path, device="a100-pcie-80gb", out_channels=(48,))
    row = verdict(paper, "a100.speedup.oc48.s90", [wrong, right], "cpu")
    assert row["verdict"] == REPLICATED
    assert "on a100-pcie-80gb" in row["reason"]


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
        ("nano.trend.speedup", "replicated"),
        ("a100.speedup.oc48.s90", "not replicated"),
        ("a100.below1.s90.oc96", "not replicated"),
        ("a100.below1.s90.oc256", "not testable here: not measured in this run: 256 output"),
        ("nano.speedup.oc40.s91", "not testable here: not measured in this run: 40 output"),
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


def test_a_smoke_run_is_too_small_for_trends(paper, tmp_path):
    results = cpu_results(
        tmp_path,
        run="smoke",
        out_channels=(24, 32),
        sparsities=(0.90, 0.94, 0.98),
        in_channels=16,
        size=64,
        rounds=3,
    )
    table = claims(paper, [results], "cpu").set_index("id")
    row = table.loc["a100.trend.speedup"]
    assert row["analogue_verdict"] == "inconclusive: 3 of 9 sparsities measured"
    assert "OC 24" in row["analogue_obtained"]
    assert "not measured in this run: 48" in table.loc["a100.speedup.oc48.s90", "analogue_verdict"]
    missing = table.loc["nano.speedup.oc32.s91", "analogue_verdict"]
    assert missing == "not testable here: not measured in this run: sparsity 0.91"
    assert table.loc["nano.speedup.oc32.s98", "analogue_obtained"]


def test_one_round_has_no_error_bar(paper, tmp_path):
    results = cpu_results(tmp_path, out_channels=(48,), rounds=1)
    row = verdict(paper, "a100.sem", [results], "cpu")
    assert "a standard error needs two rounds" in row["analogue_verdict"]


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
        ("a100", a100_results, {}),
        ("a100", a100_results, {"out_channels": (48, 64, 80, 96, 112, 128)}),
        ("a100", a100_results, {"out_channels": (48, 256), "batch": 1}),
        ("tegra-x1", nano_results, {}),
        ("tegra-x1", nano_results, {"out_channels": (48,), "sparsities": (0.90, 0.98)}),
    ],
)
def test_what_was_announced_is_what_comes_out(paper, tmp_path, family, write, changes):
    results = write(tmp_path, **{"rounds": 2, "executions": 1, **changes})
    announced = decidable(paper, family, results.settings)
    table = claims(paper, [results], results.device).set_index("id")
    for name, row in table.iterrows():
        if name == "a100.one_block":
            continue  # needs facts that only a measurement knows
        own = row["verdict"] != NOT_TESTABLE
        open_ = (row["verdict"] + row["analogue_verdict"]).endswith("sparsities measured")
        assert (announced[name] == "decidable") == (own and "sparsities" not in row["reason"]), name
        analogue = row["analogue_verdict"].split(":")[0] in VERDICTS[:3]
        assert (announced[name] == "analogue") == (analogue and not open_), name


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


def test_the_preamble_says_what_the_verdicts_are_worth(paper, on_cpu):
    text = preamble(paper, on_cpu.reset_index(), "cpu")
    assert "independent implementation" in text
    assert "not refuted" in text
    assert "Keshvi Tuteja" in text
    for verdict_, number in counts(on_cpu.reset_index()).items():
        assert f"{number} {verdict_}" in text
    assert "is not the device" in text


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
