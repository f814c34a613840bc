"""Layers that advise has not seen: drawn, scored, drawn as a figure."""

import copy
import json
import math
import os
import pathlib
import runpy
import sys

import numpy as np
import pandas as pd
import pytest
import yaml
from synthetic import SCHEDULE, experiment, read_csv, write_experiments, write_results

from packedconv import calibration, roofline
from packedconv import config as configuration
from packedconv.bench.experiment import load_experiment
from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended import held_out
from packedconv.evidence.extended.crossover import fit_crossover
from packedconv.evidence.extended.held_out import best_threshold, held_out_table, score
from packedconv.extended import EXPERIMENTS, draw_parts, resolve_extended
from packedconv.layer import Layer, sparsity_key
from packedconv.plots.extended.held_out import held_out_figure

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = {
    "seed": 5,
    "count": 20,
    "sparsities": [{"least": 0.1, "most": 0.3}, {"least": 0.3, "most": 0.9}],
    "flops": {"least": 1e5, "most": 1e7},
    "most_weights": 7000,
    "batch": [1, 2],
    "channels": [8, 16, 24, 32],
    "sizes": [7, 10, 20],
    "kernel_sizes": [1, 3],
    "strides": [1, 2],
}

# What is drawn


def drawn_layers(parts):
    """(Layer, sparsity) of each part."""
    return [
        (
            Layer(
                **{**record, "batch": record["batch"][0], "out_channels": record["out_channels"][0]}
            ),
            part["sparsities"][0],
        )
        for part in parts
        for record in part["layers"]
    ]


def test_layers_are_drawn_within_the_limits():
    found = drawn_layers(draw_parts(SPEC, []))
    assert len(found) == len({tuple(layer)[1:] for layer, _ in found}) == 20
    for index, (layer, sparsity) in enumerate(found):
        assert 1e5 <= roofline.dense_flops(layer) <= 1e7
        assert layer.weight_count <= 7000
        assert layer.padding == layer.kernel_size // 2
        assert (0.3 <= sparsity <= 0.9) if index % 2 else (0.1 <= sparsity <= 0.3)
        assert sparsity_key(sparsity)
    assert len({sparsity for _, sparsity in found}) > 10


def test_the_seed_decides_what_is_drawn():
    first = draw_parts(SPEC, [])
    assert first == draw_parts(copy.deepcopy(SPEC), [])
    assert first != draw_parts({**SPEC, "seed": 6}, [])
    # Of random.Random(5): 0.6229, 0.7418, 0.7952, 0.9424, 0.7399, 0.9223, 0.0290.
    assert drawn_layers(first)[0] == (Layer("held_00", 2, 32, 24, 10, 10, 3, 2, 1), 0.11)


def test_what_is_taken_is_not_drawn():
    before = [layer for layer, _ in drawn_layers(draw_parts(SPEC, []))]
    taken = [layer._replace(name="other") for layer in before[:10]]
    after = {tuple(layer)[1:] for layer, _ in drawn_layers(draw_parts(SPEC, taken))}
    assert not after & {tuple(layer)[1:] for layer in taken}
    assert len(after) == 20


def test_too_few_to_draw():
    with pytest.raises(ValueError, match=r"expected 20 layers within the limits .* got 0 in 10000"):
        draw_parts({**SPEC, "flops": {"least": 1e12, "most": 1e13}}, [])


@pytest.fixture
def extended(tmp_path):
    """config/extended.yaml with a change; the root folder is a copy of config/ alone."""
    (tmp_path / "config").mkdir()
    os.symlink(ROOT / "config" / "schema", tmp_path / "config" / "schema")
    content = configuration.load_yaml(ROOT / "config" / "extended.yaml")

    def resolve(change=lambda content: None):
        change(content)
        (tmp_path / "config" / "extended.yaml").write_text(yaml.safe_dump(content))
        return resolve_extended({"extended": "config/extended.yaml"}, tmp_path)

    return resolve


