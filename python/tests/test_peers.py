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

from packedconv.bench import lock, mnn, peers, protocol
from packedconv.bench.protocol import Measurement, Sample
from packedconv.device import DeviceError
from packedconv.evidence import peers as evidence
from packedconv.layer import Layer
from packedconv.samples_file import SAMPLE_COLUMNS, format_csv, read_rows, text_sha256
from packedconv.settings import validate_settings

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
with_mnn = pytest.mark.skipif(
    importlib.util.find_spec("MNN") is None, reason="MNN is not installed (it is optional)"
)


@pytest.fixture(autouse=True)
def quick(torch_threads, tmp_path, monkeypatch):
    """Short warm-ups, a lock of its own, and no repetition on a busy machine."""
    monkeypatch.setattr(lock, "FOLDER", str(tmp_path))
    monkeypatch.setattr(protocol, "WARMUP_SECONDS", 0.0)
    monkeypatch.setattr(protocol, "PEAK_BURST_SECONDS", 0.005)
    monkeypatch.setattr(peers, "REPEATS", 0)


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
        with pytest.raises(mnn.UnavailableError, match=r"expected MNN 3\.6, got 3\.4\.1"):
            mnn.load()

    def test_another_device_is_refused(self):
        settings = dict(SETTINGS, device={"name": "h200", "kind": "cuda"})
        with pytest.raises(DeviceError, match=r"expected a CPU.*got h200"):
            peers.peers(settings, peers.LAYERS[0].name, "stamp", "out", "facts")

    def test_unknown_layer(self):
        with pytest.raises(ValueError, match="expected one of a_oc64_n1"):
            peers.find_layer("a")


class FakeSession:
    """Stands in for MNN: dense settings refuse, blocks of channels compute wrongly."""

    sparse_parameter = None
    backend = "CPU"

    def __init__(self, setting, layer, input, weight, threads):
        if not setting.sparse:
            raise mnn.UnavailableError("it fails with code 7")
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


class TestSteadyRounds:
    @staticmethod
    def measurement(group, slow):
        """Two keys of which the first one's last round takes `slow` seconds, others 1."""
        samples = [
            Sample(key, "sparse", "packed", number, 0, slow if key == "s90" and number else 1.0)
            for key in group
            for number in range(2)
        ]
        return Measurement(samples, [1e9], {(key, "sparse"): slow for key in group})

    def test_a_wide_key_is_measured_again(self, monkeypatch):
        monkeypatch.setattr(peers, "REPEATS", 3)
        asked, slowness = [], iter([3.0, 2.0, 1.1, 9.0])

        def time_rounds(group):
            asked.append(sorted(group))
            return self.measurement(group, next(slowness))

        measured, spreads = peers.steady_rounds({"s90": [], "s98": []}, time_rounds)
        assert asked == [["s90", "s98"], ["s90"], ["s90"]]
        assert max(sample.seconds for sample in measured.samples) == 1.1
        assert len(measured.samples) == 4
        assert [round(value, 3) for value in spreads["s90"]] == [0.5, 0.333, 0.048]
        assert spreads["s98"] == [0.0]
        assert measured.page_faults == {("s90", "sparse"): 1.1, ("s98", "sparse"): 3.0}
        assert len(measured.peak_bursts) == 3

    def test_the_steadiest_attempt_is_kept(self, monkeypatch):
        monkeypatch.setattr(peers, "REPEATS", 2)
        slowness = iter([3.0, 2.0, 5.0])
        measured, spreads = peers.steady_rounds(
            {"s90": []}, lambda group: self.measurement(group, next(slowness))
        )
        assert max(sample.seconds for sample in measured.samples) == 2.0
        assert len(spreads["s90"]) == 3


