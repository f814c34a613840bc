"""Baselines on a CPU: im2col, peak memory, the measurement, its table and figure."""

import json
import math
import pathlib
import runpy
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from synthetic import experiment, read_csv, write_experiments, write_results

import packedconv
from packedconv.bench import cpu_experiments, protocol
from packedconv.bench.contenders import UnavailableError
from packedconv.bench.experiment import load_experiment
from packedconv.bench.extended import baseline_contenders, baselines, im2col, peak_memory
from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended import baselines as evidence
from packedconv.layer import Layer
from packedconv.plots.extended.baselines import baselines_figure
from packedconv.settings import load_settings

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAYER = Layer("t_oc8_n2", 2, 4, 8, 12, 20)
LAYERS = [
    LAYER,
    Layer("stride", 1, 3, 5, 13, 9, 3, 2, 1),
    Layer("dilation", 2, 3, 5, 11, 14, 3, 1, 2, dilation=2),
    Layer("wide_kernel", 2, 2, 3, 12, 10, 5, 3, 0),
    Layer("one", 1, 6, 4, 7, 5, 1, 1, 0),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch, torch_threads):
    """Short warm-ups and bursts."""
    monkeypatch.setattr(protocol, "WARMUP_SECONDS", 0.0)
    monkeypatch.setattr(cpu_experiments, "PEAK_BURST_SECONDS", 0.001)


@pytest.fixture
def results(tmp_path):
    return write_results(tmp_path / "results", out_channels=(8,), sparsities=(0.9,), rounds=2)


@pytest.fixture
def settings(results):
    return load_settings(str(results / "settings.json"))


def drawn(layer, sparsity=0.7):
    generator = torch.Generator().manual_seed(1)
    image = torch.rand(layer.input_shape, generator=generator)
    weight = torch.rand(layer.weight_shape, generator=generator) - 0.5
    keep = torch.rand(layer.weight_shape, generator=generator) >= sparsity
    return image, weight * keep


# im2col


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
@pytest.mark.parametrize("make", [im2col.torch_csr, im2col.scipy_csr, im2col.dense_matrix])
@pytest.mark.parametrize("way", [im2col.by_unfold, im2col.by_windows, 1, 2, 1000])
def test_im2col_is_the_convolution(layer, make, way):
    """way: to unfold whole images, or the rows of a band."""
    image, weight = drawn(layer)
    if isinstance(way, int):
        variant = im2col.Variant(make, band_bytes=way * im2col.unfolded_bytes(layer, 1) + 3)
    else:
        variant = im2col.Variant(make, way)
    out = torch.full(layer.output_shape, math.nan)
    with torch.inference_mode():
        variant.convolution(layer, weight)(image, out)
        expected = torch.nn.functional.conv2d(
            image.double(), weight.double(), **layer.conv2d_arguments
        )
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_sizes_are_those_of_the_tensors(layer):
    image, weight = drawn(layer)
    columns = torch.nn.functional.unfold(
        image[:1], layer.kernel_size, layer.dilation, layer.padding, layer.stride
    )
    assert im2col.unfolded_bytes(layer) == columns.nbytes
    matrix = weight.flatten(1).numpy()
    rows, _ = np.nonzero(matrix)
    assert im2col.csr_bytes(weight) == 4 * (2 * len(rows) + len(matrix) + 1)


def test_an_image_is_inflated_by_the_kernel_where_no_border_is_lost():
    layer = Layer("same", 3, 4, 8, 10, 12, 5, 1, 2)
    assert im2col.unfolded_bytes(layer) == 25 * 4 * 4 * 10 * 12


def test_what_a_layer_has_not(monkeypatch):
    whole, band = (
        im2col.Variant(im2col.torch_csr),
        im2col.Variant(im2col.torch_csr, band_bytes=2**20),
    )
    with pytest.raises(UnavailableError, match="a band is the whole image"):
        band.require(LAYER)
    with pytest.raises(UnavailableError, match="for one group, this layer has 2"):
        whole.require(LAYER._replace(groups=2))
    whole.require(LAYER)
    monkeypatch.setattr(im2col, "available_memory_bytes", lambda: 30_000)
    with pytest.raises(UnavailableError, match=r"takes 0 MB, 0 MB are free"):
        whole.require(LAYER)
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(UnavailableError, match="SciPy is not installed"):
        im2col.scipy_csr(drawn(LAYER)[1])


