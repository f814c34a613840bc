"""Weights with the nonzeros of another one, in other places: each takes out one irregularity."""

import math
import random
import typing

import numpy as np

# Of each output channel, the positions (ic, py, px), flat and ascending, of so many nonzeros.
_Places = typing.Callable[[int, typing.Callable[[], float]], typing.List[int]]


def rows_equalised(weight: np.ndarray, seed: int) -> np.ndarray:
    """Every output channel has the same number of nonzeros, as near as whole numbers come;
    positions are drawn."""
    size = weight[0].size
    return _placed(weight, _equal(weight), lambda count, draw: _drawn(size, count, draw), seed)


def indices_contiguous(weight: np.ndarray, seed: int) -> np.ndarray:
    """Every output channel has as many nonzeros as before, one behind the other from a drawn
    position on."""
    size = weight[0].size

    def places(count: int, draw: typing.Callable[[], float]) -> typing.List[int]:
        begin = int(draw() * (size - count + 1))
        return list(range(begin, begin + count))

    return _placed(weight, _counts(weight), places, seed)


def few_channels(weight: np.ndarray, seed: int) -> np.ndarray:
    """Every output channel has as many nonzeros as before, at drawn positions of the fewest
    input channels that hold those of each, the first ones."""
    counts, window = _counts(weight), weight[0, 0].size
    size = math.ceil(max(counts) / window) * window
    return _placed(weight, counts, lambda count, draw: _drawn(size, count, draw), seed)


def regular(weight: np.ndarray, seed: int) -> np.ndarray:
    """All three at once: every output channel has the same number of nonzeros, at the first
    positions."""
    return _placed(weight, _equal(weight), lambda count, draw: list(range(count)), seed)


def empty(weight: np.ndarray, seed: int) -> np.ndarray:
    """No nonzeros."""
    return np.zeros_like(weight)


PATTERNS = {
    "rows_equalised": rows_equalised,
    "indices_contiguous": indices_contiguous,
    "few_channels": few_channels,
    "regular": regular,
    "empty": empty,
}


def _counts(weight: np.ndarray) -> typing.List[int]:
    return [int(np.count_nonzero(channel)) for channel in weight]


def _equal(weight: np.ndarray) -> typing.List[int]:
    total, channels = int(np.count_nonzero(weight)), len(weight)
    ends = [total * number // channels for number in range(channels + 1)]
    return [end - begin for begin, end in zip(ends, ends[1:])]


def _drawn(size: int, count: int, draw: typing.Callable[[], float]) -> typing.List[int]:
    return sorted(sorted(range(size), key=lambda _: draw())[:count])


def _placed(
    weight: np.ndarray, counts: typing.Sequence[int], places: _Places, seed: int
) -> np.ndarray:
    """The values of a weight (OC, IC, K, K) in their order, so many in each output channel."""
    draw = random.Random(seed).random
    placed = np.zeros(weight.shape, weight.dtype).reshape(len(weight), -1)
    values = weight[weight != 0]
    begin = 0
    for channel, count in zip(placed, counts):
        channel[places(count, draw)] = values[begin : begin + count]
        begin += count
    return placed.reshape(weight.shape)
