"""Settings, contenders, protocol, check, ceilings and the steps that use the device."""

import contextlib
import copy
import getpass
import hashlib
import itertools
import json
import mmap
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

import packedconv
from packedconv import _core, script
from packedconv.bench import check, contenders, lock, machine, protocol, steps
from packedconv.bench.ceilings import copy_bytes, measure_ceilings, peak_flops
from packedconv.bench.contenders import Contender
from packedconv.device import DeviceError
from packedconv.layer import Layer, nonzero_count
from packedconv.roofline import border_exact_flops
from packedconv.samples_file import (
    ERROR_COLUMNS,
    SAMPLE_COLUMNS,
    format_csv,
    read_rows,
    text_sha256,
)
from packedconv.seal import is_intact
from packedconv.settings import (
    contenders_of,
    find_layer,
    layers_of,
    load_settings,
    settings_hash,
    validate_settings,
)
from packedconv.weights import make_input, make_weight, make_weights, save_weights

ROOT = pathlib.Path(__file__).parents[2]
LAYER = Layer("oc8", 1, 4, 8, 12, 16)
SETTINGS = {
    "device": {"name": "cpu", "kind": "cpu", "family": "cpu", "title": "CPU"},
    "run": "test",
    "seed": 1,
    "sparsities": [0.9, 0.5],
    "threads": 2,
    "protocol": {"rounds": 2, "executions": 3, "warmup_executions": 1, "trial_executions": 2},
    "layers": [dict(LAYER._asdict())],
}


@pytest.fixture(autouse=True)
def own_lock(tmp_path, monkeypatch):
    """Tests neither wait for a measurement of this machine nor hold one up."""
    monkeypatch.setattr(lock, "FOLDER", str(tmp_path))


@pytest.fixture(autouse=True)
def quick(torch_threads, monkeypatch):
    """Short warm-ups and bursts; torch's threads, which steps set, are put back."""
    monkeypatch.setattr(protocol, "WARMUP_SECONDS", 0.0)
    monkeypatch.setattr(protocol, "PEAK_BURST_SECONDS", 0.005)


def changed(path, value):
    """SETTINGS with one value replaced, named by its path."""
    settings = copy.deepcopy(SETTINGS)
    place = settings
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return settings


