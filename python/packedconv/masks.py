"""Fixed-seed masks: where the nonzeros of a weight are, spread evenly or not.

Every random number is one `random.Random(seed).random()`, as in `packedconv.weights`. The seed of
a mask is the SHA-256 digest, read as a big-endian integer, of the ASCII text

    masks/<seed>/<mask>/<layer name>/<OC>x<IC>x<K>x<K>/<sparsity key>
"""

import hashlib
import random
from collections.abc import Callable

import numpy as np

from packedconv.layer import Layer, nonzero_count, sparsity_key
from packedconv.weights import make_skewed_weight

# Consecutive weights of an output channel in a run.
RUN = 8
# Part of all pairs of channels that lies in a neighbourhood, whose density is a sum over a square
# of so many pairs to each side.
NEIGHBOURHOOD_SHARE = 0.3
NEIGHBOURHOOD_RADIUS = 2
# Output channels that share their positions.
BLOCK_CHANNELS = 4
# Sums of whole numbers are the same in any order.
_LEVELS = 2**20

Draw = Callable[[], float]


def make_mask(name: str, layer: Layer, sparsity: float, seed: int) -> np.ndarray:
    """True where the weight of a layer has a nonzero, shape (OC, IC / groups, K, K).

    name: of `MASKS`. Exactly round((1 - S) · n) nonzeros, or where a mask consists of blocks as
    many blocks as come nearest to that.
    Raises ValueError where the layer cannot have the mask at that sparsity.
    """
    shape = "x".join(str(size) for size in layer.weight_shape)
    text = f"masks/{seed}/{name}/{layer.name}/{shape}/{sparsity_key(sparsity)}"
    digest = int.from_bytes(hashlib.sha256(text.encode("ascii")).digest(), "big")
    return MASKS[name](layer, sparsity, seed, random.Random(digest).random)


def channel_nonzeros(mask: np.ndarray) -> np.ndarray:
    """Number of nonzeros of each output channel, shape (OC,)."""
    return np.count_nonzero(mask, axis=(1, 2, 3))


def adjacent_weights(mask: np.ndarray) -> int:
    """How many nonzeros come right after another one of their output channel, in the order of
    the weight: input channel, kernel row, kernel column."""
    rows = mask.reshape(len(mask), -1) != 0
    return int(np.count_nonzero(rows[:, 1:] & rows[:, :-1]))


def adjacent_channels(mask: np.ndarray) -> int:
    """How many nonzeros have one at the same place of the output channel before."""
    rows = mask.reshape(len(mask), -1) != 0
    return int(np.count_nonzero(rows[1:] & rows[:-1]))


def _uniform(layer: Layer, sparsity: float, seed: int, draw: Draw) -> np.ndarray:
    count = layer.weight_count
    return _marked(layer.weight_shape, _chosen(draw, count, nonzero_count(count, sparsity)))


def _skewed(layer: Layer, sparsity: float, seed: int, draw: Draw) -> np.ndarray:
    """The positions of `weights.make_skewed_weight`, which draws for itself."""
    return make_skewed_weight(layer, sparsity, seed) != 0


