"""What rounding does to a convolution: FP16 weights, order of summation, TF32, Winograd.

Emulated with NumPy element by element in a fixed order, so that every machine gets the same
digits. Errors are maxima over all outputs of one small layer with the workflow's weights and
inputs (uniform on ± sqrt(6 / (K² IC)) and on [0, 1)).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from packedconv.layer import Layer
from packedconv.weights import make_input, make_weight

# Channels of Table 1's layer on an image that takes well under a second.
SMALL_LAYER = Layer("audit", batch=1, in_channels=32, out_channels=64, height=48, width=48)

# Winograd's transforms of F(m × m, 3 × 3): inverse, kernel and data (Lavin and Gray 2016).
_WINOGRAD = {
    2: (
        [[1, 1, 1, 0], [0, 1, -1, -1]],
        [[1, 0, 0], [1 / 2, 1 / 2, 1 / 2], [1 / 2, -1 / 2, 1 / 2], [0, 0, 1]],
        [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]],
    ),
    4: (
        [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]],
        [
            [1 / 4, 0, 0],
            [-1 / 6, -1 / 6, -1 / 6],
            [-1 / 6, 1 / 6, -1 / 6],
            [1 / 24, 1 / 12, 1 / 6],
            [1 / 24, -1 / 12, 1 / 6],
            [0, 0, 1],
        ],
        [
            [4, 0, -5, 0, 1, 0],
            [0, -4, -4, 1, 1, 0],
            [0, 4, -4, -1, 1, 0],
            [0, -2, -1, 2, 1, 0],
            [0, 2, -1, -2, 1, 0],
            [0, 4, 0, -5, 0, 1],
        ],
    ),
}


class Errors(NamedTuple):
    """Maximum absolute errors at one sparsity.

    quantised: packed FP16 weights against the original ones, both summed in FP32.
    summation: the same FP16 weights on both sides, summed in FP32 in two orders.
    tf32, winograd2, winograd4: a dense method against float64, same weights.
    """

    quantised: float
    summation: float
    tf32: float
    winograd2: float
    winograd4: float


@functools.lru_cache(maxsize=None)
def errors(sparsity: float, layer: Layer = SMALL_LAYER, seed: int = 1) -> Errors:
    """Errors of a layer at a sparsity, from the workflow's weights and inputs."""
    image = make_input(layer, seed)[0]
    weight = make_weight(layer, sparsity, seed)
    halved = weight.astype(np.float16).astype(np.float32)
    sparse = convolve(image, halved)
    exact = convolve(image, weight, np.float64)
    return Errors(
        quantised=_largest(sparse, convolve(image, weight, position_first=True)),
        summation=_largest(sparse, convolve(image, halved, position_first=True)),
        tf32=_largest(convolve(to_tf32(image), to_tf32(weight)), exact),
        winograd2=_largest(winograd(image, weight, 2), exact),
        winograd4=_largest(winograd(image, weight, 4), exact),
    )


def convolve(
    image: np.ndarray,
    weight: np.ndarray,
    dtype: type = np.float32,
    position_first: bool = False,
) -> np.ndarray:
    """Stride 1, same padding: image (IC, H, W), weight (OC, IC, K, K) -> (OC, H, W).

    Terms are added one after another in `dtype`, by input channel and then kernel position,
    or the other way round (`position_first`).
    """
    out_channels, _, size, _ = weight.shape
    height, width = image.shape[1:]
    padded = _padded(image, size // 2).astype(dtype)
    output = np.zeros((out_channels, height, width), dtype)
    for oc in range(out_channels):
        terms = np.argwhere(weight[oc])
        if position_first:
            terms = terms[np.lexsort((terms[:, 0], terms[:, 2], terms[:, 1]))]
        for ic, row, column in terms:
            window = padded[ic, row : row + height, column : column + width]
            output[oc] += dtype(weight[oc, ic, row, column]) * window
    return output


def winograd(image: np.ndarray, weight: np.ndarray, output_tile: int) -> np.ndarray:
    """F(m × m, 3 × 3) in FP32, same padding; H and W multiples of m, which is 2 or 4."""
    inverse, kernel, data = (np.array(matrix, np.float32) for matrix in _WINOGRAD[output_tile])
    in_channels, height, width = image.shape
    size = output_tile + 2
    rows, columns = height // output_tile, width // output_tile
    padded = _padded(image, 1)
    tiles = np.empty((size, size, in_channels, rows, columns), np.float32)
    for row in range(size):
        for column in range(size):
            tiles[row, column] = padded[
                :, row : row + height : output_tile, column : column + width : output_tile
            ]
    tiles = _transform(data, tiles)
    kernels = _transform(kernel, np.moveaxis(weight, (2, 3), (0, 1)))
    products = np.zeros((size, size, weight.shape[0], rows, columns), np.float32)
    for ic in range(in_channels):
        products += kernels[:, :, :, ic, None, None] * tiles[:, :, None, ic]
    blocks = _transform(inverse, products)
    return np.moveaxis(blocks, (0, 1), (2, 4)).reshape(weight.shape[0], height, width)


def to_tf32(values: np.ndarray) -> np.ndarray:
    """FP32 values rounded to the 10 mantissa bits of TF32, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & ~np.uint32(
        0x1FFF
    )
    return rounded.view(np.float32)


def _transform(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """matrix · values · matrixᵀ over the first two axes."""
    for axis in (0, 1):
        values = np.stack([_combine(row, values, axis) for row in matrix], axis)
    return values


def _combine(factors: Sequence[float], values: np.ndarray, axis: int) -> np.ndarray:
    total = np.zeros(np.delete(values.shape, axis), np.float32)
    for index, factor in enumerate(factors):
        if factor:
            total += factor * values.take(index, axis)
    return total


def _padded(image: np.ndarray, padding: int) -> np.ndarray:
    return np.pad(image, ((0, 0), (padding, padding), (padding, padding)))


def _largest(values: np.ndarray, reference: np.ndarray) -> float:
    return float(np.abs(values.astype(np.float64) - reference).max())