class TestSettings:
    def test_defaults_are_filled_in(self):
        settings = validate_settings(SETTINGS)
        assert settings["weights"]["distribution"] == "uniform"
        assert settings["inputs"] == {"distribution": "uniform", "low": 0.0, "high": 1.0}
        assert layers_of(settings) == [LAYER]
        assert find_layer(settings, "oc8") == LAYER

    def test_contenders_are_a_gpus(self):
        # Without the key a CPU's settings are what they were before there was a choice.
        assert "contenders" not in validate_settings(SETTINGS)
        assert contenders_of(SETTINGS) == "all"
        gpu = dict(SETTINGS, device={"name": "h200", "kind": "cuda"}, contenders="paper-protocol")
        assert contenders_of(validate_settings(gpu)) == "paper-protocol"

    def test_dilation_and_groups_are_one_unless_stated(self):
        record = dict(LAYER._asdict())
        del record["dilation"], record["groups"]
        assert layers_of(changed(("layers", 0), record)) == [LAYER]

    def test_unknown_layer(self):
        with pytest.raises(ValueError, match="layer: expected one of oc8, got 'oc9'"):
            find_layer(SETTINGS, "oc9")

    @pytest.mark.parametrize(
        ("path", "value", "name"),
        [
            (("colour",), 1, "settings"),
            (("device",), "cpu", "device"),
            (("device", "kind"), None, "device.kind"),
            (("run",), "", "run"),
            (("seed",), 1.5, "seed"),
            (("seed",), True, "seed"),
            (("sparsities",), [], "sparsities"),
            (("sparsities",), [0.9, 0.9], "sparsities"),
            (("sparsities",), ["0.9"], "sparsities"),
            (("sparsities",), [1.0], "sparsities"),
            (("threads",), 0, "threads"),
            (("protocol", "rounds"), 0, "protocol.rounds"),
            (("protocol", "executions"), 2.0, "protocol.executions"),
            (("protocol", "extra"), 1, "protocol"),
            (("layers",), [], "layers"),
            (("layers",), SETTINGS["layers"] * 2, "layers"),
            (("layers", 0, "batch"), 0, "layer oc8.batch"),
            (("layers", 0, "padding"), -1, "layer oc8.padding"),
            (("layers", 0, "name"), "../x", "layers.name"),
            (("layers", 0, "colour"), 1, "layers"),
            (("layers", 0, "kernel_size"), 40, "layer oc8"),
            (("layers", 0, "groups"), 3, "layer oc8.groups"),
            (("layers", 0, "dilation"), 0, "layer oc8.dilation"),
            (("contenders",), "paper-protocol", "contenders"),
            (("contenders",), "everything", "contenders"),
        ],
    )
    def test_what_is_wrong_is_named(self, path, value, name):
        with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
            validate_settings(changed(path, value))

    def test_missing_key(self):
        with pytest.raises(ValueError, match=r"settings: expected the keys \['seed'\]"):
            validate_settings({key: SETTINGS[key] for key in SETTINGS if key != "seed"})

    def test_a_layer_without_nonzeros_is_refused(self):
        small = dict(LAYER._asdict(), in_channels=1, out_channels=1)
        with pytest.raises(ValueError, match=r"at least one nonzero at sparsity 0\.99"):
            validate_settings(dict(SETTINGS, layers=[small], sparsities=[0.99]))

    def test_hash_depends_on_values_not_on_order(self):
        assert settings_hash(SETTINGS) == settings_hash(dict(reversed(list(SETTINGS.items()))))
        assert settings_hash(SETTINGS) != settings_hash(changed(("seed",), 2))

    def test_a_cut_file(self, tmp_path):
        path = tmp_path / "settings.json"
        path.write_text(json.dumps(SETTINGS))
        assert load_settings(str(path)) == validate_settings(SETTINGS)
        path.write_text(json.dumps(SETTINGS)[:50])
        with pytest.raises(ValueError, match="not JSON"):
            load_settings(str(path))