def chosen(monkeypatch, variants):
    """choose_variants with one contender of these variants."""
    monkeypatch.setattr(im2col, "VARIANTS", {"im2col_csr": variants})
    image, weight = drawn(LAYER)
    packed = packedconv.pack(weight)
    expected = packedconv.conv2d(image, packed, **LAYER.conv2d_arguments)
    return baseline_contenders.choose_variants(
        LAYER, image, packed, expected, {"trial_executions": 2, "warmup_executions": 0}
    )


def test_variants_that_fail_or_are_wrong_are_skipped(monkeypatch):
    def fail(weight):
        raise RuntimeError("no kernel\nat some place")

    def writes_nothing(weight):
        return lambda columns, out: None

    def wrong(weight):
        return im2col.dense_matrix(1.001 * weight)

    contenders, trials = chosen(
        monkeypatch,
        {
            "fails": im2col.Variant(fail),
            "writes nothing": im2col.Variant(writes_nothing),
            "wrong": im2col.Variant(wrong),
            "right": im2col.Variant(im2col.torch_csr),
        },
    )
    assert [contender.layout for contender in contenders] == ["right"]
    found = trials["im2col_csr"]
    assert found["skipped"]["fails"] == "no kernel"
    assert found["skipped"]["writes nothing"] == "differs from the checked output by up to nan"
    assert found["skipped"]["wrong"].startswith("differs from the checked output by up to 0.00")
    assert list(found["seconds"]) == ["right"]
    assert len(found["seconds"]["right"]) == 2


def test_a_contender_without_a_variant_does_not_contend(monkeypatch):
    contenders, trials = chosen(
        monkeypatch, {"band": im2col.Variant(im2col.torch_csr, band_bytes=2**20)}
    )
    assert contenders == []
    assert trials["im2col_csr"] == {"seconds": {}, "skipped": {"band": "a band is the whole image"}}


# Peak memory


def peak_or_skip(execute):
    try:
        return peak_memory.peak_bytes(execute)
    except UnavailableError as error:
        pytest.skip(str(error))


def test_the_peak_is_what_was_allocated_at_once():
    def allocate():
        for _ in range(3):
            np.ones(2**23)

    kept = []
    assert peak_or_skip(lambda: None) < 2**21
    assert peak_or_skip(allocate) == pytest.approx(2**26, abs=2**22)
    assert peak_or_skip(lambda: kept.append(np.ones(2**23))) == pytest.approx(2**26, abs=2**22)


def test_memory_that_the_library_had_counts():
    """Many small pieces, which the C library does not give back by itself."""
    pieces = [bytearray(2**16) for _ in range(2**9)]
    last = bytearray(2**16)
    del pieces
    assert peak_or_skip(lambda: [bytearray(2**16) for _ in range(2**9)]) > 2**24
    assert len(last) == 2**16


def test_a_system_that_does_not_tell(monkeypatch, tmp_path):
    monkeypatch.setattr(peak_memory, "_CLEAR_REFS", str(tmp_path / "none" / "clear_refs"))
    with pytest.raises(UnavailableError, match="does not tell the peak memory"):
        peak_memory.peak_bytes(lambda: None)


def request(settings, layer, contender, variant):
    return {
        "settings": settings,
        "experiment": json.dumps(experiment(layer)),
        "threads": 1,
        "sparsity": 0.9,
        "contender": contender,
        "variant": variant,
    }


def test_a_child_sees_the_unfolded_image(settings):
    layer = Layer("big", 2, 8, 4, 300, 300)
    found = peak_memory.in_child(request(settings, layer, "im2col_csr", "windows, torch.sparse"))
    if "skipped" in found:
        pytest.skip(found["skipped"])
    unfolded = im2col.unfolded_bytes(layer)
    assert unfolded < found["working_bytes"] < 1.3 * unfolded
    nonzeros = round(0.1 * layer.weight_count)
    held = 4 * 2 * (8 + 4) * 300 * 300 + 8 * nonzeros + 4 * 5
    assert found["held_bytes"] == held


