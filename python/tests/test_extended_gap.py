"""What keeps the sparse convolution from 1 / (1 - S): what is removed, measured and said of it."""

import json
import math
import pathlib
import runpy
import sys

import numpy as np
import pytest
import torch
from synthetic import SCHEDULE, experiment, read_csv, write_experiments, write_results

import packedconv
from packedconv import _core, roofline
from packedconv.bench import cpu_experiments, protocol
from packedconv.bench.experiment import load_experiment
from packedconv.bench.extended import counters
from packedconv.bench.extended import gap as measuring
from packedconv.bench.extended.gap import REMOVALS
from packedconv.bench.extended.gap_patterns import PATTERNS
from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.gap import (
    COLUMNS,
    DECISIVE,
    INHERENT,
    MIXED,
    NO_GAP,
    NOT_INHERENT,
    OPEN,
    STATEMENT,
    TITLES,
    gap,
    judge,
    judge_point,
)
from packedconv.layer import Layer
from packedconv.plots.extended.gap import gap_figure
from packedconv.script import CheckError
from packedconv.settings import load_settings
from packedconv.weights import make_weight

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAYER = Layer("t_oc8_n1", 1, 8, 8, 12, 20)
OTHER = Layer("g_oc8_n2", 2, 8, 8, 13, 9, 3, 2, 2, dilation=2, groups=4)
# Outputs that are written as whole rows, as runs and in parts.
LAYERS = (
    LAYER,
    OTHER,
    Layer("w_oc4_n1", 1, 6, 4, 16, 64),
    Layer("p_oc4_n3", 3, 40, 4, 7, 7, 1, 1, 0),
)


@pytest.fixture(autouse=True)
def quick(torch_threads, monkeypatch):
    """Short warm-ups, bursts and copies."""
    monkeypatch.setattr(protocol, "WARMUP_SECONDS", 0.0)
    monkeypatch.setattr(cpu_experiments, "PEAK_BURST_SECONDS", 0.001)
    monkeypatch.setattr(measuring, "PEAK_SECONDS", 0.001)
    monkeypatch.setattr(measuring, "copy_bytes", lambda: 2**20)


@pytest.fixture
def results(tmp_path):
    return write_results(tmp_path / "results", out_channels=(8,), sparsities=(0.9,), rounds=2)


@pytest.fixture
def settings(results):
    return load_settings(str(results / "settings.json"))


# Patterns


@pytest.fixture
def weight():
    """Four output channels with 7, 1, 0 and 9 nonzeros of 5 x 3 x 3."""
    array = np.zeros((4, 45), np.float32)
    draw = np.random.default_rng(3)
    for channel, count in zip(array, (7, 1, 0, 9), strict=True):
        channel[draw.choice(45, count, replace=False)] = 1 + draw.random(count)
    return array.reshape(4, 5, 3, 3)


def places(weight):
    return [np.flatnonzero(channel) for channel in weight]


@pytest.mark.parametrize("name", sorted(set(PATTERNS) - {"empty"}))
def test_patterns_keep_the_values(weight, name):
    placed = PATTERNS[name](weight, 1)
    assert (placed.shape, placed.dtype) == (weight.shape, weight.dtype)
    np.testing.assert_array_equal(placed[placed != 0], weight[weight != 0])
    np.testing.assert_array_equal(PATTERNS[name](weight, 1), placed)


def test_each_pattern_takes_out_one_irregularity(weight):
    made = {name: places(make(weight, 1)) for name, make in PATTERNS.items()}
    counts = {name: [len(place) for place in found] for name, found in made.items()}
    assert counts == {
        "rows_equalised": [4, 4, 4, 5],
        "indices_contiguous": [7, 1, 0, 9],
        "few_channels": [7, 1, 0, 9],
        "regular": [4, 4, 4, 5],
        "empty": [0, 0, 0, 0],
    }
    assert any(place.max() >= 9 for place in made["rows_equalised"])
    for place in made["indices_contiguous"]:
        assert (np.diff(place) == 1).all()
    # Nine nonzeros fit into one input channel.
    assert all(place.max(initial=0) < 9 for place in made["few_channels"])
    for place in made["regular"]:
        np.testing.assert_array_equal(place, range(len(place)))


