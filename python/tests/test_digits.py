"""The digits network: its pruning, its run through packedconv, and its table."""

import copy
import json
import pathlib
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
from synthetic import read_csv, write_results

from packedconv.bench.extended import digits, digits_step
from packedconv.bench.extended.pruning import Pruner, scheduled_sparsity
from packedconv.device import DeviceError
from packedconv.evidence.extended import digits as evidence
from packedconv.script import CheckError
from packedconv.settings import load_settings, settings_hash

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAINING = {
    "image_size": 8,
    "channels": [4, 8, 8],
    "sparsities": [0.5, 0.9],
    "held_out_share": 0.5,
    "batch": 64,
    "learning_rate": 0.002,
    "epochs": {"dense": 1, "pruning": 1, "fine_tuning": 1},
}


# Pruning


def test_the_schedule_is_that_of_zhu_and_gupta():
    values = [scheduled_sparsity(0.0, 0.8, progress) for progress in (-1, 0, 0.25, 0.5, 1, 2)]
    assert values == pytest.approx([0, 0, 0.8 * (1 - 0.75**3), 0.7, 0.8, 0.8])
    assert scheduled_sparsity(0.9, 0.95, 0.5) == pytest.approx(0.94375)


def layer(values):
    found = torch.nn.Linear(len(values), 1, bias=False)
    found.weight.data = torch.tensor([values])
    return found


def test_pruning_keeps_the_largest_magnitudes():
    one, other = layer([0.1, -4.0, 3.0, -0.2]), layer([5.0, 6.0])
    Pruner({"one": one, "other": other}).prune(0.5)
    # Each layer by itself.
    assert one.weight.tolist() == [[0.0, -4.0, 3.0, 0.0]]
    assert other.weight.tolist() == [[0.0, 6.0]]


def test_what_was_pruned_never_comes_back():
    one = layer([1.0, 2.0, 3.0, 4.0])
    pruner = Pruner({"one": one})
    pruner.prune(0.5)
    one.weight.data[0, 0] = 9.0
    pruner.apply()
    assert one.weight.tolist() == [[0.0, 0.0, 3.0, 4.0]]
    # Not even where one that was not pruned is zero by chance.
    one.weight.data = torch.tensor([[9.0, 9.0, 0.0, 4.0]])
    pruner.prune(0.5)
    assert one.weight.tolist() == [[0.0, 0.0, 0.0, 4.0]]
    one.weight.data[0, 2] = 3.0
    pruner.apply()
    assert one.weight.tolist() == [[0.0, 0.0, 3.0, 4.0]]


# Training and what runs through packedconv


@pytest.fixture(scope="module")
def measured():
    return digits.measure(TRAINING, 3)


def test_the_images_are_split_alike_everywhere():
    training, held_out = digits.load_images(8, 0.5)
    assert training.images.shape == (898, 1, 8, 8)
    assert held_out.images.shape == (899, 1, 8, 8)
    assert float(training.images.min()) == 0
    assert float(training.images.max()) == 1
    counts = held_out.labels.bincount()
    assert int(counts.min()) >= 86
    # An image that is in both would be no held-out one; the data set has no twins.
    seen = {image.numpy().tobytes() for image in training.images}
    assert not any(image.numpy().tobytes() in seen for image in held_out.images)
    again = digits.load_images(8, 0.5)[1]
    assert torch.equal(again.images, held_out.images)


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match=r"expected scikit-learn.*requirements\.lock"):
        digits.load_images(8, 0.5)


def test_all_but_the_first_convolution_are_pruned_exactly(measured):
    weights, facts = measured
    shapes = {"conv2": (8, 4, 3, 3), "conv3": (8, 8, 3, 3)}
    assert {name: weight.shape for name, weight in weights.items()} == {
        f"{name}_{key}": shape for key in ("s50", "s90") for name, shape in shapes.items()
    }
    for sparsity, key in ((0.5, "s50"), (0.9, "s90")):
        nonzeros = facts["stages"][key]["nonzeros"]
        assert nonzeros["conv1"] == 36
        for name in shapes:
            weight = weights[f"{name}_{key}"]
            assert np.count_nonzero(weight) == round((1 - sparsity) * weight.size)
            assert nonzeros[name] == np.count_nonzero(weight)
    # Pruned from one sparsity to the next.
    assert not (weights["conv3_s90"].astype(bool) & ~weights["conv3_s50"].astype(bool)).any()
    assert facts["stages"]["s00"]["nonzeros"] == {"conv1": 36, "conv2": 288, "conv3": 576}
    assert facts["images"] == {"training": 898, "held_out": 899}
    pruned = {name: found["pruned"] for name, found in facts["convolutions"].items()}
    assert pruned == {"conv1": False, "conv2": True, "conv3": True}


