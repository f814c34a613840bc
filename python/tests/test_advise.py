"""packedconv.advise: the model, its calibration, and what it says of a layer."""

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import nnls
from synthetic import write_results

import packedconv
from packedconv import _core, advice, calibration, device, plan, probes
from packedconv.bench import ceilings, protocol
from packedconv.calibration import Point, dense_terms, fit, fit_sum, sparse_terms
from packedconv.evidence.extended.crossover import fit_gpu_results
from packedconv.evidence.samples import Results
from packedconv.layer import Layer
from packedconv.script import CheckError

LAYERS = [
    Layer("k3", 1, 16, 32, 40, 40),
    Layer("k3_small", 2, 64, 16, 7, 7),
    Layer("k1", 1, 64, 32, 20, 20, 1, padding=0),
    Layer("k1_large", 1, 32, 64, 64, 64, 1, padding=0),
    Layer("s2", 1, 32, 32, 28, 28, stride=2),
    Layer("k5", 4, 16, 16, 14, 14, 5, padding=2),
    Layer("k5_s2", 1, 48, 32, 28, 28, 5, 2, 2),
    Layer("k3_wide", 1, 64, 16, 24, 24),
    Layer("k1_s2", 2, 64, 48, 20, 20, 1, 2, 0),
    Layer("k3_n4", 4, 32, 64, 10, 10),
    Layer("k5_n1", 1, 64, 64, 10, 10, 5, padding=2),
    Layer("k1_few", 1, 16, 16, 56, 56, 1, padding=0),
    Layer("k3_s2_few", 1, 16, 16, 56, 56, stride=2),
    Layer("k3_few", 3, 16, 48, 20, 20),
]
SPARSITIES = (0.0, 0.5, 0.9, 0.98)
# Seconds of each count, made up: sparse is faster from about S 0.5 on.
DENSE = {"call": 1e-5, "point_flop": 4e-12, "window_flop": 3e-12, "output": 5e-11}
SPARSE = {"call": 1e-5, "flop": 6e-12, "output": 5e-11}


def seconds_of(terms, coefficients):
    return sum(value * terms[name] for name, value in coefficients.items())


def workload(layer, sparsity, with_plan=True):
    packed = advice._spread(layer.weight_shape, sparsity)
    if not with_plan:
        return calibration.workload_of_layer(layer, packed.nnz, 2)
    made = packed.plan(layer.input_shape, threads=2, **layer.conv2d_arguments)
    return calibration.workload_of_layer(layer, packed.nnz, 2, made.schedule, made.facts)


def points(contenders, with_plan=True):
    """Times that the coefficients of each contender give."""
    return [
        Point(layer.name, work, name, seconds_of(calibration.terms_of(name, work), coefficients))
        for layer in LAYERS
        for work in (workload(layer, sparsity, with_plan) for sparsity in SPARSITIES)
        for name, coefficients in contenders.items()
    ]


@pytest.fixture(scope="module")
def made_up():
    """A calibration of this machine from made-up times."""
    return fit(
        points({"sparse": SPARSE, "dense": DENSE}),
        "cpu",
        device.cpu_title(),
        2,
        _core.isa(),
        200e9,
        20e9,
        "made-up times",
    )


@pytest.fixture(scope="module")
def gpu():
    """A calibration of a GPU, where TF32 and FP16 are faster than FP32."""
    contenders = {
        "sparse": SPARSE,
        "sparse_column": {name: 0.9 * value for name, value in SPARSE.items()},
        "dense": {name: 0.5 * value for name, value in DENSE.items()},
        "dense_fp32": DENSE,
        "dense_channels_last": {name: 1.1 * value for name, value in DENSE.items()},
        "dense_tf32": {name: 0.5 * value for name, value in DENSE.items()},
        "dense_fp16": {name: 0.2 * value for name, value in DENSE.items()},
    }
    return fit(points(contenders, with_plan=False), "cuda", "A GPU", None, None, 1e13, 1e12)


# The fit