def test_patterns_are_drawn(weight):
    for name in ("rows_equalised", "indices_contiguous", "few_channels"):
        drawn = [PATTERNS[name](weight, seed) for seed in range(4)]
        assert any((one != drawn[0]).any() for one in drawn[1:]), name


# Executions without part of their work


class Case:
    """A layer's plan, and executions into an output with room around it."""

    def __init__(self, layer, schedule=None, threads=2):
        weight = torch.from_numpy(make_weight(layer, 0.7, 1))
        self.packed, self.threads = packedconv.pack(weight), threads
        self.image = torch.rand(layer.input_shape)
        self.plan = self.packed.plan(
            layer.input_shape, threads=threads, schedule=schedule, **layer.conv2d_arguments
        )
        self.shape = layer.output_shape

    def partial(self, **work):
        return _core.CpuPartialExecution(self.plan.core, self.threads, **work)

    def run(self, partial=None, image=None):
        """The output, and what lies around it; NaN where nothing was written."""
        image = self.image if image is None else image
        memory = torch.full((math.prod(self.shape) + 128,), float("nan"))
        out = memory[64:-64].view(self.shape)
        pair = image.data_ptr(), image.stride(), out.data_ptr(), out.stride()
        if partial is None:
            self.plan.core.execute(*pair[:2], 0, False, *pair[2:], self.threads)
        else:
            partial.execute(*pair)
        assert memory[:64].isnan().all()
        assert memory[-64:].isnan().all()
        return out


@pytest.fixture(params=LAYERS, ids=lambda layer: layer.name)
def case(request):
    return Case(request.param)


def schedules(layer):
    packed = packedconv.pack(torch.from_numpy(make_weight(layer, 0.7, 1)))
    first = packed.plan(layer.input_shape, threads=2, **layer.conv2d_arguments).schedule
    blocks = {"path": "loose", "block_channels": 3, "strip": 1}
    return [first, {**first, **blocks}, {**first, **blocks, "strip": 2, "stream": True}]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
@pytest.mark.parametrize("index", range(3))
def test_nothing_left_out_is_the_convolution(layer, index):
    case = Case(layer, schedules(layer)[index])
    partial = case.partial(fill=True, stores=True)
    for _ in range(2):
        assert torch.equal(case.run(partial), case.run())


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("fill", [True, False])
def test_without_stores_the_output_stays_untouched(layer, index, fill):
    case = Case(layer, schedules(layer)[index])
    partial = case.partial(fill=fill, stores=False)
    for _ in range(2):
        assert case.run(partial).isnan().all()


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_without_fill_the_input_is_read_once(layer):
    # One thread: on two, which of them computes what is not the same in every call.
    case = Case(layer, threads=1)
    partial = case.partial(fill=False, stores=True)
    first = case.run(partial)
    assert first.isfinite().all()
    assert torch.equal(case.run(partial, torch.full_like(case.image, 9.0)), first)


def test_the_convolution_is_as_before(case):
    before = case.run()
    for fill in (False, True):
        case.run(case.partial(fill=fill, stores=False))
        case.run(case.partial(fill=fill, stores=True))
    assert torch.equal(case.run(), before)


def test_a_partial_execution_keeps_its_plan():
    case = Case(LAYER)
    partial, expected = case.partial(fill=True, stores=True), case.run()
    image, shape = case.image, case.shape
    del case
    out = torch.full(shape, float("nan"))
    partial.execute(image.data_ptr(), image.stride(), out.data_ptr(), out.stride())
    assert torch.equal(out, expected)


def test_a_naive_plan_has_no_parts():
    case = Case(LAYER, {**SCHEDULE, "path": "naive"})
    with pytest.raises(ValueError, match="plan: expected one with tiles, got path naive"):
        case.partial(fill=False, stores=True)


def test_no_public_call_leaves_out_work():
    with pytest.raises(TypeError):
        _core.CpuPartialExecution(Case(LAYER).plan.core, 2, False, False)
    package = ROOT / "python" / "packedconv"
    users = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "CpuPartialExecution" in path.read_text()
    }
    assert users == {"bench/extended/gap.py"}


# Hardware counters


def test_counters_or_the_reason():
    found = counters.count(lambda: None, 3)
    assert set(found["values"]) | set(found["left_out"]) == set(counters.EVENTS)
    assert not set(found["values"]) & set(found["left_out"])
    assert all(found["left_out"].values())


