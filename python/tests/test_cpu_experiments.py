"""Layers beside the paper's on a CPU: what is listed, measured, tabled and drawn."""

import copy
import json
import os
import pathlib
import runpy
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from synthetic import SCHEDULE, experiment, read_csv, write_experiments, write_results

import packedconv
from packedconv import _core, roofline
from packedconv import config as configuration
from packedconv.bench import (
    cpu_experiments,
    cpu_steps,
    lock,
    machine,
    protocol,
    rotation,
    rungs,
)
from packedconv.bench import spread as spreading
from packedconv.bench.experiment import load_experiment
from packedconv.bench.spread import spread
from packedconv.device import DeviceError
from packedconv.evidence import layer_table
from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.ladder import TITLES, ladder
from packedconv.evidence.samples import Results
from packedconv.evidence.statistics import bound_fractions
from packedconv.layer import Layer
from packedconv.plots.ladder import ladder_figure
from packedconv.samples_file import EXPERIMENT_COLUMNS, read_rows, text_sha256
from packedconv.schedule import FIELDS
from packedconv.script import CheckError
from packedconv.settings import load_settings, settings_hash

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAYER = Layer("t_oc8_n1", 1, 8, 8, 12, 20)
OTHER = Layer("g_oc8_n2", 2, 8, 8, 13, 9, 3, 2, 2, dilation=2, groups=4)
EVERYTHING = ["sparse", "dense", "sparse_one_thread", "sparse_bias_relu", "sparse_subnormal"]
TITLES_OF_PARTS = {"t_oc8_n1": "Part", "g_oc8_n2": "Others", "v9_oc8_n1": "Others"}


@pytest.fixture(autouse=True)
def quick(tmp_path, torch_threads, monkeypatch):
    """Short warm-ups and bursts, and a lock of the test's own."""
    monkeypatch.setattr(protocol, "WARMUP_SECONDS", 0.0)
    monkeypatch.setattr(cpu_experiments, "PEAK_BURST_SECONDS", 0.001)
    monkeypatch.setattr(lock, "FOLDER", str(tmp_path))


@pytest.fixture
def results(tmp_path):
    return write_results(tmp_path / "results", out_channels=(8,), sparsities=(0.9,), rounds=2)


@pytest.fixture
def settings(results):
    return load_settings(str(results / "settings.json"))


# What is listed


@pytest.fixture
def tables(tmp_path):
    """config/layers.yaml with a change; the root folder is a copy of config/ alone."""
    (tmp_path / "config").mkdir()
    os.symlink(ROOT / "config" / "schema", tmp_path / "config" / "schema")
    content = configuration.load_yaml(ROOT / "config" / "layers.yaml")

    def resolve(change=lambda content: None):
        change(content)
        (tmp_path / "config" / "layers.yaml").write_text(yaml.safe_dump(content))
        return configuration.resolve_layer_tables({"layer_tables": "config/layers.yaml"}, tmp_path)

    return resolve


def test_the_listed_layers(tables):
    found = tables()
    assert set(found) == {"layers", "layers_cold", "ladder", "peers"}
    titles = {name: one["title"] for name, one in found["layers"].items()}
    assert titles["a_oc48_n1"] == "A: the paper's A100 workload"
    found = {
        table: {name: one["experiment"] for name, one in listed.items()}
        for table, listed in found.items()
    }
    warm = found["layers"]
    for text in [json.dumps(one) for table in found.values() for one in table.values()]:
        assert load_experiment(text).record() == json.loads(text)
    shapes = {name: load_experiment(json.dumps(one)).layer for name, one in warm.items()}
    for count in (48, 64, 80, 96, 112, 128):
        for batch in (1, 4):
            name = f"a_oc{count}_n{batch}"
            assert shapes[name] == Layer(name, batch, 32, count, 256, 256)
            assert warm[name]["sparsities"] == [0.9, 0.98]
    assert shapes["p56_s2_oc512_n32"].output_shape == (32, 512, 28, 28)
    assert shapes["d28_oc128_n1"].output_shape == (1, 128, 28, 28)
    assert shapes["g14_oc256_n32"].weight_shape == (256, 64, 3, 3)
    assert all(one["set_bytes"] is None for one in warm.values())
    assert {one["set_bytes"] for one in found["layers_cold"].values()} == {2**30}
    assert set(found["layers_cold"]) < set(warm)
    assert all(one["contenders"] == ["sparse", "dense"] for one in found["layers_cold"].values())
    assert not any(one["environment"] for one in found["layers_cold"].values())
    assert list(found["ladder"]) == ["a_oc64_n1", "r14_oc256_n32"]
    assert list(found["peers"]) == ["a_oc64_n1", "b_oc48_n8", "r56_oc64_n1", "r14_oc256_n1"]
    assert [name for name, one in warm.items() if one["skewed"]] == [
        *("skewed_a_oc64_n1", "skewed_r14_oc256_n1")
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("warm"), "top level: 'warm' is a required property"),
        (lambda t: t.update(colour=1), "'colour' was unexpected"),
        (lambda t: t["parts"][0]["layers"][0].update(size=3), "'size' was unexpected"),
        (lambda t: t["parts"][0].update(contenders=["dense"]), "parts.0.contenders"),
        (lambda t: t["parts"][0].update(contenders=["sparse", "fast"]), "parts.0.contenders"),
        (lambda t: t["parts"][0].update(sparsities=[0.9055]), "sparsity: expected a multiple"),
        (lambda t: t["parts"][0]["layers"][0].update(groups=5), r"a_oc48_n1\.groups: expected a"),
        (lambda t: t["parts"].append(t["parts"][0]), "expected each layer once, got a_oc48_n1"),
        (lambda t: t["cold"].pop("set_bytes"), "cold: 'set_bytes' is a required property"),
        (lambda t: t.update(widest_spread=0), "widest_spread"),
        (lambda t: t["parts"][0].update(environment={"A B": "1"}), "parts.0.environment"),
        (lambda t: t["parts"][0].update(environment={"x;y": "1"}), "parts.0.environment"),
        (lambda t: t["peers"].pop("parts"), "'parts' is a required property"),
    ],
)
def test_wrong_lists_are_refused(tables, change, message):
    with pytest.raises(ValueError, match=rf"config/layers\.yaml: .*{message}"):
        tables(change)


