"""The comparison with MNN: what is timed, what is left out and why, and the table of it."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from synthetic import experiment, write_experiments, write_results

from packedconv.bench import cpu_experiments, lock, mnn, peers, protocol
from packedconv.bench.experiment import load_experiment
from packedconv.device import DeviceError
from packedconv.evidence import peers as evidence
from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.layer import Layer
from packedconv.samples_file import EXPERIMENT_COLUMNS, read_rows, text_sha256
from packedconv.settings import load_settings, validate_settings

ROOT = pathlib.Path(__file__).parents[2]
LAYER = Layer("tiny", 1, 16, 16, 20, 24)
SETTINGS = validate_settings(
    {
        "device": {"name": "cpu", "kind": "cpu", "family": "cpu", "title": "CPU"},
        "run": "test",
        "seed": 1,
        "sparsities": [0.9, 0.98],
        "threads": 2,
        "protocol": {"rounds": 2, "executions": 3, "warmup_executions": 1, "trial_executions": 2},
        "layers": [dict(LAYER._asdict())],
    }
)
WANTED = experiment(
    LAYER,
    contenders=["sparse", "dense"],
    protocol={"rounds": 2, "executions": 3, "warmup_executions": 1, "trial_executions": 2},
    repeats=0,
)
with_mnn = pytest.mark.skipif(
    importlib.util.find_spec("MNN") is None, reason="MNN is not installed (it is optional)"
)


@pytest.fixture(autouse=True)
def quick(torch_threads, tmp_path, monkeypatch):
    """Short warm-ups and bursts, and a lock of its own."""
    monkeypatch.setattr(lock, "FOLDER", str(tmp_path))
    monkeypatch.setattr(protocol, "WARMUP_SECONDS", 0.0)
    monkeypatch.setattr(cpu_experiments, "PEAK_BURST_SECONDS", 0.005)


@pytest.fixture
def drawn():
    """Input and weight of LAYER, float32, a tenth of the weights nonzero."""
    generator = np.random.default_rng(5)
    weight = generator.standard_normal(LAYER.weight_shape).astype(np.float32)
    weight[generator.random(weight.shape) < 0.9] = 0
    return generator.random(LAYER.input_shape).astype(np.float32), weight


class TestMissing:
    def test_the_message_names_the_command(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "MNN", None)
        with pytest.raises(mnn.MissingPeerError, match=r"got none; install it: .*pip") as no:
            mnn.require()
        pins = (ROOT / str(no.value).split()[-1]).read_text().splitlines()
        assert [pin[:8] for pin in pins if not pin.startswith("#")] == ["MNN==3.6"]

    def test_only_this_target_asks_for_it(self, tmp_path):
        (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['MNN'] = None\n")
        environment = dict(os.environ, PYTHONPATH=str(tmp_path))

        def plan(target):
            return subprocess.run(
                [sys.executable, "-m", "snakemake", "--cores", "1", "-n", target]
                + ["--config", "run=unmeasured"],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )

        refused = plan("peers")
        assert refused.returncode != 0
        assert refused.stdout.count("envs/requirements-peers.txt") == 1
        assert plan("figures/unmeasured/fig3.pdf").returncode == 0

    def test_another_version_is_refused(self, monkeypatch):
        class Module:
            @staticmethod
            def version():
                return "3.4.1"

        monkeypatch.setitem(sys.modules, "MNN", Module)
        with pytest.raises(mnn.MnnError, match=r"expected MNN 3\.6, got 3\.4\.1"):
            mnn.load()

    def test_another_device_is_refused(self):
        settings = dict(SETTINGS, device={"name": "h200", "kind": "cuda"})
        with pytest.raises(DeviceError, match=r"expected a CPU.*got h200"):
            peers.peers(settings, json.dumps(WANTED), "stamp", "out", "facts")


class FakeSession:
    """Stands in for MNN: dense settings refuse, blocks of channels compute wrongly."""

    sparse_parameter = None
    backend = "CPU"

    def __init__(self, setting, layer, input, weight, threads):
        if not setting.sparse:
            raise mnn.MnnError("it fails with code 7")
        self._output = (
            torch.nn.functional.conv2d(
                torch.from_numpy(input), torch.from_numpy(weight), **layer.conv2d_arguments
            )
            + (setting.block > 1)
        ).numpy()

    def run(self):
        pass

    def output(self):
        return self._output


class TestChoice:
    def test_right_ones_only(self, drawn, monkeypatch):
        monkeypatch.setattr(mnn, "Session", FakeSession)
        error = peers._error(LAYER, *map(torch.from_numpy, drawn))
        setting, session, facts = mnn.choose(LAYER, *drawn, 2, error, 3, 1)
        assert setting.name == "sparse"
        assert isinstance(session, FakeSession)
        assert set(facts["settings"]) == {"sparse", "sparse_oc4"}
        assert [len(found["seconds"]) for found in facts["settings"].values()] == [3, 3]
        assert set(facts["skipped"]) == {setting.name for setting in mnn.SETTINGS} - {"sparse"}
        assert "times what FP32 sums are allowed" in facts["skipped"]["sparse_oc4"]
        assert facts["skipped"]["dense_direct"] == "it fails with code 7"

    def test_none_is_right(self, drawn, monkeypatch):
        monkeypatch.setattr(mnn, "Session", FakeSession)
        setting, session, facts = mnn.choose(LAYER, *drawn, 2, lambda _: float("nan"), 1, 0)
        assert setting is session is None
        assert facts["settings"]["sparse"]["error_fraction"] is None
        json.dumps(facts, allow_nan=False)

    def test_error_is_that_of_the_output(self, drawn):
        image, weight = map(torch.from_numpy, drawn)
        error = peers._error(LAYER, image, weight)
        output = torch.nn.functional.conv2d(image, weight, padding=1).numpy()
        assert 0 < error(output) <= 1
        output[0, 3, 5, 7] += 1e-3
        assert error(output) > 10
        output[0, 3, 5, 7] = np.nan
        assert error(output) == float("inf")

    def test_settings_in_words(self):
        words = [mnn.described(setting, 2) for setting in mnn.SETTINGS]
        assert len(set(words)) == len(words)
        assert all("numThread 2" in text and "precision high" in text for text in words)
        assert [text.startswith("--detectSparseSpeedUp") for text in words] == [
            setting.sparse for setting in mnn.SETTINGS
        ]


@pytest.fixture
def results(tmp_path):
    return write_results(tmp_path / "results", out_channels=(8,), sparsities=(0.9,), rounds=2)


def synthetic(folder, seconds, chosen=None, skipped=None, unavailable=None, **changes):
    """A run's comparison with MNN: `seconds[implementation]`, None for what was not timed."""
    found = {
        "described": "--detectSparseSpeedUp, numThread 2",
        "backend": "CPU",
        "error_fraction": 0.2,
        "seconds": [4e-3, 5e-3, 6e-3],
        "sparse_parameter": None,
    }
    keys = ("s90", "s98")
    facts = {
        "machine": {
            "cpu": "Some CPU",
            "isa": "x86-64-v4",
            "torch": "2.13.0",
            "extension": {"version": "0.1.0"},
        },
        "peak_bursts": [2e11, 1e11],
        "mnn": {
            "version": None if unavailable else "3.6.1",
            "unavailable": unavailable,
            "chosen": dict.fromkeys(keys, "packed") if chosen is None else chosen,
            "sparsities": {
                key: {
                    "settings": {"dense_direct": found, "packed": found},
                    "skipped": skipped or {},
                }
                for key in keys
            },
        },
        **changes,
    }

    def timed(name, sparsity, contender, number):
        value = seconds.get(contender)
        wide = 0.6 if sparsity == 0.98 and contender == "dense" else 0.01
        return None if value is None else value * (1 + number * wide)

    return write_experiments(
        folder,
        "peers",
        [WANTED],
        timed,
        contenders=["sparse", "dense", "mnn"],
        attempts=2,
        changes={LAYER.name: facts},
    )