def test_an_event_of_the_system_is_counted():
    clock = {"task_clock": (1, 1)}  # nanoseconds, which need no hardware
    rounds = {}
    for count in (1, 100):
        found = counters.count(lambda count=count: sum(range(1000 * count)), 20, clock)
        if found["left_out"]:
            pytest.skip(found["left_out"]["task_clock"])
        rounds[count] = found["values"]["task_clock"]
    assert rounds[100] > 5 * rounds[1] > 0


def test_an_event_that_is_not_there():
    found = counters.count(lambda: None, 1, {"none": (0, 1 << 40)})
    assert found["values"] == {}
    assert found["left_out"]["none"].startswith("perf_event_open: ")


def test_a_system_without_counters(monkeypatch):
    monkeypatch.setattr(counters.platform, "machine", lambda: "vax")
    found = counters.count(lambda: None, 1)
    assert set(found["left_out"].values()) == {"no perf_event_open on Linux vax"}


# Measuring


def asked(layer=LAYER, **changes):
    protocol = {"rounds": 2, "executions": 1, "warmup_executions": 0, "trial_executions": 1}
    wanted = experiment(layer, contenders=[], repeats=0, protocol=protocol, **changes)
    return load_experiment(json.dumps(wanted))


@pytest.mark.parametrize("layer", [LAYER, OTHER], ids=lambda layer: layer.name)
def test_the_gap_is_measured(settings, layer):
    rows, facts = measuring.measure(settings, asked(layer), 2)
    names = {removal.name for removal in REMOVALS}
    for key, sparsity in (("s90", 0.9), ("s98", 0.98)):
        left_out = set(facts["left_out"][key])
        assert left_out <= {"whole_tiles"}
        timed = {row["implementation"] for row in rows if row["sparsity"] == sparsity}
        assert timed == {"sparse", "dense", *names} - left_out - {"no_nonzeros"}
        assert len(facts["no_nonzeros_seconds"][key]) == 2
        assert min(facts["no_nonzeros_seconds"][key]) > 0
        assert set(facts["removals"][key]) == names - left_out
        counted = facts["counters"][key]
        assert set(counted["values"]) | set(counted["left_out"]) == set(counters.EVENTS)
    alone = {row["implementation"] for row in rows if row["threads"] == 1}
    assert alone == {"one_thread", "only_pattern", "all_removed"}
    assert facts["one_thread"].keys() == {"peak_flops", "bandwidth"}
    assert json.loads(json.dumps(facts)) == facts


def test_times_of_other_pixels_and_threads_are_scaled(settings):
    prepared = cpu_experiments.Prepared(settings, asked(), 2)
    point = measuring._Point(prepared, 0.9, 1)
    removal = {one.name: one for one in REMOVALS}
    schedule, lanes = point.plan.schedule, point.plan.facts["lanes"]
    rows, columns = schedule["rows"], schedule["vectors"] * lanes
    whole = math.ceil(12 / rows) * rows, math.ceil(20 / columns) * columns
    pixels = 12 * 20 / math.prod(whole)
    assert point._whole.output_shape[2:] == whole
    assert point.scale(removal["no_fill"]) == 1
    assert point.scale(removal["one_thread"]) == 0.5
    assert point.scale(removal["whole_tiles"]) == pixels
    assert point.scale(removal["all_removed"]) == 0.5


def test_an_image_of_whole_tiles_has_no_idle_lanes_to_remove(settings):
    experiment = asked(Layer("w_oc4_n1", 1, 6, 4, 336, 64), sparsities=[0.9])
    point = measuring._Point(cpu_experiments.Prepared(settings, experiment, 2), 0.9, 1)
    assert point.plan.facts["lanes_used"] == 1.0
    reasons = {removal.name: point.why_not(removal) for removal in REMOVALS}
    assert {name for name, why in reasons.items() if why} == {"whole_tiles"}
    assert reasons["whole_tiles"] == "tiles cover this image"


