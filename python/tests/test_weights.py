"""Fixed-seed weights and inputs: the same numbers everywhere, exactly as many nonzeros."""

import io
import json
import random
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packedconv.layer import Layer, nonzero_count, sparsity_key
from packedconv.weights import (
    array_sha256,
    input_seed,
    load_weights,
    make_input,
    make_skewed_weight,
    make_weight,
    make_weights,
    manifest,
    save_weights,
    weight_bound,
    weight_seed,
)

SMALL = Layer("oc4", 2, 3, 4, 5, 7)
SETTINGS = {"seed": 1, "sparsities": [0.9, 0.5]}

WEIGHT_SEED = "d9f041fc5f444de5511c98ea7f77ead079ae0ef1d60737fcc10165e80647afaa"
INPUT_SEED = "1fee6192fb303083028270e51b272d2ca1fc34586d987b01adfff7fca5ed2525"
WEIGHT_BYTES = "ae7024af30f635ea4c4cb14d22dad2166aceb729747b8739fe28a0688dd3b948"
INPUT_BYTES = "c7b6b089021fcf6f961f24090d25c597bd12872e0810932225d272132319e0b3"


def test_known_seeds():
    # sha256("weights/1/oc4/4x3x3x3/s90") and sha256("inputs/1/oc4/2x3x5x7").
    assert "%064x" % weight_seed(1, SMALL, 0.9) == WEIGHT_SEED
    assert "%064x" % input_seed(1, SMALL) == INPUT_SEED


def test_known_bytes():
    assert array_sha256(make_weight(SMALL, 0.9, seed=1)) == WEIGHT_BYTES
    assert array_sha256(make_input(SMALL, seed=1)) == INPUT_BYTES


@given(
    out_channels=st.integers(1, 9),
    in_channels=st.integers(1, 9),
    kernel_size=st.integers(1, 5),
    percent=st.integers(0, 99),
    seed=st.integers(0, 2**70),
)
def test_exact_nonzeros_within_the_bound(out_channels, in_channels, kernel_size, percent, seed):
    layer = Layer("x", 1, in_channels, out_channels, 8, 8, kernel_size)
    weight = make_weight(layer, percent / 100, seed)
    assert weight.shape == layer.weight_shape
    assert weight.dtype == np.float32
    assert np.count_nonzero(weight) == nonzero_count(layer.weight_count, percent / 100)
    assert np.count_nonzero(weight.astype(np.float16)) == np.count_nonzero(weight)
    assert np.abs(weight).max() <= np.float32(weight_bound(layer))


def test_values_that_fp16_makes_zero_are_drawn_again(monkeypatch):
    draws = iter([0.0, 0.5, 0.5 + 2.0**-40, 0.75])
    monkeypatch.setattr(random.Random, "random", lambda self: next(draws))
    layer = Layer("x", 1, 1, 1, 8, 8, kernel_size=1)
    # Position 0, then two values too small, then half of the bound.
    assert make_weight(layer, 0.0, 1).item() == np.float32(0.5 * weight_bound(layer))


@pytest.mark.parametrize("sparsity", [0.9, 0.98])
def test_an_eighth_of_skewed_channels_has_ten_times_the_nonzeros(sparsity):
    layer = Layer("x", 1, 32, 64, 8, 8)
    weight = make_skewed_weight(layer, sparsity, seed=1)
    assert np.count_nonzero(weight) == nonzero_count(layer.weight_count, sparsity)
    counts = np.sort(np.count_nonzero(weight.reshape(64, -1), axis=1))
    light, heavy = counts[:56], counts[56:]
    assert light.max() - light.min() <= 1
    assert heavy.max() - heavy.min() <= 1
    assert heavy.mean() / light.mean() == pytest.approx(10, rel=0.05)
    assert np.abs(weight).max() <= np.float32(weight_bound(layer))
    # The same every time, and another for another seed.
    np.testing.assert_array_equal(weight, make_skewed_weight(layer, sparsity, seed=1))
    assert (weight != make_skewed_weight(layer, sparsity, seed=2)).any()
    rows = np.count_nonzero(weight.reshape(64, -1), axis=1) > 2 * light.max()
    assert 0 < rows[:32].sum() < 8, "heavy channels are drawn, not the first or last ones"


@pytest.mark.parametrize(("out_channels", "sparsity"), [(7, 0.9), (64, 0.5)])
def test_channels_that_cannot_be_skewed(out_channels, sparsity):
    with pytest.raises(ValueError, match="layer x: expected 8 output channels or more, and"):
        make_skewed_weight(Layer("x", 1, 32, out_channels, 8, 8), sparsity, seed=1)


