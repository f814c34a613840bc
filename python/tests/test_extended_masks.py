"""Masks of a layer: what is timed, what is tabled and drawn."""

import json
import pathlib
import runpy
import sys

import numpy as np
import pytest
from synthetic import SCHEDULE, experiment, read_csv, write_experiments, write_results

from packedconv.bench import cpu_experiments, protocol
from packedconv.bench.experiment import load_experiment
from packedconv.bench.extended import masks as bench
from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.masks import COLUMNS, TITLES, masks
from packedconv.layer import Layer
from packedconv.masks import MASKS
from packedconv.plots.extended.masks import masks_figure
from packedconv.samples_file import EXPERIMENT_COLUMNS
from packedconv.script import CheckError
from packedconv.settings import load_settings
from packedconv.weights import save_weights

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAYER = Layer("mask_t_oc16_n1", 1, 24, 16, 12, 20)
# Of output channels that are no multiple of a block of four, and too few to be skewed.
ODD = Layer("mask_odd_oc6_n1", 1, 24, 6, 9, 9)


@pytest.fixture(autouse=True)
def quick(torch_threads, monkeypatch):
    monkeypatch.setattr(protocol, "WARMUP_SECONDS", 0.0)
    monkeypatch.setattr(cpu_experiments, "PEAK_BURST_SECONDS", 0.001)


@pytest.fixture
def results(tmp_path):
    return write_results(tmp_path / "results", out_channels=(8,), sparsities=(0.9,), rounds=2)


@pytest.fixture
def settings(results):
    return load_settings(str(results / "settings.json"))


@pytest.fixture
def trained(tmp_path):
    """Weights of a network, of which conv2 has the layer's shape at one sparsity only."""
    generator = np.random.default_rng(1)
    weight = generator.normal(size=LAYER.weight_shape).astype(np.float32)
    weight[np.abs(weight) < 1.7] = 0
    path = tmp_path / "digits.npz"
    save_weights(str(path), {"conv1_s90": weight[:, :1], "conv2_s90": weight})
    return str(path), weight


def asked(layer, **changes):
    changes = {"contenders": [], "sparsities": [0.9, 0.95], "repeats": 0, **changes}
    changes["protocol"] = {
        "rounds": 2,
        "executions": 2,
        "warmup_executions": 0,
        "trial_executions": 1,
    }
    return experiment(layer, **changes)


def measured(settings, layer, trained=None):
    return bench.measure(settings, load_experiment(json.dumps(asked(layer))), 2, trained)


def test_every_mask_is_timed(settings, trained):
    path, weight = trained
    rows, facts = measured(settings, LAYER, path)
    found = {(row["sparsity"], row["implementation"]) for row in rows}
    everything = {"sparse", "dense", *MASKS}
    assert found == {(0.95, name) for name in everything} | {
        (0.9, name) for name in (*everything, "trained")
    }
    assert len(rows) == 2 * 2 * len(found)
    assert set(rows[0]) == set(EXPERIMENT_COLUMNS)
    nonzeros = {(row["sparsity"], row["implementation"]): row["nonzeros"] for row in rows}
    # 346 is round(0.1 * 3456), of which blocks of 4 and 9 have the nearest multiple.
    assert {name: nonzeros[0.9, name] for name in MASKS} == {
        **dict.fromkeys(MASKS, 346),
        "channel_blocks": 344,
        "kernels": 342,
    }
    assert nonzeros[0.9, "sparse"] == nonzeros[0.9, "dense"] == 346
    assert nonzeros[0.9, "trained"] == np.count_nonzero(weight)
    assert facts["masks"]["s90"]["trained"]["source"] == "conv2"
    assert facts["masks"]["s90"]["trained"]["channel_nonzeros"] == [
        int(np.count_nonzero(channel)) for channel in weight
    ]
    assert set(facts["left_out"]["s95"]) == {"trained"}
    assert "weight of 16x24x3x3 at s95, among ['conv1_s90'" in facts["left_out"]["s95"]["trained"]
    assert set(facts["masks"]["s90"]["runs"]["schedule"]) == set(SCHEDULE)


def test_what_a_layer_cannot_have_is_left_out(settings):
    rows, facts = measured(settings, ODD)
    assert set(facts["left_out"]["s90"]) == {"channel_blocks", "skewed", "trained"}
    assert "at s90, among none" in facts["left_out"]["s90"]["trained"]
    timed = {row["implementation"] for row in rows}
    assert timed == {"sparse", "dense", *MASKS} - {"channel_blocks", "skewed"}


def test_a_file_that_is_none_of_weights_is_refused(settings, tmp_path):
    path = tmp_path / "cut.npz"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match=r"trained: .*cut\.npz: .*; delete it and make it again"):
        measured(settings, LAYER, str(path))


def test_a_wrong_output_of_a_mask_is_refused(settings, monkeypatch):
    compare = bench.compare_with_float64

    def wrong(output, layer, input, weight):
        output[0, 3, 2, 1] += 0.1
        return compare(output, layer, input, weight)

    monkeypatch.setattr(bench, "compare_with_float64", wrong)
    with pytest.raises(CheckError, match=r"sparsity 0\.9, mask uniform: output \(0, 3, 2, 1\)"):
        measured(settings, LAYER)


# The table and the figure