def test_round_medians_are_of_the_last_attempt():
    rows = [
        {"attempt": attempt, "round": number, "seconds": f"{10 * attempt + number + add:.9f}"}
        for attempt in (0, 1)
        for number in (0, 1, 2)
        for add in (0.0, 0.1, 0.5)
    ]
    assert measuring._round_medians(rows) == pytest.approx([10.1, 11.1, 12.1])


class Wrong:
    """A partial execution that writes, or does not."""

    def __init__(self, core, threads, fill, stores):
        self.real = _core.CpuPartialExecution(core, threads, fill=fill, stores=not stores)
        self.execute = self.real.execute


@pytest.mark.parametrize(
    ("name", "wanted"), [("no_stores", "none written"), ("no_fill", "every element written")]
)
def test_a_part_that_is_not_left_out_is_noticed(settings, monkeypatch, name, wanted):
    prepared = cpu_experiments.Prepared(settings, asked(), 2)
    point = measuring._Point(prepared, 0.9, 1)
    (removal,) = (one for one in REMOVALS if one.name == name)
    point.contender(removal).execute()

    class Core:
        CpuPartialExecution = Wrong
        isa = staticmethod(_core.isa)

    monkeypatch.setattr(measuring, "_core", Core)
    with pytest.raises(CheckError, match=rf"{name}: output: expected {wanted}"):
        point.contender(removal)


def test_a_wrong_pattern_is_noticed(settings, monkeypatch):
    """A kernel that ignores the other pattern is not timed."""
    prepared = cpu_experiments.Prepared(settings, asked(), 2)
    point = measuring._Point(prepared, 0.9, 1)
    own = point.plan
    monkeypatch.setattr(point, "_plan", lambda packed, layer: own)
    with pytest.raises(CheckError, match="rows_equalised"):
        point.contender(REMOVALS[0])


# What follows

PEAK, BANDWIDTH = 200e9, 50e9
NONZEROS = {0.9: 58, 0.98: 12}


def made_up(name, sparsity, contender, number):
    """Seconds, as many in every round."""
    sparse = 1e-3
    return {
        "dense": 4e-3,
        "sparse": sparse,
        "rows_equalised": sparse / 1.25,
        "one_thread": 2 * sparse / 1.6,
        # On one thread.
        "only_pattern": 2 * sparse * (0.25 if sparsity == 0.9 else 0.75),
        "all_removed": 2 * sparse / 8,
    }.get(contender, sparse / 2)


def removals(changes=()):
    """As measured on two threads, on an image of twice as many pixels where whole."""
    found = {}
    for removal in REMOVALS:
        scale = (0.5 if removal.one_thread else 1) * (0.5 if removal.whole_tiles else 1)
        found[removal.name] = {**removal._asdict(), "scale": scale}
    for name in changes:
        del found[name]
    return found


def gap_facts(**more):
    counted = {"values": {"cycles": 12.0}, "left_out": {"instructions": "none", "x": "none"}}
    return {
        "removals": {"s90": removals(), "s98": removals(["whole_tiles"])},
        "left_out": {"s90": {}, "s98": {"whole_tiles": "tiles cover this image"}},
        "counters": {"s90": counted, "s98": {"values": {}, "left_out": {}}},
        "no_nonzeros_seconds": dict.fromkeys(NAMED, [0.2e-3] * 5),
        "one_thread": {"peak_flops": 110e9, "bandwidth": 20e9},
        "plans": {key: {"schedule": SCHEDULE, "facts": {"lanes_used": 0.5}} for key in NAMED},
        **more,
    }


NAMED = ("s90", "s98")
TIMED = [removal.name for removal in REMOVALS if removal.name != "no_nonzeros"]
CONTENDERS = ["sparse", "dense", *TIMED]


def loaded(results, seconds=made_up, **more):
    paths = write_experiments(
        results,
        "gap",
        [experiment(LAYER, contenders=[])],
        lambda name, sparsity, contender, number: (
            None
            if (sparsity, contender) == (0.98, "whole_tiles")
            else seconds(name, sparsity, contender, number)
        ),
        contenders=CONTENDERS,
        changes={LAYER.name: gap_facts(**more)},
    )
    return load_experiments(results, paths), paths


@pytest.fixture
def table(results):
    return gap(loaded(results)[0])


def row_of(table, name, sparsity=0.9):
    found = table[(table["experiment"] == name) & (table["sparsity"] == sparsity)]
    return found.iloc[0]


