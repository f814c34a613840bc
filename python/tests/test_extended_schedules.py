"""Schedules of a CPU's plans: what is tried, measured, tabled and drawn."""

import json
import pathlib
import runpy
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from synthetic import SCHEDULE, experiment, read_csv, write_experiments, write_results

from packedconv.bench import cpu_experiments
from packedconv.bench.check import compare_with_float64
from packedconv.bench.experiment import load_experiment
from packedconv.bench.extended import schedules as bench
from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended import schedules as evidence
from packedconv.layer import Layer
from packedconv.plots.extended.schedules import PLACES, schedules_figure
from packedconv.script import CheckError
from packedconv.settings import load_settings

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAYER = Layer("t_oc8_n1", 1, 8, 8, 12, 20)
# Several rows of vectors, and more channels than a block of the least size.
MEASURED = Layer("t_oc8_n2", 2, 20, 8, 9, 33)


@pytest.fixture(autouse=True)
def quick(torch_threads, monkeypatch):
    monkeypatch.setattr(bench, "WARMUP_SECONDS", 0.0)
    monkeypatch.setattr(cpu_experiments, "PEAK_BURST_SECONDS", 0.001)


@pytest.fixture
def results(tmp_path):
    return write_results(tmp_path / "results", out_channels=(8,), sparsities=(0.9,), rounds=2)


# What is tried


def test_each_field_is_changed_alone():
    tiles = [(4, 2), (1, 1), (2, 2), (1, 1)]
    found = bench.changes(SCHEDULE, tiles, group_channels=32)
    assert [(one.field, one.change) for one in found] == [
        *(("tile", "1x1"), ("tile", "2x2")),
        *(("block_channels", "halved"), ("block_channels", "doubled"), ("block_channels", "whole")),
        *(("strip", "1"), ("strip", "doubled"), ("prefetch", "off"), ("stream", "off")),
        ("path", "loose"),
    ]
    for field, _, schedule in found:
        changed = {name for name in SCHEDULE if schedule[name] != SCHEDULE[name]}
        assert changed <= ({"rows", "vectors"} if field == "tile" else {field})
        assert changed
    values = {one.change: one.schedule for one in found if one.field == "block_channels"}
    assert [one["block_channels"] for one in values.values()] == [4, 16, 32]


def test_a_change_to_what_is_there_is_none():
    plan = {**SCHEDULE, "block_channels": 32, "strip": 1, "prefetch": False, "path": "loose"}
    found = bench.changes(plan, [(4, 2)], group_channels=32)
    assert [(one.field, one.change) for one in found] == [
        *(("block_channels", "halved"), ("strip", "doubled"), ("prefetch", "on")),
        *(("stream", "off"), ("path", "aligned")),
    ]
    assert bench.changes({**plan, "path": "naive"}, [(4, 2)], 32) == []


def test_every_schedule_is_a_candidate_once():
    """A layer that cuts strips to 4 and has no loose path."""

    def executed(schedule):
        if schedule["path"] == "loose":
            raise ValueError("no loose path")
        return {**schedule, "strip": min(4, schedule["strip"])}

    listed = [SCHEDULE, {**SCHEDULE, "block_channels": 32}, {**SCHEDULE, "rows": 1}]
    changed = bench.changes(SCHEDULE, [(4, 2), (1, 2), (2, 2)], group_channels=16)
    found, left_out = bench.candidates(listed, changed, executed)
    assert [(one.rank, one.field, one.change) for one in found] == [
        *((0, "", ""), (1, "", ""), (2, "tile", "1x2"), (None, "tile", "2x2")),
        *((None, "block_channels", "halved"), (None, "block_channels", "doubled, whole")),
        *((None, "strip", "1"), (None, "prefetch", "off"), (None, "stream", "off")),
    ]
    assert len({one.name for one in found}) == len(found)
    assert [(one["change"], one["reason"]) for one in left_out] == [
        *(("doubled", bench.SAME), ("loose", "no loose path"))
    ]
    assert left_out[0]["schedule"]["strip"] == 8


