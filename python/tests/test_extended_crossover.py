"""The crossover map: measured, tabled, drawn, and fitted."""

import json
import math
import pathlib
import runpy
import sys

import numpy as np
import pytest
from synthetic import SCHEDULE, experiment, read_csv, write_experiments, write_results

import packedconv
from packedconv.bench import cpu_experiments, protocol
from packedconv.bench.experiment import Experiment
from packedconv.bench.extended import crossover as measuring
from packedconv.calibration import dense_terms, sparse_terms
from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended import crossover
from packedconv.evidence.extended.crossover import crossover_table, fit_crossover
from packedconv.layer import Layer, sparsity_key
from packedconv.plots.extended.crossover import crossover_figure
from packedconv.settings import load_settings

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPARSITIES = [0.0, 0.5, 0.7, 0.9]
PLAN = {
    "schedule": SCHEDULE,
    "facts": {"lanes_used": 0.8, "lanes": 16, "tile_bytes": 1000, "items": 8, "pieces_per_tile": 1},
    "why": "made up",
}
LAYERS = [
    Layer("small_oc8_n1", 1, 16, 8, 12, 12),
    Layer("large_oc8_n1", 1, 32, 8, 40, 40),
    Layer("point_oc64_n8", 8, 16, 64, 12, 12, 1, 1, 0),
]
# Speedup at the sparsities: crosses between .5 and .7, at once, and never.
SPEEDUPS = {
    "small_oc8_n1": [0.5, 0.8, 1.2, 3.0],
    "large_oc8_n1": [1.6, 2.0, 3.0, 9.0],
    "point_oc64_n8": [0.3, 0.4, 0.5, 0.6],
}


@pytest.fixture
def results(tmp_path):
    return write_results(tmp_path / "results", out_channels=(8,), sparsities=(0.9,), rounds=2)


def write(results, layers=LAYERS, speedups=SPEEDUPS, wobble=0.0, changes=None):
    """Times with these speedups; wobble: relative, of the sparse side, between rounds."""
    plans = {"plans": {sparsity_key(sparsity): PLAN for sparsity in SPARSITIES}}
    changes = changes or {}

    def seconds(name, sparsity, contender, number):
        if contender == "dense":
            return 1e-3
        return 1e-3 / speedups[name][SPARSITIES.index(sparsity)] * (1 + wobble * (number - 2))

    return write_experiments(
        results,
        "crossover",
        [experiment(layer, contenders=[], sparsities=SPARSITIES) for layer in layers],
        seconds,
        contenders=["sparse", "dense"],
        changes={layer.name: {**plans, **changes.get(layer.name, {})} for layer in layers},
    )


@pytest.fixture
def written(results):
    return load_experiments(results, write(results))


def test_the_speedups_and_where_they_reach_one(written):
    table = crossover_table(written)
    assert list(table.columns) == crossover.COLUMNS
    assert len(table) == len(LAYERS) * len(SPARSITIES)
    for name, speedups in SPEEDUPS.items():
        rows = table[table["layer"] == name]
        np.testing.assert_allclose(rows["speedup"], speedups)
        np.testing.assert_allclose(rows["speedup_low"], speedups)
        assert not rows["inconclusive"].any()
    reached = table.groupby("layer")["break_even"].first()
    assert reached["small_oc8_n1"] == pytest.approx(0.6)
    assert reached["large_oc8_n1"] == -math.inf
    assert reached["point_oc64_n8"] == math.inf


def test_an_interval_across_one_is_inconclusive(results):
    speedups = {**SPEEDUPS, "small_oc8_n1": [0.5, 0.8, 1.02, 3.0]}
    experiments = load_experiments(results, write(results, speedups=speedups, wobble=0.05))
    table = crossover_table(experiments).set_index(["layer", "sparsity"])
    found = table.loc["small_oc8_n1"]
    assert list(found["inconclusive"]) == [False, False, True, False]
    assert found["speedup_low"][0.7] <= 1 <= found["speedup_high"][0.7]
    # Where the ratio reaches 1 is as uncertain.
    assert found["break_even_low"][0.7] < found["break_even"][0.7] < found["break_even_high"][0.7]
    assert found["break_even"][0.7] == pytest.approx(0.5 + 0.2 * (1 - 0.8) / (1.02 - 0.8))


def test_the_titles_of_layers(written):
    titles = crossover.layer_titles(crossover_table(written))
    assert titles["small_oc8_n1"] == "3×3, 16→8, 12²"
    assert titles["point_oc64_n8"] == "1×1, 16→64, 12², N 8"


def caption(figure):
    text = next(text for text in figure.texts if text.get_gid() == "caption").get_text()
    return text.replace("\n", " ")


