"""Measuring on a GPU: all steps, with a stand-in that computes on the CPU (fake_gpu.py).

No GPU was there: events, memory, clocks and kernels' names are the stand-in's. What
bench/accelerator.py itself calls is seen by a GPU alone.
"""

import argparse
import copy
import hashlib
import inspect
import json
import math
import os
import pathlib
import re
import runpy
import shutil
import stat
import subprocess
import sys
import warnings

import fake_gpu
import numpy as np
import pandas as pd
import pytest
import torch
from fake_gpu import FakeGpu, state
from synthetic import write_results

import packedconv
from packedconv import _core, cuda, samples_file
from packedconv.bench import accelerator as accelerators
from packedconv.bench import (
    events,
    gpu_ceilings,
    gpu_check,
    gpu_contenders,
    gpu_experiments,
    gpu_layer,
    gpu_state,
    lock,
    protocol,
    steps,
)
from packedconv.bench.contenders import UnavailableError
from packedconv.collect import collect
from packedconv.device import Device, DeviceError
from packedconv.evidence import claims, published
from packedconv.evidence import contenders as contenders_table
from packedconv.evidence.experiments import load_ablation, load_fixed_cost
from packedconv.evidence.samples import Results, against_dense
from packedconv.layer import Layer
from packedconv.plots import captions
from packedconv.plots.experiments import ablation_figure, fixed_cost_figure
from packedconv.samples_file import IMPLEMENTATIONS
from packedconv.script import CheckError
from packedconv.settings import validate_settings
from packedconv.weights import make_input, make_weight, make_weights, save_weights

ROOT = pathlib.Path(__file__).parents[2]
LAYER = Layer("oc8", 2, 4, 8, 12, 16)
SETTINGS = {
    "device": {
        "name": "a100-sxm4-40gb",
        "kind": "cuda",
        "family": "a100",
        "title": fake_gpu.TITLE,
        "match": fake_gpu.TITLE,
        "peak_flops": 19.5e12,
        "bandwidth": 1.555e12,
    },
    "run": "test",
    "seed": 1,
    "sparsities": [0.9, 0.5],
    "threads": 1,
    "protocol": {"rounds": 2, "executions": 3, "warmup_executions": 1, "trial_executions": 2},
    "contenders": "all",
    "layers": [dict(LAYER._asdict())],
}
CONV2D = inspect.signature(cuda.conv2d)
COLUMNS_OF = {
    "ablation": samples_file.ABLATION_COLUMNS,
    "fixed_cost": samples_file.FIXED_COST_COLUMNS,
}
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2 GiB\nIf reserved memory is >> allocated"


@pytest.fixture(autouse=True)
def quick(tmp_path, torch_threads, monkeypatch):
    """A lock of its own, and blocks, pairs and bursts as short as can be."""
    monkeypatch.setattr(lock, "FOLDER", str(tmp_path))
    monkeypatch.setattr(protocol, "WARMUP_SECONDS", 0.0)
    monkeypatch.setattr(events, "PAIR_SECONDS", 1e-5)
    monkeypatch.setattr(gpu_ceilings, "BURST_SECONDS", 1e-4)
    monkeypatch.setattr(gpu_ceilings, "MATRIX_SIZE", 64)
    monkeypatch.setattr(gpu_ceilings, "COPY_BYTES", 2**12)


@pytest.fixture
def gpu(monkeypatch):
    """The stand-in, found wherever a step looks for the device."""
    fake = FakeGpu()
    monkeypatch.setattr(steps, "require", lambda device_file: fake_gpu.DEVICE)
    monkeypatch.setattr(accelerators, "find", lambda device: fake)
    return fake


def changed(**values):
    return {**copy.deepcopy(SETTINGS), **values}


class Run:
    """The files of a run in results/<device>/<run>/."""

    def __init__(self, folder, settings=SETTINGS):
        self.settings = validate_settings(settings)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "settings.json").write_text(json.dumps(self.settings))
        (folder / "weights").mkdir(exist_ok=True)
        save_weights(self.path("weights/oc8.npz"), make_weights(self.settings, LAYER))
        digest = hashlib.sha256(pathlib.Path(_core.__file__).read_bytes()).hexdigest()
        (folder / "stamp.json").write_text(json.dumps({"sha256": digest}))

    def path(self, name):
        return str(self.folder / name)

    def inputs(self):
        return self.settings, "oc8", self.path("weights/oc8.npz"), self.path("stamp.json")

    def check(self):
        steps.check(*self.inputs(), self.path("check/oc8.csv"), self.path("check/oc8.json"))

    def change_errors(self, edit):
        """Collect as if the check had found other errors: those of the lines of its file."""
        path = self.folder / "check" / "oc8.csv"
        lines = path.read_text().splitlines(True)
        changed = "".join(edit(lines))
        assert changed != "".join(lines)
        path.write_text(changed)
        facts = json.loads(path.with_suffix(".json").read_text())
        facts["errors_sha256"] = samples_file.text_sha256(changed)
        samples_file.write_facts(str(path.with_suffix(".json")), facts)
        self.collect()

    def ceilings(self):
        out = self.path("ceilings.csv"), self.path("ceilings.json")
        steps.ceilings(self.settings, self.path("stamp.json"), *out)

    def bench(self):
        steps.bench(*self.inputs(), self.path("bench/oc8.csv"), self.path("bench/oc8.json"))
        return (
            samples_file.read_rows(self.path("bench/oc8.csv"), samples_file.SAMPLE_COLUMNS),
            json.loads((self.folder / "bench/oc8.json").read_text()),
        )

    def collect(self):
        collect(
            [self.path("bench/oc8.csv")],
            [self.path("bench/oc8.json")],
            [self.path("check/oc8.csv")],
            self.path("ceilings.csv"),
            self.path("ceilings.json"),
            self.path("samples.csv"),
            self.path("errors.csv"),
            self.path("peaks.json"),
        )

    def experiments(self):
        for name, more in (("ablation", ()), ("fixed_cost", (self.path("bench/oc8.json"),))):
            out = self.path(f"{name}/oc8.csv"), self.path(f"{name}/oc8.json")
            getattr(steps, name)(*self.inputs(), *more, *out)


@pytest.fixture
def run(tmp_path, gpu):
    return Run(tmp_path / "results" / "a100-sxm4-40gb" / "test")


def render(script, *arguments):
    path = str(ROOT / "scripts" / script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [path, *arguments])
        runpy.run_path(path, run_name="__main__")


