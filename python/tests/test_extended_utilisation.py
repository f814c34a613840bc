"""Bandwidth utilisation of matrix times vector: what is measured, counted and drawn."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic import experiment, read_csv, write_experiments, write_results

import packedconv
from packedconv.bench import cpu_experiments, protocol
from packedconv.bench.experiment import load_experiment
from packedconv.bench.extended import matrices
from packedconv.bench.extended import utilisation as timing
from packedconv.evidence import published
from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.utilisation import COLUMNS, IMPLEMENTATIONS, table
from packedconv.layer import Layer, nonzero_count
from packedconv.plots.extended.utilisation import utilisation_figure
from packedconv.script import CheckError
from packedconv.settings import UNIFORM_WEIGHTS, load_settings
from packedconv.weights import weight_bound

ROOT = Path(__file__).resolve().parents[2]
PAPER = published.load(str(ROOT / "config" / "paper.yaml"))
PROTOCOL = {"rounds": 2, "executions": 3, "warmup_executions": 0, "trial_executions": 1}
LAYER = Layer("v_oc48_n1", 1, 64, 48, 1, 1, 1, 1, 0)


@pytest.fixture(autouse=True)
def quick(torch_threads, monkeypatch):
    """Short warm-ups and bursts."""
    monkeypatch.setattr(protocol, "WARMUP_SECONDS", 0.0)
    monkeypatch.setattr(cpu_experiments, "PEAK_BURST_SECONDS", 0.001)


@pytest.fixture
def results(tmp_path):
    return write_results(tmp_path / "results", out_channels=(8,), sparsities=(0.9,), rounds=2)


@pytest.fixture
def settings(results):
    return load_settings(str(results / "settings.json"))


def asked(layer=LAYER, **changes):
    wanted = experiment(layer, contenders=[], repeats=0, protocol=PROTOCOL, **changes)
    return load_experiment(json.dumps(wanted))


# Measuring


def test_bytes_by_hand():
    layer = Layer("v", 1, 300, 10, 1, 1, 1, 1, 0)
    vectors = 4 * (300 + 10)
    # 300 columns are two blocks of packed words, with offsets of each.
    assert timing.moved_bytes(layer, 7) == {
        "sparse": 4 * (7 + 2 * 11) + vectors,
        "torch_csr": 8 * 7 + 4 * 11 + vectors,
        "scipy_csr": 8 * 7 + 4 * 11 + vectors,
        "dense": 4 * 3000 + vectors,
        "dense_linear": 4 * 3000 + vectors,
    }


@pytest.mark.parametrize("cache", [2**30, 1024], ids=["caches", "memory"])
def test_matrix_times_vector_is_measured(settings, monkeypatch, cache):
    monkeypatch.setattr(timing, "largest_cache_bytes", lambda: cache)
    rows, facts = timing.measure(settings, asked(), 2)
    assert json.loads(json.dumps(facts)) == facts
    found = {}
    for row in rows:
        point = (row["sparsity"], row["implementation"])
        found[point] = found.get(point, 0) + 1
        assert row["threads"] == (1 if row["implementation"] == "scipy_csr" else 2)
        assert row["nonzeros"] == nonzero_count(LAYER.weight_count, row["sparsity"])
    assert found == {(s, name): 6 for s in (0.9, 0.98) for name in IMPLEMENTATIONS}
    assert facts["past_caches"] == (cache == 1024)
    for key, copies in facts["copies"].items():
        for name, count in copies.items():
            moved = facts["bytes"][key][name]
            assert count == (-(-4 * cache // moved) if cache == 1024 else 1)


def test_every_copy_is_read_in_turn():
    seen = []
    execute = timing._in_turn([lambda number=number: seen.append(number) for number in range(3)])
    for _ in range(4):
        execute()
    assert seen == [0, 1, 2, 0]


def test_copies_have_memory_of_their_own(settings):
    wanted = asked(sparsities=[0.9])
    prepared = timing._PreparedMatrix(settings, wanted, 1)
    matrix = prepared.dense["s90"].reshape(48, 64)
    reference = matrix @ prepared.image.reshape(64)
    for name, _, make in timing._contenders(prepared, "s90", matrix):
        executions = make(3)
        assert len(executions) == 3
        for execute in executions:
            torch.testing.assert_close(execute().reshape(48), reference, msg=name)
        if name != "sparse":
            held = [execute.args[0] for execute in executions]
            arrays = [
                matrices.matrix_arrays(one)[-1] if name.endswith("csr") else one.numpy()
                for one in held
            ]
            assert not np.shares_memory(arrays[0], arrays[1])


def test_how_many_copies(monkeypatch):
    monkeypatch.setattr(timing, "available_memory_bytes", lambda: 2**50)
    assert timing.copies_of(100, 1000) == 40
    assert timing.copies_of(4001, 1000) == 1
    assert timing.copies_of(2**20, 2**40) == 2**10
    monkeypatch.setattr(timing, "available_memory_bytes", lambda: 8 * 700)
    assert timing.copies_of(100, 1000) == 7


def test_weights_are_as_many_as_asked_for_and_the_same_again():
    layer = Layer("w", 1, 100, 30, 1, 1, 1, 1, 0)
    weight = timing.make_matrix_weight(layer, 0.9, 1, UNIFORM_WEIGHTS)
    assert weight.shape == layer.weight_shape
    assert weight.dtype == np.float32
    assert np.count_nonzero(weight) == np.count_nonzero(weight.astype(np.float16)) == 300
    bound = weight_bound(layer)
    assert 0.9 * bound < np.abs(weight).max() <= bound
    np.testing.assert_array_equal(weight, timing.make_matrix_weight(layer, 0.9, 1, UNIFORM_WEIGHTS))
    other = timing.make_matrix_weight(layer, 0.9, 2, UNIFORM_WEIGHTS)
    assert (weight != other).any()
    # Spread over rows and columns alike.
    assert (weight != 0).sum((1, 2, 3)).max() < 30


@pytest.mark.parametrize(
    "change", [{"batch": 2}, {"height": 2}, {"kernel_size": 3, "padding": 1}, {"groups": 2}]
)
def test_other_layers_are_refused(settings, change):
    with pytest.raises(ValueError, match="layer v_oc48_n1: expected a 1x1 kernel on one pixel"):
        timing.measure(settings, asked(LAYER._replace(**change)), 2)


def test_a_layer_without_memory_is_left_out(settings, monkeypatch):
    monkeypatch.setattr(timing, "available_memory_bytes", lambda: 1000)
    rows, facts = timing.measure(settings, asked(), 2)
    assert rows == []
    assert facts["skipped"] == "needs 0.0 GB of memory, 0.0 can be had"
    assert facts["page_faults_per_execution"] == {}


@pytest.mark.parametrize("library", matrices.LIBRARIES)
def test_a_wrong_product_is_left_out(settings, monkeypatch, library):
    right = timing.multiply

    def wrong(matrix, vector):
        product = right(matrix, vector)
        if (library == "torch") == isinstance(matrix, torch.Tensor):
            product[3] += 0.5
        return product

    monkeypatch.setattr(timing, "multiply", wrong)
    rows, facts = timing.measure(settings, asked(sparsities=[0.9]), 2)
    name = f"{library}_csr"
    assert {row["implementation"] for row in rows} == set(IMPLEMENTATIONS) - {name}
    assert "output (0, 3, 0, 0)" in facts["left_out"]["s90"][name]


def test_a_wrong_packedconv_is_an_error(settings, monkeypatch):
    monkeypatch.setattr(packedconv, "conv2d", lambda *_, out, **__: out.fill_(1.0))
    with pytest.raises(CheckError, match=r"check of layer v_oc48_n1, sparsity 0\.9, sparse"):
        timing.measure(settings, asked(), 2)


# Evidence

SECONDS = {"sparse": 2e-6, "torch_csr": 1e-6, "dense": 1e-6, "dense_linear": 4e-6}


@pytest.fixture
def measured(results):
    """A layer from the caches, one from memory, and one that was left out."""
    layers = [LAYER, LAYER._replace(name="m_oc48_n1"), LAYER._replace(name="x_oc48_n1")]
    changes = {}
    for layer in layers[:2]:
        moved = {
            key: timing.moved_bytes(layer, nonzero_count(layer.weight_count, sparsity))
            for key, sparsity in (("s90", 0.9), ("s98", 0.98))
        }
        changes[layer.name] = {
            "bytes": moved,
            "copies": {key: dict.fromkeys(IMPLEMENTATIONS, 3) for key in moved},
            "left_out": {key: {"scipy_csr": "not there"} for key in moved},
            "cache_bytes": 2**20,
            "past_caches": layer is layers[1],
        }
    changes["x_oc48_n1"] = {"skipped": "needs 9 GB of memory, 1 can be had"}
    paths = write_experiments(
        results,
        "utilisation",
        [experiment(layer, contenders=[]) for layer in layers],
        lambda name, sparsity, contender, number: (
            SECONDS[contender] * (1 + (0.5 if name == "v_oc48_n1" else 0.01) * number)
        ),
        contenders=list(SECONDS),
        changes=changes,
    )
    return load_experiments(results, paths), paths


def test_the_table(measured):
    frame = table(measured[0], PAPER)
    assert list(frame.columns) == COLUMNS
    # From memory first.
    assert list(frame["layer"].dropna().unique()) == ["m_oc48_n1", "v_oc48_n1", "x_oc48_n1"]
    first = frame[(frame["layer"] == "m_oc48_n1") & (frame["sparsity"] == 0.9)]
    assert list(first["implementation"]) == list(IMPLEMENTATIONS)
    rows = first.set_index("implementation")
    dense = rows.loc["dense"]
    moved = 4 * (48 * 64 + 48 + 64)
    # Round 2 of 0 to 4 is the median; 50 GB/s is the bandwidth.
    assert dense["bytes"] == moved
    assert dense["utilisation"] == pytest.approx(moved / 1.02e-6 / 50e9)
    assert dense["utilisation_low"] < dense["utilisation"] < dense["utilisation_high"]
    assert dense["set_bytes"] == 3 * moved
    assert not dense["beyond_copy"]
    assert rows.loc["sparse", "speedup"] == pytest.approx(0.5)
    assert rows.loc["scipy_csr", "left_out"] == "not there"
    assert np.isnan(rows.loc["scipy_csr", "utilisation"])
    skipped = frame[frame["layer"] == "x_oc48_n1"]
    assert list(skipped["left_out"]) == ["needs 9 GB of memory, 1 can be had"]


def test_printed_figures_come_from_the_paper_alone(measured):
    frame = table(measured[0], PAPER)
    printed = frame[frame["origin"] == "printed"].set_index("implementation")
    assert printed["utilisation_low"].to_dict() == pytest.approx({"csrmv": 0.029, "gemv": 0.6779})
    assert printed["utilisation_high"].to_dict() == pytest.approx({"csrmv": 0.1134, "gemv": 0.7367})
    assert set(printed["where"]) == {"4.2"}
    assert set(printed["device"]) == {"a100"}
    assert printed[["utilisation", "seconds"]].isna().all(axis=None)
    other = PAPER.copy()
    other.cited["gemv"]["high"] = 80
    changed = table(measured[0], other)
    assert changed["utilisation_high"].iloc[-1] == pytest.approx(0.8)


def test_the_figure(measured):
    frame = table(measured[0], PAPER)
    figure = utilisation_figure(measured[0], frame)
    memory, caches, cited = figure.axes
    assert memory.get_title(loc="left") == "48×64, from memory"
    assert caches.get_title(loc="left") == "48×64, from the caches"
    heights = sorted(bar.get_height() for bar in memory.patches)
    expected = frame[(frame["layer"] == "m_oc48_n1")]["utilisation"].dropna()
    np.testing.assert_allclose(heights, sorted(expected))
    for bar, (low, high) in zip(cited.patches, ((0.029, 0.1134), (0.6779, 0.7367)), strict=True):
        assert bar.get_facecolor()[3] == 0
        np.testing.assert_allclose([bar.get_y(), bar.get_y() + bar.get_height()], [low, high])
    assert cited.get_ylim() == memory.get_ylim()
    caption = next(text for text in figure.texts if text.get_gid() == "caption").get_text()
    caption = caption.replace("\n", " ")
    assert "ranges printed in the paper (section 4.2)" in caption
    assert "Left out: x_oc48_n1 (needs 9 GB of memory, 1 can be had)." in caption
    assert "(not there)" in caption
    assert "too far apart after the repeats: v_oc48_n1, S 0.9 (50%, measured 1 time);" in caption
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "printed in the paper" in labels
    assert "CSR, scipy.sparse (one thread)" not in labels


def test_the_figure_script(measured, results, tmp_path, monkeypatch):
    out = tmp_path / "utilisation.pdf"
    arguments = ["--results", results, "--samples", *measured[1], "--out", out]
    monkeypatch.setattr(sys, "argv", ["figure_utilisation.py", *map(str, arguments)])
    runpy.run_path(str(ROOT / "scripts" / "figure_utilisation.py"), run_name="__main__")
    rows = read_csv(tmp_path / "utilisation.csv")
    assert len(rows) == 2 * 2 * len(IMPLEMENTATIONS) + 1 + 2
    assert (tmp_path / "utilisation.png").stat().st_size > 10_000