def _runs(layer: Layer, sparsity: float, seed: int, draw: Draw) -> np.ndarray:
    """Runs of RUN consecutive weights of an output channel, which may overlap; of the last one
    what is still wanted."""
    count = layer.weight_count
    size, wanted = count // layer.out_channels, nonzero_count(count, sparsity)
    mask, found = np.zeros(count, dtype=bool), 0
    while found < wanted:
        begin = int(draw() * count)
        run = mask[begin : min(begin + RUN, (begin // size + 1) * size)]
        new = np.flatnonzero(~run)[: wanted - found]
        run[new] = True
        found += len(new)
    return mask.reshape(layer.weight_shape)


def _neighbourhoods(layer: Layer, sparsity: float, seed: int, draw: Draw) -> np.ndarray:
    """All nonzeros at pairs of output and input channels that lie together, evenly among them."""
    out_channels, in_channels, size, _ = layer.weight_shape
    plane = np.array([int(_LEVELS * draw()) for _ in range(out_channels * in_channels)])
    plane = plane.reshape(out_channels, in_channels)
    steps = range(-NEIGHBOURHOOD_RADIUS, NEIGHBOURHOOD_RADIUS + 1)
    for axis in (0, 1):
        plane = sum(np.roll(plane, step, axis) for step in steps)
    pairs = round(NEIGHBOURHOOD_SHARE * plane.size)
    near = np.sort(np.argsort(-plane.ravel(), kind="stable")[:pairs])
    wanted = nonzero_count(layer.weight_count, sparsity)
    if wanted > pairs * size**2:
        raise ValueError(
            f"layer {layer.name}: expected a sparsity of {1 - NEIGHBOURHOOD_SHARE:g} or more for "
            f"neighbourhoods, got {sparsity}"
        )
    places = (near[:, np.newaxis] * size**2 + np.arange(size**2)).ravel()
    return _marked(layer.weight_shape, places[_chosen(draw, len(places), wanted)])


def _channel_blocks(layer: Layer, sparsity: float, seed: int, draw: Draw) -> np.ndarray:
    """BLOCK_CHANNELS output channels after one another have their nonzeros at the same places."""
    if layer.out_channels % BLOCK_CHANNELS:
        raise ValueError(
            f"layer {layer.name}: expected a multiple of {BLOCK_CHANNELS} output channels for "
            f"blocks of so many, got {layer.out_channels}"
        )
    blocks = layer.weight_count // BLOCK_CHANNELS
    chosen = _chosen(draw, blocks, nonzero_count(blocks, sparsity))
    mask = _marked((layer.out_channels // BLOCK_CHANNELS, *layer.weight_shape[1:]), chosen)
    return np.repeat(mask, BLOCK_CHANNELS, axis=0)


def _kernels(layer: Layer, sparsity: float, seed: int, draw: Draw) -> np.ndarray:
    """Whole kernels, K² weights of an output and an input channel."""
    pairs = layer.weight_count // layer.kernel_size**2
    chosen = _chosen(draw, pairs, nonzero_count(pairs, sparsity))
    mask = _marked((*layer.weight_shape[:2], 1, 1), chosen)
    return np.broadcast_to(mask, layer.weight_shape).copy()


def _one_of_m(layer: Layer, sparsity: float, seed: int, draw: Draw) -> np.ndarray:
    """1:M: one nonzero among M input channels after one another, M = 1 / (1 - S).

    Where M does not divide the input channels, each rest of fewer has one nonzero or none, so
    many that the number of all is exact.
    """
    length = round(1 / (1 - sparsity))
    if abs(length * (1 - sparsity) - 1) > 1e-9 or length < 2:
        raise ValueError(
            f"layer {layer.name}: expected a sparsity of 1 - 1/M for 1:M, got {sparsity}"
        )
    out_channels, in_channels, size, _ = layer.weight_shape
    columns = out_channels * size**2
    # Input channels last.
    mask = np.zeros((columns, in_channels), dtype=bool)
    whole, rest = divmod(in_channels, length)
    for group in range(whole):
        places = [group * length + int(draw() * length) for _ in range(columns)]
        mask[np.arange(columns), places] = True
    if rest:
        missing = nonzero_count(layer.weight_count, sparsity) - whole * columns
        for column in _chosen(draw, columns, missing):
            mask[column, whole * length + int(draw() * rest)] = True
    return mask.reshape(out_channels, size, size, in_channels).transpose(0, 3, 1, 2).copy()


def _chosen(draw: Draw, count: int, wanted: int) -> np.ndarray:
    """So many of range(count), ascending: those with the smallest of `count` draws."""
    ranks = np.array([draw() for _ in range(count)])
    return np.sort(np.argsort(ranks, kind="stable")[:wanted])


def _marked(shape: tuple[int, ...], places: np.ndarray) -> np.ndarray:
    mask = np.zeros(shape, dtype=bool)
    mask.ravel()[places] = True
    return mask


# What makes each mask, from a layer, a sparsity, the run's seed and draws.
MASKS: dict[str, Callable[[Layer, float, int, Draw], np.ndarray]] = {
    "uniform": _uniform,
    "skewed": _skewed,
    "runs": _runs,
    "neighbourhoods": _neighbourhoods,
    "channel_blocks": _channel_blocks,
    "kernels": _kernels,
    "one_of_m": _one_of_m,
}