def loaded(results, *arguments, **changes):
    return load_experiments(results, synthetic(results, *arguments, **changes))


class TestTable:
    def test_ratios_version_and_settings(self, results):
        found = loaded(results, {"sparse": 2e-3, "dense": 9e-3, "mnn": 5e-3})
        table = evidence.table(found)
        assert list(table.columns) == evidence.COLUMNS
        timed = table[table["ratio"].notna()].set_index(["sparsity", "implementation"])
        assert timed.loc[(0.9, "mnn"), "ratio"] == pytest.approx(2.5)
        assert timed.loc[(0.9, "dense"), "ratio"] == pytest.approx(4.5)
        # The slower first attempt does not count.
        assert timed.loc[(0.9, "sparse"), "seconds"] == pytest.approx(2e-3 * 1.005)
        assert (timed["attempts"] == 2).all()
        assert (timed.loc[0.9, "spread"] < 0.15).all()
        assert list(timed["wide"]) == [False] * 3 + [True] * 3
        peer = table[table["implementation"] == "mnn"]
        assert set(peer["version"]) == {"3.6.1"}
        assert peer["settings"].str.contains("numThread 2; CPU").all()
        # The other setting was tried only.
        assert list(peer["layout"]) == ["packed", "dense_direct"] * 2
        assert list(peer["ratio"].isna()) == [False, True] * 2
        assert peer["trial_seconds"].eq(5e-3).all()
        text = evidence.preamble(found, table)
        assert "ahead of MNN at 2 of the 2 points" in text
        assert "2.50 to 2.50 at S 0.90" in text
        assert "100 to 200 GFLOP/s" in text
        assert "2 threads: 2 rounds of 3 executions" in text
        assert "Spread too widely, repeated though they were: tiny at S 0.98 (" in text
        assert "Timed while the machine was busy: tiny at S 0.90 (" in text
        group, variants = evidence.shown(table)
        assert "5 (trial)" in set(group.frame["ms"])
        assert "MNN 3.6.1" in set(group.frame["Contender"])
        assert list(variants.frame["Variant"]) == ["packed", "dense_direct"]
        assert "2.50 [2.50, 2.50]†" in set(group.frame["Ratio"])
        assert "2.50 [2.50, 2.50]*†" in set(group.frame["Ratio"])

    def test_a_rounds_value_is_its_median(self, results):
        """One slow execution, which a mean would count, changes nothing."""
        (path,) = synthetic(results, {"sparse": 2e-3, "dense": 9e-3, "mnn": 5e-3})
        before = evidence.table(load_experiments(results, [path]))
        rows = pd.read_csv(path)
        slow = (rows["execution"] == 2) & (rows["implementation"] == "sparse")
        rows.loc[slow, "seconds"] *= 50
        rows.to_csv(path, index=False, lineterminator="\n")
        facts = json.loads(path.with_suffix(".json").read_text())
        facts["samples_sha256"] = text_sha256(path.read_text())
        path.with_suffix(".json").write_text(json.dumps(facts))
        after = evidence.table(load_experiments(results, [path]))
        np.testing.assert_allclose(after["ratio"], before["ratio"])

    def test_behind_is_said(self, results):
        table = evidence.table(loaded(results, {"sparse": 2e-3, "dense": 9e-3, "mnn": 1e-3}))
        assert "ahead of MNN at 0 of the 2 points" in evidence.verdict(table)

    def test_wrong_everywhere_is_a_row_with_its_reason(self, results):
        skipped = {"dense_direct": "it fails", "packed": "its error is 3 times", "other": "refused"}
        table = evidence.table(loaded(results, {"sparse": 2e-3, "dense": 9e-3}, {}, skipped))
        peer = table[table["implementation"] == "mnn"]
        assert peer["ratio"].isna().all()
        assert set(peer["skipped"]) == set(skipped.values())
        group, _ = evidence.shown(table)
        assert "skipped: refused" in set(group.frame["ms"])
        assert evidence.verdict(table).startswith("MNN was not timed")

    def test_one_that_does_not_load_is_a_row_with_its_reason(self, results):
        seconds = {"sparse": 2e-3, "dense": 9e-3}
        table = evidence.table(loaded(results, seconds, {}, unavailable="MNN does not load: no"))
        peer = table[table["implementation"] == "mnn"]
        assert list(peer["skipped"]) == ["MNN does not load: no"] * 2

    def test_script(self, results, tmp_path):
        paths = synthetic(results, {"sparse": 2e-3, "dense": 9e-3, "mnn": 5e-3})
        out = tmp_path / "peers.csv"
        subprocess.run(
            [sys.executable, str(ROOT / "scripts/table_peers.py"), "--results", str(results)]
            + ["--samples", *map(str, paths), "--out", str(out)],
            check=True,
            env=dict(os.environ, PYTHONPATH=str(ROOT / "python")),
        )
        assert list(pd.read_csv(out).columns) == evidence.COLUMNS
        assert "IC 16, OC 16, 20 × 24, N 1 (tiny)" in (tmp_path / "peers.md").read_text("utf-8")
        assert (tmp_path / "peers.tex").exists()

    def test_other_settings_are_refused(self, results):
        paths = synthetic(results, {"sparse": 2e-3, "dense": 9e-3}, settings_hash="0")
        with pytest.raises(ValueError, match="settings_hash: expected that of settings"):
            load_experiments(results, paths)