class TestContenders:
    @pytest.mark.parametrize(
        "layer", [LAYER, LAYER._replace(batch=2, stride=2, padding=0, kernel_size=5)]
    )
    @pytest.mark.parametrize("layout", sorted(contenders.DENSE_LAYOUTS))
    def test_every_layout_computes_the_same(self, layer, layout):
        weight = torch.from_numpy(make_weight(layer, 0.5, 1))
        image = torch.from_numpy(make_input(layer, 1))
        try:
            convolve = contenders.DENSE_LAYOUTS[layout](layer, image, weight)
        except contenders.UnavailableError as error:
            pytest.skip(str(error))
        found = check.compare_with_float64(convolve(), layer, image, weight)
        assert found.bound_fraction <= 1

    def test_layouts_are_what_they_say(self):
        weight = torch.from_numpy(make_weight(LAYER, 0.5, 1))
        image = torch.from_numpy(make_input(LAYER, 1))
        nchw = contenders.DENSE_LAYOUTS["nchw"](LAYER, image, weight)()
        last = contenders.DENSE_LAYOUTS["channels_last"](LAYER, image, weight)()
        assert nchw.is_contiguous()
        assert last.is_contiguous(memory_format=torch.channels_last)

    def test_sparse_writes_into_out(self):
        weight = torch.from_numpy(make_weight(LAYER, 0.5, 1))
        packed = packedconv.pack(weight)
        image = torch.from_numpy(make_input(LAYER, 1))
        out = torch.full(LAYER.output_shape, float("nan"))
        contender = contenders.sparse_contender(LAYER, image, packed, out)
        assert contender.execute() is None
        found = check.compare_with_float64(out, LAYER, image, packed.unpack())
        assert found.bound_fraction <= 1

    def test_the_fastest_layout_is_chosen_and_all_trials_kept(self, monkeypatch):
        def takes(seconds, factor=1.0):
            def make(layer, image, weight):
                result = factor * contenders._nchw(layer, image, weight)()
                return lambda: (time.sleep(seconds), result)[1]

            return make

        def missing(layer, image, weight):
            raise contenders.UnavailableError("not here")

        def broken(layer, image, weight):
            raise RuntimeError("no such operator")

        layouts = {
            "slow": takes(0.02),
            "fast": takes(0.001),
            "missing": missing,
            "broken": broken,
            "wrong": takes(0.0, factor=1.001),
        }
        monkeypatch.setattr(contenders, "DENSE_LAYOUTS", layouts)
        image, weight = torch.rand(LAYER.input_shape), torch.rand(LAYER.weight_shape)
        layout, trials = contenders.choose_dense(LAYER, image, weight, 3, 0)
        assert layout == "fast"
        assert {key: len(values) for key, values in trials["seconds"].items()} == {
            "slow": 3,
            "fast": 3,
        }
        wrong = trials["skipped"].pop("wrong")
        assert wrong.startswith("differs from NCHW by up to")
        assert trials["skipped"] == {"missing": "not here", "broken": "no such operator"}

    def test_dense_memory_is_reused(self):
        # In a process of its own: the allocator's state is not this one's. Outputs of
        # 32 MiB and more are mapped afresh by glibc's defaults.
        code = """if True:
            import sys, torch
            from packedconv.bench.contenders import dense_contender, reuse_memory
            from packedconv.bench.protocol import minor_faults
            from packedconv.layer import Layer
            if sys.argv[1] == "reuse":
                assert reuse_memory()
            layer = Layer("x", 1, 1, 160, 256, 256, kernel_size=1, padding=0)
            image, weight = torch.rand(layer.input_shape), torch.rand(layer.weight_shape)
            execute = dense_contender("nchw", layer, image, weight).execute
            execute(), execute()
            faults = []
            for _ in range(5):
                before = minor_faults()
                execute()
                faults.append(minor_faults() - before)
            # Not the mean: once in a while a thread gets memory of its own.
            print(sorted(faults)[2])
        """
        faults = {
            mode: float(subprocess.check_output([sys.executable, "-c", code, mode]))
            for mode in ("reuse", "default")
        }
        assert faults["reuse"] < 64
        # Huge pages can make them few, never as few as none.
        assert faults["default"] > faults["reuse"]


class Recorder:
    """Contenders that write down when they are executed."""

    def __init__(self):
        self.calls = []

    def contender(self, key, implementation):
        return Contender(implementation, "layout", lambda: self.calls.append((key, implementation)))


class TestProtocol:
    def measure(self, rounds=4, executions=3, warmup_executions=2, seed=1):
        recorder = Recorder()
        group = {
            key: [recorder.contender(key, side) for side in ("sparse", "dense")]
            for key in ("s90", "s95", "s98")
        }
        bursts = itertools.count(1.0)
        measured = protocol.run_rounds(
            group, rounds, executions, warmup_executions, seed, lambda: next(bursts), "oc8"
        )
        return recorder.calls, measured

    def test_every_execution_of_every_round_once(self):
        calls, measured = self.measure()
        assert len(calls) == 4 * 6 * (2 + 3)
        found = {
            (sample.key, sample.implementation, sample.round, sample.execution)
            for sample in measured.samples
        }
        sides = itertools.product(("s90", "s95", "s98"), ("sparse", "dense"), range(4), range(3))
        assert len(measured.samples) == len(found) == 72
        assert found == set(sides)
        assert all(sample.seconds > 0 for sample in measured.samples)
        assert measured.peak_bursts == [1.0, 2.0, 3.0, 4.0]
        assert set(measured.page_faults) == set(
            itertools.product(*[("s90", "s95", "s98"), ("sparse", "dense")])
        )

    def test_rounds_are_interleaved_and_pairs_stay_together(self):
        calls, _ = self.measure()
        blocks = [calls[index] for index in range(0, len(calls), 5)]
        rounds = [blocks[index : index + 6] for index in range(0, len(blocks), 6)]
        assert len(rounds) == 4
        for order in rounds:
            assert len(set(order)) == 6
            assert [order[index][0] for index in (0, 2, 4)] == [
                order[index][0] for index in (1, 3, 5)
            ]
        # Neither side always comes first.
        assert len({order[0][1] for order in rounds} | {order[2][1] for order in rounds}) == 2
        assert len({tuple(order) for order in rounds}) > 1

    def test_the_seed_sets_the_order(self):
        assert self.measure(seed=5)[0] == self.measure(seed=5)[0]
        assert self.measure(seed=5)[0] != self.measure(seed=6)[0]

    def test_a_switch_is_warmed_up_at_least_once(self):
        calls, _ = self.measure(rounds=1, executions=1, warmup_executions=0)
        assert len(calls) == 6 * 2

    def test_a_warm_up_lasts_a_while(self, monkeypatch):
        monkeypatch.setattr(protocol, "WARMUP_SECONDS", 0.05)
        begin, ends = time.perf_counter(), []
        contender = Contender("dense", "x", lambda: ends.append(time.perf_counter()))
        group = {"s90": [contender]}
        measured = protocol.run_rounds(group, 1, 2, 1, 1, lambda: 1.0, "x")
        assert len(measured.samples) == 2
        assert len(ends) > 10
        assert ends[-2] >= begin + 0.05

    def test_page_faults_are_per_execution(self):
        def fault():
            with mmap.mmap(-1, 64 * mmap.PAGESIZE) as memory:
                for page in range(64):
                    memory[page * mmap.PAGESIZE] = 1

        measured = protocol.run_rounds(
            {"s90": [Contender("dense", "x", fault)]}, 2, 5, 1, 1, lambda: 1.0, "x"
        )
        assert 1 <= measured.page_faults["s90", "dense"] < 200