def test_names_tell_schedules_apart():
    assert bench.name_of(SCHEDULE) == "aligned_4x2_block8_strip4_prefetch_stream"
    plain = {**SCHEDULE, "prefetch": False, "stream": False}
    assert bench.name_of(plain) == "aligned_4x2_block8_strip4"


def test_what_is_hopeless():
    """Only what seems hopeless is tried again, and one disturbance is not enough."""
    seconds = {
        "plan": [2.0] * 4,
        "slow": [6.4, 6.1, 9.0, 6.2],
        "edge": [6.0],
        "disturbed": [80.0, 70.0, 2.1],
        "fast": [1.0],
    }
    remaining = {name: iter(values) for name, values in seconds.items()}
    found = bench.hopeless(list(seconds), lambda name: next(remaining[name]))
    assert found == {"slow": 3.05}
    assert [list(values) for values in remaining.values()] == [[]] * 5


def test_a_plan_that_is_disturbed_at_first_keeps_all():
    seconds = {"plan": [20.0, 2.0, 2.0, 2.0], "other": [40.0]}
    remaining = {name: iter(values) for name, values in seconds.items()}
    assert bench.hopeless(list(seconds), lambda name: next(remaining[name])) == {}


def test_both_sides_know_the_same_words():
    assert (evidence.AGAIN, evidence.SAME) == (bench.AGAIN, bench.SAME)


# Measuring


def asked(**changes):
    return load_experiment(json.dumps(experiment(MEASURED, contenders=[], **changes)))


def test_the_reference_is_that_of_the_check():
    generator = torch.Generator().manual_seed(1)
    layer = MEASURED._replace(in_channels=4)
    image = torch.rand(layer.input_shape, generator=generator) - 0.5
    weight = torch.rand(layer.weight_shape, generator=generator) - 0.5
    output = torch.nn.functional.conv2d(image, weight, **layer.conv2d_arguments)
    reference = bench.Reference(layer, image, weight)
    for change in (0.0, 0.25):
        output[1, 2, 3, 4] += change
        expected = compare_with_float64(output, layer, image, weight)
        found = reference.compare(output)
        assert found.index == expected.index
        assert found.bound_fraction == pytest.approx(expected.bound_fraction)
        assert found.max_abs_error == pytest.approx(expected.max_abs_error)
        assert found.bound == pytest.approx(expected.bound)
    output[0, 0, 0, 0] = float("nan")
    assert reference.compare(output).bound_fraction == float("inf")
    assert reference.compare(output).index == (0, 0, 0, 0)


def test_a_layer_is_measured(results, monkeypatch):
    monkeypatch.setattr(bench, "HOPELESS", float("inf"))
    settings = load_settings(str(results / "settings.json"))
    rows, facts = bench.measure(settings, asked(repeats=0, sparsities=[0.9]), 2)
    found = facts["schedules"]["s90"]
    names = [one["name"] for one in found["candidates"]]
    assert {row["implementation"] for row in rows} == {*names, bench.AGAIN}
    assert len(rows) == (len(names) + 1) * 5 * 2
    plan = found["candidates"][0]
    assert plan["rank"] == 0
    assert plan["schedule"] == facts["plans"]["s90"]["schedule"]
    changed = [one for one in (*found["candidates"], *found["left_out"]) if one["field"]]
    assert {one["field"] for one in changed} == set(evidence.CHANGED)
    assert json.loads(json.dumps(facts)) == facts


def test_a_wrong_schedule_is_not_timed(results, monkeypatch):
    right = bench._contender

    def wrong(prepared, key, candidate, out):
        made = right(prepared, key, candidate, out)

        def execute():
            made.execute()
            if candidate.rank is None:
                out[0, 0, 0, 0] += 0.5

        return made._replace(execute=execute)

    monkeypatch.setattr(bench, "_contender", wrong)
    settings = load_settings(str(results / "settings.json"))
    with pytest.raises(CheckError, match=r"schedule (aligned|loose)_\d+x\d+_block\d+_strip\d+"):
        bench.measure(settings, asked(repeats=0), 2)


