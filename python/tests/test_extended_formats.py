"""Formats of a sparse weight: what is measured, what breaks even where, and the figure."""

import json
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic import experiment, read_csv, write_experiments, write_results

import packedconv
from packedconv import formats
from packedconv.bench import cpu_experiments, protocol
from packedconv.bench.experiment import load_experiment
from packedconv.bench.extended import formats as timing
from packedconv.bench.extended import matrices
from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.formats import (
    COLUMNS,
    break_even_text,
    break_evens,
    table,
    with_break_evens,
)
from packedconv.layer import Layer, nonzero_count, sparsity_key
from packedconv.plots.extended.formats import formats_figure
from packedconv.script import CheckError
from packedconv.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
LAYER = Layer("t_oc8_n1", 1, 8, 8, 12, 20)
SPARSITIES = [0.5, 0.8, 0.9]
PROTOCOL = {"rounds": 2, "executions": 3, "warmup_executions": 0, "trial_executions": 1}
TIMED = ["sparse", "dense", "bitmap", *timing.MATRICES]


@pytest.fixture(autouse=True)
def quick(torch_threads, monkeypatch):
    """Short warm-ups and bursts, and nothing is slow, however busy the machine is."""
    monkeypatch.setattr(protocol, "WARMUP_SECONDS", 0.0)
    monkeypatch.setattr(cpu_experiments, "PEAK_BURST_SECONDS", 0.001)
    monkeypatch.setattr(timing, "SLOW_SECONDS", 60.0)


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


def test_every_format_is_measured(settings):
    rows, facts = timing.measure(settings, asked(sparsities=[0.5, 0.9]), 2)
    assert json.loads(json.dumps(facts)) == facts
    for sparsity in (0.5, 0.9):
        key = sparsity_key(sparsity)
        here = [row for row in rows if row["sparsity"] == sparsity]
        counts = {name: sum(row["implementation"] == name for row in here) for name in TIMED}
        assert counts == dict.fromkeys(TIMED, 2 * 3)
        assert {row["implementation"] for row in here} == set(TIMED)
        assert facts["left_out"][key] == {}
        found = facts["formats"][key]
        assert set(found) == set(formats.FORMATS)
        nonzeros = here[0]["nonzeros"]
        for name, one in found.items():
            assert len(one["conversion_seconds"]) == 2
            # FP32 values, and torch's COO has indices of 64 bits.
            width = 2 if name == "packed" else 4
            long = name == "coo" and one["library"] == "torch"
            assert one["bytes"] == formats.stored_bytes(
                name, LAYER, nonzeros, width, one.get("blocks"), 8 if long else 4
            )
    assert len(facts["im2col_seconds"]) == 2
    one_thread = {row["layout"] for row in rows if row["threads"] == 1}
    assert one_thread <= {"scipy"}


def test_other_layers_are_refused(settings):
    grouped = Layer("g_oc8_n2", 2, 8, 8, 12, 20, groups=2)
    with pytest.raises(ValueError, match="layer g_oc8_n2: expected batch 1 and groups 1"):
        timing.measure(settings, asked(grouped), 2)


@pytest.mark.parametrize("broken", [("torch",), ("torch", "scipy")])
def test_what_a_library_computes_wrongly_is_left_out(settings, monkeypatch, broken):
    right = matrices.multiply

    def wrong(matrix, columns):
        library = "torch" if isinstance(matrix, torch.Tensor) else "scipy"
        return right(matrix, columns) + (0.5 if library in broken else 0)

    monkeypatch.setattr(matrices, "multiply", wrong)
    rows, facts = timing.measure(settings, asked(sparsities=[0.9]), 2)
    timed = {row["implementation"] for row in rows}
    if len(broken) == 1:
        assert timed == set(TIMED)
        csr = facts["formats"]["s90"]["csr"]
        assert csr["library"] == "scipy"
        assert "csr of torch" in csr["failed"]["torch"]
    else:
        assert timed == {"sparse", "dense", "bitmap"}
        assert set(facts["left_out"]["s90"]) == set(timing.MATRICES)
        assert "torch: check of layer" in facts["left_out"]["s90"]["csr"]


def test_a_wrong_packedconv_is_an_error(settings, monkeypatch):
    monkeypatch.setattr(packedconv, "conv2d", lambda *_, out, **__: out.fill_(1.0))
    with pytest.raises(CheckError, match="check of layer t_oc8_n1"):
        timing.measure(settings, asked(sparsities=[0.9]), 2)


def test_a_library_that_is_not_there_is_left_out(settings, monkeypatch):
    def missing(name, dense):
        raise ImportError("No module named 'scipy'")

    monkeypatch.setitem(matrices._MAKERS, "scipy", missing)
    _, facts = timing.measure(settings, asked(sparsities=[0.9]), 2)
    found = facts["formats"]["s90"]
    assert {found[name]["library"] for name in timing.MATRICES} == {"torch"}
    assert found["csr"]["failed"] == {"scipy": "No module named 'scipy'"}