@pytest.mark.parametrize("seed", range(20))
def test_least_squares_that_are_not_negative(seed):
    draw = np.random.default_rng(seed)
    matrix, target = draw.normal(size=(12, 5)), draw.normal(size=12)
    np.testing.assert_allclose(
        calibration.nonnegative_least_squares(matrix, target), nnls(matrix, target)[0], atol=1e-9
    )


def test_least_squares_of_columns_that_depend_on_each_other():
    matrix = np.array([[1.0, 2.0, 0.0], [2.0, 4.0, 0.0], [1.0, 2.0, 0.0]])
    found = calibration.nonnegative_least_squares(matrix, np.array([1.0, 2.0, 1.0]))
    np.testing.assert_allclose(matrix @ found, [1, 2, 1])
    assert (found >= 0).all()


def test_a_sum_is_found_again():
    draw = np.random.default_rng(3)
    counts = 10 ** draw.uniform(0, 6, size=(40, 4))
    wanted = np.array([1e-6, 3e-9, 0.0, 2e-8])
    np.testing.assert_allclose(fit_sum(counts, counts @ wanted), wanted, rtol=1e-6, atol=1e-15)


def test_the_fit_is_of_logarithms():
    # One count: the best factor for the logarithm is the geometric mean.
    seconds = np.array([1.0, 2.0, 8.0])
    assert fit_sum(np.ones((3, 1)), seconds)[0] == pytest.approx(16 ** (1 / 3), rel=1e-5)


def test_disturbed_points_hardly_count():
    draw = np.random.default_rng(4)
    counts = 10 ** draw.uniform(0, 4, size=(60, 2))
    wanted = np.array([1e-6, 3e-7])
    seconds = counts @ wanted * np.exp(0.02 * draw.normal(size=60))
    seconds[::6] *= 20
    np.testing.assert_allclose(fit_sum(counts, seconds), wanted, rtol=0.05)


def test_the_terms_of_a_dense_layer():
    work = calibration.workload_of_layer(Layer("t", 2, 24, 40, 8, 8, 3, 2, 1), 5)
    # Of the first row and column of outputs, a third of the reads lies on the padding.
    assert work.inside == pytest.approx((11 / 12) ** 2)
    flop = 2 * 2 * 4 * 4 * 9 * 24 * 48 * (11 / 12) ** 2  # 40 channels in whole vectors of 16
    assert dense_terms(work) == {
        "call": 1,
        "point_flop": 0,
        "window_flop": pytest.approx(flop),
        "strided_flop": pytest.approx(flop),
        "rows": 2 * 4 * 9 * 24 * 48,
        "few_inputs": pytest.approx(flop / 24),
        "input": 2 * 24 * 64,
        "output": 2 * 40 * 16,
        "far_output": 0,
        "weight": 9 * 24 * 40,
    }
    work = calibration.workload_of_layer(Layer("t", 1, 24, 16, 8, 8, 1, 1, 0), 5)
    assert work.inside == 1
    assert dense_terms(work)["point_flop"] == 2 * 64 * 24 * 16
    assert dense_terms(work)["window_flop"] == dense_terms(work)["strided_flop"] == 0


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_a_call_is_the_workload_of_its_layer(layer):
    packed = advice._spread(layer.weight_shape, 0.9)
    key = plan.plan_key(packed, layer.input_shape, threads=2, **layer.conv2d_arguments)
    made = calibration.workload_of_call(key, packed.shape[2:], packed.nnz)
    other = calibration.workload_of_layer(layer, packed.nnz, 2)
    assert made.inside == pytest.approx(other.inside)
    assert made._replace(inside=1) == other._replace(inside=1)