def test_a_list_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"layer_tables: expected a YAML file, got 'none\.yaml'"):
        configuration.resolve_layer_tables({"layer_tables": "none.yaml"}, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "expected the keys"),
        ({"skewed": 1}, "skewed: expected true or false, got 1"),
        ({"contenders": ["dense"]}, "contenders: expected sparse and others"),
        ({"contenders": ["sparse", "fast"]}, "contenders: expected sparse and others"),
        ({"sparsities": [1.0]}, "sparsity: expected"),
        ({"protocol": {"rounds": 2}}, "protocol: expected the keys"),
        ({"layer": {**LAYER._asdict(), "groups": 3}}, "groups: expected a divisor"),
    ],
)
def test_wrong_experiments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        load_experiment(json.dumps(experiment(LAYER, **change)))
    with pytest.raises(ValueError, match="experiment: expected JSON"):
        load_experiment("{")


def test_the_environment_must_be_there_from_the_start(monkeypatch):
    asked = {"ONEDNN_MAX_CPU_ISA": "A"}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "B")
    with pytest.raises(ValueError, match="expected ONEDNN_MAX_CPU_ISA=A, got 'B'"):
        machine.require_environment(asked)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "A")
    machine.require_environment(asked)


@pytest.mark.parametrize("name", ["ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"])
def test_nothing_may_slow_down_the_dense_side_unasked(settings, stamp, tmp_path, monkeypatch, name):
    before = machine.comparable_facts()
    monkeypatch.setenv(name, "SSE41")
    assert machine.comparable_facts() != before
    assert machine.comparable_facts()["environment"][name] == "SSE41"
    message = f"environment: expected {name} unset, which this layer does not ask for, got 'SSE41'"
    paths = str(tmp_path / "t.csv"), str(tmp_path / "t.json")
    for step in (cpu_steps.layers, cpu_steps.ladder):
        with pytest.raises(ValueError, match=message):
            step(settings, json.dumps(experiment(LAYER)), stamp, *paths)
    assert not os.path.exists(paths[0])


# Layers with dilation and groups


def test_dilation_and_groups_count_in_the_model():
    assert OTHER.output_shape == (2, 8, 7, 5)
    assert OTHER.weight_shape == (8, 2, 3, 3)
    assert OTHER.weight_count == 144
    weight = torch.ones(OTHER.weight_shape)
    ones = torch.ones(OTHER.input_shape)
    products = torch.nn.functional.conv2d(ones, weight, **OTHER.conv2d_arguments).sum()
    assert roofline.border_exact_macs(OTHER) == int(products)
    assert roofline.dense_flops(OTHER) == 2 * 2 * 7 * 5 * 144


def test_the_bound_by_hand():
    layer = Layer("deep", 2, 512, 4, 3, 5, 1, 1, 0)
    device = roofline.Device("d", 1e9, 1e12)
    # 2 images of 15 pixels.
    assert roofline.execution_bound(layer, 100, device) == 2 * 30 * 100 / 1e9
    # Inputs, outputs, words, and offsets of two blocks of 256 channels.
    moved = 4 * (2 * 512 * 15 + 2 * 4 * 15 + 100 + 2 * 5)
    assert roofline.execution_bound(layer, 100, device._replace(bandwidth=1.0)) == moved


def test_offsets_counted_are_those_of_the_packed_weight():
    weight = torch.zeros(4, 300, 1, 1)
    weight[:, ::10] = 1
    packed = packedconv.pack(weight)
    layer = Layer("deep", 1, 300, 4, 1, 1, 1, 1, 0)
    device = roofline.Device("d", 1e30, 1.0)
    moved = 4 * (300 + 4) + packed.nbytes
    assert roofline.execution_bound(layer, packed.nnz, device) == moved


def test_bound_fractions_of_a_run(results):
    found = Results.load(results)
    fractions = bound_fractions(found.samples, found.peaks).iloc[0]
    layer = found.layers["oc8"]
    samples = found.samples[found.samples["implementation"] == "sparse"]
    device = roofline.Device("d", 200e9, 50e9)
    nonzeros = int(samples["nonzeros"].iloc[0])
    assert fractions["bound_seconds"] == roofline.execution_bound(layer, nonzeros, device)
    median = samples.groupby("round")["seconds"].mean().median()
    assert fractions["bound_fraction"] == pytest.approx(fractions["bound_seconds"] / median)


# The ladder's rungs


def test_every_rung_changes_one_thing():
    asked = []

    def executed(schedule):
        asked.append(schedule)
        return schedule

    found, left_out = rungs.climb(SCHEDULE, executed, 32)
    assert [rung.name for rung in found] == list(rungs.NAMES)
    assert left_out == {}
    assert asked == [rung.schedule for rung in found]
    assert found[-1].schedule == SCHEDULE
    changed = [
        {key for key in SCHEDULE if after.schedule[key] != before.schedule[key]}
        for before, after in zip(found, found[1:], strict=False)
    ]
    assert changed == [
        *({"path"}, {"rows", "vectors"}, {"strip"}, {"prefetch"}, {"stream"}, {"path"}),
        {"block_channels"},
    ]