def synthetic(folder, seconds, chosen=None, skipped=None, unavailable=None, layer=LAYER):
    """Write results/<device>/<run>/ of one layer: `seconds[implementation]` at every sparsity."""
    target = pathlib.Path(folder)
    (target / "peers").mkdir(parents=True, exist_ok=True)
    (target / "settings.json").write_text(json.dumps(SETTINGS))
    layouts = {"sparse": "packed", "dense": "channels_last", "mnn": "sparse"}
    rows = [
        dict(
            {**layer._asdict(), "layer": layer.name},
            device="cpu",
            run="test",
            sparsity=sparsity,
            nonzeros=230,
            implementation=implementation,
            layout=layouts[implementation],
            threads=2,
            round=number,
            execution=execution,
            seconds=value * (1 + number / 100),
        )
        for sparsity in SETTINGS["sparsities"]
        for implementation, value in seconds.items()
        for number in range(2)
        for execution in range(3)
    ]
    text = format_csv([{key: row[key] for key in SAMPLE_COLUMNS} for row in rows], SAMPLE_COLUMNS)
    (target / "peers" / f"{layer.name}.csv").write_text(text)
    found = {
        "described": "--detectSparseSpeedUp, numThread 2",
        "backend": "CPU",
        "error_fraction": 0.2,
        "seconds": [4e-3, 5e-3, 6e-3],
        "sparse_parameter": None,
    }
    keys = ("s90", "s98")
    facts = {
        "layer": dict(layer._asdict()),
        "threads": 2,
        "settings_hash": "settings",
        "stamp": {},
        "comparable": {},
        "samples_sha256": text_sha256(text),
        "dense": {"layout": "channels_last"},
        "machine": {
            "cpu": "Some CPU",
            "isa": "x86-64-v4",
            "torch": "2.13.0",
            "extension": {"version": "0.1.0"},
        },
        "spreads": {"s90": [0.3, 0.02], "s98": [0.4, 0.2]},
        "widest_spread": 0.15,
        "peak_bursts": [2e11, 1e11],
        "mnn": {
            "version": None if unavailable else "3.6.1",
            "unavailable": unavailable,
            "chosen": dict.fromkeys(keys, "sparse") if chosen is None else chosen,
            "sparsities": {
                key: {
                    "settings": {"dense_direct": found, "sparse": found},
                    "skipped": skipped or {},
                }
                for key in keys
            },
        },
    }
    (target / "peers" / f"{layer.name}.json").write_text(json.dumps(facts))
    return target


class TestTable:
    def test_ratios_version_and_settings(self, tmp_path):
        folder = synthetic(tmp_path, {"sparse": 2e-3, "dense": 9e-3, "mnn": 5e-3})
        results = evidence.load(folder, ["tiny"])
        table = evidence.table(results)
        assert list(table.columns) == evidence.COLUMNS
        timed = table[table["ratio"].notna()].set_index(["sparsity", "implementation"])
        assert timed.loc[(0.9, "mnn"), "ratio"] == pytest.approx(2.5)
        assert timed.loc[(0.9, "dense"), "ratio"] == pytest.approx(4.5)
        assert (timed.loc[0.9, "spread"] == 0.02).all()
        peer = table[table["implementation"] == "mnn"]
        assert set(peer["version"]) == {"3.6.1"}
        assert peer["settings"].str.contains("numThread 2; CPU").all()
        # The other setting was tried only.
        assert list(peer["layout"]) == ["sparse", "dense_direct"] * 2
        assert list(peer["ratio"].isna()) == [False, True] * 2
        assert peer["trial_seconds"].eq(5e-3).all()
        text = evidence.preamble(results, table)
        assert "ahead of MNN at 2 of the 2 points" in text
        assert "2.50 to 2.50 at S 0.90" in text
        assert "100 to 200 GFLOP/s" in text
        assert "Spread too widely, repeated though they were: tiny at S 0.98 (20%);" in text
        group, variants = evidence.shown(table)
        assert "5 (trial)" in set(group.frame["ms"])
        assert "MNN 3.6.1" in set(group.frame["Contender"])
        assert list(variants.frame["Variant"]) == ["sparse", "dense_direct"]

    def test_behind_is_said(self, tmp_path):
        folder = synthetic(tmp_path, {"sparse": 2e-3, "dense": 9e-3, "mnn": 1e-3})
        table = evidence.table(evidence.load(folder, ["tiny"]))
        assert "ahead of MNN at 0 of the 2 points" in evidence.verdict(table)

    def test_wrong_everywhere_is_a_row_with_its_reason(self, tmp_path):
        skipped = {"dense_direct": "it fails", "sparse": "its error is 3 times", "other": "refused"}
        folder = synthetic(tmp_path, {"sparse": 2e-3, "dense": 9e-3}, {}, skipped)
        table = evidence.table(evidence.load(folder, ["tiny"]))
        peer = table[table["implementation"] == "mnn"]
        assert peer["ratio"].isna().all()
        assert set(peer["skipped"]) == set(skipped.values())
        group, _ = evidence.shown(table)
        assert "skipped: refused" in set(group.frame["ms"])
        assert evidence.verdict(table).startswith("MNN was not timed")

    def test_one_that_does_not_load_is_a_row_with_its_reason(self, tmp_path):
        folder = synthetic(
            tmp_path, {"sparse": 2e-3, "dense": 9e-3}, {}, unavailable="MNN does not load: no"
        )
        table = evidence.table(evidence.load(folder, ["tiny"]))
        peer = table[table["implementation"] == "mnn"]
        assert list(peer["skipped"]) == ["MNN does not load: no"] * 2

    def test_script(self, tmp_path):
        folder = synthetic(tmp_path / "results", {"sparse": 2e-3, "dense": 9e-3, "mnn": 5e-3})
        out = tmp_path / "peers.csv"
        subprocess.run(
            [sys.executable, str(ROOT / "scripts/table_peers.py"), "--results", str(folder)]
            + ["--layers", "tiny", "--out", str(out)],
            check=True,
            env=dict(os.environ, PYTHONPATH=str(ROOT / "python")),
        )
        assert list(pd.read_csv(out).columns) == evidence.COLUMNS
        assert "IC 16, OC 16, 20 × 24, N 1 (tiny)" in (tmp_path / "peers.md").read_text("utf-8")
        assert (tmp_path / "peers.tex").exists()

    def test_edited_samples_are_refused(self, tmp_path):
        folder = synthetic(tmp_path, {"sparse": 2e-3, "dense": 9e-3})
        path = folder / "peers" / "tiny.csv"
        path.write_text(path.read_text().replace("0.002", "0.001"))
        with pytest.raises(ValueError, match=r"expected the samples that tiny\.json belongs to"):
            evidence.load(folder, ["tiny"])

    def test_layers_measured_otherwise_are_refused(self, tmp_path):
        seconds = {"sparse": 2e-3, "dense": 9e-3}
        synthetic(tmp_path, seconds)
        folder = synthetic(tmp_path, seconds, layer=LAYER._replace(name="other"))
        path = folder / "peers" / "other.json"
        path.write_text(json.dumps(dict(json.loads(path.read_text()), stamp={"sha256": "x"})))
        with pytest.raises(ValueError, match="as of layer tiny"):
            evidence.load(folder, ["tiny", "other"])


