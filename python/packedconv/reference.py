"""Equations 1 and 3 of the paper as written, in float64: slow, for small layers.

The paper writes both for stride 1; here an output row h reads from h · stride.
"""

import typing

import numpy as np

from packedconv.layer import output_size


def dense_reference(
    input: np.ndarray, weight: np.ndarray, stride: int = 1, padding: int = 0
) -> np.ndarray:
    """Equation 1: sums over the kernel positions that lie inside the image.

    input: (N, IC, H, W); weight: (OC, IC, K_h, K_w). Returns float64 (N, OC, H_out, W_out).
    """
    in_channels, height, width = input.shape[1:]
    kernel_height, kernel_width = weight.shape[2:]
    output = _empty_output(input.shape, weight.shape, stride, padding)
    for n, oc, h, w in np.ndindex(*output.shape):
        row, column = h * stride, w * stride
        total = 0.0
        for ic in range(in_channels):
            for kh in range(max(0, padding - row), min(kernel_height, height + padding - row)):
                for kw in range(
                    max(0, padding - column), min(kernel_width, width + padding - column)
                ):
                    value = float(input[n, ic, row + kh - padding, column + kw - padding])
                    total += value * float(weight[oc, ic, kh, kw])
        output[n, oc, h, w] = total
    return output


def sparse_reference(
    input: np.ndarray, packed: typing.Any, stride: int = 1, padding: int = 0
) -> np.ndarray:
    """Equation 3: sums over the nonzeros j of an output channel, from the packed words.

    input: (N, IC, H, W); packed: anything with `words`, `offsets` and `shape` of the packed
    format. Returns float64 (N, OC, H_out, W_out).
    """
    height, width = input.shape[2:]
    output = _empty_output(input.shape, packed.shape, stride, padding)
    for n, oc, h, w in np.ndindex(*output.shape):
        total = 0.0
        for value, ic, px, py in _nonzeros(packed, oc):
            row, column = h * stride + py - padding, w * stride + px - padding
            if 0 <= row < height and 0 <= column < width:
                total += value * float(input[n, ic, row, column])
        output[n, oc, h, w] = total
    return output


def _nonzeros(packed: typing.Any, oc: int) -> typing.Iterator[typing.Tuple[float, int, int, int]]:
    """(value, ic, px, py) of every nonzero of an output channel (paper section 5.3)."""
    for block, offsets in enumerate(packed.offsets):
        for word in packed.words[int(offsets[oc]) : int(offsets[oc + 1])]:
            bits = int(word)
            value = float(np.array(bits >> 16, dtype=np.uint16).view(np.float16))
            yield value, 256 * block + (bits >> 8 & 0xFF), bits >> 4 & 0xF, bits & 0xF


def _empty_output(
    input_shape: typing.Sequence[int],
    weight_shape: typing.Sequence[int],
    stride: int,
    padding: int,
) -> np.ndarray:
    return np.empty(
        (
            input_shape[0],
            weight_shape[0],
            output_size(input_shape[2], weight_shape[2], stride, padding),
            output_size(input_shape[3], weight_shape[3], stride, padding),
        )
    )