def test_the_listed_layers(extended):
    found = extended()
    assert tuple(found) == EXPERIMENTS
    held = [one["experiment"] for one in found["held_out"].values()]
    for one in held:
        assert load_experiment(json.dumps(one)).record() == one
        assert len(one["sparsities"]) == 1
    assert len(held) >= 60
    shapes = {tuple(Layer(**one["layer"]))[1:] for one in held}
    seen = {tuple(Layer(**one["experiment"]["layer"]))[1:] for one in found["crossover"].values()}
    assert len(shapes) == len(held)
    assert not shapes & seen
    # Sparse enough and dense enough to lie on both sides.
    sparsities = np.array([one["sparsities"][0] for one in held])
    assert 25 <= (sparsities < 0.45).sum() <= len(held) - 25
    assert 24 <= len(found["crossover"]) <= 32
    for one in found["crossover"].values():
        assert one["experiment"]["sparsities"] == [0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found["held_out"].update(other=1), "other"),
        (lambda found: found["held_out"].pop("seed"), "seed"),
        (lambda found: found["held_out"]["sparsities"][0].update(most=1), "1"),
        (lambda found: found["held_out"].update(most_weights=10), "held_out: expected 96 layers"),
    ],
)
def test_wrong_limits_are_named(extended, change, message):
    with pytest.raises(ValueError, match=message):
        extended(change)


# The score


def table_of(rows):
    """From (sparsity, faster, outside_band, right)."""
    names = ["sparsity", "faster", "outside_band", "right"]
    return pd.DataFrame(rows, columns=names)


@pytest.mark.parametrize("seed", range(8))
def test_the_best_threshold_is_the_best(seed):
    draw = np.random.default_rng(seed)
    sparsities = draw.integers(0, 10, 15) / 10
    faster = np.where(draw.random(15) < sparsities, "sparse", "dense")
    table = pd.DataFrame({"sparsity": sparsities, "faster": faster})

    def right(threshold):
        return int(((sparsities >= threshold) == (faster == "sparse")).sum())

    best = max(right(value) for value in [*np.arange(-0.05, 1.1, 0.1), math.inf])
    assert right(best_threshold(table)) == best


def test_one_answer_may_be_the_best_threshold():
    rows = [(0.1, "dense", True, True), (0.9, "dense", True, True)]
    assert best_threshold(table_of(rows)) == math.inf
    rows = [(0.1, "sparse", True, True), (0.9, "sparse", True, True)]
    assert best_threshold(table_of(rows)) == -math.inf


def scored(right, threshold_right, outside=40, sparse_faster=30, layers=72):
    return held_out.Score(layers, sparse_faster, outside, right, 0.5, threshold_right)


@pytest.mark.parametrize(
    ("found", "reached"),
    [
        (scored(36, 35), True),
        (scored(35, 30), False),  # below 90 %
        (scored(38, 38), False),  # not better than the threshold
        (scored(38, 35, sparse_faster=24), False),
        (scored(38, 35, sparse_faster=48), False),
        (scored(38, 35, layers=59), False),
        (scored(0, 0, outside=0), False),
    ],
)
def test_what_is_asked_for(found, reached):
    assert found.reached is reached


# The table and the figure

PLAN = {
    "schedule": SCHEDULE,
    "facts": {"lanes_used": 1.0, "lanes": 16, "tile_bytes": 1000, "items": 8, "pieces_per_tile": 1},
    "why": "made up",
}
SEEN = [
    Layer(
        f"seen_{index}",
        1,
        16 * (1 + index % 3),
        16 * (1 + index % 4),
        size,
        size,
        kernel,
        1,
        kernel // 2,
    )
    for index, (size, kernel) in enumerate(
        [(12, 1), (12, 3), (20, 3), (28, 1), (28, 3), (40, 3), (40, 1), (16, 5), (24, 5), (32, 3)]
    )
]
HELD = [
    (Layer("held_00_oc32_n1", 1, 48, 32, 24, 24), 0.9),
    (Layer("held_01_oc48_n1", 1, 16, 48, 30, 30), 0.2),
    (Layer("held_02_oc16_n1", 1, 32, 16, 18, 18, 1, 1, 0), 0.7),
    (Layer("held_03_oc16_n1", 1, 32, 64, 14, 14, 1, 1, 0), 0.2),
]


