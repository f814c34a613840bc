"""Masks that are not spread evenly: their pattern, their number of nonzeros, their repetition."""

import numpy as np
import pytest

from packedconv.layer import Layer, nonzero_count
from packedconv.masks import (
    BLOCK_CHANNELS,
    MASKS,
    NEIGHBOURHOOD_SHARE,
    RUN,
    adjacent_channels,
    adjacent_weights,
    channel_nonzeros,
    make_mask,
)
from packedconv.weights import array_sha256

LAYER = Layer("a", 1, 32, 64, 8, 8)
DEEP = Layer("deep", 1, 50, 16, 8, 8)
# Whose number of nonzeros is that of whole blocks.
BLOCKED = {"channel_blocks": BLOCK_CHANNELS, "kernels": 9}
# Of masks that this code made once.
DIGESTS = {
    "uniform": "43d2d19ff24c0eb1",
    "skewed": "e4de164d56fc5945",
    "runs": "f4c4c07bc041cd2b",
    "neighbourhoods": "0cc3e11033d03bfa",
    "channel_blocks": "78a9eaf5ea300564",
    "kernels": "826056ce8de26d12",
    "one_of_m": "8fea8d5917a6470e",
}


@pytest.mark.parametrize("sparsity", [0.9, 0.95])
@pytest.mark.parametrize("layer", [LAYER, DEEP], ids=lambda layer: layer.name)
@pytest.mark.parametrize("name", MASKS)
def test_the_number_of_nonzeros(name, layer, sparsity):
    mask = make_mask(name, layer, sparsity, 1)
    assert mask.dtype == bool
    assert mask.shape == layer.weight_shape
    size = BLOCKED.get(name, 1)
    assert mask.sum() == size * nonzero_count(layer.weight_count // size, sparsity)
    assert abs(mask.sum() - (1 - sparsity) * layer.weight_count) <= size / 2


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_depends_on_what_it_is_drawn_for_alone(name):
    mask = make_mask(name, LAYER, 0.9, 1)
    assert (mask == make_mask(name, LAYER, 0.9, 1)).all()
    for layer, seed in ((LAYER, 2), (LAYER._replace(name="b"), 1)):
        assert (mask != make_mask(name, layer, 0.9, seed)).any()


def test_masks_are_the_same_on_every_machine():
    made = {name: make_mask(name, LAYER, 0.9, 1).astype(np.float32) for name in MASKS}
    assert {name: array_sha256(mask)[:16] for name, mask in made.items()} == DIGESTS


def test_runs():
    rows = make_mask("runs", LAYER, 0.95, 1).reshape(64, -1)
    lengths = []
    for row in rows:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
        lengths += list((edges[1::2] - edges[::2]) * (edges[1::2] < row.size))
    # At the end of a channel a run is cut, and one run is the last.
    assert sum(0 < length < RUN for length in lengths) <= 1
    assert adjacent_weights(rows) > 0.8 * rows.sum()


def test_neighbourhoods_are_pairs_of_channels_that_lie_together():
    mask = make_mask("neighbourhoods", LAYER, 0.9, 1)
    pairs = mask.any(axis=(2, 3))
    assert pairs.sum() <= NEIGHBOURHOOD_SHARE * pairs.size + 1
    # A pair has a neighbour in the same row far more often than pairs drawn singly would.
    assert (pairs[:, 1:] & pairs[:, :-1]).sum() > 1.5 * pairs.mean() * pairs.sum()
    with pytest.raises(ValueError, match=r"sparsity of 0\.7 or more for neighbourhoods, got 0\.6"):
        make_mask("neighbourhoods", LAYER, 0.6, 1)


def test_channel_blocks():
    mask = make_mask("channel_blocks", LAYER, 0.9, 1)
    blocks = mask.reshape(-1, BLOCK_CHANNELS, *mask.shape[1:])
    assert (blocks == blocks[:, :1]).all()
    with pytest.raises(ValueError, match=r"multiple of 4 output channels .* got 6"):
        make_mask("channel_blocks", LAYER._replace(out_channels=6), 0.9, 1)


def test_kernels_are_whole():
    counts = make_mask("kernels", LAYER, 0.9, 1).sum(axis=(2, 3))
    assert set(np.unique(counts)) == {0, 9}


@pytest.mark.parametrize(("sparsity", "length"), [(0.9, 10), (0.95, 20)])
@pytest.mark.parametrize("layer", [LAYER, DEEP], ids=lambda layer: layer.name)
def test_one_of_m(layer, sparsity, length):
    mask = make_mask("one_of_m", layer, sparsity, 1)
    whole = layer.in_channels // length
    groups = mask[:, : whole * length].reshape(layer.out_channels, whole, length, 3, 3)
    assert (groups.sum(axis=2) == 1).all()
    assert (mask[:, whole * length :].sum(axis=1) <= 1).all()


@pytest.mark.parametrize("sparsity", [0.0, 0.93])
def test_one_of_m_needs_an_m(sparsity):
    with pytest.raises(ValueError, match="sparsity of 1 - 1/M for 1:M"):
        make_mask("one_of_m", LAYER, sparsity, 1)


def test_skewed_is_the_skewed_weight():
    counts = np.sort(channel_nonzeros(make_mask("skewed", LAYER, 0.9, 1)))
    assert counts[-8:].min() >= 9 * counts[:-8].max()


def test_adjacency_by_hand():
    mask = np.zeros((3, 2, 2, 2), dtype=bool)
    mask[0, 0, 1, 1] = mask[0, 1, 0, 0] = mask[0, 1, 0, 1] = True
    # After the last of channel 0, but of another channel.
    mask[0, 1, 1, 1] = mask[1, 0, 0, 0] = True
    mask[2, 0, 0, 0] = mask[2, 1, 1, 1] = True
    assert channel_nonzeros(mask).tolist() == [4, 1, 2]
    assert adjacent_weights(mask) == 2
    assert adjacent_channels(mask) == 1