def test_the_terms_of_a_sparse_layer_are_those_of_its_plan():
    layer = Layer("t", 1, 32, 16, 40, 40)
    schedule = {"path": "aligned", "rows": 3, "vectors": 2, "block_channels": 10}
    facts = {"lanes_used": 0.5, "lanes": 16, "tile_bytes": 64 << 10, "items": 8}
    facts["pieces_per_tile"] = 1
    work = calibration.workload_of_layer(layer, 460, 2, schedule, facts)
    computed, tiles = 1600 / 0.5, 1600 / 0.5 / 96
    assert sparse_terms(work) == {
        "call": 1,
        "flop": 2 * 460 * computed,
        "far_flop": 2 * 460 * computed,
        "visits": pytest.approx(460 * tiles),
        "few_visits": pytest.approx(460 * tiles),
        "channels": pytest.approx(16 * tiles * 4),
        "shifts": pytest.approx(16 * tiles * 4 * 6 * 2),
        "carried": 16 * computed * 3,
        "copied": pytest.approx(tiles * 4 * (16 << 10)),
        "strided_copied": 0,
        "pieces_copied": 0,
        "pieces_output": 0,
        "input": 1600 * 32,
        "output": 1600 * 16,
        "far_output": 0,
        "nonzeros": 460,
    }
    near = {**facts, "tile_bytes": 32 << 10}
    assert sparse_terms(work._replace(facts=near))["far_flop"] == 0
    larger = sparse_terms(work._replace(schedule={**schedule, "rows": 4}))
    assert larger["few_visits"] == 0 < larger["visits"]
    loose = {**schedule, "path": "loose"}
    assert sparse_terms(work._replace(schedule=loose))["shifts"] == 0
    pieces = sparse_terms(work._replace(facts={**facts, "pieces_per_tile": 2}))
    assert pieces["pieces_copied"] == pieces["copied"]
    assert pieces["pieces_output"] == pieces["output"]
    strided = sparse_terms(work._replace(stride=2))
    assert strided["strided_copied"] == strided["copied"]
    # Three items on two threads take as long as four.
    uneven = sparse_terms(work._replace(facts={**facts, "items": 3}))
    assert uneven["call"] == 1
    assert uneven["flop"] == pytest.approx(4 / 3 * 2 * 460 * computed)
    large = work._replace(batch=64)
    assert (
        sparse_terms(large)["far_output"] == dense_terms(large)["far_output"] == 64 * 25600 - 2**20
    )
    plain = sparse_terms(work._replace(schedule=None, facts=None))
    assert plain["flop"] == 2 * 460 * 1600
    assert set(plain) < set(sparse_terms(work))


def test_a_calibration_predicts_what_it_was_made_from(made_up):
    for layer in LAYERS:
        for sparsity in SPARSITIES:
            work = workload(layer, sparsity)
            found = made_up.predict(work)
            dense = seconds_of(dense_terms(work), DENSE)
            sparse = seconds_of(sparse_terms(work), SPARSE)
            assert found.dense_seconds == pytest.approx(dense, rel=1e-3)
            assert found.sparse_seconds == pytest.approx(sparse, rel=1e-3)
            assert found.speedup == pytest.approx(dense / sparse, rel=2e-3)
            assert found.choice == ("sparse" if dense > sparse else "dense")
            assert found.low < found.speedup < found.high
            assert not found.outside
    # Without noise nothing is left but what two runs differ by.
    assert made_up.models["dense"].spread == calibration.LEAST_SPREAD


def test_noise_makes_it_less_sure(made_up):
    draw = np.random.default_rng(1)
    noisy = [
        point._replace(seconds=point.seconds * math.exp(0.3 * draw.normal()))
        for point in points({"sparse": SPARSE, "dense": DENSE})
    ]
    rough = fit(noisy, "cpu", made_up.title, 2, made_up.isa)
    assert 0.15 < rough.models["dense"].spread < 0.6
    work = workload(LAYERS[0], 0.9)
    ours, theirs = made_up.predict(work), rough.predict(work)
    assert 0.5 < theirs.confidence < ours.confidence <= 1
    assert theirs.high / theirs.low > ours.high / ours.low