def times(layers):
    """Made-up seconds of layers: sparse costs 1.5 times as much as dense at S 0."""
    works = {}
    for layer in layers:
        for sparsity in (0.0, 0.2, 0.5, 0.7, 0.9):
            nonzeros = round((1 - sparsity) * layer.weight_count)
            works[layer.name, sparsity] = calibration.workload_of_layer(
                layer, nonzeros, 2, PLAN["schedule"], PLAN["facts"]
            )

    def seconds(name, sparsity, contender, number):
        work = works[name, sparsity]
        if contender == "dense":
            terms = calibration.dense_terms(work)
            flop = terms["point_flop"] + terms["window_flop"]
            return (2e-6 + 1e-11 * flop) * (1 + 0.001 * number)
        return (2e-6 + 1.5e-11 * calibration.sparse_terms(work)["flop"]) * (1 + 0.001 * number)

    return seconds


@pytest.fixture
def results(tmp_path):
    return write_results(tmp_path / "results", out_channels=(8,), sparsities=(0.9,), rounds=2)


def write(results, name, wanted, seconds, bursts=None):
    plans = {
        layer.name: {
            "plans": {sparsity_key(value): PLAN for value in values},
            **(bursts or {}).get(layer.name, {}),
        }
        for layer, values in wanted
    }
    return write_experiments(
        results,
        name,
        [experiment(layer, contenders=[], sparsities=values) for layer, values in wanted],
        seconds,
        contenders=["sparse", "dense"],
        changes=plans,
    )


@pytest.fixture
def measured(results):
    """Samples of both: the third held-out layer is far slower than expected."""
    seen = write(results, "crossover", [(layer, [0.0, 0.5, 0.9]) for layer in SEEN], times(SEEN))
    expected = times([layer for layer, _ in HELD])

    def seconds(name, sparsity, contender, number):
        odd = name == HELD[2][0].name and contender == "sparse"
        return expected(name, sparsity, contender, number) * (5 if odd else 1)

    held = write(results, "held_out", [(layer, [value]) for layer, value in HELD], seconds)
    return seen, held


def test_advice_is_compared_with_measurement(results, measured):
    seen, held = (load_experiments(results, paths) for paths in measured)
    held_out.require_disjoint(held, seen)
    table = held_out_table(held, fit_crossover(seen))
    assert list(table.columns) == held_out.COLUMNS
    assert list(table["layer"]) == [layer.name for layer, _ in HELD]
    right = table[table["layer"] != HELD[2][0].name]
    np.testing.assert_allclose(right["predicted"], right["speedup"], rtol=0.02)
    assert list(table["faster"]) == ["sparse", "dense", "dense", "dense"]
    assert list(table["advised"]) == ["sparse", "dense", "sparse", "dense"]
    assert list(table["right"]) == [True, True, False, True]
    assert table["outside_band"].all()
    assert not (table["outside_range"] != "").any()
    found = score(table)
    assert found == held_out.Score(4, 1, 4, 3, pytest.approx(0.8), 4)
    assert not found.reached


def test_what_lies_inside_the_band_does_not_count(results, measured):
    seen = load_experiments(results, measured[0])
    made_up = times([layer for layer, _ in HELD])

    def seconds(name, sparsity, contender, number):
        ratio = {HELD[0][0].name: 1.09, HELD[1][0].name: 1 / 1.09}.get(name, 1.2)
        dense = made_up(name, sparsity, "dense", number)
        return dense if contender == "dense" else dense / ratio

    held = load_experiments(
        results, write(results, "held_out", [(layer, [value]) for layer, value in HELD], seconds)
    )
    table = held_out_table(held, fit_crossover(seen))
    assert list(table["outside_band"]) == [False, False, True, True]
    found = score(table)
    assert (found.layers, found.sparse_faster, found.outside) == (4, 3, 2)