class Clock:
    """A clock that work moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def work(self, seconds):
        def execute():
            self.now += seconds

        return execute


class TestEvents:
    def test_a_sample_is_the_mean_within_its_pair(self):
        clock = Clock()
        gpu = FakeGpu(clock)
        durations = iter([1.0, 2.0, 3.0, 5.0, 7.0, 9.0])

        def execute():
            clock.now += next(durations)

        assert events.time_pairs(gpu, execute, 2, 3) == [2.0, 7.0]
        assert gpu.synchronized == 1

    @pytest.mark.parametrize(
        ("seconds", "executions"), [(1.0, 1), (0.002, 1), (0.0011, 2), (1e-4, 20), (1e-9, 1000)]
    )
    def test_a_pair_spans_well_beyond_a_launch(self, monkeypatch, seconds, executions):
        monkeypatch.setattr(events, "PAIR_SECONDS", 0.002)
        clock = Clock()
        pace = events.calibrate(FakeGpu(clock), clock.work(seconds))
        assert pace.executions in (executions, executions + 1)
        assert pace.seconds == pytest.approx(seconds)

    def test_a_slow_first_execution_does_not_set_the_pace(self, monkeypatch):
        monkeypatch.setattr(events, "PAIR_SECONDS", 0.002)
        clock = Clock()
        durations = iter([5.0])

        def execute():
            clock.now += next(durations, 1e-4)

        assert events.calibrate(FakeGpu(clock), execute).executions >= 20

    @pytest.mark.parametrize(
        ("call", "compute", "bound"), [(1e-4, 1e-5, True), (8.9e-5, 1e-4, False), (0, 1e-3, False)]
    )
    def test_a_pair_that_the_host_cannot_fill_is_known(self, monkeypatch, call, compute, bound):
        """A device that works through its queue while the host still fills it."""
        monkeypatch.setattr(events, "PAIR_SECONDS", 0.002)
        now = {"host": 0.0, "device": 0.0}
        monkeypatch.setattr(events.time, "perf_counter", lambda: now["host"])

        def execute():
            now["host"] += call
            now["device"] = max(now["device"], now["host"]) + compute

        class Queue(FakeGpu):
            def record(self):
                now["device"] = max(now["device"], now["host"])
                return now["device"]

            def synchronize(self):
                now["host"] = max(now["host"], now["device"])

        pace = events.calibrate(Queue(), execute)
        assert pace.queue_seconds == pytest.approx(call)
        assert pace.call_bound is bound

    def test_warm_up(self, monkeypatch):
        monkeypatch.setattr(protocol, "WARMUP_SECONDS", 0.02)
        calls = []
        events.warm_up(lambda: calls.append(1), events.Pace(1, 0.001), 5)
        assert len(calls) == 20
        calls.clear()
        events.warm_up(lambda: calls.append(1), events.Pace(1, 1.0), 5)
        assert len(calls) == 5

    @pytest.mark.parametrize(
        ("input_bytes", "l2_bytes", "copies"),
        [
            (268 * 2**20, 40 * 2**20, 1),
            (160 * 2**20, 40 * 2**20, 1),
            (159 * 2**20, 40 * 2**20, 2),
            (2**20, 40 * 2**20, 160),
        ],
    )
    def test_rotation_exceeds_the_cache(self, input_bytes, l2_bytes, copies):
        assert events.rotation_count(input_bytes, l2_bytes) == copies
        assert copies * input_bytes >= events.ROTATION_FACTOR * l2_bytes

    def test_copies_go_round(self):
        following = events.rotate(["a", "b", "c"])
        assert [following() for _ in range(7)] == list("abcabca")


class TestSwitches:
    def read(self):
        cudnn = torch.backends.cudnn
        return cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, cudnn.benchmark

    @pytest.mark.parametrize("allow_tf32", [False, True])
    @pytest.mark.parametrize("benchmark", [False, True])
    def test_set_and_put_back(self, allow_tf32, benchmark):
        before = self.read()
        with gpu_contenders.switched(gpu_contenders.Switches(allow_tf32, benchmark)):
            assert self.read() == (allow_tf32, allow_tf32, benchmark)
        assert self.read() == before

    def test_put_back_after_an_error(self):
        before = self.read()
        switches = gpu_contenders.Switches(not before[0], not before[2])
        with pytest.raises(RuntimeError, match="surprise"), gpu_contenders.switched(switches):
            raise RuntimeError("surprise")
        assert self.read() == before

    def test_every_block_runs_with_its_own(self, gpu, monkeypatch):
        seen = {}
        convolve = torch.nn.functional.conv2d

        def watching(input, weight, **arguments):
            last = weight.is_contiguous(memory_format=torch.channels_last)
            key = str(weight.dtype), last and not weight.is_contiguous()
            seen.setdefault(key, set()).add(self.read())
            return convolve(input, weight, **arguments)

        monkeypatch.setattr(torch.nn.functional, "conv2d", watching)
        before = self.read()
        measure(gpu)
        assert self.read() == before
        # NCHW in FP32: PyTorch's default, FP32 benchmarked, TF32 benchmarked.
        assert seen["torch.float32", False] == {
            (True, True, False),
            (False, False, True),
            (True, True, True),
        }
        assert seen["torch.float32", True] == {(False, False, True)}
        assert seen["torch.float16", False] == {(True, True, True)}


def measure(gpu, settings=SETTINGS, layer=LAYER):
    weights = make_weights(settings, layer)
    return gpu_layer.measure_layer(validate_settings(settings), layer, weights, 1, gpu)


class TestLayer:
    def test_samples_and_facts(self, gpu):
        rows, facts = measure(gpu)
        assert len(rows) == len(IMPLEMENTATIONS) * 2 * 2 * 3
        assert {row["implementation"] for row in rows} == set(IMPLEMENTATIONS)
        assert {row["threads"] for row in rows} == {1}
        assert all(float(row["seconds"]) > 0 for row in rows)
        assert facts["skipped"] == {}
        assert facts["clocks_moved"] is False
        assert len(facts["peak_bursts"]) == 2
        assert len(facts["gpu_states"]) == 3
        assert facts["before"]["gpu"] == facts["after"]["gpu"] == state()
        assert set(facts["implementations"]) == set(IMPLEMENTATIONS)
        for found in facts["implementations"].values():
            assert found["kernels"] == ["fake_kernel"]
            assert (found["memory_standing"], found["max_memory_allocated"]) == (1000, 5000)
            for name in ("executions_per_pair", "pace_seconds", "queue_seconds"):
                assert set(found[name]) == {"s90", "s50"}
            assert set(found["call_bound"]) <= {"s90", "s50"}
        assert "stopped" not in facts
        assert set(facts["mapping"]) == {"s90", "s50"}
        for name, kernel in (("sparse", "paper"), ("sparse_column", "column")):
            plans = facts["implementations"][name]["plans"]
            assert {key: plan["kernel"] for key, plan in plans.items()} == {
                "s90": kernel,
                "s50": kernel,
            }
        for key, plan in facts["implementations"]["sparse"]["plans"].items():
            assert plan["slices"] == facts["mapping"][key]["slices"]
        assert facts["machine"]["tf32"]["dense"] is True
        assert facts["machine"]["tf32"]["dense_fp32"] is False
        json.dumps(facts, allow_nan=False)

    def test_layouts_and_conversion(self, gpu):
        rows, facts = measure(gpu)
        layouts = {row["implementation"]: row["layout"] for row in rows}
        assert layouts["sparse"] == layouts["sparse_column"] == "packed"
        assert layouts["dense"] == layouts["dense_fp32"] == layouts["dense_tf32"] == "nchw"
        assert layouts["dense_channels_last"] == "channels_last"
        found = facts["implementations"]
        assert found["dense"]["conversion_seconds"] is None
        for name in ("dense_channels_last", "dense_fp16"):
            seconds = found[name]["conversion_seconds"]
            if name == "dense_channels_last" or layouts[name] == "channels_last":
                assert seconds["input"] > 0
                assert seconds["output"] > 0
        assert found["dense_fp16"]["dtype"] == "float16"
        assert set(found["dense_fp16"]["layout_trials"]["seconds"]) == {"nchw", "channels_last"}

    def test_inputs_are_rotated_past_the_cache(self, gpu):
        rotation = measure(gpu)[1]["rotation"]
        size = 4 * math.prod(LAYER.input_shape)
        copies = rotation["copies"]
        assert copies["nchw float32"] == math.ceil(4 * gpu.l2_bytes / size)
        assert copies["nchw float16"] == math.ceil(4 * gpu.l2_bytes / (size / 2))
        gpu.l2_bytes = size // 4
        assert measure(gpu)[1]["rotation"]["copies"]["nchw float32"] == 1

    def test_rotation_leaves_memory_for_others(self, gpu, monkeypatch):
        size = 4 * math.prod(LAYER.input_shape)
        monkeypatch.setattr(gpu, "free_bytes", lambda: 8 * size)
        packed = {"s50": packedconv.pack(torch.ones(LAYER.weight_shape))}
        image = torch.from_numpy(make_input(LAYER, 1))
        assert len(gpu_contenders.LayerData(gpu, LAYER, image, packed).inputs()) == 3

    def test_paper_protocol_has_two_sides(self, gpu):
        rows, facts = measure(gpu, changed(contenders="paper-protocol"))
        assert {row["implementation"] for row in rows} == {"sparse", "dense"}
        assert set(facts["implementations"]) == {"sparse", "dense"}
        assert facts["skipped"] == {}
        assert facts["mapping"]["s50"]["slices"] in gpu_contenders.TRIED_SLICES

    @pytest.mark.parametrize("when", ["at first", "in a round"])
    def test_out_of_memory_is_a_reason_not_a_failure(self, gpu, monkeypatch, capsys, when):
        make = gpu_contenders._dense_execute
        rounds = []
        burst = gpu_ceilings.Peak.burst
        monkeypatch.setattr(
            gpu_ceilings.Peak, "burst", lambda *given: rounds.append(1) or burst(*given)
        )

        def failing(data, key, implementation, layout):
            execute = make(data, key, implementation, layout)

            def fail():
                if when == "at first" or rounds:
                    raise RuntimeError(OUT_OF_MEMORY)
                execute()

            return fail if implementation == "dense_fp32" else execute

        monkeypatch.setattr(gpu_contenders, "_dense_execute", failing)
        rows, facts = measure(gpu, changed(protocol={**SETTINGS["protocol"], "executions": 30}))
        reason = "out of memory: CUDA out of memory. Tried to allocate 2 GiB"
        assert facts["skipped"] == {"dense_fp32": reason}
        assert "dense_fp32" not in {row["implementation"] for row in rows}
        assert len(rows) == (len(IMPLEMENTATIONS) - 1) * 2 * 2 * 30
        assert f"layer oc8: skipped dense_fp32: {reason}" in capsys.readouterr().err
        assert gpu.emptied > 0
        assert ("dense_fp32" in facts["implementations"]) == (when == "in a round")

    @pytest.mark.parametrize("implementation", ["sparse", "dense"])
    def test_without_the_two_sides_the_layer_fails(self, gpu, monkeypatch, implementation):
        if implementation == "sparse":
            gpu.fails["paper"] = RuntimeError(OUT_OF_MEMORY)
        else:
            real = gpu_contenders._dense_execute

            def failing(data, key, name, layout):
                if name == "dense":
                    raise RuntimeError(OUT_OF_MEMORY)
                return real(data, key, name, layout)

            monkeypatch.setattr(gpu_contenders, "_dense_execute", failing)
        with pytest.raises(
            DeviceError, match=f"layer oc8: {implementation} cannot be timed on NVIDIA.*memory"
        ):
            measure(gpu)

    def test_a_fault_of_this_program_is_none_of_the_devices(self, gpu):
        gpu.fails["column"] = TypeError("conv2d() got an unexpected keyword argument")
        with pytest.raises(TypeError, match="unexpected keyword"):
            measure(gpu)

    def test_memory_is_given_back_after_the_failure(self, gpu, monkeypatch):
        """Not while the error still holds tensors."""
        handled = []
        monkeypatch.setattr(gpu, "empty_cache", lambda: handled.append(sys.exc_info()[0]))
        make = gpu_contenders._dense_execute

        def failing(data, key, implementation, layout):
            if implementation in ("dense_fp32", "dense_fp16"):
                raise RuntimeError(OUT_OF_MEMORY)
            return make(data, key, implementation, layout)

        monkeypatch.setattr(gpu_contenders, "_dense_execute", failing)
        assert set(measure(gpu)[1]["skipped"]) == {"dense_fp32", "dense_fp16"}
        assert handled
        assert set(handled) == {None}

    def test_no_copies_of_an_input_stay_that_nobody_times(self, gpu, monkeypatch):
        datas = []
        make = gpu_contenders.LayerData

        def keeping(*arguments):
            datas.append(make(*arguments))
            return datas[-1]

        monkeypatch.setattr(gpu_contenders, "LayerData", keeping)
        rows, _ = measure(gpu)
        layouts = {row["implementation"]: row["layout"] for row in rows}
        assert set(datas[0]._inputs) == {
            ("nchw", torch.float32),
            ("channels_last", torch.float32),
            (layouts["dense_fp16"], torch.float16),
        }

    def test_no_tf32_before_ampere(self, gpu):
        gpu.compute_capability = (5, 3)
        rows, facts = measure(gpu)
        assert facts["skipped"] == {
            "dense_tf32": "TF32 needs compute capability 8.0, this GPU has 5.3"
        }
        assert "dense_tf32" not in {row["implementation"] for row in rows}

    def test_the_column_kernel_may_be_missing(self, gpu):
        plan = gpu.plan

        def refusing(layer, packed, implementation, config=None):
            if implementation == "column":
                raise ValueError("implementation: no tile of the column kernel")
            return plan(layer, packed, implementation, config)

        gpu.plan = refusing
        facts = measure(gpu)[1]
        assert facts["skipped"] == {"sparse_column": "implementation: no tile of the column kernel"}

    def test_kernels_that_nobody_saw(self, gpu):
        gpu.known_kernels = False
        found = measure(gpu)[1]["implementations"]["dense"]
        assert found["kernels"] is None
        assert found["kernels_unknown"] == "no profiler: it is not there"

    def test_clocks_that_moved_are_warned_of(self, gpu, capsys):
        gpu.states = [state(), state(), state(sm_clock_mhz=1200.0), state()]
        facts = measure(gpu)[1]
        assert facts["clocks_moved"] is True
        message = capsys.readouterr().err
        assert "warning: layer oc8: the clocks moved (1200 to 1410 MHz)" in message

    def test_throttling_is_warned_of(self, gpu, capsys):
        gpu.states = [state(throttle_reasons=["power cap"])]
        facts = measure(gpu)[1]
        assert facts["clocks_moved"] is False
        assert facts["throttled"] == ["power cap"]
        assert "slowed by power cap" in capsys.readouterr().err

    def test_unknown_clocks_are_said(self, gpu, capsys):
        gpu.states = [state(sm_clock_mhz=None, throttle_reasons=None, source=None)]
        facts = measure(gpu)[1]
        assert facts["clocks_moved"] is None
        assert "whether they moved is not known" in capsys.readouterr().err

    def test_a_state_of_an_idle_gpu_tells_nothing(self, gpu, capsys):
        gpu.busy = False
        gpu.states = [state(), state(), state(sm_clock_mhz=300.0, throttle_reasons=["power cap"])]
        facts = measure(gpu)[1]
        assert [one["under_load"] for one in facts["gpu_states"]] == [False] * 3
        assert facts["clocks_moved"] is None
        assert facts["throttled"] == []
        assert "whether they moved is not known" in capsys.readouterr().err

    def test_the_profiler_comes_after_the_rounds(self, gpu, monkeypatch):
        order = []
        kernels, rounds = gpu.kernels, gpu_layer.run_rounds
        monkeypatch.setattr(
            gpu, "kernels", lambda execute: order.append("profiler") or kernels(execute)
        )
        monkeypatch.setattr(
            gpu_layer, "run_rounds", lambda *given: order.append("rounds") or rounds(*given)
        )
        measure(gpu)
        assert order == ["rounds", *["profiler"] * len(IMPLEMENTATIONS)]

    def test_steady_clocks_are_nothing_to_say(self, gpu, capsys):
        measure(gpu)
        assert capsys.readouterr().err == ""


class TestMapping:
    def data(self, gpu, layer=LAYER, sparsities=(0.5,)):
        packed = {
            f"s{round(100 * one)}": packedconv.pack(torch.from_numpy(make_weight(layer, one, 1)))
            for one in sparsities
        }
        image = torch.from_numpy(make_input(layer, 1))
        return gpu_contenders.LayerData(gpu, layer, image, packed)

    def test_the_fastest_is_chosen_and_all_trials_kept(self):
        clock = Clock()
        gpu = FakeGpu(clock)

        def sparse(layer, input, packed, out, implementation, config=None):
            clock.now += {(8, 2, 4, 2): 1.0}.get(config, 1.0 + sum(config))

        gpu.sparse = sparse
        mappings, found = gpu_contenders.choose_mappings(self.data(gpu), 3)
        assert mappings == {"s50": (8, 2, 4, 2)}
        facts = found["s50"]
        assert {name: facts[name] for name in samples_file.MAPPING_FIELDS} == {
            "col_per_warp": 8,
            "rows_per_thread": 2,
            "warps_per_block": 4,
            "slices": 2,
        }
        assert len(facts["trials"]) == len(fake_gpu.MAPPINGS) * len(gpu_contenders.TRIED_SLICES)
        assert all(trial["pace_seconds"] > 0 for trial in facts["trials"])
        finalists = [trial for trial in facts["trials"] if len(trial["seconds"]) == 3]
        assert len(finalists) == gpu_contenders.FINALISTS

    def test_every_sparsity_has_its_own(self):
        clock = Clock()
        gpu = FakeGpu(clock)
        data = self.data(gpu, sparsities=(0.5, 0.9))
        best = {data.packed["s50"].nnz: (8, 2, 4, 2), data.packed["s90"].nnz: (32, 4, 2, 1)}
        run = []

        def sparse(layer, input, packed, out, implementation, config=None):
            clock.now += 1.0 if config == best[packed.nnz] else 2.0
            run.append((packed.nnz, config))

        gpu.sparse = sparse
        mappings, facts = gpu_contenders.choose_mappings(data, 1)
        assert mappings == {"s50": (8, 2, 4, 2), "s90": (32, 4, 2, 1)}
        assert (facts["s50"]["slices"], facts["s90"]["slices"]) == (2, 1)
        prepared = gpu_contenders.prepare_sparse(data, "sparse", "paper", mappings)
        run.clear()
        for contender in prepared.contenders.values():
            contender.execute()
        assert run == list(best.items())
        plans = prepared.facts["plans"]
        assert {key: plan["slices"] for key, plan in plans.items()} == {"s50": 2, "s90": 1}

    @pytest.mark.parametrize("pairs", [1, 2])
    def test_the_pair_that_set_the_pace_is_none_of_the_trials(self, pairs):
        """A mapping that is fast but then falls off is not chosen for its first pair."""
        clock = Clock()
        gpu = FakeGpu(clock)
        calls = []

        def sparse(layer, input, packed, out, implementation, config=None):
            calls.append(config)
            early = calls.count(config) < 3
            clock.now += 1.0 if config == (8, 2, 4, 1) or early else 5.0
            clock.now -= 0.9 if config == (4, 8, 2, 1) and early else 0.0

        gpu.sparse = sparse
        mappings, _ = gpu_contenders.choose_mappings(self.data(gpu), pairs)
        assert mappings["s50"] == (8, 2, 4, 1)

    def test_a_slow_first_pair_does_not_decide(self):
        """The choice is by the median of a finalist's pairs."""
        clock = Clock()
        gpu = FakeGpu(clock)
        calls = []

        def sparse(layer, input, packed, out, implementation, config=None):
            calls.append(config)
            best = config == (4, 8, 2, 1)
            clock.now += 1.5 if best and calls.count(config) < 3 else 1.0 if best else 2.0

        gpu.sparse = sparse
        assert gpu_contenders.choose_mappings(self.data(gpu), 5)[0] == {"s50": (4, 8, 2, 1)}

    def test_what_does_not_fit_is_skipped_with_its_reason(self, gpu, monkeypatch):
        plan = gpu.plan

        def refusing(layer, packed, implementation, config=None):
            if config[0] == 4:
                raise ValueError("mapping: a tile too large")
            return plan(layer, packed, implementation, config)

        monkeypatch.setattr(gpu, "plan", refusing)
        mappings, facts = gpu_contenders.choose_mappings(self.data(gpu), 1)
        assert mappings["s50"][0] != 4
        reasons = [trial["skipped"] for trial in facts["s50"]["trials"] if "skipped" in trial]
        assert reasons == ["mapping: a tile too large"] * len(gpu_contenders.TRIED_SLICES)

    def test_no_mapping_at_all(self, gpu):
        gpu.fails["paper"] = RuntimeError("no kernel image")
        with pytest.raises(UnavailableError, match=r"no mapping .* runs: no kernel image"):
            gpu_contenders.choose_mappings(self.data(gpu), 1)

    def test_tf32_weight_has_an_alignment_of_its_own(self):
        weight = torch.rand(LAYER.weight_shape)
        moved = gpu_contenders._apart(weight)
        assert torch.equal(moved, weight)
        assert moved.is_contiguous()
        assert moved.data_ptr() % 32 == 16 or weight.data_ptr() % 32 != moved.data_ptr() % 32

    def test_every_compiled_mapping_is_in_the_ablation(self):
        """What the kernel is compiled for, each with every number of slices."""
        compiled = _core.cuda_kernels()["paper"]
        gpu = FakeGpu()
        gpu.mappings = lambda: [tuple(mapping) for mapping in compiled]
        found = gpu_contenders.all_mappings(gpu)
        assert len(found) == len(set(found)) == len(compiled) * len(gpu_contenders.TRIED_SLICES)
        assert {mapping[:3] for mapping in found} == {tuple(one[:3]) for one in compiled}