def test_a_row_for_every_experiment(table):
    assert list(table.columns) == COLUMNS
    names = ["sparse", *TITLES, "no_nonzeros"]
    assert list(table["experiment"]) == [*names, *names, STATEMENT]
    assert set(TITLES) == {removal.name for removal in REMOVALS} - {"no_nonzeros"} | {"dense"}
    assert row_of(table, "whole_tiles", 0.98)["left_out"] == "tiles cover this image"
    assert np.isnan(row_of(table, "whole_tiles", 0.98)["seconds"])


def test_factors_are_of_the_scaled_times(table):
    assert row_of(table, "sparse")["factor"] == 1
    assert row_of(table, "rows_equalised")["factor"] == pytest.approx(1.25)
    assert row_of(table, "one_thread")["factor"] == pytest.approx(1.6)
    assert row_of(table, "one_thread")["seconds"] == pytest.approx(1e-3 / 1.6)
    assert row_of(table, "all_removed")["factor"] == pytest.approx(8)
    assert row_of(table, "whole_tiles")["factor"] == pytest.approx(4)
    for end in ("factor_low", "factor_high"):
        assert row_of(table, "all_removed")[end] == pytest.approx(8)


def test_each_bound_is_that_of_what_is_left(table):
    pixels, read, written = 12 * 20, 4 * 8 * 240, 4 * 8 * 240
    weights = 4 * (NONZEROS[0.9] + 9)
    flop = 2 * pixels * NONZEROS[0.9]
    both = (read + written + weights) / BANDWIDTH
    assert both > flop / PEAK
    # One thread has 20 GB/s and 110 GFLOP/s: two have no more than 50 and 220.
    expected = {
        "sparse": both,
        "rows_equalised": both,
        "input_in_cache": (written + weights) / BANDWIDTH,
        "no_fill": (written + weights) / BANDWIDTH,
        "no_stores": (read + weights) / BANDWIDTH,
        "one_thread": both,
        "only_pattern": flop / 220e9,
        "all_removed": flop / 220e9,
        "no_nonzeros": (read + written + 4 * 9) / BANDWIDTH,
    }
    assert flop / 220e9 > weights / BANDWIDTH
    for name, value in expected.items():
        assert row_of(table, name)["bound_seconds"] == pytest.approx(value), name
        row = row_of(table, name)
        assert row["over_bound"] == pytest.approx(row["seconds"] / value), name


def test_dense_is_held_against_its_own_bound(table):
    device = roofline.Device("d", PEAK, BANDWIDTH)
    bound = float(
        roofline.roofline_time(roofline.dense_flops(LAYER), roofline.dense_bytes(LAYER), device)
    )
    row = row_of(table, "dense")
    assert row["bound_seconds"] == bound
    assert row["factor"] == pytest.approx(4e-3 / bound)
    assert np.isnan(row["share"])


def test_speedups(table):
    row = row_of(table, "sparse", 0.98)
    assert row["ideal"] == pytest.approx(50)
    assert row["speedup"] == pytest.approx(4)
    assert row["bound_speedup"] == pytest.approx(4e-3 / row["bound_seconds"])


def test_the_share_of_the_gap_is_of_times_above_their_bounds(table):
    for sparsity, seconds, verdict in ((0.9, 0.25e-3, NOT_INHERENT), (0.98, 0.75e-3, INHERENT)):
        sparse, row = row_of(table, "sparse", sparsity), row_of(table, DECISIVE, sparsity)
        share = 1 - (seconds - row["bound_seconds"]) / (1e-3 - sparse["bound_seconds"])
        assert row["share"] == pytest.approx(share)
        assert row["verdict"] == verdict
    last = table.iloc[-1]
    assert last["experiment"] == STATEMENT
    assert last["verdict"] == MIXED
    shares = table.loc[table["experiment"] == DECISIVE, "share"]
    assert last["share_low"] == pytest.approx(shares.min())
    assert last["share"] == pytest.approx(shares.mean())
    assert last["share_high"] == pytest.approx(shares.max())