def test_a_child_that_fails_says_why(settings, monkeypatch):
    found = peak_memory.in_child(request(settings, LAYER, "im2col_csr", "nothing"))
    assert found == {"skipped": "KeyError: 'nothing'"}
    monkeypatch.setattr(peak_memory, "TIMEOUT_SECONDS", 0.01)
    found = peak_memory.in_child(request(settings, LAYER, "sparse", "packed"))
    assert found == {"skipped": "took more than 0.01 s"}
    monkeypatch.setattr(peak_memory, "TIMEOUT_SECONDS", 60)
    monkeypatch.setattr(peak_memory.sys, "executable", "/bin/sh")
    monkeypatch.setattr(peak_memory, "_CHILD", ("-c", "kill -9 $$"))
    found = peak_memory.in_child(request(settings, LAYER, "sparse", "packed"))
    assert found == {"skipped": "ended by signal 9, as for want of memory"}


# Measured


def test_a_layer_is_measured(settings, monkeypatch):
    asked = []

    def in_child(request):
        asked.append(request)
        return {"working_bytes": 1, "held_bytes": 2}

    monkeypatch.setattr(baselines, "in_child", in_child)
    monkeypatch.setattr(im2col, "VARIANTS", {"im2col_csr": im2col.VARIANTS["im2col_csr"]})
    wanted = load_experiment(json.dumps(experiment(LAYER, contenders=[], repeats=0)))
    rows, facts = baselines.measure(settings, wanted, 1)
    counts = pd.DataFrame(rows).groupby(["sparsity", "implementation"]).size()
    names = ("dense", "dense_default", "im2col_csr", "sparse")
    assert counts.to_dict() == {(s, name): 10 for s in (0.9, 0.98) for name in names}
    assert {request["sparsity"] for request in asked} == {0.9}
    assert {request["contender"] for request in asked} == set(names)
    for part in asked:
        assert facts["memory"]["contenders"][part["contender"]]["variant"] == part["variant"]
    assert set(facts["im2col"]) == {"s90", "s98"}
    assert facts["unfolded_bytes"] == 4 * 9 * 4 * 12 * 20
    json.dumps(facts)


# The table and the figure

SECONDS = {
    "sparse": 0.002,
    "dense": 0.008,
    "dense_default": 0.016,
    "im2col_csr": 0.008,
    "im2col_dense": 0.032,
}
SHAPE = Layer("t_oc8_n2", 2, 4, 8, 64, 64)
UNFOLDED = 4 * 9 * 4 * 64 * 64


@pytest.fixture
def measured(results):
    trials = {
        "im2col_csr": {"seconds": {"torch.sparse": [0.008]}, "skipped": {}},
        "im2col_csr_bands": {
            "seconds": {},
            "skipped": {"a, 1 MiB": "a band is the whole image", "b, 1 MiB": "no b"},
        },
        "im2col_dense": {"seconds": {"mm": [0.032]}, "skipped": {}},
    }
    memory = {
        "sparse": {"variant": "packed", "working_bytes": 0, "held_bytes": 10**6},
        "dense": {"variant": "nchw", "working_bytes": 10**6, "held_bytes": 10**6},
        "dense_default": {"variant": "nchw", "skipped": "too little"},
        "im2col_csr": {"variant": "torch.sparse", "working_bytes": UNFOLDED, "held_bytes": 10**6},
    }
    facts = {
        "im2col": {"s90": trials, "s98": trials},
        "unfolded_bytes": UNFOLDED,
        "memory": {"sparsity": 0.9, "contenders": memory},
        "not_timed": {"other": "not here"},
        # Half of the ceiling.
        "peak_bursts": [100e9],
    }

    def seconds(layer, sparsity, contender, number):
        # Rounds on both sides of dense.
        jump = 1 + 0.3 * (-1) ** number if contender == "im2col_csr" and sparsity == 0.98 else 1
        return jump * SECONDS[contender] * (1.01 if contender == "im2col_csr" else 1)

    paths = write_experiments(
        results,
        "baselines",
        [experiment(SHAPE, contenders=[])],
        seconds,
        list(SECONDS),
        changes={SHAPE.name: facts},
    )
    return load_experiments(results, paths), paths