def test_a_layer_of_a_busy_machine_says_nothing(results, measured):
    expected = fit_crossover(load_experiments(results, measured[0]))
    made_up = times(SEEN)
    busy = SEEN[-1].name

    def seconds(name, sparsity, contender, number):
        return 8e-3 if name == busy else made_up(name, sparsity, contender, number)

    bursts = {busy: {"peak_bursts": [200e9, 100e9, 100e9]}}
    wanted = [(layer, [0.0, 0.5, 0.9]) for layer in SEEN]
    found = load_experiments(results, write(results, "crossover", wanted, seconds, bursts))
    assert found.peaks["busy_layers"] == [busy]
    fitted = fit_crossover(found)
    assert f"{len(SEEN) - 1} layers" in fitted.source
    assert f"{len(SEEN)} layers" in expected.source
    for name, model in fitted.models.items():
        assert model.points == 3 * (len(SEEN) - 1)
        assert model.spread == pytest.approx(expected.models[name].spread, abs=0.02)


def test_a_layer_of_the_crossover_is_not_held_out(results):
    seen = write(results, "crossover", [(layer, [0.5]) for layer in SEEN], times(SEEN))
    same = SEEN[0]._replace(name="held_00_oc16_n1")
    held = write(results, "held_out", [(same, [0.5])], times([same]))
    with pytest.raises(ValueError, match="held_00_oc16_n1, which has the shape of seen_0"):
        held_out.require_disjoint(load_experiments(results, held), load_experiments(results, seen))


def caption(figure):
    text = next(text for text in figure.texts if text.get_gid() == "caption").get_text()
    return text.replace("\n", " ")


def test_the_figure_states_the_counts(results, measured):
    seen, held = (load_experiments(results, paths) for paths in measured)
    fitted = fit_crossover(seen)
    table = held_out_table(held, fitted)
    figure = held_out_figure(held, fitted, table, score(table))
    axes = figure.axes[0]
    title = axes.get_title(loc="left").replace("\n", " ")
    assert "advise is right on 3 of 4 layers outside the band (75.0%)" in title
    assert "threshold on S (S ≥ 0.8) on 4" in title
    (wrong,) = (line for line in axes.lines if line.get_label() == "wrong outside the band")
    bad = table.iloc[2]
    np.testing.assert_allclose(wrong.get_xydata(), [[bad["speedup"], bad["predicted"]]])
    shown = sum(len(container.lines[0].get_xdata()) for container in axes.containers)
    assert shown == len(table)
    text = caption(figure)
    assert "5 rounds of 2 executions" in text
    assert "Sparse is faster on 1 of them, dense on 3; 0 lie inside the band" in text
    assert "advise is right on 3 of 4, the best single threshold on S" in text
    assert "25 or more on each side: not reached." in text
    assert "Wrong: 1×1, 32→16, 18², S 0.7" in text
    assert "crossover map of run paper, 10 layers" in text
    assert "Inconclusive, with 1 in the measured interval: 0 of 4." in text


def test_the_script(results, measured, tmp_path, monkeypatch):
    out = tmp_path / "figures" / "held_out.pdf"
    arguments = ["--results", results, "--samples", *measured[1], "--out", out]
    monkeypatch.setattr(sys, "argv", ["figure_held_out", *map(str, arguments)])
    runpy.run_path(str(ROOT / "scripts" / "figure_held_out.py"), run_name="__main__")
    assert [row["right"] for row in read_csv(out.with_suffix(".csv"))] == [
        *("True", "True", "False", "True")
    ]
    assert out.with_suffix(".png").stat().st_size > 10_000