def test_the_confidence_is_the_normal_probability(made_up):
    models = {
        name: calibration.Model({"call": value}, 0.1, 9)
        for name, value in (("sparse", 1.0), ("dense", math.exp(0.1 * math.sqrt(2))))
    }
    found = made_up._replace(models=models).predict(workload(LAYERS[0], 0.5))
    # One standard deviation.
    assert found.confidence == pytest.approx(0.841345, abs=1e-6)
    equal = {**models, "dense": models["sparse"]}
    assert made_up._replace(models=equal).predict(workload(LAYERS[0], 0.5)).confidence == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found[:0], "sparse and of a dense contender, got "),
        (lambda found: [one for one in found if one.contender == "dense"], "got .'dense'"),
        (lambda found: [one for one in found if one.layer == "k3"], "two layers or more, got 1"),
        (lambda found: [one._replace(seconds=0.0) for one in found], "positive seconds, got 0"),
        (lambda found: [one._replace(seconds=math.nan) for one in found], "positive seconds"),
    ],
)
def test_what_cannot_be_fitted(change, message):
    found = points({"sparse": SPARSE, "dense": DENSE})
    with pytest.raises(ValueError, match=message):
        fit(change(found), "cpu", "t")


# The file


def test_a_calibration_is_read_as_it_was_written(made_up, gpu, tmp_path):
    for found in (made_up, gpu):
        found.save(str(tmp_path / "found.json"))
        assert packedconv.Calibration.load(str(tmp_path / "found.json")) == found


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.pop("models"),
        lambda record: record.update(schema=0),
        lambda record: record.update(kind="tpu"),
        lambda record: record["models"].pop("sparse"),
        lambda record: record["models"].pop("dense"),
        lambda record: record["models"]["dense"]["seconds"].update(call=-1),
        lambda record: record["models"]["dense"]["seconds"].update(call="x"),
        lambda record: record["models"]["dense"]["seconds"].clear(),
        lambda record: record["models"]["dense"].update(spread=0),
        lambda record: record["ranges"].pop("stride"),
    ],
)
def test_a_damaged_file_is_refused(made_up, tmp_path, damage):
    path = tmp_path / "found.json"
    made_up.save(str(path))
    record = json.loads(path.read_text())
    damage(record)
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"found.json: expected a calibration .* calibrate again"):
        packedconv.advise(LAYERS[0], sparsity=0.9, calibration=path)


def test_text_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "found.json").write_text("[1, 2")
    with pytest.raises(ValueError, match=r"found.json: expected a calibration"):
        packedconv.Calibration.load(str(tmp_path / "found.json"))
    (tmp_path / "found.json").write_text("[]")
    with pytest.raises(ValueError, match=r"found.json: expected a calibration"):
        packedconv.Calibration.load(str(tmp_path / "found.json"))


# Advice


def test_advice_on_both_sides_of_break_even(made_up, torch_threads):
    torch_threads(2)
    sparse = packedconv.advise(LAYERS[0], sparsity=0.9, calibration=made_up)
    dense = packedconv.advise(LAYERS[0], sparsity=0.1, calibration=made_up)
    assert (sparse.choice, dense.choice) == ("sparse", "dense")
    assert sparse.speedup > 1 > dense.speedup
    assert min(sparse.confidence, dense.confidence) > 0.95
    assert sparse.sparsity == pytest.approx(0.9, abs=1e-3)
    work = workload(LAYERS[0], 0.9)
    assert sparse.speedup == made_up.predict(work).speedup
    text = str(sparse)
    assert text.startswith("sparse: expected speedup of sparse over dense ")
    assert "multiply-adds" in text
    assert "Calibrated on" in text
    assert "made-up times" in text
    assert "Outside" not in text


def test_the_roofline_says_which_bound(made_up):
    layer = LAYERS[0]
    found = packedconv.advise(layer, sparsity=0.5, calibration=made_up)
    packed = advice._spread(layer.weight_shape, 0.5)
    flop = 2 * packed.nnz * 1600
    moved = 4 * 1600 * (16 + 32) + packed.nbytes
    assert found.bound == "compute"
    assert found.bound_seconds == pytest.approx(max(flop / 200e9, moved / 20e9))
    assert "sparse has" in str(found)
    assert "is compute-bound" in str(found)
    found = packedconv.advise(layer, sparsity=0.98, calibration=made_up)
    assert found.bound == "memory"
    assert found.bound_seconds == pytest.approx(
        (4 * 1600 * 48 + advice._spread(layer.weight_shape, 0.98).nbytes) / 20e9
    )
    without = made_up._replace(peak_flops=None, bandwidth=None)
    found = packedconv.advise(layer, sparsity=0.5, calibration=without)
    assert found.bound is None
    assert "Roofline" not in str(found)