def test_rungs_that_change_nothing_are_left_out():
    plan = {**SCHEDULE, "path": "loose", "strip": 1, "prefetch": False, "block_channels": 32}
    found, left_out = rungs.climb(plan, lambda schedule: schedule, 32)
    assert [rung.name for rung in found] == ["naive", "register", "tile", "stream"]
    assert left_out == dict.fromkeys(("strip", "prefetch", "aligned", "blocks"), rungs.SAME)


def test_rungs_are_what_is_executed():
    """A plan that cuts its strip to two tiles, whatever it is asked for."""
    found, left_out = rungs.climb(
        {**SCHEDULE, "strip": 2},
        lambda schedule: {**schedule, "strip": 2, "block_channels": 8},
        32,
    )
    assert left_out == dict.fromkeys(("strip", "blocks"), rungs.SAME)
    assert all(rung.schedule["strip"] == 2 for rung in found)


def test_the_ladder_of_a_naive_plan_has_one_rung():
    plan = {**SCHEDULE, "path": "naive"}
    found, left_out = rungs.climb(plan, lambda schedule: schedule, 32)
    assert found == [rungs.Rung("naive", plan)]
    assert left_out == dict.fromkeys(rungs.NAMES[1:], rungs.SAME)


def test_a_rung_that_cannot_run_by_itself_comes_with_the_next():
    def executed(schedule):
        if schedule["prefetch"] and not schedule["stream"]:
            raise ValueError("none")
        return schedule

    found, left_out = rungs.climb(SCHEDULE, executed, 32)
    assert left_out == {"prefetch": "comes with the next: none"}
    stream = next(rung for rung in found if rung.name == "stream")
    assert stream.schedule["prefetch"]
    assert found[-1].schedule == SCHEDULE


def test_a_layer_without_the_first_rungs_is_an_error():
    def require(schedule):
        raise ValueError("no such path")

    with pytest.raises(ValueError, match="no such path"):
        rungs.climb(SCHEDULE, require, 32)


# Measuring


def test_spread():
    assert spread([1, 2, 3, 4, 5]) == pytest.approx(2 / 3)
    assert spread([4.0]) == 0


def sample(key, implementation, number, seconds):
    return protocol.Sample(key, implementation, "packed", number, 0, seconds)


def test_wide_points_are_those_of_any_contender():
    steady = [sample("s90", "sparse", number, 1.0) for number in range(4) for _ in range(2)]
    jumpy = [sample("s98", "dense", number, 1.0 + number) for number in range(4)]
    # One slow execution of a round leaves its median.
    outlier = sample("s90", "sparse", 0, 9.0)
    assert spreading.wide_points([*steady, *jumpy, outlier], 0.15) == {"s98"}
    assert spreading.wide_points(jumpy, 2.0) == set()


def asked(layer=LAYER, **changes):
    return load_experiment(json.dumps(experiment(layer, **changes)))


@pytest.mark.parametrize("layer", [LAYER, OTHER], ids=lambda layer: layer.name)
@pytest.mark.parametrize("set_bytes", [None, 2**16], ids=["warm", "cold"])
def test_a_layer_is_measured(settings, layer, set_bytes):
    wanted = asked(layer, contenders=EVERYTHING, set_bytes=set_bytes, repeats=0)
    rows, facts = cpu_experiments.measure_layer(settings, wanted, 2)
    frame = pd.DataFrame(rows)
    assert set(frame.columns) == set(EXPERIMENT_COLUMNS)
    counts = frame.groupby(["sparsity", "implementation"]).size()
    assert counts.to_dict() == {
        (sparsity, name): 5 * 2 for sparsity in (0.9, 0.98) for name in EVERYTHING
    }
    threads = frame.groupby("implementation")["threads"].unique().map(list).to_dict()
    assert threads == {name: [1 if name == "sparse_one_thread" else 2] for name in EVERYTHING}
    assert set(frame["groups"]) == {layer.groups}
    assert set(frame["dilation"]) == {layer.dilation}
    plan = facts["plans"]["s90"]
    assert set(plan["schedule"]) == set(FIELDS)
    assert plan["why"]
    # The plan and the model count alike.
    nonzeros = int(frame.loc[frame["sparsity"] == 0.9, "nonzeros"].iloc[0])
    for fact, device in (
        ("flop", roofline.Device("d", 1.0, 1e30)),
        ("bytes", roofline.Device("d", 1e30, 1.0)),
    ):
        assert roofline.execution_bound(layer, nonzeros, device) == plan["facts"][fact]
    assert facts["dense"]["layout"] in facts["dense"]["seconds"]
    if set_bytes is None:
        assert facts["rotated"] is None
    else:
        pair = rotation.pair_bytes(layer)
        assert facts["rotated"]["copies"] == 2**16 // pair
        assert facts["rotated"]["set_bytes"] == 2**16 // pair * pair
    assert json.loads(json.dumps(facts)) == facts


def test_wide_points_are_repeated_and_all_samples_kept(settings, monkeypatch):
    attempts = iter([{"s90", "s98"}, {"s98"}, {"s98"}, set()])
    monkeypatch.setattr(spreading, "wide_points", lambda *arguments: next(attempts))
    wanted = asked(repeats=2)
    rows, facts = cpu_experiments.measure_layer(settings, wanted, 2)
    frame = pd.DataFrame(rows)
    # A point is measured again with all its contenders, in the same rounds.
    counts = frame.groupby(["sparsity", "attempt", "implementation"]).size().to_dict()
    assert counts == {
        (sparsity, attempt, name): 10
        for sparsity, attempt in ((0.9, 0), (0.98, 0), (0.9, 1), (0.98, 1), (0.98, 2))
        for name in wanted.contenders
    }
    assert len(facts["peak_bursts"]) == 3 * 5
    # Of every point, whichever attempt was its last.
    faults = facts["page_faults_per_execution"]
    assert {name: set(found) for name, found in faults.items()} == {
        name: {"s90", "s98"} for name in wanted.contenders
    }