@pytest.mark.parametrize("library", matrices.LIBRARIES)
@pytest.mark.parametrize("name", timing.MATRICES)
def test_products(name, library):
    dense = torch.zeros(8, 12)
    dense[1, 2], dense[7, 11] = 2.0, -3.0
    right = torch.arange(36.0).reshape(12, 3)
    matrix = matrices.make_matrix(name, library, dense)
    torch.testing.assert_close(matrices.multiply(matrix, right), dense @ right)
    vector = right[:, 0].contiguous()
    torch.testing.assert_close(matrices.multiply(matrix, vector), dense @ vector)
    again = matrices.copied(matrix)
    for one, other in zip(
        matrices.matrix_arrays(matrix), matrices.matrix_arrays(again), strict=True
    ):
        np.testing.assert_array_equal(one, other)
        assert not np.shares_memory(one, other)


def test_the_im2col_matrix_gives_the_convolution():
    layer = Layer("s", 1, 3, 4, 9, 7, 3, 2, 1)
    image, weight = torch.rand(layer.input_shape), torch.rand(layer.weight_shape)
    expected = torch.nn.functional.conv2d(image, weight, **layer.conv2d_arguments)
    found = weight.reshape(4, -1) @ timing.unfolded(image, layer)
    torch.testing.assert_close(found.reshape(expected.shape), expected)


def test_what_is_slow_is_executed_once_a_round(monkeypatch):
    calls = []
    contender = timing.Contender("csr", "torch", lambda: calls.append(1))
    monkeypatch.setattr(timing, "SLOW_SECONDS", 0.0)
    assert len(timing.time_block(contender, 7, 3)[0]) == 1
    assert len(calls) == 2
    monkeypatch.setattr(timing, "SLOW_SECONDS", 60.0)
    assert len(timing.time_block(contender, 7, 3)[0]) == 7


# Evidence

DENSE_SECONDS, IM2COL_SECONDS = 8e-3, 1e-3
# Of the product alone; with the im2col matrix CSR takes as long as dense at S 0.85.
CSR_SECONDS = {0.5: 20e-3, 0.8: 8e-3, 0.9: 6e-3}


def made_up(name, sparsity, contender, number):
    return {
        "dense": DENSE_SECONDS,
        "sparse": DENSE_SECONDS / 4,
        "csr": CSR_SECONDS[sparsity],
        "coo": 2 * CSR_SECONDS[0.5],
        "bsr_2x2": None,
        "bsr_4x4": 9e-3,
        "bitmap": DENSE_SECONDS + 1e-4,
    }[contender]


@pytest.fixture
def measured(results):
    blocks = {0.5: 144, 0.8: 80, 0.9: 30}
    found = {}
    for sparsity in SPARSITIES:
        found[sparsity_key(sparsity)] = {
            name: {
                "library": {"packed": "packedconv", "bitmap": "numpy, torch"}.get(name, "torch"),
                "bytes": 1,
                "conversion_seconds": [2e-3] * 5,
                **({"blocks": blocks[sparsity]} if name in formats.BLOCKS else {}),
            }
            for name in formats.FORMATS
            if name != "bsr_2x2"
        }
    found["s50"]["csr"]["failed"] = {"scipy": "not there"}
    changes = {
        LAYER.name: {
            "formats": found,
            "left_out": {key: {"bsr_2x2": "no such blocks"} for key in found},
            "im2col_seconds": [IM2COL_SECONDS] * 5,
        }
    }
    wanted = experiment(LAYER, contenders=[], sparsities=SPARSITIES)
    paths = write_experiments(
        results, "formats", [wanted], made_up, contenders=TIMED, changes=changes
    )
    return load_experiments(results, paths), paths


def test_the_table(measured):
    frame = table(measured[0])
    assert list(frame.columns) == COLUMNS
    assert len(frame) == len(SPARSITIES) * (1 + len(formats.FORMATS))
    row = frame[(frame["format"] == "csr") & (frame["sparsity"] == 0.9)].iloc[0]
    nonzeros = nonzero_count(LAYER.weight_count, 0.9)
    assert row["bytes_fp32"] == 8 * nonzeros + 4 * 9
    assert row["bytes_fp16"] == 6 * nonzeros + 4 * 9
    assert row["bytes_per_nonzero_fp32"] == pytest.approx(row["bytes_fp32"] / nonzeros)
    assert row["seconds"] == CSR_SECONDS[0.9]
    assert row["whole_seconds"] == pytest.approx(CSR_SECONDS[0.9] + IM2COL_SECONDS)
    assert row["speedup"] == pytest.approx(8 / 7)
    assert row["conversion_seconds"] == 2e-3
    packed = frame[(frame["format"] == "packed") & (frame["sparsity"] == 0.9)].iloc[0]
    assert packed["bytes_fp16"] == 4 * nonzeros + 4 * 9
    assert np.isnan(packed["bytes_per_nonzero_fp32"])
    assert packed["seconds"] == packed["whole_seconds"] == DENSE_SECONDS / 4
    blocks = frame[(frame["format"] == "bsr_4x4") & (frame["sparsity"] == 0.9)].iloc[0]
    assert blocks["bytes_fp32"] == 30 * (4 + 64) + 4 * 3
    assert blocks["stored_per_nonzero"] == pytest.approx(30 * 16 / nonzeros)
    missing = frame[frame["format"] == "bsr_2x2"]
    assert set(missing["left_out"]) == {"no such blocks"}
    assert missing[["bytes_fp32", "seconds"]].isna().all(axis=None)