def test_every_description_of_a_layer_gives_the_same(made_up):
    layer = Layer("t", 2, 16, 32, 20, 20, 3, 2, 1)
    expected = packedconv.advise(layer, sparsity=0.75, calibration=made_up)
    packed = advice._spread(layer.weight_shape, 0.75)
    conv = torch.nn.Conv2d(16, 32, 3, stride=2, padding=1)
    with torch.no_grad():
        conv.weight.copy_(packed.unpack())
    module = packedconv.SparseConv2d.from_dense(conv)
    shape, more = layer.input_shape, {"calibration": made_up}
    plain = {"stride": 2, "padding": 1, **more}
    for found in (
        packedconv.advise(conv, shape, **more),
        packedconv.advise(conv, shape, 0.75, **more),
        packedconv.advise(module, shape, **more),
        packedconv.advise(module, shape, 0.75, **more),
        packedconv.advise(packed, shape, **plain),
        packedconv.advise(layer.weight_shape, shape, 0.75, **plain),
        packedconv.advise(list(layer.weight_shape), list(shape), 0.75, **plain),
    ):
        assert found == expected
    assert packedconv.advise(packed, shape, 0.1, **plain).choice == "dense"
    # One image without its batch.
    assert packedconv.advise(packed, shape[1:], **plain) == packedconv.advise(
        packed, (1, *shape[1:]), **plain
    )


def test_a_dense_weight_is_dense(made_up):
    conv = torch.nn.Conv2d(16, 32, 3)
    found = packedconv.advise(conv, (1, 16, 40, 40), calibration=made_up)
    assert found.sparsity == 0
    assert found.choice == "dense"


def test_no_nonzeros_at_all(made_up):
    found = packedconv.advise((32, 16, 3, 3), (1, 16, 40, 40), 1.0, calibration=made_up)
    assert found.choice == "sparse"
    assert found.sparsity == 1


def test_without_a_calibration_it_says_what_it_assumes():
    for sparsity, choice in ((0.9, "sparse"), (0.4, "dense")):
        found = packedconv.advise(LAYERS[0], sparsity=sparsity)
        assert found.choice == choice
        assert not found.calibrated
        assert found.confidence == 0.5
        assert (found.low, found.high) == (0, math.inf)
        assert found.sparse_seconds is None
        assert "nothing measured" in str(found)
        assert "this assumes that a nonzero costs as much as 2 weights" in str(found)
        assert "calibration=packedconv.calibrate()" in str(found)


def test_what_was_not_calibrated_makes_it_less_sure(made_up, torch_threads):
    torch_threads(2)
    work = workload(LAYERS[0], 0.9)
    inside = made_up.predict(work)
    found = packedconv.advise(
        (32, 512, 3, 3), (1, 512, 40, 40), 0.9, padding=1, calibration=made_up
    )
    assert "input channels of a group of 512 (calibrated: 16 to 64)" in str(found)
    assert found.high / found.low == pytest.approx((inside.high / inside.low) ** 2)
    for change, text in (
        ({"title": "Another CPU"}, "(calibrated: Another CPU)"),
        ({"isa": "another"}, "(calibrated: another)"),
        ({"threads": 1}, "number of threads: 2 (calibrated: 1)"),
    ):
        found = packedconv.advise(LAYERS[0], sparsity=0.9, calibration=made_up._replace(**change))
        assert text in str(found)
        assert found.high / found.low == pytest.approx((inside.high / inside.low) ** 2)