def test_the_last_attempt_counts():
    def time_rounds(groups, attempt):
        found = [
            sample(key, "sparse", number, 1.0 + number * (key == "s90"))
            for key in groups
            for number in range(3)
        ]
        faults = {(key, "sparse"): float(attempt) for key in groups}
        return protocol.Measurement(found, [float(attempt)], faults)

    attempts, measured = spreading.repeated({"s90": [], "s98": []}, time_rounds, 0.15, 2)
    assert [{one.key for one in samples} for samples in attempts] == [
        *({"s90", "s98"}, {"s90"}, {"s90"})
    ]
    assert measured.samples == attempts[-1]
    assert measured.peak_bursts == [0.0, 1.0, 2.0]
    assert measured.page_faults == {("s90", "sparse"): 2.0, ("s98", "sparse"): 0.0}


def test_page_faults_are_those_of_what_ran():
    """A slow contender that runs once a round."""

    def time_block(contender, executions, warmup_executions):
        count = 1 if contender.implementation == "slow" else executions
        return [1.0] * count, 6 * count

    found = protocol.run_rounds(
        {"s90": [cpu_experiments.Contender(name, "packed", None) for name in ("slow", "fast")]},
        *(3, 4, 0, 1, lambda: 1e9, "t", time_block),
    )
    assert found.page_faults == {("s90", "slow"): 6.0, ("s90", "fast"): 6.0}


def test_a_skewed_layer_is_measured(settings):
    wanted = asked(Layer("k_oc16_n1", 1, 8, 16, 12, 20), skewed=True, repeats=0, sparsities=[0.9])
    packed = cpu_experiments.Prepared(settings, wanted, 1).packed["s90"]
    counts = np.sort((packed.unpack() != 0).flatten(1).sum(1).numpy())
    assert counts[-2:].min() > 8 * counts[:-2].max() > 0
    rows, _ = cpu_experiments.measure_layer(settings, wanted, 2)
    assert {row["nonzeros"] for row in rows} == {packed.nnz} == {115}


def test_subnormal_input_must_count(settings, monkeypatch):
    """A kernel that takes subnormal inputs for zero is not timed."""
    right = packedconv.conv2d

    def flushing(input, packed, out, **arguments):
        kept = torch.where(input.abs() < 2.0**-126, torch.zeros_like(input), input)
        right(kept, packed, out=out, **arguments)

    wanted = asked(contenders=["sparse", "sparse_subnormal"], repeats=0)
    rows, _ = cpu_experiments.measure_layer(settings, wanted, 2)
    assert {row["implementation"] for row in rows} == set(wanted.contenders)
    monkeypatch.setattr(packedconv, "conv2d", flushing)
    with pytest.raises(CheckError, match="sparse_subnormal differs"):
        cpu_experiments.measure_layer(settings, wanted, 2)


@pytest.mark.parametrize("name", ["sparse", "sparse_bias_relu", "sparse_one_thread"])
def test_a_wrong_output_is_not_timed(settings, monkeypatch, name):
    right = packedconv.conv2d

    def wrong(input, packed, out, **arguments):
        right(input, packed, out=out, **arguments)
        one = torch.get_num_threads() == 1
        if {"sparse_bias_relu": "bias" in arguments, "sparse_one_thread": one}.get(name, True):
            out[0, 0, 0, 0] += 0.5

    monkeypatch.setattr(packedconv, "conv2d", wrong)
    with pytest.raises(CheckError, match="check of layer t_oc8_n1"):
        cpu_experiments.measure_layer(settings, asked(contenders=EVERYTHING), 2)


def test_the_ladder_is_measured(settings):
    rows, facts = cpu_experiments.measure_ladder(settings, asked(repeats=0), 2)
    for key, sparsity in (("s90", 0.9), ("s98", 0.98)):
        names = [rung["name"] for rung in facts["rungs"][key]]
        assert names[:2] == ["naive", "register"]
        assert set(names) | set(facts["left_out"][key]) == set(rungs.NAMES)
        timed = {row["implementation"] for row in rows if row["sparsity"] == sparsity}
        assert timed == {*names, "dense"}
        prepared = cpu_experiments.Prepared(settings, asked(), 2)
        assert facts["rungs"][key][-1]["schedule"] == prepared.plan(key).schedule


def test_a_slow_rung_is_executed_once(monkeypatch):
    monkeypatch.setattr(cpu_experiments, "SLOW_SECONDS", 0.0)
    calls = []
    contender = cpu_experiments.Contender("naive", "packed", lambda: calls.append(1))
    prepared = []
    contender = contender._replace(prepare=lambda: prepared.append(len(calls)))
    seconds, _ = cpu_experiments._time_rung(contender, 7, 3)
    assert len(seconds) == 1
    assert len(calls) == 2
    assert prepared == [0]
    monkeypatch.setattr(cpu_experiments, "SLOW_SECONDS", 60.0)
    assert len(cpu_experiments._time_rung(contender, 7, 3)[0]) == 7


def test_rotation_takes_every_copy_in_turn():
    image = torch.rand(LAYER.input_shape)
    weight = torch.rand(LAYER.weight_shape)
    turning = rotation.Rotation(LAYER, image, 3)
    seen = []
    sparse = turning.sparse(lambda *pair: seen.append(tuple(one.data_ptr() for one in pair)))
    dense = turning.dense("channels_last", weight)
    for _ in range(3):
        sparse()
    assert len(set(seen)) == 3
    assert len({address for address, _ in seen}) == 3
    sparse()
    assert seen[3] == seen[0]
    # The position is everybody's: what one has just touched, no other takes next.
    dense.execute()
    sparse()
    assert seen[4] == seen[2]
    # Inputs are copies of the one image, outputs are kept.
    output = turning._outputs["dense"][2]
    expected = torch.nn.functional.conv2d(image, weight, padding=1)
    torch.testing.assert_close(output.contiguous(), expected)