def test_no_gap_is_no_share(results):
    """The sparse convolution takes what the bound says, in some rounds less."""
    bound = (2 * 4 * 8 * 240 + 4 * (NONZEROS[0.9] + 9)) / BANDWIDTH

    def at_the_bound(name, sparsity, contender, number):
        if contender == "sparse":
            return bound * (0.99 + 0.01 * number)
        return made_up(name, sparsity, contender, number)

    table = gap(loaded(results, at_the_bound)[0])
    assert row_of(table, DECISIVE)["verdict"] == NO_GAP
    assert np.isnan(row_of(table, DECISIVE)["share"])


def test_noise_leaves_the_statement_open(results):
    def jumpy(name, sparsity, contender, number):
        return made_up(name, sparsity, contender, number) * (1 + number * (contender == "dense"))

    table = gap(loaded(results, jumpy)[0])
    assert set(table.loc[table["experiment"] == DECISIVE, "verdict"]) == {OPEN}
    assert table.iloc[-1]["verdict"] == OPEN


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.8, 0.7, 0.9], NOT_INHERENT),
        ([0.2, 0.1, 0.3], INHERENT),
        ([0.5, 0.4, 0.6], OPEN),
        ([0.6, 0.5, 0.7], OPEN),
        (None, NO_GAP),
    ],
)
def test_a_point_is_judged_by_its_interval(values, verdict):
    share = None if values is None else np.array([values[0], *values[1:] * 1000])
    assert judge_point(share, False) == verdict
    assert judge_point(share, True) == OPEN


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        ([INHERENT, INHERENT, NO_GAP], INHERENT),
        ([NOT_INHERENT, NOT_INHERENT], NOT_INHERENT),
        ([NOT_INHERENT, INHERENT, OPEN], MIXED),
        ([NOT_INHERENT, OPEN], OPEN),
        ([NO_GAP], NO_GAP),
        ([], NO_GAP),
    ],
)
def test_points_are_judged_together(verdicts, verdict):
    assert judge(verdicts) == verdict


def test_counters_are_in_the_table(table):
    row = row_of(table, "sparse")
    assert row["cycles"] == 12
    assert row["counters_left_out"] == "instructions, x: none"
    assert row_of(table, "sparse", 0.98)[["cycles", "counters_left_out"]].isna().all()


# The figure


def test_the_figure_draws_its_table(results):
    experiments, _ = loaded(results, peak_bursts=[100e9, 200e9, 100e9])
    table = gap(experiments)
    figure = gap_figure(experiments, table)
    for axes, (_, panel) in zip(figure.axes, table.groupby("sparsity"), strict=True):
        rows = panel.set_index("experiment")
        timed = rows.loc[list(TITLES)].dropna(subset="factor")
        widths = [bar.get_width() for bar in axes.patches]
        np.testing.assert_allclose(widths, timed["factor"] - 1)
        lines = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "None"]
        sparse = rows.loc["sparse"]
        for value in (1.0, sparse["over_bound"], sparse["ideal"] / sparse["speedup"]):
            assert any(np.isclose(line, value) for line in lines)
        diamonds = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "d"]
        left = timed.drop("dense")["bound_seconds"]
        np.testing.assert_allclose(diamonds, sparse["seconds"] / left)
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels == list(TITLES.values())
    texts = [text.get_text() for text in figure.axes[1].texts]
    assert "left out: tiles cover this image" in texts
    caption = next(text for text in figure.texts if text.get_gid() == "caption").get_text()
    caption = caption.replace("\n", " ")
    assert "parts need not add up" in caption
    assert "5 rounds of 2 executions" in caption
    assert "Hardware counters that were left out: instructions, x: none." in caption
    assert "Together: inconclusive." in caption
    assert "an empty weight takes too: t_oc8_n1, S 0.9: 20%" in caption
    assert "Timed while the machine was busy: t_oc8_n1, S 0.9; t_oc8_n1, S 0.98." in caption


def test_the_figure_script(results, tmp_path, monkeypatch):
    _, paths = loaded(results)
    out = tmp_path / "gap.pdf"
    script = ROOT / "scripts" / "figure_gap.py"
    arguments = ["--results", results, "--samples", *paths, "--out", out]
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    runpy.run_path(str(script), run_name="__main__")
    assert len(read_csv(tmp_path / "gap.csv")) == 2 * (len(TITLES) + 2) + 1
    assert (tmp_path / "gap.png").stat().st_size > 10_000