TIMES = {
    # Of one layer alone.
    "trained": 1.5,
    "sparse": 1.0,
    "dense": 4.0,
    "uniform": 1.0,
    "one_of_m": 0.8,
    "channel_blocks": 1.0,
    "kernels": 1.25,
    "runs": 1.1,
    "neighbourhoods": 1.2,
    "skewed": 2.0,
}
# Channels 0 and 1 on one thread, 2 and 3 on the other.
CHANNELS = [10, 20, 30, 40]


@pytest.fixture
def samples(results):
    def seconds(layer, sparsity, contender, number):
        if contender not in TIMES or (contender == "trained" and layer != ODD.name):
            return None
        # As often faster as slower than the uniform mask.
        jitter = {"uniform": 0.05 * (-1) ** number}.get(contender, 0.0)
        return 1e-3 * (TIMES[contender] + jitter)

    def described(mask):
        other = {"strip": 9} if mask == "runs" else {}
        nonzeros = CHANNELS if mask != "kernels" else [9, 18, 36, 36]
        return {
            "channel_nonzeros": nonzeros,
            "adjacent_weights": 25,
            "adjacent_channels": 10,
            "schedule": {**SCHEDULE, **other},
            "source": "conv2" if mask == "trained" else None,
        }

    wanted = [asked(LAYER, sparsities=[0.9]), asked(ODD, sparsities=[0.9, 0.95])]
    for one in wanted:
        one["protocol"]["rounds"] = 8
    changes = {}
    for name in (LAYER.name, ODD.name):
        timed = set(TIMES) - {"dense"} - ({"trained"} if name == LAYER.name else set())
        changes[name] = {
            "masks": {key: {mask: described(mask) for mask in timed} for key in ("s90", "s95")},
            "left_out": {key: {"trained": "no network"} for key in ("s90", "s95")},
        }
    return write_experiments(
        results, "masks", wanted, seconds, contenders=list(TIMES), changes=changes
    )


def test_the_table(results, samples):
    table = masks(load_experiments(results, samples))
    assert list(table.columns) == COLUMNS
    assert len(table) == 3 * len(TITLES)
    point = table[(table["layer"] == LAYER.name)].set_index("mask")
    assert list(point.index) == list(TITLES)
    for mask in set(TITLES) - {"trained", "uniform"}:
        assert point.loc[mask, "ratio"] == pytest.approx(TIMES[mask])
        assert point.loc[mask, "speedup"] == pytest.approx(4 / TIMES[mask])
    verdicts = point["verdict"].dropna().to_dict()
    assert verdicts == {
        "uniform": "inconclusive",
        "one_of_m": "faster",
        "channel_blocks": "inconclusive",
        **dict.fromkeys(("kernels", "runs", "neighbourhoods", "skewed"), "slower"),
    }
    skewed = point.loc["skewed"]
    assert skewed["channel_balance"] == pytest.approx(40 / 25)
    assert skewed["slice_balance"] == pytest.approx(70 / 50)
    assert (skewed["adjacent_weights"], skewed["adjacent_channels"]) == (0.25, 0.1)
    assert skewed["share_of_weights"] == 100 / 3456
    assert point["same_schedule"].dropna().to_dict() == {
        mask: mask != "runs" for mask in TITLES if mask != "trained"
    }
    trained = point.loc["trained"]
    assert trained["left_out"] == "no network"
    assert np.isnan(trained["seconds"])


def test_the_figure(results, samples):
    experiments = load_experiments(results, samples)
    figure = masks_figure(experiments, masks(experiments))
    text = " ".join(found.get_text() for found in figure.texts).replace("\n", " ")
    for part in (
        "Synthetic CPU (device cpu, run paper), 2 threads: 8 rounds of 2 executions",
        "Measured ceilings: 200 GFLOP/s, 50.0 GB/s",
        "Weights uniform on ±sqrt(6/(K²·IC)), inputs uniform on [0, 1)",
        f"{LAYER.name}, S 0.9: 100 (whole kernels 99)",
        f"chosen for {LAYER.name}, S 0.9: runs of 8",
        f"Left out of {LAYER.name}, S 0.9: trained and pruned (no network)",
        f"whatever image it had: conv2 in {ODD.name}.",
    ):
        assert part in text
    # Two layers by two sparsities, of which one layer has one.
    shown = [axes for axes in figure.axes if axes.axison]
    assert len(figure.axes) == 8
    assert len(shown) == 6
    labels = [found.get_text() for found in shown[0].texts]
    assert labels[0] == "4× dense"
    assert "1.00?, 4× dense" in labels
    assert "left out" in labels
    title = f"{LAYER.name}, S = 0.9\nN = 1, IC = 24, OC = 16, 12×20"
    assert shown[0].get_title(loc="left") == title


def test_the_script(results, samples, tmp_path, monkeypatch):
    out = tmp_path / "out" / "masks.pdf"
    arguments = ["--results", results, "--samples", *samples, "--out", out]
    monkeypatch.setattr(sys, "argv", ["figure_masks.py", *map(str, arguments)])
    runpy.run_path(str(ROOT / "scripts" / "figure_masks.py"), run_name="__main__")
    assert len(read_csv(out.with_suffix(".csv"))) == 3 * len(TITLES)
    assert out.is_file()
    assert out.with_suffix(".png").is_file()