def test_on_a_gpu_less_precision_may_be_faster(gpu):
    layer = LAYERS[0]
    found = packedconv.advise(layer, sparsity=0.7, calibration=gpu)
    assert found.choice == "sparse"
    dense = seconds_of(dense_terms(workload(layer, 0.7, False)), DENSE)
    sparse = 0.9 * seconds_of(sparse_terms(workload(layer, 0.7, False)), SPARSE)
    assert found.speedup == pytest.approx(dense / sparse, rel=2e-3)
    assert set(found.other_precisions) == {"dense", "dense_tf32", "dense_fp16"}
    assert found.other_precisions["dense_fp16"] == pytest.approx(sparse / (0.2 * dense), rel=2e-3)
    text = str(found)
    assert text.index("FP16, ") < text.index("TF32, ")
    assert "At less precision dense is faster: FP16" in text
    # Sparse enough, nothing is faster.
    cheap = gpu._replace(
        models={**gpu.models, "sparse": gpu.models["sparse"]._replace(seconds={"call": 1e-9})}
    )
    found = packedconv.advise(layer, sparsity=0.98, calibration=cheap)
    assert not found.other_precisions
    assert "less precision" not in str(found)


def test_a_gpu_without_fp32_is_compared_with_its_default(gpu):
    models = {name: gpu.models[name] for name in ("sparse", "dense")}
    found = gpu._replace(models=models).predict(workload(LAYERS[0], 0.7, False))
    assert found.dense == "dense"
    assert not found.others


def test_results_of_a_gpu_calibrate(tmp_path):
    folder = write_results(
        tmp_path, device="h200", out_channels=(48, 64, 96), sparsities=(0.9, 0.98), rounds=3
    )
    results = Results.load(folder)
    samples = results.every_sample
    fast = samples[samples["implementation"] == "dense"].assign(
        implementation="dense_tf32", seconds=lambda frame: frame["seconds"] / 8
    )
    results = dataclasses.replace(results, every_sample=pd.concat([samples, fast]))
    found = fit_gpu_results(results)
    assert set(found.models) == {"sparse", "dense", "dense_tf32"}
    assert (found.kind, found.threads, found.title) == ("cuda", None, "Synthetic h200")
    shape = ((64, 32, 3, 3), (1, 32, 256, 256), 0.9)
    advised = packedconv.advise(*shape, padding=1, calibration=found)
    # As write_results has it.
    assert advised.speedup == pytest.approx(2 + 64 / 1000, rel=0.1)
    assert advised.other_precisions == {"dense_tf32": pytest.approx(8 / advised.speedup, rel=0.1)}
    # What was timed for one layer alone says nothing of others.
    one = fast[fast["out_channels"] == 64]
    results = dataclasses.replace(results, every_sample=pd.concat([samples, one]))
    assert set(fit_gpu_results(results).models) == {"sparse", "dense"}


def test_results_of_a_cpu_are_not_those_of_a_gpu(tmp_path):
    results = Results.load(write_results(tmp_path, rounds=2))
    with pytest.raises(ValueError, match="expected those of a GPU, got cpu"):
        fit_gpu_results(results)


@pytest.mark.parametrize(
    ("arguments", "more", "error", "message"),
    [
        ((LAYERS[0], (1, 16, 40, 40)), {"sparsity": 0.9}, TypeError, "input_shape: expected none"),
        ((LAYERS[0],), {}, TypeError, "sparsity: expected a number"),
        ((LAYERS[0],), {"sparsity": 1.5}, ValueError, "sparsity: expected .* got 1.5"),
        ((LAYERS[0],), {"sparsity": "0.9"}, TypeError, "sparsity: expected a number .* got '0.9'"),
        ((LAYERS[0],), {"sparsity": True}, TypeError, "sparsity: expected a number"),
        ((LAYERS[0],), {"sparsity": 0.9, "stride": 1}, TypeError, "stride: expected none beside"),
        (((8, 8, 3, 3),), {"sparsity": 0.9}, TypeError, r"input_shape: expected \(N, IC, H, W\)"),
        (((8, 8, 3), (1, 8, 9, 9)), {"sparsity": 0.9}, TypeError, "layer: expected a torch.nn"),
        (("conv", (1, 8, 9, 9)), {"sparsity": 0.9}, TypeError, "layer: expected a torch.nn"),
        (((8, 8, 3, 0), (1, 8, 9, 9)), {"sparsity": 0.9}, TypeError, "layer: expected a torch.nn"),
        (((8, 8, 3, 3), (1, 4, 9, 9)), {"sparsity": 0.9}, ValueError, "expected 8 channels"),
        (((8, 8, 3, 3), (0, 8, 9, 9)), {"sparsity": 0.9}, ValueError, "input_shape: expected a la"),
        (((8, 8, 3, 3), (1, 8, 2, 2)), {"sparsity": 0.9}, ValueError, "padded height of at least"),
        (
            (LAYERS[0],),
            {"sparsity": 0.9, "calibration": 3},
            TypeError,
            "calibration: expected what packedconv.calibrate",
        ),
        (
            (LAYERS[0],),
            {"sparsity": 0.9, "calibration": "/nowhere.json"},
            FileNotFoundError,
            "nowhere",
        ),
    ],
)
def test_wrong_arguments(arguments, more, error, message):
    with pytest.raises(error, match=message):
        packedconv.advise(*arguments, **more)