# The table

LOOSE = {**SCHEDULE, "path": "loose"}
WHOLE = {**SCHEDULE, "block_channels": 16}
PLAIN = {**SCHEDULE, "prefetch": False}
CANDIDATES = [
    bench.Candidate(bench.name_of(SCHEDULE), SCHEDULE, 0),
    bench.Candidate(bench.name_of(LOOSE), LOOSE, 1, "path", "loose"),
    bench.Candidate(bench.name_of(WHOLE), WHOLE, None, "block_channels", "doubled, whole"),
    bench.Candidate(bench.name_of(PLAIN), PLAIN, None, "prefetch", "off"),
]
NAMES = [one.name for one in CANDIDATES]
LEFT_OUT = [
    {"schedule": SCHEDULE, "field": "strip", "change": "doubled", "reason": bench.SAME},
    {"schedule": SCHEDULE, "field": "tile", "change": "1x1", "reason": "schedule: expected 4 x 2"},
    {
        **{"name": "slow", "schedule": {**SCHEDULE, "strip": 1}, "rank": 2},
        **{"field": "strip", "change": "1", "trial_ratio": 3.5, "reason": "over 3 times"},
    },
]
MILLISECONDS = dict(zip(NAMES, (2.0, 1.6, 3.0, 2.0), strict=True))


def seconds(name, sparsity, contender, number):
    """Steady, but for a plan without prefetch that is now faster, now slower."""
    value = MILLISECONDS.get(contender, 2.0)
    if contender == NAMES[3]:
        value *= (0.7, 1.0, 1.4, 0.8, 1.3)[number]
    return 1e-3 * value


@pytest.fixture
def measured(results):
    found = {"candidates": [one._asdict() for one in CANDIDATES], "left_out": LEFT_OUT}
    paths = write_experiments(
        results,
        "schedules",
        [experiment(LAYER, contenders=[], sparsities=[0.9])],
        seconds,
        contenders=[*NAMES, bench.AGAIN],
        changes={LAYER.name: {"schedules": {"s90": found}, "warmup_seconds": 0.005}},
    )
    return load_experiments(results, paths), paths


def test_ratios_to_the_plans_own(measured):
    table = evidence.schedule_table(measured[0])
    assert list(table.columns) == evidence.COLUMNS
    timed = table[table["left_out"].isna()]
    assert timed["role"].tolist() == ["plan", "listed", "changed", "changed", "control"]
    np.testing.assert_allclose(timed["ratio"], [1, 0.8, 1.5, 1, 1])
    assert timed["verdict"].tolist() == ["", "faster", "slower", "inconclusive", "inconclusive"]
    assert timed["wide"].tolist() == [False, False, False, True, False]
    slow = table[table["trial_ratio"].notna()].iloc[0]
    assert (slow["role"], slow["field"], slow["trial_ratio"]) == ("listed", "strip", 3.5)
    assert table["left_out"].dropna().tolist() == [one["reason"] for one in LEFT_OUT]


def test_what_the_choice_misses(measured):
    experiments, _ = measured
    row = evidence.regret_table(experiments, evidence.schedule_table(experiments)).iloc[0]
    assert (row["timed"], row["listed"]) == (4, 2)
    assert row["best"] == row["best_any"] == NAMES[1]
    assert row["regret"] == row["held_out"] == pytest.approx(1.25)
    assert row["verdict"] == "slower"
    # What a trial ruled out, costs more than anything that was timed.
    assert (row["most_field"], row["most_change"], row["most_loss"]) == ("strip", "1", 3.5)
    assert row["most_in_trial"]
    assert np.isnan(row["most_low"])