class TestCheck:
    def rows(self, convolve=None, layer=LAYER, sparsities=(0.5, 0.9)):
        weights = {sparsity: make_weight(layer, sparsity, 1) for sparsity in sparsities}
        return check.check_layer("cpu", "test", layer, weights, make_input(layer, 1), convolve)

    def test_rows(self):
        rows = self.rows()
        assert [set(row) for row in rows] == [set(ERROR_COLUMNS)] * 8
        kinds = [(row["implementation"], row["reference"], row["weights"]) for row in rows[:4]]
        assert kinds == [
            ("sparse", "float64", "packed"),
            ("dense", "float64", "packed"),
            ("sparse", "dense", "packed"),
            ("sparse", "dense", "original"),
        ]
        for row in rows:
            assert row["nonzeros"] == nonzero_count(LAYER.weight_count, row["sparsity"])
            assert (row["bound_fraction"] is None) == (row["reference"] == "dense")
        # Rounding weights to FP16 is of another order than the order of summation.
        assert rows[0]["max_abs_error"] < 1e-6 < rows[3]["max_abs_error"] < 1e-2
        assert 0 < rows[0]["bound_fraction"] <= 1

    @pytest.mark.parametrize("wrong", [1e-4, float("nan"), float("inf")])
    def test_one_wrong_output_fails_and_is_named(self, wrong):
        def convolve(image, packed, layer):
            output = packedconv.conv2d(image, packed, stride=1, padding=1)
            output[1, 5, 3, 2] += wrong
            return output

        with pytest.raises(
            script.CheckError,
            match=r"layer oc8, sparsity 0\.5: output \(1, 5, 3, 2\) .* expected .* within",
        ):
            self.rows(convolve, LAYER._replace(batch=2))

    def test_a_channel_without_nonzeros_must_be_zero(self):
        layer = LAYER._replace(out_channels=2)
        weight = make_weight(layer, 0.5, 1)
        weight[1] = 0

        def run(value):
            def convolve(image, packed, layer):
                output = packedconv.conv2d(image, packed, padding=1)
                output[0, 1, 0, 0] = value
                return output

            return check.check_layer(
                "cpu", "test", layer, {0.5: weight}, make_input(layer, 1), convolve
            )

        assert run(0.0)[0]["bound_fraction"] <= 1
        with pytest.raises(script.CheckError, match=r"\(0, 1, 0, 0\)"):
            run(1e-30)

    def test_bound_by_hand(self):
        layer = Layer("x", 1, 1, 1, 1, 1, kernel_size=1, padding=0)
        image, weight = torch.full((1, 1, 1, 1), 2.0), torch.full((1, 1, 1, 1), -3.0)
        output = torch.tensor([[[[-6.0 + 2**-20]]]])
        found = check.compare_with_float64(output, layer, image, weight)
        # n = 1: (4 + 1) * 2^-23 * 6.
        assert found.bound == 5 * 2**-23 * 6
        assert found.max_abs_error == 2**-20
        assert found.bound_fraction == 2**-20 / found.bound