def test_the_map_draws_its_table(results):
    speedups = {**SPEEDUPS, "small_oc8_n1": [0.5, 0.8, 1.02, 3.0]}
    skipped = {"dense": {"layout": "nchw", "skipped": {"prepacked_nchw": "no oneDNN"}}}
    busy = {"peak_bursts": [200e9, 100e9, 100e9]}
    paths = write(
        results,
        speedups=speedups,
        wobble=0.05,
        changes={"small_oc8_n1": {**skipped, **busy}},
    )
    experiments = load_experiments(results, paths)
    table = crossover_table(experiments)
    figure = crossover_figure(experiments, table)
    axes = figure.axes[0]
    labels = [text.get_text() for text in axes.get_yticklabels()]
    # By kernel, then size, the largest first.
    assert labels == ["1×1, 16→64, 12², N 8", "3×3, 32→8, 40²", "3×3, 16→8, 12²"]
    shown = {text.get_position(): text.get_text() for text in axes.texts}
    assert shown[3, 1] == "9"
    assert shown[1, 2] == "0.8†"
    assert len(shown) == len(table)
    hatched = [patch for patch in axes.patches if patch.get_hatch()]
    assert [patch.get_xy() for patch in hatched] == [(1.5, 1.5)]
    values = np.asarray(axes.images[0].get_array())
    np.testing.assert_allclose(values[2], [0.5, 0.8, 1.02, 3.0])
    marks = [line for line in axes.lines if line.get_marker() == "|"]
    places = [tuple(point) for line in marks for point in line.get_xydata()]
    # Between the second and third column, at the place of its sparsity.
    assert places == [(pytest.approx(1 + (1 - 0.8) / (1.02 - 0.8)), 2)]
    text = caption(figure)
    assert "5 rounds of 2 executions" in text
    assert "Inconclusive: 1 of 12 cells." in text
    assert "reached between S 0.68 and 0.68 in 1 of 3 layers, is below the lowest S in 1," in text
    assert "†: timed while the machine was busy, 4 of 12 cells." in text
    assert "Dense layout prepacked_nchw was not timed for 1 layer: no oneDNN." in text


def test_wide_rounds_are_marked(results):
    experiments = load_experiments(results, write(results, wobble=0.3))
    figure = crossover_figure(experiments, crossover_table(experiments))
    assert all(text.get_text().endswith("*") for text in figure.axes[0].texts)
    assert "rounds still further apart than 15% after the repeats, in 12 of 12" in caption(figure)


def test_a_map_without_break_even(results):
    layers = [LAYERS[1], LAYERS[2]]
    experiments = load_experiments(results, write(results, layers))
    figure = crossover_figure(experiments, crossover_table(experiments))
    assert "No layer of 2 has its break-even among the sparsities." in caption(figure)


def test_the_calibration_has_the_plans_and_the_ceilings(written):
    found = fit_crossover(written)
    assert (found.kind, found.title, found.threads) == ("cpu", "Synthetic CPU", 2)
    assert (found.peak_flops, found.bandwidth) == (200e9, 50e9)
    assert found.isa == "x86_64_v4"
    assert found.models["sparse"].points == found.models["dense"].points == 12
    assert found.ranges["pixels"] == (144, 1600)
    work = crossover.planned_workload(written.facts["small_oc8_n1"], LAYERS[0], 0.5)
    assert work.nonzeros == 576
    assert sparse_terms(work)["flop"] == pytest.approx(2 * 576 * 144 / 0.8)


def test_the_script_writes_the_map_and_the_calibration(results, tmp_path, monkeypatch):
    paths = write(results)
    out = tmp_path / "figures" / "crossover.pdf"
    arguments = ["--results", results, "--samples", *paths, "--out", out]
    monkeypatch.setattr(sys, "argv", ["figure_crossover", *map(str, arguments)])
    runpy.run_path(str(ROOT / "scripts" / "figure_crossover.py"), run_name="__main__")
    assert len(read_csv(out.with_suffix(".csv"))) == 12
    assert out.with_suffix(".png").stat().st_size > 10_000
    found = packedconv.Calibration.load(str(out.with_suffix(".json")))
    assert found == fit_crossover(load_experiments(results, paths))


def test_missing_samples_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected the samples of crossover"):
        crossover.sample_paths(tmp_path)


# Measured


def test_a_layer_is_measured_both_ways(results, torch_threads, monkeypatch):
    monkeypatch.setattr(protocol, "WARMUP_SECONDS", 0.0)
    monkeypatch.setattr(cpu_experiments, "PEAK_BURST_SECONDS", 0.001)
    layer = Layer("t_oc8_n1", 1, 8, 8, 12, 20)
    wanted = experiment(layer, contenders=[], sparsities=[0.0, 0.5], repeats=0)
    wanted = Experiment(**{**wanted, "layer": layer})
    settings = load_settings(str(results / "settings.json"))
    rows, facts = measuring.measure(settings, wanted, 2)
    protocol_rows = wanted.protocol["rounds"] * wanted.protocol["executions"]
    for sparsity in (0.0, 0.5):
        for implementation in ("sparse", "dense"):
            found = [
                row
                for row in rows
                if (row["sparsity"], row["implementation"]) == (sparsity, implementation)
            ]
            assert len(found) == protocol_rows
    assert set(facts["plans"]) == {"s00", "s50"}
    assert facts["dense"]["layout"]
    json.dumps(facts)
    # What the fit needs of it.
    work = crossover.planned_workload(facts, layer, 0.5)
    assert min(sparse_terms(work)["flop"], dense_terms(work)["window_flop"]) > 0