def test_how_many_copies(monkeypatch):
    pair = rotation.pair_bytes(LAYER)
    assert pair == 4 * (8 * 12 * 20 + 8 * 12 * 20)
    monkeypatch.setattr(rotation, "available_memory_bytes", lambda: 2**40)
    monkeypatch.setattr(rotation, "largest_cache_bytes", lambda: 10 * pair)
    assert rotation.copies(LAYER, 2**40) == 20
    assert rotation.copies(LAYER, 7 * pair) == 7
    assert rotation.copies(LAYER, 1) == 2
    monkeypatch.setattr(rotation, "largest_cache_bytes", lambda: 0)
    monkeypatch.setattr(rotation, "available_memory_bytes", lambda: 30 * pair)
    assert rotation.copies(LAYER, 2**40) == 5


@pytest.fixture
def stamp(tmp_path):
    path = tmp_path / "stamp.json"
    runpy_path = str(ROOT / "scripts" / "stamp.py")
    argv, sys.argv = sys.argv, [runpy_path, "--out", str(path)]
    try:
        runpy.run_path(runpy_path, run_name="__main__")
    finally:
        sys.argv = argv
    return str(path)


def test_the_step_writes_samples_and_facts(settings, stamp, tmp_path):
    out, facts_path = tmp_path / "layers" / "t.csv", tmp_path / "layers" / "t.json"
    text = json.dumps(experiment(LAYER, contenders=["sparse"], sparsities=[0.999]))
    cpu_steps.layers(settings, text, stamp, str(out), str(facts_path))
    rows = read_rows(str(out), EXPERIMENT_COLUMNS)
    assert {row["sparsity"] for row in rows} == {"0.999"}
    facts = json.loads(facts_path.read_text())
    assert facts["experiment"] == json.loads(text)
    assert facts["settings_hash"] == settings_hash(settings)
    assert len(list((tmp_path / "layers" / "archive").iterdir())) == 2
    cpu_steps.ladder(settings, json.dumps(experiment(LAYER)), stamp, str(out), str(facts_path))
    assert {"naive", "dense"} <= {row["implementation"] for row in read_csv(out)}


def test_a_full_disk_is_noticed_before_measuring(settings, stamp, tmp_path, monkeypatch):
    """The rows are those of the layer and its repeats, not of the paper's run."""
    paths = str(tmp_path / "t.csv"), str(tmp_path / "t.json")
    text = json.dumps(experiment(LAYER, repeats=3))
    counts = []
    monkeypatch.setattr(cpu_steps, "require_space", lambda path, rows: counts.append(rows))
    cpu_steps.layers(settings, text, stamp, *paths)
    written = len(read_rows(paths[0], EXPERIMENT_COLUMNS))
    assert written <= counts[0] == 100 * 2 * (1 + 3) * 5 * 2


def test_an_instruction_set_that_is_not_there_is_no_failure(settings, stamp, tmp_path, monkeypatch):
    monkeypatch.setenv("PACKEDCONV_ISA", "x86_64_v9")
    text = json.dumps(experiment(LAYER, environment={"PACKEDCONV_ISA": "x86_64_v9"}))
    out, facts_path = tmp_path / "t.csv", tmp_path / "t.json"
    cpu_steps.layers(settings, text, stamp, str(out), str(facts_path))
    assert read_csv(out) == []
    skipped = json.loads(facts_path.read_text())["skipped"]
    assert skipped == f"this processor has {', '.join(_core.isas())}, not x86_64_v9"


def test_a_gpu_has_no_such_experiment(settings, stamp):
    gpu = copy.deepcopy(settings)
    gpu["device"]["kind"] = "cuda"
    with pytest.raises(DeviceError, match="device: expected a CPU"):
        cpu_steps.layers(gpu, json.dumps(experiment(LAYER)), stamp, "t.csv", "t.json")


# Tables


def made_up(name, sparsity, contender, number):
    """Seconds: the sparse side is 4 times as fast as dense at 0.90 and 8 times at 0.98."""
    dense = 8e-3
    sparse = dense / (4 if sparsity == 0.9 else 8)
    seconds = {
        "dense": dense,
        "sparse": sparse,
        "sparse_one_thread": 1.6 * sparse,
        "sparse_bias_relu": 1.01 * sparse,
        "sparse_subnormal": 1.5 * sparse,
    }[contender]
    return seconds * (1 + 0.01 * number)


@pytest.fixture
def tabled(results):
    """Two layers, one of them without dense and one attempt more, and one left out."""
    wanted = [
        experiment(LAYER),
        experiment(OTHER, contenders=["sparse", "sparse_bias_relu"]),
        experiment(Layer("v9_oc8_n1", 1, 8, 8, 12, 20)),
    ]
    changes = {"v9_oc8_n1": {"skipped": "this processor has not x86_64_v9"}}
    paths = write_experiments(results, "layers", wanted, made_up, attempts=2, changes=changes)
    return load_experiments(results, paths)