def test_the_costliest_change_of_those_that_were_timed(measured):
    table = evidence.schedule_table(measured[0])
    most = evidence.most_costly(table[table["trial_ratio"].isna()])
    assert (most["most_field"], most["most_change"]) == ("block_channels", "doubled, whole")
    assert most["most_loss"] == pytest.approx(1.5)
    assert not most["most_in_trial"]
    assert evidence.most_costly(table[table["field"] == ""]) == {}


def test_the_best_of_the_other_rounds():
    plan = np.array([4.0, 4.0, 4.0])
    # Each of two is best in one round by luck, and the third one is always as good as the plan.
    candidates = np.array([[1.0, 9.0, 9.0], [9.0, 1.0, 9.0], [4.0, 4.0, 4.0]])
    assert evidence.held_out_ratios(plan, candidates).tolist() == [1, 1, 1]
    # One that is better by a half in every round is found without it.
    better = np.vstack([candidates, [2.0, 2.0, 2.0]])
    assert evidence.held_out_ratios(plan, better).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.8, 0.9, "faster"),
        (1.1, 1.2, "slower"),
        (0.9, 1.1, "inconclusive"),
        (1, 1, "inconclusive"),
    ],
)
def test_verdicts(low, high, verdict):
    assert evidence.verdict(low, high) == verdict


# The figure


def caption(figure):
    (text,) = (text for text in figure.texts if text.get_gid() == "caption")
    return text.get_text().replace("\n", " ")


def test_the_figure_draws_its_table(measured):
    experiments, _ = measured
    table = evidence.schedule_table(experiments)
    regrets = evidence.regret_table(experiments, table)
    figure = schedules_figure(experiments, table, regrets)
    panel, summary = figure.axes
    assert [text.get_text() for text in panel.get_xticklabels()] == list(PLACES)
    drawn = {
        round(float(bars.lines[0].get_xdata()[0])): float(bars.lines[0].get_ydata()[0])
        for bars in panel.containers
    }
    # The last listed one, and whatever else was timed, at its field.
    assert drawn == pytest.approx({0: 0.8, 2: 1.5, 4: 1.0, 6: 0.8, 7: 1.0})
    assert len(panel.containers) == 6
    assert [float(bars.lines[0].get_xdata()[0]) for bars in summary.containers] == pytest.approx(
        [1.25, 1.25, 1.25]
    )
    text = caption(figure)
    assert "5 rounds of 2 executions, contenders interleaved and each warmed for at least 5" in text
    assert "own over the best of 2 listed 1.25 [1.25, 1.25], of the other rounds 1.25" in text
    assert "[1.25, 1.25], and of 4 timed; costliest" in text
    assert "costliest change alone: strip 1, 3.50 in trials" in text
    assert "drawn hollow: t_oc8_n1, S 0.9: 1 of 5 (measured 1 time)" in text
    assert f"Left out: 1 of t_oc8_n1, S 0.9 ({bench.SAME})" in text
    assert "1 of t_oc8_n1, S 0.9 (the layer has no such schedule; the CSV says why)" in text
    assert "1 of t_oc8_n1, S 0.9 (over 3 times)" in text
    assert "Timed while the machine was busy" not in text


def test_the_figure_script(measured, results, tmp_path, monkeypatch):
    _, paths = measured
    out = tmp_path / "schedules.pdf"
    arguments = ["--results", results, "--samples", *paths, "--out", out]
    script = str(ROOT / "scripts" / "figure_schedules.py")
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    runpy.run_path(script, run_name="__main__")
    rows = pd.DataFrame(read_csv(tmp_path / "schedules.csv"))
    assert len(rows) == len(CANDIDATES) + 1 + len(LEFT_OUT)
    # What a plan misses stands with the plan, once.
    assert (rows["regret"] != "").tolist() == (rows["role"] == "plan").tolist()
    assert (tmp_path / "schedules.png").stat().st_size > 10_000