class TestCeilings:
    def test_rows(self, monkeypatch):
        monkeypatch.setattr("packedconv.bench.ceilings.PEAK_SECONDS", 0.01)
        monkeypatch.setattr("packedconv.bench.ceilings.COPY_REPEATS", 1)
        monkeypatch.setattr("packedconv.bench.ceilings.copy_bytes", lambda: 2**22)
        rows = measure_ceilings("cpu", "test", threads=2, trials=2)
        assert [(row["quantity"], row["threads"], row["trial"]) for row in rows] == [
            (quantity, threads, trial)
            for trial in (0, 1)
            for threads in (2, 1)
            for quantity in ("peak_flops", "bandwidth")
        ]
        assert all(row["value"] > 1e8 for row in rows)

    def test_one_thread_is_measured_once(self, monkeypatch):
        monkeypatch.setattr(_core, "fma_peak", lambda threads, seconds: 1.0)
        monkeypatch.setattr(_core, "copy_bandwidth", lambda threads, size, repeats: 2.0)
        assert len(measure_ceilings("cpu", "test", threads=1, trials=1)) == 2

    def test_the_peak_is_the_best_burst(self, monkeypatch):
        found = iter([3.0, 5.0, 9.0, 4.0] + [1.0] * 10**6)
        begin = time.perf_counter()
        monkeypatch.setattr(_core, "fma_peak", lambda threads, seconds: next(found))
        assert peak_flops(2, 0.01) == 9.0
        assert time.perf_counter() >= begin + 0.01

    def test_a_peak_is_never_nothing(self, monkeypatch):
        """On a busy machine threads may start when a burst is over already."""
        found = iter([0.0, 0.0, 0.0, 3.0, 9.0])
        monkeypatch.setattr(_core, "fma_peak", lambda threads, seconds: next(found))
        assert peak_flops(2, 0.0) == 3.0

    def test_copied_arrays_leave_the_caches_and_fit_into_memory(self, monkeypatch):
        module = "packedconv.bench.ceilings."
        monkeypatch.setattr(module + "largest_cache_bytes", lambda: 2**28)
        monkeypatch.setattr(module + "available_memory_bytes", lambda: 2**40)
        assert copy_bytes() == 2**30
        monkeypatch.setattr(module + "available_memory_bytes", lambda: 2**29)
        assert copy_bytes() == 2**26


class TestMachine:
    def test_facts_are_json_without_names(self):
        facts = machine.machine_facts()
        text = json.dumps(facts, allow_nan=False)
        assert facts["usable_cores"] >= 1
        assert facts["torch"] == torch.__version__
        assert facts["extension"] == _core.build_info()
        assert facts["memory_bytes"] > 2**28
        own = {key: value for key, value in facts.items() if key != "torch_config"}
        values = json.dumps(own).lower().replace('"', " ").split()
        for name in (socket.gethostname(), getpass.getuser()):
            assert name.lower() not in values
        assert str(ROOT) not in text

    def test_moment(self):
        now = machine.moment()
        assert len(now["load_average"]) == 3
        assert time.strptime(now["time"], "%Y-%m-%dT%H:%M:%SZ")


def prepare(folder):
    """Settings, weights and a stamp that fits, in a folder."""
    (folder / "settings.json").write_text(json.dumps(SETTINGS))
    save_weights(str(folder / "oc8.npz"), make_weights(SETTINGS, LAYER))
    digest = hashlib.sha256(pathlib.Path(_core.__file__).read_bytes()).hexdigest()
    (folder / "stamp.json").write_text(json.dumps({"sha256": digest}))


@pytest.fixture
def files(tmp_path):
    """Paths of a run in a folder of its own."""
    prepare(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def measured_once(tmp_path_factory):
    """The two files of one measurement, by name."""
    folder = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock, "FOLDER", str(folder))
        prepare(folder)
        bench(folder)
    return {name: (folder / name).read_text() for name in ("oc8.csv", "oc8.json")}