def test_the_table(tabled):
    table = layer_table.layer_table(tabled, TITLES_OF_PARTS)
    assert list(table.columns) == layer_table.COLUMNS
    assert list(table["layer"]) == [*[LAYER.name] * 2, *[OTHER.name] * 2, "v9_oc8_n1"]
    first = table.iloc[0]
    # Round 2 of 0 to 4 is the median; the slower first attempt does not count.
    assert first["dense_seconds"] == pytest.approx(8e-3 * 1.02)
    assert first["sparse_seconds"] == pytest.approx(2e-3 * 1.02)
    for value in ("speedup", "speedup_low", "speedup_high"):
        assert first[value] == pytest.approx(4)
    assert first["threads_ratio"] == pytest.approx(1 / 1.6)
    assert first["one_thread_seconds"] == pytest.approx(1.6 * 2e-3 * 1.02)
    device = roofline.Device("d", 200e9, 50e9)
    bound = roofline.execution_bound(LAYER, int(first["nonzeros"]), device)
    assert first["bound_seconds"] == bound
    assert first["bound_fraction"] == pytest.approx(bound / first["sparse_seconds"])
    assert first["bound_by"] == "memory"
    assert first["attempts"] == 2
    assert not first["wide"]
    assert first["spread"] == pytest.approx(spread([1, 1.01, 1.02, 1.03, 1.04]))
    assert {key: first[key] for key in SCHEDULE} == SCHEDULE
    assert np.isnan(first["bias_relu_ratio"])
    other = table.iloc[2]
    assert other["bias_relu_ratio"] == pytest.approx(1.01)
    assert pd.isna(other["speedup"])
    assert (other["dilation"], other["groups"]) == (2, 4)
    assert table.iloc[4]["skipped"] == "this processor has not x86_64_v9"
    assert table.iloc[4][["sparse_seconds", "nonzeros"]].isna().all()


def test_what_a_reader_sees(tabled):
    table = layer_table.layer_table(tabled, TITLES_OF_PARTS)
    part, others = layer_table.shown(table)
    assert part.title == "Part"
    row = part.frame.iloc[0]
    assert row["Layer"] == "N 1, 8→8, 12×20, K 3"
    assert row["Speedup"] == "4.00 [4.00, 4.00]"
    assert row["Plan"] == "aligned 4×2, block 8, strip 4, prefetch, stream"
    assert "Bias+ReLU" not in part.frame
    assert others.intro == "Not measured: this processor has not x86_64_v9."
    assert list(others.frame["Bias+ReLU"]) == ["1.010 [1.010, 1.010]"] * 2
    assert others.frame.iloc[0]["Layer"].endswith("K 3, stride 2, dilation 2, groups 4")
    assert {"Speedup", "Dense (ms)", "All/one", "Subnormal"}.isdisjoint(others.frame)
    found = "\n".join(layer_table.findings(table))
    assert "Part, S 0.9: least speedup 4.00 (t_oc8_n1)" in found
    assert "longest time on all threads, in times on one: 0.625" in found
    assert "in times without: 1.010 [1.010, 1.010] (g_oc8_n2, S 0.9)" in found


@pytest.mark.parametrize(
    ("padding", "dilation", "ending"), [(1, 1, "K 3"), (2, 2, "dilation 2"), (0, 1, ", padding 0")]
)
def test_unusual_padding_is_shown(padding, dilation, ending):
    row = LAYER._replace(padding=padding, dilation=dilation)
    assert layer_table.layer_text(row).endswith(ending)


def test_subnormal_input_in_the_table(results):
    wanted = [experiment(LAYER, contenders=["sparse", "sparse_subnormal"])]
    paths = write_experiments(results, "layers", wanted, made_up)
    table = layer_table.layer_table(load_experiments(results, paths), TITLES_OF_PARTS)
    np.testing.assert_allclose(table["subnormal_ratio"], 1.5)
    (part,) = layer_table.shown(table)
    assert list(part.frame["Subnormal"]) == ["1.50 [1.50, 1.50]"] * 2
    found = "\n".join(layer_table.findings(table))
    assert "longest time of subnormal input, in times of the usual one: 1.500" in found


def test_dense_layouts_that_were_not_timed_are_named(results):
    wanted = [experiment(LAYER), experiment(OTHER)]
    skipped = {"prepacked_nchw": "this PyTorch has no oneDNN"}
    dense = {"dense": {"layout": "nchw", "skipped": skipped}}
    changes = {layer.name: dense for layer in (LAYER, OTHER)}
    paths = write_experiments(results, "layers", wanted, made_up, changes=changes)
    text = "dense layout prepacked_nchw was not timed for 2 layers: this PyTorch has no oneDNN"
    assert text in layer_table.notes(load_experiments(results, paths))


def test_wide_and_busy_points_are_marked(results):
    def jumpy(name, sparsity, contender, number):
        return 1e-3 * (1 + (number if sparsity == 0.98 and contender == "dense" else 0))

    changes = {LAYER.name: {"peak_bursts": [100e9, 200e9, 100e9]}}
    paths = write_experiments(results, "layers", [experiment(LAYER)], jumpy, changes=changes)
    table = layer_table.layer_table(load_experiments(results, paths), TITLES_OF_PARTS)
    assert list(table["wide"]) == [False, True]
    assert list(table["busy"]) == [True, True]
    shown = layer_table.shown(table)[0].frame
    assert shown["Spread"].iloc[0] == "0%†"
    assert shown["Spread"].iloc[1].endswith("%*†")
    found = layer_table.findings(table)
    assert "1 of 2 points are still too wide (*)" in found
    assert "2 of 2 points were timed while the machine was busy (†)" in found
    text = "\n".join(found)
    assert "(t_oc8_n1†), least fraction of the bound" in text
    assert "S 0.98: least speedup 3.00 (t_oc8_n1*†), least fraction" in text
    assert "in times on one: 1.000 [1.000, 1.000] (t_oc8_n1†, S 0.9)" in text


@pytest.mark.parametrize(("slip", "text"), [(1.0, "falls"), (3.0, "does not always fall")])
def test_whether_time_falls_with_sparsity(results, slip, text):
    def falling(name, sparsity, contender, number):
        return 1e-3 * (1 - sparsity) * (slip if sparsity == 0.999 else 1) * 10

    sparsities = [0.5, 0.997, 0.999]
    wanted = [experiment(LAYER, sparsities=sparsities, contenders=["sparse"])]
    paths = write_experiments(results, "layers", wanted, falling)
    table = layer_table.layer_table(load_experiments(results, paths), TITLES_OF_PARTS)
    assert f"t_oc8_n1: its time {text} from S 0.5 to 0.999" in layer_table.findings(table)


