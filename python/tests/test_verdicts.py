"""Two runs on one machine must not contradict one another: verdicts on made-up noisy runs.

The true values are the same in both runs of a pair. Times differ by what a shared machine does
to them: rounds, of which the part that all contenders share, and runs.
"""

import copy
import pathlib
from collections import Counter
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import SPARSITIES, write_results

from packedconv import roofline
from packedconv.evidence import published, statistics
from packedconv.evidence.claims import (
    INCONCLUSIVE,
    NOT_REPLICATED,
    REPLICATED,
    band,
    judge,
)
from packedconv.evidence.quantities import MEASURED, Measured, Measurement, Part
from packedconv.evidence.samples import Results

PAPER = pathlib.Path(__file__).parents[2] / "config" / "paper.yaml"
ROUNDS, PAIRS, QUIET_PAIRS, RESAMPLES = 10, 200, 40, 300

# Interquartile range of the rounds of a point over their median, half of it in common to all;
# standard deviation between runs of all times of a layer and implementation, and of a point:
# times of two busy runs typically differ by 3 to 4 %, speedups by 5 %.
BUSY = {"spread": 0.08, "between_runs": 0.03, "of_a_point": 0.01}
QUIET = {"spread": 0.01, "between_runs": 0.005, "of_a_point": 0.002}
# Of a normal distribution.
INTERQUARTILE_RANGE = 1.349


class Run:
    """Noise of one run: medians of factors with their resamples, by point, and their errors."""

    def __init__(self, seed, layers, noise):
        draw = np.random.default_rng(seed)
        deviation = noise["spread"] / INTERQUARTILE_RANGE * np.exp(0.2 * draw.standard_normal())
        self.medians, self.errors = {}, []
        for layer in layers:
            shared = draw.standard_normal(ROUNDS)
            for implementation in ("dense", "sparse"):
                run = noise["between_runs"] * draw.standard_normal()
                for sparsity in SPARSITIES:
                    own = 0.5 * shared + np.sqrt(0.75) * draw.standard_normal(ROUNDS)
                    point = noise["of_a_point"] * draw.standard_normal()
                    values = np.exp(run + point + deviation * own)
                    key = implementation, layer.name, sparsity
                    self.medians[key] = statistics.resampled_median(values)
                    self.errors.append((*key, values.mean(), statistics.sem(values)))
        self.roof = float(np.exp(noise["between_runs"] * draw.standard_normal()))


class Pairs:
    """Pairs of runs of the same two layers, OC 48 and 80, on one device."""

    def __init__(self, folder, device, noise, pairs):
        self.judging = published.load(PAPER).judging
        results = Results.load(
            write_results(folder, device, out_channels=(48, 80), rounds=2, executions=1)
        )
        self.data = Measured(results, self.judging)
        self.layers = results.layers
        layers = list(self.layers.values())
        self.runs = [[Run((pair, k), layers, noise) for k in (0, 1)] for pair in range(pairs)]
        self.factors = {
            (implementation, name): statistics.run_factors(
                f"{implementation} of {name}", self.data.between_runs
            )
            for implementation in ("dense", "sparse")
            for name in self.layers
        }

    def verdicts(self, statement, seconds):
        """Verdicts of both runs of each pair; seconds: the true times, by implementation, of
        (layer, sparsity)."""
        quantity = MEASURED[statement["quantity"]]
        return [
            [
                judge(
                    statement, quantity(self._data(run, seconds), **statement["parameters"])
                ).verdict
                for run in pair
            ]
            for pair in self.runs
        ]

    def _data(self, run, seconds):
        medians = {
            key: seconds[key[0]](self.layers[key[1]], key[2]) * values * self.factors[key[:2]]
            for key, values in run.medians.items()
        }
        columns = ["implementation", "layer", "sparsity", "mean", "sem"]
        data = copy.copy(self.data)
        data.medians = lambda: medians
        data.times = lambda: pd.DataFrame(run.errors, columns=columns)
        # Far from the bandwidth; a share of the roof is then a throughput.
        data.roofs = roofline.Device("made up", run.roof, 1e30)
        return data


@pytest.fixture(scope="module")
def few_resamples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "RESAMPLES", RESAMPLES)
        yield


@pytest.fixture(scope="module")
def busy(few_resamples, tmp_path_factory):
    return Pairs(tmp_path_factory.mktemp("busy"), "cpu", BUSY, PAIRS)


@pytest.fixture(scope="module")
def quiet(few_resamples, tmp_path_factory):
    return Pairs(tmp_path_factory.mktemp("quiet"), "a100-sxm4-40gb", QUIET, QUIET_PAIRS)


def speedup_of(ratio):
    return {"dense": lambda layer, s: 1.0, "sparse": lambda layer, s: 1 / ratio}