def test_where_formats_break_even(measured):
    frame = table(measured[0])
    found = break_evens(measured[0], frame).set_index(["format", "quantity"])
    sparsity, text = found["sparsity"], found["text"]
    # Linear in between: 7 ms + 1 ms is what dense takes.
    ratios = [8 / 9, 8 / 7]
    expected = 0.8 + 0.1 * (1 - ratios[0]) / (ratios[1] - ratios[0])
    assert sparsity["csr", "seconds"] == pytest.approx(expected)
    assert text["csr", "seconds"] == f"{expected:.3f}"
    assert sparsity["csr", "product_seconds"] == pytest.approx(0.8)
    assert text["coo", "seconds"] == "never"
    assert text["packed", "seconds"] == "always"
    assert text["bitmap", "seconds"] == "never"
    assert ("bitmap", "product_seconds") not in found.index
    most = (4 * 576 - 36) // 8
    assert sparsity["csr", "bytes_fp32"] == pytest.approx(1 - most / 576)
    assert sparsity["packed", "bytes_fp16_of_fp32"] == pytest.approx(36 / 4 / 576)
    assert ("packed", "bytes_fp32") not in found.index
    # Blocks of 68 bytes and offsets of 12, in 2304 bytes: 33.7 of them, between 80 and 30.
    limit = (2304 - 12) / 68
    assert sparsity["bsr_4x4", "bytes_fp32"] == pytest.approx(0.8 + 0.1 * (80 - limit) / 50)
    assert not [index for index in found.index if index[0] == "bsr_2x2"]
    joined = with_break_evens(frame, found.reset_index())
    csr = joined[joined["format"] == "csr"]
    assert (csr["break_even_seconds"] == sparsity["csr", "seconds"]).all()
    assert joined[joined["format"] == "dense"]["break_even_seconds"].isna().all()
    assert "break_even_bytes_fp32_low" not in joined.columns


def test_texts_of_break_even():
    assert break_even_text(0.9344, 0.93, 0.9501) == "0.934 [0.930, 0.950]"
    assert break_even_text(0.97, 0.95, math.inf) == "0.970 [0.950, never]"
    assert break_even_text(-math.inf, -math.inf, 0.6) == "always [always, 0.600]"
    assert break_even_text(math.inf, math.inf, math.inf) == "never"


def test_the_figure(measured):
    frame = table(measured[0])
    figure = formats_figure(measured[0], frame, break_evens(measured[0], frame))
    assert len(figure.axes) == 5
    lines = {line.get_gid(): line for line in figure.axes[0].lines if line.get_gid()}
    csr = frame[frame["format"] == "csr"]
    drawn = lines["csr fp16"]
    np.testing.assert_allclose(drawn.get_xdata(), 1 - csr["sparsity"])
    np.testing.assert_allclose(drawn.get_ydata(), csr["bytes_per_nonzero_fp16"])
    assert len(lines["packed fp32"].get_xdata()) == 0
    points = {line.get_gid(): line.get_xdata()[0] for line in figure.axes[4].lines[1::2]}
    assert points["packed seconds"] < 0 < points["csr product_seconds"] < 1
    assert points["coo seconds"] > 1
    caption = next(text for text in figure.texts if text.get_gid() == "caption").get_text()
    caption = caption.replace("\n", " ")
    assert "5 rounds of 2 executions" in caption
    assert "time: COO never, CSR 0.8" in caption
    assert "packed word always" in caption
    assert "Left out: BSR 2×2 of t_oc8_n1, S 0.5; t_oc8_n1, S 0.8; t_oc8_n1, S 0.9" in caption
    assert "Left out: CSR of scipy of t_oc8_n1 (not there)." in caption


def test_the_figure_script(measured, results, tmp_path, monkeypatch):
    out = tmp_path / "formats.pdf"
    arguments = ["--results", results, "--samples", *measured[1], "--out", out]
    monkeypatch.setattr(sys, "argv", ["figure_formats.py", *map(str, arguments)])
    runpy.run_path(str(ROOT / "scripts" / "figure_formats.py"), run_name="__main__")
    rows = read_csv(tmp_path / "formats.csv")
    assert len(rows) == len(SPARSITIES) * (1 + len(formats.FORMATS))
    assert {row["break_even_seconds"] for row in rows if row["format"] == "coo"} == {"inf"}
    assert (tmp_path / "formats.png").stat().st_size > 10_000