@pytest.fixture
def measured(files, measured_once):
    """`files`, measured already."""
    for name, text in measured_once.items():
        (files / name).write_text(text)
    return files


def bench(files, settings=SETTINGS, force=False):
    """Measure; returns rows and facts."""
    steps.bench(
        validate_settings(settings),
        "oc8",
        str(files / "oc8.npz"),
        str(files / "stamp.json"),
        str(files / "oc8.csv"),
        str(files / "oc8.json"),
        force,
    )
    return (
        read_rows(str(files / "oc8.csv"), SAMPLE_COLUMNS),
        json.loads((files / "oc8.json").read_text()),
    )


class TestBench:
    def test_samples_and_facts(self, files):
        rows, facts = bench(files)
        assert len(rows) == 2 * 2 * 2 * 3
        assert {row["implementation"]: row["layout"] for row in rows} == {
            "sparse": "packed",
            "dense": facts["dense"]["layout"],
        }
        assert {(row["device"], row["run"], row["threads"]) for row in rows} == {
            ("cpu", "test", "2")
        }
        for row in rows:
            assert int(row["nonzeros"]) == nonzero_count(LAYER.weight_count, float(row["sparsity"]))
            assert float(row["seconds"]) > 0
        assert facts["settings_hash"] == settings_hash(validate_settings(SETTINGS))
        assert len(facts["peak_bursts"]) == 2
        for key, sparsity in (("s90", 0.9), ("s50", 0.5)):
            positions = facts["nonzeros_by_kernel_position"][key]
            assert sum(map(sum, positions)) == nonzero_count(LAYER.weight_count, sparsity)
            assert border_exact_flops(LAYER, positions) > 0
            assert facts["packing_seconds"][key] > 0
            assert facts["packed_bytes"][key] == 4 * (sum(map(sum, positions)) + 9)
        assert set(facts["page_faults_per_execution"]) == {"sparse", "dense"}
        assert set(facts["dense"]["seconds"]) | set(facts["dense"]["skipped"]) == set(
            contenders.DENSE_LAYOUTS
        )

    def test_threads_do_not_come_from_the_environment(self, files, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        rows, facts = bench(files, dict(SETTINGS, threads=None))
        cores = facts["machine"]["usable_cores"]
        assert facts["threads"] == facts["machine"]["torch_threads"] == cores
        assert {int(row["threads"]) for row in rows} == {cores}

    def test_what_has_been_measured_is_kept(self, measured, capsys):
        before = (measured / "oc8.csv").stat().st_mtime_ns
        bench(measured)
        assert (measured / "oc8.csv").stat().st_mtime_ns == before
        assert capsys.readouterr().err.startswith("kept ")
        bench(measured, force=True)
        assert (measured / "oc8.csv").stat().st_mtime_ns > before

    @pytest.mark.parametrize("spoil", ["settings", "weights", "cut", "row", "facts", "missing"])
    def test_what_does_not_fit_is_measured_again(self, measured, capsys, spoil):
        settings, samples = SETTINGS, (measured / "oc8.csv").read_text()
        if spoil == "settings":
            settings = changed(("protocol", "executions"), 4)
        elif spoil == "weights":
            save_weights(str(measured / "oc8.npz"), make_weights(dict(SETTINGS, seed=2), LAYER))
        elif spoil == "cut":
            (measured / "oc8.csv").write_text(samples[: len(samples) // 2])
        elif spoil == "row":
            (measured / "oc8.csv").write_text(samples.replace("sparse", "dense"))
        elif spoil == "facts":
            (measured / "oc8.json").write_text("{")
        else:
            (measured / "oc8.json").unlink()
        rows, facts = bench(measured, settings)
        assert "kept" not in capsys.readouterr().err
        assert len(rows) == 8 * settings["protocol"]["executions"]
        assert facts["settings_hash"] == settings_hash(validate_settings(settings))

    def test_a_stamp_of_another_build_is_refused(self, files):
        (files / "stamp.json").write_text(json.dumps({"sha256": "0" * 64}))
        with pytest.raises(ValueError, match=r"stamp .* build the extension again"):
            bench(files)
        (files / "stamp.json").unlink()
        with pytest.raises(ValueError, match=r"stamp: no file .*; build the extension first"):
            bench(files)
        assert not (files / "oc8.csv").exists()

    def test_another_device_is_refused(self, files):
        device = {"name": "h200", "kind": "cuda", "match": "NVIDIA H200"}
        with pytest.raises(DeviceError, match=r"expected h200 \(NVIDIA H200\), found cpu"):
            bench(files, dict(SETTINGS, device=device))
        assert not (files / "oc8.csv").exists()

    def test_a_full_disk_is_noticed_before_measuring(self, files, monkeypatch):
        usage = steps.shutil.disk_usage(str(files))
        monkeypatch.setattr(steps.shutil, "disk_usage", lambda path: usage._replace(free=10**5))
        monkeypatch.setattr(steps, "measure_layer", lambda *arguments: pytest.fail("measured"))
        with pytest.raises(OSError, match="No space left on device"):
            bench(files)

    @pytest.mark.parametrize(
        "name", ["ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"]
    )
    def test_nothing_may_slow_down_the_dense_side(self, files, monkeypatch, name):
        monkeypatch.setenv(name, "default")
        monkeypatch.setattr(steps, "measure_layer", lambda *arguments: pytest.fail("measured"))
        with pytest.raises(ValueError, match=f"environment: expected {name} unset, .*; unset it"):
            bench(files)

    def test_the_lock_is_held_while_measuring(self, files, monkeypatch):
        held = []
        real = steps.measurement_lock

        @contextlib.contextmanager
        def recording(device):
            with real(device):
                held.append(True)
                yield
                held.append(False)

        measure = steps.measure_layer

        def measured(*arguments):
            assert held == [True]
            return measure(*arguments)

        monkeypatch.setattr(steps, "measurement_lock", recording)
        monkeypatch.setattr(steps, "measure_layer", measured)
        bench(files)
        assert held == [True, False]
        # The files are written inside the lock: nobody sees one without the other.
        assert (files / "oc8.csv").exists()

    def test_page_faults_are_warned_of(self, capsys):
        steps.warn_of_faults(LAYER, {"dense": {"s90": 3.0}, "sparse": {"s90": 0.0}})
        assert capsys.readouterr().err == ""
        steps.warn_of_faults(LAYER, {"dense": {"s90": 8193.0}})
        assert "8193 page faults per dense execution" in capsys.readouterr().err


# A script with a lock of its own folder.
SCRIPT = """
import runpy, sys
from packedconv.bench import lock
lock.FOLDER = sys.argv[1]
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start_script(name, files, *arguments):
    script_path = str(ROOT / "scripts" / name)
    settings = ["--settings", str(files / "settings.json"), "--layer", "oc8"]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(files), script_path, *settings, *arguments],
        stderr=subprocess.PIPE,
        text=True,
    )


def run_script(name, files, *arguments):
    """Exit status and stderr."""
    process = start_script(name, files, *arguments)
    messages = process.communicate(timeout=60)[1]
    return process.returncode, messages


def bench_arguments(files):
    paths = {"weights": "oc8.npz", "stamp": "stamp.json", "out": "oc8.csv", "facts": "oc8.json"}
    return [part for key, path in paths.items() for part in ("--" + key, str(files / path))]


class TestScripts:
    def test_weights_and_check(self, files):
        arguments = ["--out", str(files / "w.npz"), "--manifest", str(files / "w.json")]
        assert run_script("weights.py", files, *arguments) == (0, "")
        assert (files / "w.npz").read_bytes() == (files / "oc8.npz").read_bytes()
        assert json.loads((files / "w.json").read_text())["seed"] == 1
        arguments = ["--weights", str(files / "w.npz"), "--out", str(files / "c.csv")]
        arguments += ["--stamp", str(files / "stamp.json"), "--facts", str(files / "c.json")]
        assert run_script("check.py", files, *arguments) == (0, "")
        assert len(read_rows(str(files / "c.csv"), ERROR_COLUMNS)) == 8
        facts = json.loads((files / "c.json").read_text())
        assert facts["errors_sha256"] == text_sha256((files / "c.csv").read_text())
        assert facts["stamp"] == json.loads((files / "stamp.json").read_text())
        manifest = json.loads((files / "w.json").read_text())["sparsities"]
        assert facts["weights_sha256"] == {key: one["sha256"] for key, one in manifest.items()}
        assert "cpu" in facts["machine"]
        assert is_intact(facts)

    def test_check_refuses_another_extension(self, files):
        (files / "stamp.json").write_text(json.dumps({"sha256": "0"}))
        arguments = ["--weights", str(files / "oc8.npz"), "--out", str(files / "c.csv")]
        arguments += ["--stamp", str(files / "stamp.json"), "--facts", str(files / "c.json")]
        status, messages = run_script("check.py", files, *arguments)
        assert (status, messages[:12]) == (1, "error: stamp")
        assert not (files / "c.csv").exists()

    def test_one_message_and_exit_status_1(self, files):
        (files / "stamp.json").unlink()
        log = files / "logs" / "bench.log"
        arguments = [*bench_arguments(files), "--log", str(log)]
        status, messages = run_script("bench.py", files, *arguments)
        assert status == 1
        assert messages.startswith("error: stamp: no file")
        assert messages.count("\n") == 1
        assert log.read_text() == messages

    def test_of_two_at_once_the_second_keeps_what_the_first_measured(self, files):
        (files / "settings.json").write_text(json.dumps(changed(("protocol", "rounds"), 10)))
        first = start_script("bench.py", files, *bench_arguments(files))
        while lock.lock_holder(str(files / "packedconv-cpu.lock")) != first.pid:
            assert first.poll() is None
            time.sleep(0.01)
        status, messages = run_script("bench.py", files, *bench_arguments(files))
        assert first.communicate()[1] == ""
        assert (first.returncode, status) == (0, 0)
        waiting, kept = messages.splitlines()
        assert waiting.startswith(f"waiting for process {first.pid}")
        assert kept.startswith("kept ")

    def test_sigkill_leaves_nothing_half_done(self, files):
        (files / "settings.json").write_text(json.dumps(changed(("protocol", "rounds"), 10**6)))
        process = start_script("bench.py", files, *bench_arguments(files))
        time.sleep(2.5)
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (files / "oc8.csv").exists()
        assert not (files / "oc8.json").exists()
        assert len(bench(files)[0]) == 24


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "does not fit into memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "does not fit"),
        (ImportError("no", name="packedconv._core"), "extension is not built"),
        (OSError(28, "No space left on device", "x.csv"), "free some space"),
        (ValueError("threads: expected 1, got 0"), "error: threads: expected 1, got 0"),
        (script.CheckError("wrong"), "error: wrong"),
    ],
)
def test_expected_failures_are_one_message(error, message):
    def fail():
        raise error

    with pytest.raises(SystemExit) as exit_info:
        script.run(fail)
    assert str(exit_info.value.code).startswith("error: ")
    assert message in exit_info.value.code


def test_unexpected_failures_keep_their_traceback():
    with pytest.raises(RuntimeError, match="surprise"):
        script.run(lambda: (_ for _ in ()).throw(RuntimeError("surprise")))


def test_csv_round_trip_and_cut_rows(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(format_csv([{"a": 0.1, "b": None}, {"a": 1, "b": "x"}], ("a", "b")))
    assert path.read_text() == "a,b\n0.1,\n1,x\n"
    assert read_rows(str(path), ("a", "b")) == [{"a": "0.1", "b": ""}, {"a": "1", "b": "x"}]
    with pytest.raises(ValueError, match="expected the columns a, c, got a, b"):
        read_rows(str(path), ("a", "c"))
    path.write_text("a,b\n0.1,2\n1\n")
    with pytest.raises(ValueError, match="line 3: expected 2 fields"):
        read_rows(str(path), ("a", "b"))


def test_waiting_for_the_lock_needs_no_torch():
    # A waiting process must not disturb the one that measures.
    code = "import sys, packedconv.bench.steps, packedconv.script; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "packedconv.bench.steps" in loaded
    assert "torch" not in loaded