def test_the_preamble_says_how_cold(results):
    wanted = [experiment(LAYER), experiment(OTHER)]
    paths = write_experiments(results, "layers", wanted, made_up, contenders=["sparse"])
    text = layer_table.preamble(load_experiments(results, paths))
    assert "Warm caches" in text
    assert "200 GFLOP/s, 50.0 GB/s" in text
    assert "2 threads: 5 rounds of 2 executions" in text
    changes = {
        layer.name: {"rotated": {"copies": n, "set_bytes": n * 10**8, "cache_bytes": 480 * 10**6}}
        for layer, n in ((LAYER, 9), (OTHER, 10))
    }
    paths = write_experiments(
        results, "layers_cold", wanted, made_up, contenders=["sparse"], changes=changes
    )
    text = layer_table.preamble(load_experiments(results, paths))
    assert "9 to 10 inputs and outputs, together 900 to 1000 MB" in text
    assert text.endswith("has 480 MB.")


@pytest.mark.parametrize(
    ("cache_bytes", "ending"),
    [
        (480 * 10**6, "has 480 MB, which the set does not exceed for 1 of 1 layers, so that it"),
        (0, "The size of the last-level cache is not known."),
    ],
)
def test_the_preamble_says_what_may_not_be_cold(results, cache_bytes, ending):
    rotated = {"copies": 2, "set_bytes": 10**6, "cache_bytes": cache_bytes}
    changes = {LAYER.name: {"rotated": rotated}}
    paths = write_experiments(results, "cold", [experiment(LAYER)], made_up, changes=changes)
    assert ending in layer_table.preamble(load_experiments(results, paths))


def change_experiment(path, **changes):
    change_facts(path, experiment={**experiment(OTHER), **changes})


def change_samples(path, old, new):
    text = path.read_text().replace(old, new)
    path.write_text(text)
    change_facts(path, samples_sha256=text_sha256(text))


def change_ceilings(path):
    ceilings = path.parents[1] / "ceilings.csv"
    ceilings.write_text(ceilings.read_text().replace("200000000000.0", "400000000000.0"))


def change_facts(path, **changes):
    facts = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({**facts, **changes}))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda path: path.unlink(), ValueError, "expected the samples that"),
        (lambda path: path.with_suffix(".json").unlink(), FileNotFoundError, "not found"),
        (lambda path: path.write_text(path.read_text() + "x"), ValueError, "expected the samples"),
        (lambda path: change_facts(path, settings_hash="0"), ValueError, "settings_hash"),
        (lambda path: change_facts(path, stamp={}), ValueError, "g_oc8_n2: stamp: expected"),
        (lambda path: change_facts(path, threads=3), ValueError, "g_oc8_n2: threads: expected 2"),
        (
            lambda path: change_facts(path, comparable={"isa": "x86_64_v3"}),
            ValueError,
            "g_oc8_n2: comparable: expected",
        ),
        (change_ceilings, ValueError, "expected the ceilings that .*ceilings.json belongs to"),
        (lambda path: change_experiment(path, repeats=7), ValueError, "g_oc8_n2: repeats: expec"),
        (lambda path: change_experiment(path, set_bytes=7), ValueError, "g_oc8_n2: set_bytes"),
        (lambda path: change_experiment(path, widest_spread=1), ValueError, "widest_spread"),
        (
            lambda path: change_experiment(path, protocol={"rounds": 3}),
            ValueError,
            "protocol: expected .* as layer t_oc8_n1 has, got .*measure the older",
        ),
        (lambda path: change_samples(path, ",paper,", ",mine,"), ValueError, "run: expected"),
        (lambda path: change_samples(path, "cpu,", "gpu,"), ValueError, "device: expected"),
        (lambda path: change_samples(path, "g_oc8_n2", "other"), ValueError, "layer: expected"),
        (
            lambda path: change_experiment(path, layer=LAYER._asdict()),
            ValueError,
            "layer: expected g_oc8_n2 as the file's name, got t_oc8_n1",
        ),
    ],
)
def test_what_does_not_belong_together_is_refused(results, damage, error, message):
    wanted = [experiment(LAYER), experiment(OTHER)]
    paths = write_experiments(results, "layers", wanted, made_up)
    load_experiments(results, paths)
    damage(paths[1])
    with pytest.raises(error, match=message):
        load_experiments(results, paths)


def test_another_instruction_set_is_right_where_it_was_asked_for(results):
    environment = {"PACKEDCONV_ISA": "x86_64_v3"}
    wanted = [experiment(LAYER), experiment(OTHER, environment=environment)]
    variables = {"PACKEDCONV_ISA": "x86_64_v3", "ONEDNN_MAX_CPU_ISA": None}
    comparable = {"cpu": "Synthetic CPU", "isa": "x86_64_v3", "environment": variables}
    changes = {OTHER.name: {"comparable": comparable}}
    paths = write_experiments(results, "layers", wanted, made_up, changes=changes)
    table = layer_table.layer_table(load_experiments(results, paths), TITLES_OF_PARTS)
    assert list(table["isa"]) == ["x86_64_v4", "x86_64_v4", "x86_64_v3", "x86_64_v3"]
    # What it did not ask for must be as everywhere.
    variables["ONEDNN_MAX_CPU_ISA"] = "SSE41"
    change_facts(paths[1], comparable=comparable)
    with pytest.raises(ValueError, match="g_oc8_n2: comparable: expected"):
        load_experiments(results, paths)


def test_faster_than_the_peak_is_refused(results):
    paths = write_experiments(results, "layers", [experiment(LAYER)], lambda *point: 1e-9)
    with pytest.raises(CheckError, match="more than the measured peak of 200"):
        load_experiments(results, paths)