def test_a_layer_without_a_usable_peer(monkeypatch):
    def load():
        raise mnn.UnavailableError("MNN does not load: no such library")

    monkeypatch.setattr(mnn, "load", load)
    rows, facts = peers.measure_layer(SETTINGS, LAYER, 2)
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
        error = peers._error(layer, torch.from_numpy(image), torch.from_numpy(weight))
        # Winograd's large tiles lose some digits.
        assert error(session.output()) < (1e5 if setting.name == "dense_winograd" else 1)
        if setting.sparse:
            blocks = (weight != 0).reshape(layer.out_channels, -1)
            assert session.sparse_parameter["sparseBlockOC"] == setting.block
            if setting.block == 1:
                assert session.sparse_parameter["NNZElement"] == blocks.sum()

    def test_a_dense_weight_is_not_taken_for_a_sparse_one(self):
        weight = np.ones(LAYER.weight_shape, np.float32)
        image = np.ones(LAYER.input_shape, np.float32)
        with pytest.raises(mnn.UnavailableError, match="takes this weight for a dense one"):
            mnn.Session(mnn.SETTINGS[0], LAYER, image, weight, 2)

    def test_a_run_from_end_to_end(self, tmp_path, monkeypatch):
        monkeypatch.setattr(peers, "LAYERS", (LAYER,))
        monkeypatch.setattr(peers, "SPARSITIES", tuple(SETTINGS["sparsities"]))
        monkeypatch.setattr(peers.steps, "_load_stamp", lambda _: {"sha256": "any"})
        monkeypatch.setattr(peers.steps, "_require_stamped_extension", lambda *_: None)
        folder = tmp_path / "peers"
        paths = [str(folder / f"tiny.{suffix}") for suffix in ("csv", "json")]
        peers.peers(SETTINGS, "tiny", "stamp", *paths)
        rows = read_rows(paths[0], SAMPLE_COLUMNS)
        assert len(rows) == 2 * 3 * 2 * 3
        (tmp_path / "settings.json").write_text(json.dumps(SETTINGS))
        table = evidence.table(evidence.load(tmp_path, ["tiny"]))
        timed = table[table["ratio"].notna()]
        assert set(timed["implementation"]) == {"sparse", "dense", "mnn"}
        assert (timed["seconds"] > 0).all()
        assert table.loc[table["implementation"] == "mnn", "version"].str.startswith("3.6").all()