def test_the_table(measured):
    table = evidence.baselines(measured[0])
    assert list(table.columns) == evidence.COLUMNS
    assert list(table["contender"]) == 2 * list(evidence.TITLES)
    rows = table.set_index(["sparsity", "contender"])
    low = rows.loc[0.9]
    for contender, seconds in SECONDS.items():
        expected = 0.008 / seconds / (1.01 if contender == "im2col_csr" else 1)
        assert low.loc[contender, "speedup"] == pytest.approx(expected)
    assert low["verdict"].fillna("").to_dict() == {
        "sparse": "faster",
        "dense": "",
        "dense_default": "slower",
        "im2col_csr": "slower",
        "im2col_csr_bands": "",
        "im2col_dense": "slower",
    }
    unsure = rows.loc[0.98, "im2col_csr"]
    assert unsure["verdict"] == "inconclusive"
    assert unsure["speedup_low"] < 1 < unsure["speedup_high"]
    assert unsure["wide"]
    bands = low.loc["im2col_csr_bands"]
    assert bands["left_out"] == "a, 1 MiB: a band is the whole image; b, 1 MiB: no b"
    assert pd.isna(bands["seconds"])
    assert low.loc["dense_default", "memory_left_out"] == "too little"
    assert low.loc["im2col_csr", "working_per_input"] == 9
    assert low.loc["im2col_csr", "unfolded_per_input"] == 9
    assert rows.loc[0.98]["working_bytes"].isna().all()
    assert low["unfolded_bytes"].dropna().to_dict() == {
        "im2col_csr": UNFOLDED,
        "im2col_dense": UNFOLDED,
    }


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1.01, 1.2, "faster"), (0.8, 0.99, "slower"), (0.9, 1.1, "inconclusive"), (1, 1.1, None)],
)
def test_verdicts(low, high, expected):
    assert evidence.verdict(low, high) == (expected or "inconclusive")


def test_the_figure_draws_the_table(measured):
    experiments, _ = measured
    table = evidence.baselines(experiments)
    figure = baselines_figure(experiments, table)
    above, below = figure.axes
    drawn = {line.get_label(): line for line in above.get_children() if hasattr(line, "get_ydata")}
    assert drawn["dense, best layout"].get_ydata()[0] == 1
    hollow = [line for line in above.lines if line.get_markerfacecolor() == "white"]
    assert [line.get_xdata()[0] for line in hollow] == [1]
    assert [text.get_text() for text in above.get_xticklabels()] == ["0.9†", "0.98*†"]
    assert [text.get_text() for text in below.texts][:4] == ["+0", "+1", "none", "+0.59, 9.0×"]
    widths = [bar.get_width() for bar in below.patches]
    assert widths == pytest.approx([1, 0, 1, 1, 1, UNFOLDED / 1e6])
    caption = next(text for text in figure.texts if text.get_gid() == "caption").get_text()
    caption = caption.replace("\n", " ")
    assert "5 rounds of 2 executions" in caption
    assert "Measured at S 0.9." in caption
    assert "Not timed: im2col + CSR in bands of t_oc8_n2 (a, 1 MiB: a band is" in caption
    assert "Memory not measured: dense, NCHW of t_oc8_n2 (too little)." in caption
    assert "Not timed: other (not here)." in caption
    assert "*: rounds still too far apart after the repeats: t_oc8_n2, S 0.98 (" in caption
    assert "†: timed while the machine was busy: t_oc8_n2, S 0.9; t_oc8_n2, S 0.98." in caption


def test_every_contender_has_a_title_and_a_style():
    from packedconv.plots.extended.baselines import STYLES

    assert set(baseline_contenders.CONTENDERS) == set(evidence.TITLES) == set(STYLES)


def test_the_figure_script(measured, results, tmp_path, monkeypatch):
    _, paths = measured
    out = tmp_path / "baselines.pdf"
    arguments = ["--results", results, "--samples", *paths, "--out", out]
    monkeypatch.setattr(sys, "argv", ["figure_baselines.py", *map(str, arguments)])
    runpy.run_path(str(ROOT / "scripts" / "figure_baselines.py"), run_name="__main__")
    assert len(read_csv(tmp_path / "baselines.csv")) == 2 * len(evidence.TITLES)
    assert (tmp_path / "baselines.png").stat().st_size > 10_000