def growth_of(step):
    """Speedup that grows by that share from one sparsity to the next."""
    return {
        "dense": lambda layer, s: 1.0,
        "sparse": lambda layer, s: (1 + step) ** (-100 * (s - 0.90)),
    }


def crossing_at(sparsity):
    """Speedup of 1 at that sparsity, which changes by 15 % from one sparsity to the next."""
    return {
        "dense": lambda layer, s: 1.0,
        "sparse": lambda layer, s: 1.15 ** (-100 * (s - sparsity)),
    }


def change_of(ratio):
    """Dense time that changes by that ratio from the lowest to the highest sparsity."""
    return {
        "dense": lambda layer, s: ratio ** ((s - 0.90) / 0.08),
        "sparse": lambda layer, s: 1.0,
    }


def share_of(share):
    return {
        "dense": lambda layer, s: 1.0,
        "sparse": lambda layer, s: roofline.sparse_flops(layer, s) / share,
    }


def statement(quantity, comparator, printed=1.0, parameters=None, **tolerance):
    return {
        "id": f"made.up.{quantity}",
        "quantity": quantity,
        "comparator": comparator,
        "printed": printed,
        "tolerance": tolerance,
        "parameters": parameters or {"out_channels": 48, "sparsity": 0.90},
    }


BOTH = {"out_channels": [48, 80]}
FALLING = {**BOTH, "implementation": "sparse"}

# A statement, the truth by a parameter, where the parameter makes it true, where it makes it
# false, and values at and around its limits.
CASES = {
    "within": (
        statement("speedup", "within", relative=0.10),
        speedup_of,
        (1.0,),
        (0.5, 2.0),
        (0.85, 0.9, 0.95, 1.05, 1.1, 1.15, 1.3),
    ),
    "between": (
        statement("speedup", "between", [0.8, 1.25], factor=1.25),
        speedup_of,
        (1.0,),
        (0.4, 2.5),
        (0.6, 0.64, 0.7, 1.5, 1.56, 1.6),
    ),
    "below": (statement("speedup", "below"), speedup_of, (0.6,), (1.6,), (0.9, 1.0, 1.1)),
    "above": (statement("speedup", "above"), speedup_of, (1.6,), (0.6,), (0.9, 1.0, 1.1)),
    "at_least": (statement("speedup", "at_least"), speedup_of, (1.6,), (0.6,), (0.9, 1.0, 1.1)),
    "highest": (
        statement("highest_speedup", "within", parameters=BOTH, relative=0.10),
        speedup_of,
        (1.0,),
        (0.5, 2.0),
        (0.8, 0.9, 1.05, 1.1, 1.2),
    ),
    "below roof": (
        statement("roof_fraction", "below", "well", {"out_channels": [48]}, bound=0.5),
        share_of,
        (0.3,),
        (0.9,),
        (0.4, 0.45, 0.48, 0.5, 0.55),
    ),
    "increasing": (
        statement("speedup_trend", "increasing", "grows", BOTH, rho=0.9),
        growth_of,
        (0.2,),
        (0.0,),
        (0.01, 0.02, 0.03),
    ),
    "decreasing": (
        statement("time_trend", "decreasing", "falls", FALLING, rho=0.9),
        growth_of,
        (0.2,),
        (0.0,),
        (0.01, 0.02, 0.03),
    ),
    "flat": (
        statement("time_spread", "flat", "flat", {**BOTH, "implementation": "dense"}, ratio=1.1),
        change_of,
        (1.0,),
        (1.5, 0.6),
        (1.05, 1.08, 1.1, 1.15),
    ),
    "crossover": (
        statement("crossover", "within", 0.94, {"out_channels": 48}, absolute=0.01),
        crossing_at,
        (0.94,),
        (0.90, 0.97, 1.2),
        (0.925, 0.93, 0.935, 0.945, 0.95, 0.96),
    ),
}
# What a busy machine can never confirm: 99 % of its runs spread wider than the limits.
TOO_NARROW = {"within", "highest", "flat", "crossover"}


def contradictions(pairs):
    return sum(set(pair) == {REPLICATED, NOT_REPLICATED} for pair in pairs)


def shares(pairs):
    found = Counter(verdict for pair in pairs for verdict in pair)
    return {name: found[name] / (2 * len(pairs)) for name in (REPLICATED, NOT_REPLICATED)}


@pytest.mark.parametrize("name", CASES)
def test_runs_of_a_busy_machine_do_not_contradict_one_another(busy, name):
    wanted, truth, true, false, near = CASES[name]
    for value in (*true, *false, *near):
        pairs = busy.verdicts(wanted, truth(value))
        assert contradictions(pairs) == 0, value
        found = shares(pairs)
        if value in true:
            assert found[NOT_REPLICATED] < 0.01, value
            assert name in TOO_NARROW or found[REPLICATED] > 0.9, value
        if value in false:
            assert found[REPLICATED] == 0, value
            assert found[NOT_REPLICATED] > 0.9, value