def test_nothing_measured_at_all(results):
    changes = {LAYER.name: {"skipped": "none"}}
    paths = write_experiments(results, "layers", [experiment(LAYER)], made_up, changes=changes)
    with pytest.raises(ValueError, match="expected a layer that was measured, got none"):
        load_experiments(results, paths)


def run_script(name, *arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(ROOT / "scripts" / f"{name}.py"), run_name="__main__")


def test_the_table_script(results, tmp_path, monkeypatch):
    paths = write_experiments(results, "layers", [experiment(LAYER)], made_up)
    out = tmp_path / "layers.csv"
    arguments = ("--table", "layers", "--results", results, "--samples", *paths, "--out", out)
    arguments += ("--titles", json.dumps(TITLES_OF_PARTS))
    run_script("table_layers", *arguments, monkeypatch=monkeypatch)
    assert [row["layer"] for row in read_csv(out)] == [LAYER.name] * 2
    text = (tmp_path / "layers.md").read_text()
    assert text.startswith("**Layers with warm caches, Synthetic CPU**")
    assert "### Part" in text
    assert r"\begin{longtable}" in (tmp_path / "layers.tex").read_text()


# The ladder, drawn


@pytest.fixture
def climbed(results):
    left_out = {"strip": rungs.SAME}
    skipped = {"prepacked_nchw": "this PyTorch has no oneDNN"}
    names = [name for name in rungs.NAMES if name not in left_out]

    def seconds(name, sparsity, contender, number):
        if contender == "dense":
            return 8e-3
        wide = number if (sparsity, contender) == (0.98, "tile") else 0.01 * number
        return (2.0 ** -names.index(contender)) * 0.1 * (1 - sparsity) * (1 + wide)

    schedules = [{"name": name, "schedule": {**SCHEDULE, "rows": 1}} for name in names]
    changes = {
        LAYER.name: {
            "rungs": {"s90": schedules, "s98": schedules},
            "left_out": {"s90": left_out, "s98": left_out},
            "dense": {"layout": "channels_last", "skipped": skipped},
            "peak_bursts": [200e9, 100e9, 100e9],
        }
    }
    paths = write_experiments(
        results,
        "ladder",
        [experiment(LAYER)],
        seconds,
        contenders=[*names, "dense"],
        changes=changes,
    )
    return load_experiments(results, paths), names, paths


def test_the_ladder_has_every_rung(climbed):
    experiments, names, _ = climbed
    table = ladder(experiments)
    assert list(table["rung"]) == 2 * list(rungs.NAMES)
    timed = table.dropna(subset="seconds")
    assert list(timed["rung"]) == 2 * names
    assert timed["seconds"].iloc[0] == pytest.approx(0.1 * 0.1 * 1.02)
    assert (timed["low"] <= timed["seconds"]).all()
    assert (timed["seconds"] <= timed["high"]).all()
    np.testing.assert_allclose(timed["speedup"], 8e-3 / timed["seconds"])
    assert set(table.loc[table["seconds"].isna(), "left_out"]) == {rungs.SAME}
    assert set(TITLES) == set(rungs.NAMES)
    assert timed.groupby("sparsity")["wide"].unique().map(list).to_dict() == {
        0.9: [False],
        0.98: [True],
    }
    assert timed["busy"].all()
    assert set(timed["attempts"]) == {1}
    assert table.loc[table["seconds"].isna(), ["spread", "attempts"]].isna().all(axis=None)


def test_the_ladder_draws_its_table(climbed):
    experiments, names, _ = climbed
    table = ladder(experiments)
    figure = ladder_figure(experiments, table)
    assert len(figure.axes) == 2
    for axes, (_, panel) in zip(figure.axes, table.groupby("sparsity"), strict=True):
        timed = panel.dropna(subset="seconds")
        widths = [bar.get_width() for bar in axes.patches]
        np.testing.assert_allclose(widths, 1e3 * timed["seconds"])
        labels = [text.get_text() for text in axes.get_yticklabels()]
        assert labels == [TITLES[name] for name in names]
        (dense,) = (line for line in axes.lines if line.get_label() == "dense")
        np.testing.assert_allclose(dense.get_xdata(), 8.0)
        texts = [text.get_text() for text in axes.texts]
        assert (
            f"{1e3 * timed['seconds'].iloc[-1]:.3g} ms, {timed['speedup'].iloc[-1]:.2g}×" in texts
        )
        assert axes.get_xscale() == "log"
    caption = next(text for text in figure.texts if text.get_gid() == "caption").get_text()
    caption = caption.replace("\n", " ")
    assert "Left out of t_oc8_n1, S 0.9: input copied in strips (the plan does without)" in caption
    assert "Plan of t_oc8_n1, S 0.98: aligned 1×2, block 8" in caption
    assert "5 rounds of 2 executions" in caption
    assert "What takes more than 50 ms is executed once a round" in caption
    assert "too far apart after the repeats: t_oc8_n1, S 0.98 (67%, measured 1 time)." in caption
    assert "Timed while the machine was busy: t_oc8_n1, S 0.9; t_oc8_n1, S 0.98." in caption
    assert "Dense layout prepacked_nchw was not timed for 1 layer: this PyTorch has no" in caption


def test_the_figure_script(climbed, results, tmp_path, monkeypatch):
    _, _, paths = climbed
    out = tmp_path / "ladder.pdf"
    arguments = ("--results", results, "--samples", *paths, "--out", out)
    run_script("figure_ladder", *arguments, monkeypatch=monkeypatch)
    assert len(read_csv(tmp_path / "ladder.csv")) == 2 * len(rungs.NAMES)
    assert (tmp_path / "ladder.png").stat().st_size > 10_000