def test_a_layer_without_a_usable_peer(monkeypatch):
    def load():
        raise mnn.MnnError("MNN does not load: no such library")

    monkeypatch.setattr(mnn, "load", load)
    rows, facts = peers.measure_layer(SETTINGS, load_experiment(json.dumps(WANTED)), 2)
    assert {row["implementation"] for row in rows} == {"sparse", "dense"}
    assert facts["mnn"]["unavailable"] == "MNN does not load: no such library"


@with_mnn
class TestReal:
    @pytest.mark.parametrize(
        "layer",
        [
            LAYER,
            Layer("strided", 2, 8, 12, 17, 15, 3, 2, 1),
            Layer("dilated", 1, 5, 7, 19, 23, 3, 1, 2, 2),
            Layer("wide", 1, 16, 8, 14, 14, 5, 1, 0),
        ],
        ids=lambda layer: layer.name,
    )
    @pytest.mark.parametrize("setting", mnn.SETTINGS, ids=lambda setting: setting.name)
    def test_computes_the_layer(self, layer, setting):
        generator = np.random.default_rng(5)
        weight = generator.standard_normal(layer.weight_shape).astype(np.float32)
        weight[generator.random(weight.shape) < 0.9] = 0
        image = generator.random(layer.input_shape).astype(np.float32)
        session = mnn.Session(setting, layer, image, weight, 2)
        output, tensors = session.output(), (torch.from_numpy(image), torch.from_numpy(weight))
        if setting.name == "dense_winograd":  # whose large tiles lose some digits
            expected = torch.nn.functional.conv2d(*tensors, **layer.conv2d_arguments).numpy()
            assert np.abs(output - expected).max() < 1e-2 * np.abs(expected).max()
        else:
            assert peers._error(layer, *tensors)(output) < 1
        if setting.sparse:
            blocks = (weight != 0).reshape(layer.out_channels, -1)
            assert session.sparse_parameter["sparseBlockOC"] == setting.block
            if setting.block == 1:
                assert session.sparse_parameter["NNZElement"] == blocks.sum()

    def test_a_dense_weight_is_not_taken_for_a_sparse_one(self):
        weight = np.ones(LAYER.weight_shape, np.float32)
        image = np.ones(LAYER.input_shape, np.float32)
        with pytest.raises(mnn.MnnError, match="takes this weight for a dense one"):
            mnn.Session(mnn.SETTINGS[0], LAYER, image, weight, 2)

    def test_a_run_from_end_to_end(self, results, monkeypatch):
        monkeypatch.setattr(peers.cpu_steps, "load_stamp", lambda _: {"sha256": "any"})
        monkeypatch.setattr(peers.cpu_steps, "require_stamped_extension", lambda *_: None)
        settings = load_settings(str(results / "settings.json"))
        paths = [results / "peers" / f"tiny.{suffix}" for suffix in ("csv", "json")]
        peers.peers(settings, json.dumps(WANTED), "stamp", *map(str, paths))
        rows = read_rows(str(paths[0]), EXPERIMENT_COLUMNS)
        assert len(rows) == 2 * 3 * 2 * 3
        facts = json.loads(paths[1].read_text())
        assert facts["experiment"] == WANTED
        write_experiments(results, "others", [WANTED], lambda *_: 1e-3)
        ceilings = json.loads((results / "ceilings.json").read_text())
        ceilings.update(stamp=facts["stamp"], comparable=facts["comparable"])
        (results / "ceilings.json").write_text(json.dumps(ceilings))
        path = results / "ceilings.csv"
        path.write_text(path.read_text().replace(",2,", f",{facts['threads']},"))
        ceilings["ceilings_sha256"] = text_sha256(path.read_text())
        (results / "ceilings.json").write_text(json.dumps(ceilings))
        table = evidence.table(load_experiments(results, paths[:1]))
        timed = table[table["ratio"].notna()]
        assert set(timed["implementation"]) == {"sparse", "dense", "mnn"}
        assert (timed["seconds"] > 0).all()
        assert table.loc[table["implementation"] == "mnn", "version"].str.startswith("3.6").all()
