import math
import statistics as reference
import warnings

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from synthetic import SPARSITIES, write_results

from packedconv import roofline
from packedconv.evidence import statistics
from packedconv.evidence.samples import Results

SECONDS = st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=12)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    return Results.load(
        write_results(folder, out_channels=(48, 64), speedup=lambda oc, s: 0.9 + 10 * (s - 0.9))
    )


def samples_of(dense, sparse):
    """Samples of one layer at one sparsity: seconds[round][execution] of both sides."""
    rows = []
    for implementation, rounds in (("dense", dense), ("sparse", sparse)):
        for number, executions in enumerate(rounds):
            for execution, seconds in enumerate(executions):
                rows.append((implementation, number, execution, seconds))
    frame = pd.DataFrame(rows, columns=["implementation", "round", "execution", "seconds"])
    shape = {"batch": 1, "in_channels": 8, "out_channels": 4, "height": 16, "width": 16}
    shape.update(kernel_size=3, stride=1, padding=1, layer="oc4", sparsity=0.9, layout="any")
    return frame.assign(**shape)


def test_a_round_is_the_mean_of_its_executions():
    values = statistics.round_values(samples_of([[1.0, 3.0], [5.0, 7.0]], [[1.0, 1.0], [2.0, 4.0]]))
    assert list(values["seconds"]) == [2.0, 6.0, 1.0, 3.0]
    assert list(values["implementation"]) == ["dense", "dense", "sparse", "sparse"]


@settings(deadline=None, max_examples=30)
@given(SECONDS)
def test_error_bar_is_the_standard_error_of_the_mean(values):
    expected = reference.stdev(values) / math.sqrt(len(values))
    assert statistics.sem(np.array(values)) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_one_round_has_no_standard_error():
    assert math.isnan(statistics.sem(np.array([1.0])))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=10))
def test_speedups(pairs):
    dense, sparse = zip(*pairs, strict=True)
    row = statistics.speedups(samples_of([[x] for x in dense], [[x] for x in sparse])).iloc[0]
    ratios = [x / y for x, y in pairs]
    assert row["mean"] == pytest.approx(np.mean(ratios))
    assert row["ratio"] == pytest.approx(reference.median(dense) / reference.median(sparse))
    assert row["low"] <= row["high"]
    assert min(dense) / max(sparse) <= row["low"] * (1 + 1e-12)
    assert row["high"] <= max(dense) / min(sparse) * (1 + 1e-12)


def test_resamples_keep_rounds_paired():
    """A machine that slows down for both sides alike leaves the ratio certain."""
    drift = [1.0, 1.5, 2.0, 3.0, 5.0]
    row = statistics.speedups(samples_of([[2 * x] for x in drift], [[x] for x in drift])).iloc[0]
    assert (row["ratio"], row["low"], row["high"], row["sem"]) == (2.0, 2.0, 2.0, 0.0)


def test_interval_covers_the_true_median():
    draw = np.random.default_rng(7)
    hits = 0
    for _ in range(200):
        low, high = statistics.interval(statistics.resampled_median(draw.normal(1, 0.1, 10)))
        hits += low <= 1 <= high
    assert 170 <= hits <= 200


def test_interval_agrees_with_scipy():
    values = np.random.default_rng(3).lognormal(size=10)
    low, high = statistics.interval(statistics.resampled_median(values))
    other = scipy.stats.bootstrap(
        (values,), np.median, method="percentile", n_resamples=20000, rng=5
    ).confidence_interval
    spread = values.max() - values.min()
    assert low == pytest.approx(other.low, abs=0.1 * spread)
    assert high == pytest.approx(other.high, abs=0.1 * spread)


def test_interval_allows_infinite_ends():
    values = np.concatenate([[0.0], np.full(500, -math.inf), np.full(500, math.inf)])
    assert statistics.interval(values) == (-math.inf, math.inf)


def test_times_and_throughputs_follow_from_the_samples(results):
    times = statistics.times(results.samples)
    assert len(times) == 2 * len(SPARSITIES) * 2
    through = statistics.throughputs(results.samples)
    row = through.query("out_channels == 64 and sparsity == 0.98 and implementation == 'dense'")
    time = times.query("out_channels == 64 and sparsity == 0.98 and implementation == 'dense'")
    layer = results.layers["oc64"]
    flops = roofline.sparse_flops(layer, 0.98)
    assert row["median"].item() == pytest.approx(flops / time["median"].item() / 1e9)
    assert row["mean"].item() == pytest.approx(0.02 * 100, rel=0.01)
    intensity = flops / roofline.sparse_bytes(layer, 0.98)
    assert row["arithmetic_intensity"].item() == pytest.approx(intensity)


def test_statistics_are_the_same_on_every_call(results):
    for function in (statistics.times, statistics.speedups, statistics.throughputs):
        first = function(results.samples).to_csv()
        shuffled = results.samples.sample(frac=1, random_state=1)
        assert function(shuffled).to_csv() == first


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 6), min_size=2, max_size=9))
def test_rank_correlation_is_spearmans(values):
    sparsities = np.array(SPARSITIES[: len(values)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = statistics.spearman(sparsities, np.array(values, dtype=float))
    if len(set(values)) == 1:
        assert math.isnan(ours)
    else:
        expected = scipy.stats.spearmanr(sparsities, values).statistic
        assert ours == pytest.approx(expected, abs=1e-12)


def test_rank_correlation_of_one_point_is_not_defined():
    assert math.isnan(statistics.spearman(np.array([0.9]), np.array([1.0])))


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([0.9, 1.1, 1.2], 0.905),
        ([0.5, 0.9, 1.4], 0.912),
        ([0.9, 1.0, 1.1], 0.91),
        ([0.9, 1.1, 0.9], 0.905),
        ([1.0, 1.1, 1.2], -math.inf),
        ([1.1, 0.9, 1.2], -math.inf),
        ([0.7, 0.8, 0.9], math.inf),
    ],
)
def test_crossover(ratios, expected):
    value = statistics.crossover(np.array([0.90, 0.91, 0.92]), np.array(ratios))
    assert value == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(0.5, 2.0), min_size=2, max_size=9, unique=True),
    st.integers(0, 2**32 - 1),
)
def test_crossover_lies_between_its_neighbours(ratios, seed):
    sparsities = np.array(SPARSITIES[: len(ratios)])
    value = float(statistics.crossover(sparsities, np.array(ratios)))
    assume(math.isfinite(value))
    right = int(np.argmax(np.array(ratios) >= 1))
    assert sparsities[right - 1] <= value <= sparsities[right]
    stacked = np.random.default_rng(seed).permutation([ratios, [2.0] * len(ratios)])
    each = statistics.crossover(sparsities, stacked)
    assert sorted(each) == [-math.inf, value]