@pytest.mark.parametrize("name", CASES)
def test_a_quiet_machine_decides(quiet, name):
    wanted, truth, true, false, near = CASES[name]
    for value in (*true, *false, *near):
        pairs = quiet.verdicts(wanted, truth(value))
        assert contradictions(pairs) == 0, value
        found = shares(pairs)
        if value in true:
            assert found[REPLICATED] > 0.95, value
        if value in false:
            assert found[NOT_REPLICATED] > 0.95, value


@pytest.mark.parametrize(
    ("spread", "expected"), [(0.01, REPLICATED), (0.08, INCONCLUSIVE), (0.3, NOT_REPLICATED)]
)
def test_noise_that_itself_varies_gives_no_contradiction(busy, spread, expected):
    """The share of small standard errors, where one run may be twice as noisy as the other."""
    wanted = statement("sem_share", "at_least", "small", {**BOTH, "relative": 0.02}, bound=0.9)
    layers = list(busy.layers.values())
    other = copy.copy(busy)
    other.runs = [
        [
            Run((pair, k), layers, {**BUSY, "spread": spread * factor})
            for k, factor in enumerate((0.7, 1.4))
        ]
        for pair in range(20)
    ]
    pairs = other.verdicts(wanted, speedup_of(1.0))
    assert contradictions(pairs) == 0
    assert Counter(verdict for pair in pairs for verdict in pair)[expected] > 35


def test_without_the_allowance_for_runs_they_would(busy):
    """That these tests can fail: rounds alone say too little."""
    other = copy.copy(busy)
    other.factors = dict.fromkeys(busy.factors, 1.0)
    other.data = copy.copy(busy.data)
    other.data.judging = {**busy.judging, "confidence": 0.8}
    found = [
        contradictions(other.verdicts(CASES[name][0], CASES[name][1](value)))
        for name, value in (("below", 1.0), ("above", 1.0))
    ]
    assert min(found) > 10


# Every comparator, wherever its limits are


COMPARATORS = [
    statement("speedup", "within", relative=0.10),
    statement("speedup", "within", 0.94, absolute=0.01),
    statement("speedup", "between", [0.8, 1.25], factor=1.25),
    statement("speedup", "between", "nearly", low=7, high=10),
    statement("speedup", "below"),
    statement("speedup", "above"),
    statement("speedup", "at_least", "small", bound=0.9),
    statement("speedup_trend", "increasing", "grows", rho=0.9),
    statement("speedup_trend", "decreasing", "falls", rho=0.9),
    statement("time_spread", "flat", "flat", ratio=1.1),
]


def limits(wanted) -> list[tuple[float, Callable[[float], float]]]:
    """Finite limits, each with what moves a value from it outwards."""
    found = band(wanted)
    sides = ((found.low, lambda by: found.low - by), (found.high, lambda by: found.high + by))
    return [(limit, move) for limit, move in sides if np.isfinite(limit)]


@pytest.mark.parametrize("wanted", COMPARATORS, ids=lambda one: one["comparator"])
@given(width=st.floats(1e-4, 9e-3), at=st.floats(0.01, 0.99))
def test_an_interval_that_slides_across_a_limit(wanted, width, at):
    """Inside, across, outside: replicated, inconclusive, not replicated, and nothing else."""

    def verdict(low, high):
        part = Part("", (low + high) / 2, low, high)
        return judge(wanted, Measurement([part])).verdict

    for _, outwards in limits(wanted):
        ends = [outwards(-width - 1e-6), outwards(-1e-6)]
        assert verdict(min(ends), max(ends)) == REPLICATED
        ends = [outwards(-width * at), outwards(width * (1 - at))]
        assert verdict(min(ends), max(ends)) == INCONCLUSIVE
        ends = [outwards(1e-6), outwards(width + 1e-6)]
        assert verdict(min(ends), max(ends)) == NOT_REPLICATED


def test_one_part_across_a_limit_leaves_the_verdict_open():
    for wanted in COMPARATORS:
        (limit, outwards), *_ = limits(wanted)
        inside, outside = outwards(-0.001), outwards(0.001)
        across = Part("b", limit, min(inside, outside), max(inside, outside))
        good = Part("a", inside, inside, inside)
        bad = Part("c", outside, outside, outside)
        assert judge(wanted, Measurement([good, across])).verdict == INCONCLUSIVE
        assert judge(wanted, Measurement([good, across, bad])).verdict == NOT_REPLICATED


def test_the_highest_of_noisy_values_keeps_its_interval_around_it(busy):
    """The highest of each resample would lie above the estimate."""
    run = busy.runs[0][0]
    data = busy._data(run, speedup_of(1.0))
    (part,) = MEASURED["highest_speedup"](data, **BOTH).parts
    assert part.low < part.value < part.high
    assert abs(np.log(part.high / part.value) + np.log(part.low / part.value)) < 0.05