class TestState:
    def smi(self, folder, monkeypatch, answer):
        """A program in place of nvidia-smi that runs `answer`, a shell script."""
        path = folder / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{answer}\n")
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def test_nvidia_smi(self, tmp_path, monkeypatch):
        answer = 'echo "$@" > "$(dirname "$0")/called"; echo "1410, 1215, 45, 312.5, 0x24"'
        self.smi(tmp_path, monkeypatch, answer)
        found = gpu_state.read_state("GPU-1")
        assert found == state(
            temperature_c=45.0,
            power_w=312.5,
            throttle_reasons=["power cap", "temperature (driver)"],
        )
        assert "--id=GPU-1 --query-gpu=clocks.sm,clocks.mem" in (tmp_path / "called").read_text()

    def test_an_older_driver_knows_other_names(self, tmp_path, monkeypatch):
        answer = 'case "$*" in *event*) exit 2;; esac; echo "1410, 1215, 45, [N/A], 0x1"'
        self.smi(tmp_path, monkeypatch, answer)
        found = gpu_state.read_state("0")
        assert found["power_w"] is None
        assert found["throttle_reasons"] == []

    def test_jetson(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        for name, text in {
            "sys/class/devfreq/57000000.gpu/cur_freq": "921600000",
            "sys/class/thermal/thermal_zone0/type": "CPU-therm",
            "sys/class/thermal/thermal_zone0/temp": "60000",
            "sys/class/thermal/thermal_zone1/type": "GPU-therm",
            "sys/class/thermal/thermal_zone1/temp": "41500",
            "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0/in_power0_input": "4200",
        }.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text + "\n")
        assert gpu_state.read_state("0", root=str(tmp_path)) == {
            "sm_clock_mhz": 921.6,
            "memory_clock_mhz": None,
            "temperature_c": 41.5,
            "power_w": 4.2,
            "throttle_reasons": None,
            "source": "sysfs",
        }

    def test_nothing_tells(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        found = gpu_state.read_state("0", root=str(tmp_path))
        assert set(found.values()) == {None}
        assert gpu_state.clocks_moved([found, found]) is None
        assert gpu_state.throttled([found]) == []
        assert gpu_state.driver_version() is None

    @pytest.mark.parametrize(
        ("clocks", "moved"),
        [([1410, 1410], False), ([1410, 1390], False), ([1410, 1350], True), ([1410], None)],
    )
    def test_moved(self, clocks, moved):
        states = [state(sm_clock_mhz=float(clock)) for clock in clocks]
        assert gpu_state.clocks_moved(states) is moved


class TestCheck:
    def rows(self, gpu, layer=LAYER):
        weights = {sparsity: make_weight(layer, sparsity, 1) for sparsity in (0.9, 0.5)}
        return gpu_check.check_layer(gpu, "g", "test", layer, weights, make_input(layer, 1))

    def test_rows(self, gpu):
        rows = self.rows(gpu)
        kinds = [(row["implementation"], row["reference"], row["weights"]) for row in rows[:11]]
        assert sorted(kinds) == sorted(
            [
                *((name, "float64", "packed") for name in IMPLEMENTATIONS),
                *(("sparse", name, "packed") for name in ("dense", "dense_fp32")),
                *(("sparse", name, "original") for name in ("dense", "dense_fp32")),
            ]
        )
        assert len(rows) == 22
        by_kind = dict(zip(kinds, rows[:11]))
        assert by_kind["sparse", "float64", "packed"]["bound_fraction"] <= 1
        assert by_kind["dense_fp16", "float64", "packed"]["bound_fraction"] > 1

    @pytest.mark.parametrize(
        ("config", "name"),
        [(None, "sparse"), ((8, 2, 4, 2), r"sparse, mapping \(8, 2, 4, 2\)"), (1, "sparse_column")],
    )
    def test_a_wrong_kernel_is_named(self, gpu, config, name):
        sparse = gpu.sparse

        def wrong(layer, input, packed, out, implementation, given=None):
            sparse(layer, input, packed, out, implementation, given)
            chosen = given == config if implementation == "paper" else config == 1
            if chosen:
                out[0, 3, 5, 7] += 1e-3

        gpu.sparse = wrong
        with pytest.raises(CheckError, match=rf"check of layer oc8, .*, {name}: output \(0, 3, 5"):
            self.rows(gpu)

    def test_a_mapping_that_fits_has_to_run(self, gpu):
        gpu.fails["paper", (4, 8, 2, 4)] = RuntimeError("an illegal memory access")
        with pytest.raises(CheckError, match=r"mapping \(4, 8, 2, 4\): .* illegal memory access"):
            self.rows(gpu)

    def test_a_kernel_that_does_not_fit_has_no_row(self, gpu, monkeypatch):
        plan = gpu.plan

        def refusing(layer, packed, implementation, config=None):
            if implementation == "column" or config == (8, 2, 4, 1):
                raise ValueError("a tile too large")
            return plan(layer, packed, implementation, config)

        monkeypatch.setattr(gpu, "plan", refusing)
        gpu.fails["column"] = gpu.fails["paper", (8, 2, 4, 1)] = AssertionError("was run")
        assert "sparse_column" not in {row["implementation"] for row in self.rows(gpu)}

    def test_an_output_that_is_not_written_is_wrong(self, gpu):
        gpu.sparse = lambda *arguments: None
        with pytest.raises(CheckError, match="is nan"):
            self.rows(gpu)

    def test_short_memory_moves_the_reference_to_the_cpu(self, gpu, monkeypatch):
        real, devices = gpu_check.compare_with_float64, []

        def short(output, layer, image, weight, device=None):
            devices.append(device)
            if device is None:
                raise RuntimeError(OUT_OF_MEMORY)
            return real(output, layer, image, weight, device)

        monkeypatch.setattr(gpu_check, "compare_with_float64", short)
        assert len(self.rows(gpu)) == 22
        assert devices[:2] == [None, torch.device("cpu")]

    def test_a_dense_setting_that_does_not_run_has_no_row(self, gpu, monkeypatch, capsys):
        convolve = torch.nn.functional.conv2d

        def failing(input, weight, **arguments):
            if input.dtype == torch.float16:
                raise RuntimeError("no FP16 here")
            return convolve(input, weight, **arguments)

        monkeypatch.setattr(torch.nn.functional, "conv2d", failing)
        assert "dense_fp16" not in {row["implementation"] for row in self.rows(gpu)}
        said = "layer oc8: no errors of dense_fp16: it failed at sparsity 0.9: no FP16 here\n"
        assert capsys.readouterr().err == said

    @pytest.mark.parametrize("call", [1, 2, 3, 4])
    def test_a_dense_setting_has_all_of_its_rows_or_none(self, gpu, monkeypatch, capsys, call):
        """Whichever of its two convolutions fails, at the first or the second sparsity."""
        dense, calls = gpu_check._dense, []

        def failing(layer, image, weight, implementation):
            calls.extend([1] if implementation == "dense_fp32" else [])
            if implementation == "dense_fp32" and len(calls) == call:
                raise RuntimeError(OUT_OF_MEMORY)
            return dense(layer, image, weight, implementation)

        monkeypatch.setattr(gpu_check, "_dense", failing)
        rows = self.rows(gpu)
        assert len(rows) == 2 * (11 - 3)
        assert "dense_fp32" not in {row["implementation"] for row in rows}
        assert "dense_fp32" not in {row["reference"] for row in rows}
        assert "no errors of dense_fp32: it failed at sparsity 0." in capsys.readouterr().err

    def test_dense_settings_are_those_that_are_timed(self, gpu, monkeypatch):
        convolve, seen = torch.nn.functional.conv2d, set()

        def watching(input, weight, **arguments):
            cudnn = torch.backends.cudnn
            if input.dtype != torch.float64:
                seen.add((cudnn.allow_tf32, cudnn.benchmark))
            return convolve(input, weight, **arguments)

        monkeypatch.setattr(torch.nn.functional, "conv2d", watching)
        self.rows(gpu)
        assert seen == {tuple(setting.switches) for setting in gpu_contenders.DENSE.values()}


class TestCeilings:
    def test_rows(self, gpu):
        rows = gpu_ceilings.measure_ceilings("g", "test", 1, gpu, trials=2)
        assert [(row["quantity"], row["trial"], row["threads"]) for row in rows] == [
            ("peak_flops", 0, 1),
            ("bandwidth", 0, 1),
            ("peak_flops", 1, 1),
            ("bandwidth", 1, 1),
        ]
        assert all(row["value"] > 0 for row in rows)

    def test_arithmetic(self, monkeypatch):
        clock = Clock()
        gpu = FakeGpu(clock)
        monkeypatch.setattr(torch, "mm", lambda a, b, out: clock.work(1e-3)())
        peak = gpu_ceilings.Peak(gpu)
        monkeypatch.setattr(gpu_ceilings, "BURST_SECONDS", 0.01)
        assert peak.burst() == pytest.approx(2 * 64**3 / 1e-3)

    def test_small_memory(self, gpu, monkeypatch):
        monkeypatch.setattr(gpu_ceilings, "MATRIX_SIZE", 4096)
        monkeypatch.setattr(gpu, "free_bytes", lambda: 8 * 3 * 4 * 100**2)
        assert gpu_ceilings.Peak(gpu).size == 64


class TestExperiments:
    def test_ablation(self, run):
        run.bench()
        run.experiments()
        rows = samples_file.read_rows(run.path("ablation/oc8.csv"), samples_file.ABLATION_COLUMNS)
        mappings = {tuple(int(row[name]) for name in samples_file.MAPPING_FIELDS) for row in rows}
        assert mappings == {
            (*mapping[:3], slices) for mapping in fake_gpu.MAPPINGS for slices in (1, 2, 4)
        }
        # The run has 0.9 and not 0.98.
        assert {row["sparsity"] for row in rows} == {"0.9"}
        assert {row["execution"] for row in rows} == {"0", "1"}
        facts = json.loads(pathlib.Path(run.path("ablation/oc8.json")).read_text())
        assert facts["clocks_moved"] is False
        assert facts["comparable"]["gpu"] == fake_gpu.TITLE

    def test_a_mapping_left_out_is_a_row(self, run, gpu):
        gpu.fails["paper", (4, 8, 2, 2)] = RuntimeError("too many resources")
        run.bench()
        run.experiments()
        rows = samples_file.read_rows(run.path("ablation/oc8.csv"), samples_file.ABLATION_COLUMNS)
        left_out = [row for row in rows if row["skipped"]]
        assert [(row["skipped"], row["seconds"]) for row in left_out] == [
            ("too many resources", "")
        ]

    def test_fixed_cost(self, run):
        _, facts = run.bench()
        run.experiments()
        columns = samples_file.FIXED_COST_COLUMNS
        rows = samples_file.read_rows(run.path("fixed_cost/oc8.csv"), columns)
        timed = {(row["experiment"], row["implementation"], row["slices"]) for row in rows}
        # At the lowest sparsity, whose nonzeros are thinned.
        chosen = str(facts["mapping"]["s50"]["slices"])
        assert timed == {
            ("nonzeros", "sparse", chosen),
            ("nonzeros", "sparse_column", ""),
            *(("slices", "sparse", slices) for slices in "1248"),
            ("stores", "fill", ""),
            ("stores", "copy", ""),
            ("launch", "fill", ""),
        }
        counts = {int(row["nonzeros"]) for row in rows if row["experiment"] == "nonzeros"}
        full = round(0.5 * LAYER.weight_count)
        assert counts == {round(share * full) for share in gpu_experiments.KEPT}
        assert min(counts) == 0
        size = 4 * math.prod(LAYER.output_shape)
        assert {row["implementation"]: row["bytes"] for row in rows if row["bytes"]} == {
            "fill": "4",
            "copy": str(2 * size),
        }

    def test_fixed_cost_needs_the_mapping(self, run):
        (run.folder / "bench").mkdir()
        pathlib.Path(run.path("bench/oc8.json")).write_text("{}")
        with pytest.raises(ValueError, match="measure the layer first"):
            steps.fixed_cost(
                *run.inputs(), run.path("bench/oc8.json"), run.path("x.csv"), run.path("x.json")
            )

    @pytest.mark.parametrize("name", ["ablation", "fixed_cost"])
    def test_a_cpu_is_refused(self, tmp_path, name):
        settings = changed(device={"name": "cpu", "kind": "cpu", "family": "cpu"})
        del settings["contenders"]
        more = ["facts"] if name == "fixed_cost" else []
        with pytest.raises(DeviceError, match=r"expected a GPU, .* got cpu"):
            getattr(steps, name)(settings, "oc8", "w", "s", *more, "out", "facts")

    def test_thinned_weights_are_nested(self):
        weight = make_weight(LAYER, 0.5, 1)
        kept = [gpu_experiments.thinned(weight, share, 7) for share in (1.0, 0.5, 0.25, 0.0)]
        assert np.array_equal(kept[0], weight)
        assert not kept[-1].any()
        for larger, smaller in zip(kept, kept[1:], strict=False):
            assert np.array_equal(smaller[smaller != 0], larger[smaller != 0])
        counts = [np.count_nonzero(one) for one in kept]
        assert counts == [round(share * counts[0]) for share in (1.0, 0.5, 0.25, 0.0)]

    @pytest.mark.parametrize(
        ("sparsities", "found"),
        [([0.9, 0.94, 0.98], [0.9, 0.98]), ([0.5, 0.7, 0.6], [0.5, 0.7]), ([0.8], [0.8])],
    )
    def test_sparsities_of_the_ablation(self, sparsities, found):
        assert gpu_experiments.ablation_sparsities(sparsities) == found


class TestWhole:
    """From weights to figures."""

    def test_files_are_whole_and_render(self, run, tmp_path, gpu, capsys, monkeypatch):
        # Bursts of a tenth of a millisecond tell nothing about how busy a machine is.
        monkeypatch.setattr("packedconv.collect.STEADY_SHARE", 0.0)
        gpu.compute_capability = (5, 3)
        run.check()
        run.ceilings()
        run.bench()
        run.collect()
        run.experiments()
        results = Results.load(run.folder)
        # What the paper's figures and statements read has its two sides and no more.
        assert set(results.samples["implementation"]) == {"sparse", "dense"}
        assert set(results.every_sample["implementation"]) == set(IMPLEMENTATIONS) - {"dense_tf32"}
        assert results.peaks["peak_of"] == gpu_ceilings.PEAK_OF
        assert results.peaks["threads"] == 1

        table = contenders_table.contenders(results)
        assert len(table) == 2 * len(IMPLEMENTATIONS)
        skipped = table[table["implementation"] == "dense_tf32"]
        assert (
            list(skipped["skipped"]) == ["TF32 needs compute capability 8.0, this GPU has 5.3"] * 2
        )
        assert skipped["seconds"].isna().all()
        sparse = table[table["implementation"] == "sparse"]
        assert (sparse["ratio"] == 1).all()
        others = table[table["skipped"].isna()]
        assert (others["ratio_low"] <= others["ratio"]).all()
        assert (others["kernels"] == "fake_kernel").all()
        column = table[table["implementation"] == "sparse_column"]
        assert (column["column_ratio"] == 1).all()
        assert list(sparse["column_ratio"]) == pytest.approx(list(1 / column["ratio"]))

        stem = tmp_path / "figures" / "g"
        folder = str(run.folder)
        render("contenders.py", "--results", folder, "--out", f"{stem}/contenders.csv")
        text = (stem / "contenders.md").read_text()
        assert "skipped: TF32 needs compute capability 8.0" in text
        assert "dense: FP16" in text
        assert "\\begin{longtable}" in (stem / "contenders.tex").read_text()
        for name in ("ablation", "fixed_cost"):
            out = f"{stem}/{name}.pdf"
            render("figure_experiment.py", "--experiment", name, "--results", folder, "--out", out)
            for suffix in ("pdf", "png", "csv"):
                assert (stem / f"{name}.{suffix}").stat().st_size > 0
        for name in ("fig5_speedup", "fig6_times", "fig7_measured_roofline", "fig8_errors"):
            render(f"{name}.py", "--results", folder, "--out", f"{stem}/{name}.pdf")
        errors = (stem / "fig8_errors.csv").read_text()
        assert errors.count("\n") == 5
        assert capsys.readouterr().err.count("warning") == 0

    def test_figure_8_is_against_fp32(self, run, gpu):
        run.check()
        run.ceilings()
        run.bench()
        run.collect()
        # TF32 as a GPU would round it, in the rows of PyTorch's default.
        run.change_errors(
            lambda lines: [
                line.replace(line.split(",")[-2], "1e-3") if ",sparse,dense," in line else line
                for line in lines
            ]
        )
        out = run.folder / "fig8.pdf"
        render("fig8_errors.py", "--results", str(run.folder), "--out", str(out))
        assert "0.001" not in out.with_suffix(".csv").read_text()

    @pytest.mark.parametrize("side", ["sparse", "dense", "load"])
    def test_what_was_timed_before_a_failure_is_kept(self, run, gpu, monkeypatch, side):
        """The second round fails: the first one is in the archive, and nothing else is made."""
        rounds = []
        burst = gpu_ceilings.Peak.burst

        def counting(*given):
            rounds.append(1)
            if side == "load" and len(rounds) == 2:
                raise RuntimeError("the context is lost")
            return burst(*given)

        monkeypatch.setattr(gpu_ceilings.Peak, "burst", counting)
        for name in ("sparse_execute", "_dense_execute"):
            make = getattr(gpu_contenders, name)

            def failing(data, key, one, *more, make=make):
                execute = make(data, key, one, *more)

                def fail():
                    if len(rounds) == 2:
                        raise RuntimeError("the context is lost")
                    execute()

                return fail if one == {"sparse": "paper"}.get(side, side) else execute

            monkeypatch.setattr(gpu_contenders, name, failing)
        what = "the load between rounds" if side == "load" else side
        match = rf"layer oc8: {what} cannot be timed on .*the context is lost; .*is kept in (\S+), "
        with pytest.raises(DeviceError, match=match) as caught:
            run.bench()
        assert not (run.folder / "bench" / "oc8.csv").exists()
        assert not (run.folder / "bench" / "oc8.json").exists()
        samples, facts = sorted((run.folder / "bench" / "archive").iterdir())
        assert str(samples) in str(caught.value)
        assert str(facts) in str(caught.value)
        rows = samples_file.read_rows(str(samples), samples_file.SAMPLE_COLUMNS)
        first = [row for row in rows if row["round"] == "0"]
        assert len(first) == len(IMPLEMENTATIONS) * 2 * 3
        content = json.loads(facts.read_text())
        assert "the context is lost" in content["stopped"]
        assert content["samples_sha256"] == samples_file.text_sha256(samples.read_text())
        assert set(content["mapping"]) == {"s90", "s50"}

    def test_rounds_that_are_whole_outlive_the_load_after_them(self, run, monkeypatch):
        bursts = []
        burst = gpu_ceilings.Peak.burst

        def failing(*given):
            bursts.append(1)
            if len(bursts) == 3:
                raise RuntimeError("the context is lost")
            return burst(*given)

        monkeypatch.setattr(gpu_ceilings.Peak, "burst", failing)
        with pytest.raises(DeviceError, match=r"the load between rounds .*is kept in"):
            run.bench()
        samples, _ = sorted((run.folder / "bench" / "archive").iterdir())
        rows = samples_file.read_rows(str(samples), samples_file.SAMPLE_COLUMNS)
        assert len(rows) == len(IMPLEMENTATIONS) * 2 * 2 * 3

    def test_an_archive_that_cannot_be_written_is_said(self, run, gpu, monkeypatch):
        (run.folder / "bench").mkdir()
        (run.folder / "bench" / "archive").write_text("in the way")
        monkeypatch.setattr(
            gpu_ceilings.Peak, "burst", lambda *given: (_ for _ in ()).throw(RuntimeError("lost"))
        )
        with pytest.raises(DeviceError, match=r"lost; .*; what had been timed could not be kept"):
            run.bench()

    def test_the_state_before_and_after_the_ceilings(self, run):
        run.ceilings()
        facts = json.loads(pathlib.Path(run.path("ceilings.json")).read_text())
        assert facts["before"]["gpu"] == facts["after"]["gpu"] == state()

    def test_the_clocks_stand_in_captions(self, run, gpu, tmp_path, monkeypatch):
        monkeypatch.setattr("packedconv.collect.STEADY_SHARE", 0.0)
        gpu.states = [state(throttle_reasons=["power cap"])]
        run.check()
        run.ceilings()
        run.bench()
        run.collect()
        gpu.states = [state(sm_clock_mhz=None)]
        run.experiments()
        results = Results.load(run.folder)
        slowed = "The GPU was slowed by power cap while oc8 was timed."
        text = contenders_table.preamble(results)
        assert slowed in text
        assert re.search(r"2 rounds of 3 executions, .* each the mean over a pair of events", text)
        assert slowed in captions.measurement(results)
        unknown = "Clocks unknown: nothing tells whether they moved for oc8."
        for load, draw in (
            (load_ablation, ablation_figure),
            (load_fixed_cost, fixed_cost_figure),
        ):
            figure = draw(load(run.folder))
            text = " ".join(" ".join(one.get_text() for one in figure.texts).split())
            assert unknown in text
            assert slowed not in text

    def test_calls_that_were_timed_are_marked(self, run, monkeypatch):
        monkeypatch.setattr("packedconv.collect.STEADY_SHARE", 0.0)
        run.check()
        run.ceilings()
        run.bench()
        run.collect()
        results = Results.load(run.folder)
        found = results.facts["oc8"]["implementations"]
        for name in found:
            found[name]["call_bound"] = ["s50"] if name == "dense_fp32" else []
        del found["dense_tf32"]["call_bound"]
        table = contenders_table.contenders(results)
        marked = table[table["call_bound"].fillna(False)]
        assert list(zip(marked["implementation"], marked["sparsity"], strict=True)) == [
            ("dense_fp32", 0.5)
        ]
        assert table.loc[table["implementation"] == "dense_tf32", "call_bound"].isna().all()
        (shown, *_) = contenders_table.shown(table)
        stars = shown.frame["ms"].str.endswith("*")
        assert list(shown.frame.loc[stars, "Contender"]) == ["dense: FP32"]

    def test_each_layer_has_its_own_reference(self, run, gpu, monkeypatch):
        run.check()
        columns = samples_file.ERROR_COLUMNS
        errors = pd.DataFrame(samples_file.read_rows(run.path("check/oc8.csv"), columns))
        default = errors[~errors["reference"].eq("dense_fp32")].assign(layer="oc4")
        found = against_dense(pd.concat([default, errors]))
        assert set(zip(found["layer"], found["reference"], strict=True)) == {
            ("oc4", "dense"),
            ("oc8", "dense_fp32"),
        }
        assert len(found) == 8
        fp32 = errors.index[errors["reference"] == "dense_fp32"]
        with pytest.raises(ValueError, match=r"layer oc8: expected 4 against dense_fp32, .* got 3"):
            against_dense(errors.drop(fp32[0]))

    def test_figure_8_says_what_it_is_against(self, run, monkeypatch):
        monkeypatch.setattr("packedconv.collect.STEADY_SHARE", 0.0)
        run.check()
        run.ceilings()
        run.bench()
        run.collect()
        script = runpy.run_path(str(ROOT / "scripts" / "fig8_errors.py"))

        def lines():
            source = argparse.Namespace(results=[Results.load(run.folder)])
            return " ".join(script["references"](source))

        assert "algorithm was benchmarked anew" in lines()
        assert "against PyTorch's default" not in lines()
        run.change_errors(
            lambda lines: [line for line in lines if ",sparse,dense_fp32," not in line]
        )
        assert "OC 8: against PyTorch's default, which allows TF32" in lines()
        assert "anew" not in lines()

    def test_a_second_bench_keeps_the_first(self, run, capsys):
        run.bench()
        before = pathlib.Path(run.path("bench/oc8.csv")).stat().st_mtime_ns
        run.bench()
        assert pathlib.Path(run.path("bench/oc8.csv")).stat().st_mtime_ns == before
        assert "kept" in capsys.readouterr().err

    def test_another_gpu_is_another_measurement(self, run, gpu, capsys):
        run.bench()
        gpu.title = "NVIDIA A100-SXM4-80GB"
        run.bench()
        assert "kept" not in capsys.readouterr().err

    def test_paper_protocol(self, run, tmp_path):
        run = Run(tmp_path / "p", changed(contenders="paper-protocol"))
        run.check()
        run.ceilings()
        run.bench()
        run.collect()
        table = contenders_table.contenders(Results.load(run.folder))
        assert set(table["implementation"]) == {"sparse", "dense"}

    def test_contenders_of_a_cpu_are_refused(self, run):
        run.check()
        run.ceilings()
        run.bench()
        run.collect()
        results = Results.load(run.folder)
        results.settings["device"]["kind"] = "cpu"
        with pytest.raises(ValueError, match="expected those of a GPU"):
            contenders_table.contenders(results)


class TestExperimentFiles:
    """What is drawn was measured whole, and like the contenders that it stands beside."""

    def write(self, folder):
        """A run of two layers with experiments."""
        other = LAYER._replace(name="oc4", out_channels=4)
        settings = changed(layers=[dict(LAYER._asdict()), dict(other._asdict())])
        (folder / "bench").mkdir(parents=True)
        (folder / "settings.json").write_text(json.dumps(validate_settings(settings)))
        alike = {"settings_hash": "a", "stamp": {"sha256": "b"}, "comparable": {"gpu": "c"}}
        for layer in (LAYER, other):
            (folder / "bench" / f"{layer.name}.json").write_text(json.dumps(alike))
            base = {
                **{"device": "a100-sxm4-40gb", "run": "test", "layer": layer.name},
                **{"out_channels": layer.out_channels, "nonzeros": 10, "slices": 2},
            }
            timed = {"executions_per_pair": 3, "execution": 0, "seconds": "0.001"}
            rows = {
                "ablation": {"sparsity": 0.9, **dict.fromkeys(samples_file.MAPPING_FIELDS, 2)},
                "fixed_cost": {"experiment": "slices", "implementation": "sparse"},
            }
            for name, columns in COLUMNS_OF.items():
                text = samples_file.format_csv(
                    [
                        {**base, **rows[name], **timed},
                        {**base, **rows[name], **timed, "execution": 1, "seconds": "0.003"},
                        {**base, **rows[name], "slices": 4, "skipped": "does not fit"},
                    ],
                    columns,
                )
                facts = {
                    **alike,
                    "rows_sha256": samples_file.text_sha256(text),
                    "layer": layer._asdict(),
                    "clocks_moved": False,
                }
                (folder / name).mkdir(exist_ok=True)
                (folder / name / f"{layer.name}.csv").write_text(text)
                (folder / name / f"{layer.name}.json").write_text(json.dumps(facts))

    @pytest.fixture(params=["ablation", "fixed_cost"])
    def part(self, request, tmp_path):
        """A run to spoil: its folder, that of an experiment, and the loader of it."""
        folder = tmp_path / "a100-sxm4-40gb" / "test"
        self.write(folder)
        load = {"ablation": load_ablation, "fixed_cost": load_fixed_cost}[request.param]
        return folder, folder / request.param, lambda: load(folder)

    def rewrite(self, folder, change, digest=True):
        """Change the text of a layer's rows; with `digest` the facts go along."""
        path = folder / "oc8.csv"
        text = change(path.read_text())
        assert text != path.read_text()
        path.write_text(text)
        if digest:
            self.tell(folder / "oc8.json", rows_sha256=samples_file.text_sha256(text))

    def tell(self, path, **values):
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    def test_whole(self, part):
        _, _, load = part
        table = load().table
        assert list(table["out_channels"]) == [4, 4, 8, 8]
        assert list(table["slices"]) == [2, 4] * 2
        assert list(table["seconds"][::2]) == [0.002] * 2
        assert list(table["executions"]) == [2, 0] * 2
        assert list(table["skipped"][1::2]) == ["does not fit"] * 2
        assert table["skipped"][::2].isna().all()

    def test_a_missing_layer(self, part):
        _, folder, load = part
        (folder / "oc4.csv").unlink()
        with pytest.raises(
            ValueError,
            match=r"layer oc4: expected its times, got none; measure it on the GPU: snakemake .*"
            r"/oc4\.csv --config device=a100-sxm4-40gb",
        ):
            load()

    def test_a_layer_left_over(self, part):
        _, folder, load = part
        shutil.copy(folder / "oc4.csv", folder / "oc99.csv")
        with pytest.raises(
            ValueError, match=r"oc99\.csv: .*left over from other settings: move it"
        ):
            load()

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda text: text.replace("a100-sxm4-40gb", "h200"), r"device: expected .*got .'h200"),
            (lambda text: text.replace(",test,", ",other,"), r"run: expected .'test'.*got .'other"),
            (lambda text: text.replace(",oc8,8,", ",oc4,8,"), r"layer: expected .'oc8'.*'oc4'"),
            (lambda text: text.replace(",oc8,8,", ",oc8,9,"), r"out_channels: expected .8."),
            (lambda text: text.replace("0.001", "0"), "seconds: expected positive values, got 0"),
            (lambda text: text.replace("0.001", "-1e-3"), "seconds: expected positive values"),
            (lambda text: text.replace("0.001", "nan"), "seconds in line 2: expected a finite"),
            (lambda text: text.replace("0.001", ""), "seconds: expected a value, or why"),
            (lambda text: text.replace("does not fit", ""), "seconds: expected a value, or why"),
            (lambda text: text.replace("executions_per_pair", "n"), "columns: expected device"),
        ],
    )
    def test_rows_that_are_wrong(self, part, change, match):
        _, folder, load = part
        self.rewrite(folder, change)
        with pytest.raises(ValueError, match=rf"oc8\.csv: {match}.*; .*(measure|settings)"):
            load()

    def test_rows_of_another_measurement(self, part):
        _, folder, load = part
        self.rewrite(folder, lambda text: text.replace("0.001", "0.002"), digest=False)
        with pytest.raises(ValueError, match=r"expected the rows that oc8\.json belongs to.*again"):
            load()

    def test_facts_of_another_shape(self, part):
        _, folder, load = part
        self.tell(folder / "oc8.json", layer=LAYER._replace(batch=7)._asdict())
        with pytest.raises(ValueError, match=r"oc8\.json: layer: expected .*'batch': 2"):
            load()

    def test_facts_that_are_missing(self, part):
        _, folder, load = part
        (folder / "oc8.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"oc8\.json"):
            load()

    @pytest.mark.parametrize("key", ["settings_hash", "stamp", "comparable"])
    @pytest.mark.parametrize("both", [False, True], ids=["of the layer", "of the layers"])
    def test_measured_otherwise_than_the_contenders(self, part, key, both):
        results, folder, load = part
        self.tell(folder / "oc8.json", **{key: "other"})
        if both:
            self.tell(folder / "oc4.json", **{key: "other"})
        with pytest.raises(
            ValueError, match=rf"{key}: expected .* as in bench/oc8\.json, got other"
        ):
            load()
        # As its own contenders, but not as the first layer.
        self.tell(results / "bench" / "oc8.json", **{key: "other"})
        match = "bench/oc4" if both else f"{folder.name}/oc8"
        with pytest.raises(ValueError, match=rf"oc4\.json: {key}: expected .* as in {match}\.json"):
            load()

    def test_without_the_contenders(self, part):
        results, _, load = part
        (results / "bench" / "oc8.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"bench/oc8\.json"):
            load()


class TestFind:
    def test_a_pytorch_without_cuda(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(DeviceError, match="which finds no GPU; install a build with CUDA"):
            accelerators.find(fake_gpu.DEVICE)

    def test_a_gpu_that_is_hidden(self, monkeypatch):
        class Properties:
            name, multi_processor_count = "NVIDIA H200", 132

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
        with pytest.raises(DeviceError, match="found NVIDIA H200; check CUDA_VISIBLE_DEVICES"):
            accelerators.find(fake_gpu.DEVICE)
        built = []
        monkeypatch.setattr(accelerators, "Accelerator", built.append)
        accelerators.find(Device("h200", "cuda", "NVIDIA H200", 132))
        assert built == [0]

    def bare(self, **properties):
        """The real thing without a GPU behind it."""
        real = object.__new__(accelerators.Accelerator)
        real.device = torch.device("cuda", 1)
        real._properties = type("Properties", (), properties)
        return real

    def test_plans_and_calls(self, monkeypatch):
        real, fake = self.bare(), FakeGpu()
        monkeypatch.setattr(accelerators, "device_limits", lambda index: fake_gpu.LIMITS)
        weight = packedconv.pack(torch.from_numpy(make_weight(LAYER, 0.5, 1)))
        assert len(real.mappings()) == len(_core.cuda_kernels()["paper"])
        for kernel, config in (("paper", (8, 2, 4, 2)), ("column", None)):
            found = real.plan(LAYER, weight, kernel, config)
            assert found == fake.plan(LAYER, weight, kernel, config)
            assert found.kernel == kernel
        calls = []
        monkeypatch.setattr(cuda, "conv2d", lambda *one, **more: calls.append((one, more)))
        image, out = torch.zeros(LAYER.input_shape), torch.zeros(LAYER.output_shape)
        real.sparse(LAYER, image, weight, out, "paper", (8, 2, 4, 2))
        ((positional, named),) = calls
        # As the function takes them.
        bound = CONV2D.bind(*positional, **named).arguments
        assert (bound["implementation"], bound["config"]) == ("paper", (8, 2, 4, 2))
        assert bound["out"] is out
        assert (bound["stride"], bound["padding"]) == (1, 1)

    @pytest.mark.parametrize(
        ("properties", "size"),
        [
            ({"L2_cache_size": 50 * 2**20, "major": 9}, 50 * 2**20),
            ({"major": 5}, 4 * 2**20),
            ({"major": 8}, 64 * 2**20),
        ],
    )
    def test_cache_where_pytorch_does_not_tell(self, properties, size):
        assert self.bare(**properties).l2_bytes == size

    def test_the_gpu_by_its_name_for_nvidia_smi(self, monkeypatch):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert self.bare()._identity() == "1"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
        assert self.bare()._identity() == "GPU-5"
        assert self.bare(uuid="a-b")._identity() == "GPU-a-b"

    def test_no_kernel_is_seen_without_a_gpu(self, monkeypatch):
        real, calls = self.bare(), []
        monkeypatch.setattr(real, "synchronize", lambda: calls.append("waited"), raising=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names, reason = real.kernels(lambda: calls.append("executed"))
        assert names is None
        assert reason
        assert calls in (["executed", "waited"], [])

    def test_offered_alike(self):
        """The stand-in has all that the real one has, so no test passes by a name of its own."""
        real = {name for name in vars(accelerators.Accelerator) if not name.startswith("_")}
        assert real <= set(dir(FakeGpu()))

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (RuntimeError(OUT_OF_MEMORY), True),
            (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
            (MemoryError(), True),
            (RuntimeError("no kernel image is available"), False),
            (ValueError("out of memory"), False),
        ],
    )
    def test_out_of_memory(self, error, expected):
        assert accelerators.is_out_of_memory(error) is expected


def test_steps_import_no_torch():
    code = "import sys, packedconv.bench.steps; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class TestWorkflow:
    """What is planned for a GPU; a dry run needs none."""

    def plan(self, *arguments):
        done = subprocess.run(
            [sys.executable, "-m", "snakemake", "--cores", "1", "-n", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        table = done.stdout.partition("Job stats:")[2].split("total")[0].splitlines()[3:]
        return done, {line.split()[0]: int(line.split()[1]) for line in table if line.split()}

    def test_all_of_a_gpu(self):
        done, jobs = self.plan("all", "--config", "device=h200", "run=planned")
        assert done.returncode == 0, done.stdout
        assert {name: jobs[name] for name in ("contenders", "experiment_figure")} == {
            "contenders": 1,
            "experiment_figure": 2,
        }
        assert jobs["ablation"] == jobs["fixed_cost"] == jobs["bench"] == 6

    def test_the_papers_protocol_has_no_experiments(self):
        done, jobs = self.plan("all", "--config", "device=h200", "contenders=paper-protocol")
        assert done.returncode == 0, done.stdout
        assert "figures/paper-protocol/h200/contenders" in done.stdout
        assert jobs["bench"] == 6
        assert not {"ablation", "fixed_cost", "experiment_figure"} & set(jobs)

    def test_one_layer_of_an_experiment(self):
        target = "results/h200/planned/fixed_cost/oc48.csv"
        done, jobs = self.plan(target, "--config", "device=h200", "run=planned")
        assert done.returncode == 0, done.stdout
        assert jobs["fixed_cost"] == jobs["bench"] == 1

    @pytest.mark.parametrize("name", ["contenders.csv", "ablation.pdf", "fixed_cost.png"])
    def test_a_cpu_has_none_of_it(self, name):
        done, _ = self.plan(f"figures/cpu/{name}")
        assert done.returncode != 0
        assert "expected a GPU, which this target is about, got cpu" in done.stdout


def test_further_implementations_change_no_statement(tmp_path):
    """Figures and verdicts are about the two sides, whatever else was timed."""
    folder = write_results(
        tmp_path,
        device="a100-sxm4-40gb",
        batch=32,
        out_channels=(48, 64, 80),
        executions=40,
    )
    paper = published.load(str(ROOT / "config/paper.yaml"))
    before = claims.claims(paper, [Results.load(folder)], "a100-sxm4-40gb")
    assert set(before["verdict"]) > {"not testable here"}
    path = folder / "samples.csv"
    rows = samples_file.read_rows(str(path), samples_file.SAMPLE_COLUMNS)
    for implementation in set(IMPLEMENTATIONS) - {"sparse", "dense"}:
        rows += [
            # Faster than all the rest.
            dict(row, implementation=implementation, seconds=1e-6)
            for row in rows
            if row["implementation"] == "sparse"
        ]
    path.write_text(samples_file.format_csv(rows, samples_file.SAMPLE_COLUMNS))
    with_more = Results.load(folder)
    assert len(with_more.every_sample) > len(with_more.samples)
    after = claims.claims(paper, [with_more], "a100-sxm4-40gb")
    assert after.equals(before)