# Measured here


@pytest.fixture
def few_probes(monkeypatch):
    monkeypatch.setattr(protocol, "WARMUP_SECONDS", 0.0)
    monkeypatch.setattr(probes, "_PEAK_SECONDS", 0.001)
    monkeypatch.setattr(ceilings, "copy_bytes", lambda: 1 << 20)
    monkeypatch.setattr(probes, "PROBES", (LAYERS[1], LAYERS[2]))


def test_this_machine_is_calibrated(few_probes, torch_threads):
    torch_threads(1)
    found = packedconv.calibrate(threads=2, rounds=2)
    assert torch.get_num_threads() == 1
    assert (found.kind, found.threads, found.isa) == ("cpu", 2, _core.isa())
    assert found.title == device.cpu_title()
    assert min(found.peak_flops, found.bandwidth) > 0
    assert found.models["sparse"].points == 2 * len(probes.SPARSITIES)
    assert found.models["dense"].points == 2
    assert found.ranges["kernel_area"] == (1, 9)
    assert "2 probes at 4 sparsities, 2 rounds, 2 threads" in found.source
    advised = packedconv.advise(LAYERS[1], sparsity=0.9, calibration=found)
    assert advised.calibrated
    assert advised.sparse_seconds > 0


def test_a_wrong_kernel_is_not_calibrated(few_probes, one_thread, monkeypatch):
    right = probes.sparse_contender

    def wrong(layer, image, packed, out):
        contender = right(layer, image, packed, out)

        def execute():
            contender.execute()
            out.view(-1)[3] += 1

        return contender._replace(execute=execute)

    monkeypatch.setattr(probes, "sparse_contender", wrong)
    with pytest.raises(CheckError, match="k3_small"):
        packedconv.calibrate(rounds=1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"threads": 0}, ValueError, "threads: expected 1 or more, got 0"),
        ({"threads": 1.5}, TypeError, "threads: expected an int"),
        ({"rounds": 0}, ValueError, "rounds: expected 1 or more"),
        ({"rounds": None}, TypeError, "rounds: expected an int"),
        ({"rounds": True}, TypeError, "rounds: expected an int"),
    ],
)
def test_wrong_arguments_of_calibrate(arguments, error, message):
    with pytest.raises(error, match=message):
        packedconv.calibrate(**arguments)


def test_the_probes_span_the_sizes_of_layers():
    assert len({layer.name for layer in probes.PROBES}) == len(probes.PROBES)
    pixels = [layer.batch * layer.out_height * layer.out_width for layer in probes.PROBES]
    assert min(pixels) <= 49
    assert max(pixels) >= 256**2
    assert {layer.kernel_size for layer in probes.PROBES} == {1, 3, 5}
    assert {layer.stride for layer in probes.PROBES} == {1, 2}
    # More than there are coefficients.
    assert len(probes.PROBES) > len(dense_terms(workload(LAYERS[0], 0.5)))


def test_the_model_needs_no_torch():
    code = "import sys, packedconv.calibration; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_count_has_its_words():
    work = workload(LAYERS[0], 0.5)
    assert set(advice._PARTS) == {*dense_terms(work), *sparse_terms(work)}