def test_positions_and_values_are_spread_evenly():
    layer = Layer("x", 1, 32, 64, 8, 8)
    weight = make_weight(layer, 0.9, 1)
    per_channel = np.count_nonzero(weight, axis=(1, 2, 3))
    # 288 weights at 10 %: mean 28.8, standard deviation 5.1.
    assert 8 <= per_channel.min() <= per_channel.max() <= 50
    values = weight[weight != 0] / weight_bound(layer)
    assert abs(values.mean()) < 0.06
    assert values.std() == pytest.approx(3**-0.5, rel=0.05)


@pytest.mark.parametrize(
    "other",
    [
        make_weight(SMALL, 0.9, seed=2),
        make_weight(SMALL._replace(name="other"), 0.9, seed=1),
    ],
)
def test_another_seed_or_layer_gives_other_weights(other):
    assert not np.array_equal(other, make_weight(SMALL, 0.9, seed=1))


def test_weights_bound_by_config():
    spec = {"distribution": "uniform", "bound": 2.0}
    weight = make_weight(SMALL, 0.0, 1, spec)
    assert 1 < np.abs(weight).max() <= 2
    for bad in ({"distribution": "normal"}, dict(spec, bound=-1), dict(spec, bound="x")):
        with pytest.raises(ValueError, match=r"weights\."):
            make_weight(SMALL, 0.9, 1, bad)


@pytest.mark.parametrize("sparsity", [-0.1, 1.0, 0.9055])
def test_sparsity_must_be_whole_thousandths(sparsity):
    with pytest.raises(ValueError, match=r"sparsity: expected a multiple of 0\.001"):
        sparsity_key(sparsity)


def test_input_is_pythons_random():
    draw = random.Random(input_seed(7, SMALL)).random
    expected = np.array([draw() for _ in range(2 * 3 * 5 * 7)], dtype=np.float32)
    assert np.array_equal(make_input(SMALL, 7).ravel(), expected)


def test_input_stays_below_high():
    # Between 1 and 1 + 2^-22 lie two numbers of float32: rounding up is frequent.
    values = make_input(SMALL, 1, {"distribution": "uniform", "low": 1.0, "high": 1 + 2**-22})
    assert set(np.unique(values)) == {np.float32(1), np.float32(1 + 2**-23)}


def test_input_of_another_distribution_is_refused():
    with pytest.raises(ValueError, match=r"inputs\.distribution"):
        make_input(SMALL, 1, {"distribution": "normal"})
    with pytest.raises(ValueError, match="low < high"):
        make_input(SMALL, 1, {"distribution": "uniform", "low": 1, "high": 1})


def test_file_bytes_depend_on_the_weights_alone(tmp_path):
    weights = make_weights(SETTINGS, SMALL)
    save_weights(str(tmp_path / "a.npz"), weights)
    save_weights(str(tmp_path / "b.npz"), dict(reversed(list(weights.items()))))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    loaded = load_weights(str(tmp_path / "a.npz"), SMALL, SETTINGS["sparsities"])
    assert sorted(loaded) == ["s50", "s90"]
    for key in weights:
        assert np.array_equal(loaded[key], weights[key])


def test_manifest_describes_the_weights():
    weights = make_weights(SETTINGS, SMALL)
    content = json.loads(json.dumps(manifest(SETTINGS, SMALL, weights)))
    assert content["layer"] == SMALL._asdict()
    assert content["sparsities"]["s90"] == {
        "sparsity": 0.9,
        "nonzeros": 11,
        "sha256": array_sha256(weights["s90"]),
    }


def test_load_refuses_what_is_not_the_layers_weights(tmp_path):
    path = str(tmp_path / "w.npz")
    weights = make_weights(SETTINGS, SMALL)
    with pytest.raises(FileNotFoundError):
        load_weights(path, SMALL, [0.9])
    save_weights(path, weights)
    with pytest.raises(ValueError, match="no array 's91'"):
        load_weights(path, SMALL, [0.91])
    with pytest.raises(ValueError, match="expected float32 of shape"):
        load_weights(path, SMALL._replace(out_channels=5), [0.9])
    save_weights(path, {"s90": weights["s50"]})
    with pytest.raises(ValueError, match="expected 11 nonzeros, got 54"):
        load_weights(path, SMALL, [0.9])
    whole = (tmp_path / "w.npz").read_bytes()
    (tmp_path / "w.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="delete it and make it again"):
        load_weights(path, SMALL, [0.9])
    content = io.BytesIO(whole)
    with zipfile.ZipFile(content) as archive:
        first = archive.infolist()[0].header_offset + 200
    (tmp_path / "w.npz").write_bytes(whole[:first] + b"\xff" + whole[first + 1 :])
    with pytest.raises(ValueError, match="delete it and make it again"):
        load_weights(path, SMALL, [0.9])