def test_training_is_the_same_on_every_call(measured, torch_threads):
    state = torch.random.get_rng_state()
    torch.set_num_threads(2)
    weights, facts = digits.measure(TRAINING, 3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 2
    for name, weight in measured[0].items():
        assert (weights[name] == weight).all(), name
    for each in (facts, measured[1]):
        each.pop("training_seconds", None)
    assert facts == measured[1]


@pytest.fixture
def network():
    torch.manual_seed(5)
    return digits.make_network([4, 8, 8])


def test_the_packed_network_computes_the_same(network):
    images = torch.rand(16, 1, 8, 8)
    found = digits.evaluate(network, {}, images)
    assert found["classes"]["packed"] == found["classes"]["dense"]
    assert found["error_of_packed"] < digits.TOLERANCE
    # FP16 rounds weights: the outputs cannot be the same.
    assert 0 < found["largest_difference"] < 0.01 * found["largest_output"]
    names = [type(module).__name__ for module in digits.packed_network(network)]
    assert names.count("SparseConv2d") == 3
    assert "Conv2d" not in names


def test_a_weight_that_fp16_makes_zero_is_refused(network):
    images = torch.rand(2, 1, 8, 8)
    Pruner(digits.prunable(network)).prune(0.5)
    weight = network.conv2.weight.data
    weight[weight != 0] = torch.cat([torch.tensor([1e-12]), weight[weight != 0][1:]])
    with pytest.raises(CheckError, match=r"conv2 at sparsity 0\.5: expected 144 nonzeros, got 143"):
        digits.evaluate(network, dict.fromkeys(("conv2", "conv3"), 0.5), images)
    # Not where nothing was pruned to a number.
    assert digits.evaluate(network, {}, images)["nonzeros"]["conv2"] == 143


def test_a_wrong_convolution_is_refused(network, monkeypatch):
    make = digits.packed_network

    def wrong(network):
        found = make(network)
        found.conv3.bias += 0.01
        return found

    monkeypatch.setattr(digits, "packed_network", wrong)
    with pytest.raises(CheckError, match="within 1e-05 of float64's, relative to the largest"):
        digits.evaluate(network, {}, torch.rand(2, 1, 8, 8))


def test_only_a_cpu_trains(tmp_path):
    folder = write_results(tmp_path, device="h200", out_channels=(8,), sparsities=(0.9,))
    settings = load_settings(str(folder / "settings.json"))
    with pytest.raises(DeviceError, match="expected a CPU"):
        digits_step.digits(settings, "{}", "stamp.json", "w.npz", "w.json")


# The table


def test_loss_by_hand():
    unpruned, right = np.array([True, True, False, True]), np.array([True, False, True, False])
    losses = evidence.resampled_loss(unpruned, right)
    assert losses[0] == 25
    assert evidence.resampled_loss(right, right).tolist() == [0.0] * len(losses)
    assert set(losses) <= {25.0 * step for step in range(-4, 5)}


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-1.0, 0.5, "yes"),
        (0.5, 1.0, "yes"),
        (0.5, 1.1, "inconclusive"),
        (1.0, 2.0, "inconclusive"),
        (1.1, 2.0, "no"),
    ],
)
def test_verdicts(low, high, expected):
    assert evidence.verdict(low, high) == expected


@pytest.fixture
def stored(tmp_path, measured):
    """A results folder, and facts of 400 images with made-up classes."""
    folder = write_results(tmp_path, out_channels=(8,), sparsities=(0.9,), rounds=2)
    labels = [number % 10 for number in range(400)]
    facts = copy.deepcopy(measured[1])
    wrong = {"s00": (0, 0), "s50": (1, 2), "s90": (40, 40)}
    for key, counts in wrong.items():
        facts["stages"][key]["classes"] = {
            way: [(label + (place < count)) % 10 for place, label in enumerate(labels)]
            for way, count in zip(("dense", "packed"), counts, strict=True)
        }
    facts.update(
        labels=labels,
        settings_hash=settings_hash(load_settings(str(folder / "settings.json"))),
        device="cpu",
        run="paper",
        machine={"cpu": "Synthetic CPU", "torch": "2.13"},
    )
    path = folder / "digits.json"
    path.write_text(json.dumps(facts))
    return folder, path


def test_the_table(stored):
    table = evidence.digits(evidence.load_digits_facts(*stored))
    assert list(table.columns) == evidence.COLUMNS
    assert table["sparsity"].tolist() == [0, 0, 0.5, 0.5, 0.9, 0.9]
    assert table["computed_by"].tolist() == ["PyTorch", "packedconv"] * 3
    assert table["right"].tolist() == [400, 400, 399, 398, 360, 360]
    assert table["loss"].tolist() == pytest.approx([0, 0, 0.25, 0.5, 10, 10])
    assert table["within"].tolist() == ["yes", "yes", "yes", "inconclusive", "no", "no"]
    assert table["other_classes"].dropna().tolist() == [0, 1, 0]
    assert table["nonzeros"].tolist() == [900, 900, 468, 468, 123, 123]
    assert set(table["weights"]) == {900}


def test_the_rendered_table(stored, tmp_path, monkeypatch):
    folder, path = stored
    out = tmp_path / "out" / "digits.csv"
    arguments = ["--results", folder, "--facts", path, "--out", out]
    monkeypatch.setattr(sys, "argv", ["table_digits.py", *map(str, arguments)])
    runpy.run_path(str(ROOT / "scripts" / "table_digits.py"), run_name="__main__")
    assert len(read_csv(out)) == 6
    text = out.with_suffix(".md").read_text()
    assert "Synthetic CPU (device cpu, run paper), one thread" in text
    assert "898 images for training, 899 held out" in text
    assert "in turn conv2, conv3 are pruned" in text
    assert "The first convolution, 36 of 900 weights, is not pruned" in text
    assert "| 0.90 | packedconv | 123 of 900 |" in text
    assert out.with_suffix(".tex").is_file()


def test_facts_of_other_settings_are_refused(stored):
    folder, path = stored
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "settings_hash": "0"}))
    with pytest.raises(ValueError, match=r"settings_hash: expected that of settings\.json"):
        evidence.load_digits_facts(folder, path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(ValueError, match=r"digits\.json"):
        evidence.load_digits_facts(folder, path)


def test_rendering_needs_no_torch():
    modules = "packedconv.evidence.extended.digits, packedconv.plots.extended.masks"
    code = f"import sys, {modules}; assert not {{'torch', 'sklearn'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
