"""The roofline model of dense and sparse convolution (paper sections 3 and 4).

Every formula keeps the type of its numbers: floats give floats, `fractions.Fraction` gives
exact results. `exact` turns a number as it is written (0.9) into the fraction it means (9/10).
"""

import decimal
import fractions
import numbers
import typing

from packedconv.layer import Layer

# Input channels of a block of the packed weight, as in csrc/packed_word.h.
_BLOCK_CHANNELS = 256

Number = typing.Union[int, float, fractions.Fraction]


class Device(typing.NamedTuple):
    """Two roofs of a device: `peak_flops` in FLOP/s, `bandwidth` in bytes/s."""

    name: str
    peak_flops: Number
    bandwidth: Number

    @property
    def ridge_point(self) -> Number:
        """Arithmetic intensity (FLOP/byte) at which the two roofs meet."""
        return self.peak_flops / self.bandwidth


def exact(number: typing.Union[Number, str, decimal.Decimal]) -> fractions.Fraction:
    """The fraction that a number means as it is written: exact(0.9) == 9/10.

    A float is read through its shortest decimal form, not through its binary value.
    """
    if isinstance(number, float):
        number = repr(number)
    return fractions.Fraction(number)


def exact_device(device: Device) -> Device:
    """The same device with both roofs as exact fractions."""
    return Device(device.name, exact(device.peak_flops), exact(device.bandwidth))


def dense_bytes(layer: Layer, value_bytes: int = 4) -> int:
    """Bytes that a dense convolution moves at least (paper equation 5)."""
    return (_activation_count(layer) + layer.weight_count) * value_bytes


def dense_flops(layer: Layer) -> int:
    """Operations of a dense convolution, borders counted in full (paper equation 6)."""
    return 2 * layer.batch * layer.out_height * layer.out_width * layer.weight_count


def sparse_bytes(
    layer: Layer,
    sparsity: Number,
    activation_bytes: int = 4,
    weight_bytes: int = 2,
    index_bytes: int = 2,
) -> Number:
    """Bytes that a sparse convolution moves at least (paper equation 7).

    The paper writes P for the size of an activation and of a packed value; here they are
    `activation_bytes` and `weight_bytes`. Raises ValueError for a sparsity outside [0, 1].
    """
    _check_sparsity(sparsity)
    nonzeros = (1 - sparsity) * layer.weight_count
    return _activation_count(layer) * activation_bytes + nonzeros * (weight_bytes + index_bytes)


def sparse_flops(layer: Layer, sparsity: Number) -> Number:
    """Operations on the nonzeros, borders counted in full (paper equation 8).

    Raises ValueError for a sparsity outside [0, 1].
    """
    _check_sparsity(sparsity)
    return (1 - sparsity) * dense_flops(layer)


def arithmetic_intensity(flops: Number, moved_bytes: Number) -> Number:
    """FLOP per byte (paper equation 4). Raises ValueError unless bytes are positive."""
    _check_positive("moved_bytes", moved_bytes)
    return flops / moved_bytes


def dense_arithmetic_intensity(layer: Layer, value_bytes: int = 4) -> Number:
    """FLOP per byte of a dense convolution (paper equations 4 to 6), as a fraction."""
    return arithmetic_intensity(
        fractions.Fraction(dense_flops(layer)), dense_bytes(layer, value_bytes)
    )


def sparse_arithmetic_intensity(
    layer: Layer,
    sparsity: Number,
    activation_bytes: int = 4,
    weight_bytes: int = 2,
    index_bytes: int = 2,
) -> Number:
    """FLOP per byte of a sparse convolution (paper equations 4, 7 and 8)."""
    return arithmetic_intensity(
        sparse_flops(layer, sparsity),
        sparse_bytes(layer, sparsity, activation_bytes, weight_bytes, index_bytes),
    )


def attainable(intensity: Number, device: Device) -> Number:
    """Upper limit of FLOP/s at an arithmetic intensity: the lower of the two roofs."""
    _check_device(device)
    return min(device.peak_flops, intensity * device.bandwidth)


def bound(intensity: Number, device: Device) -> str:
    """ "memory" below the ridge point of the device, "compute" at or above it."""
    _check_device(device)
    return "memory" if intensity < device.ridge_point else "compute"


def roofline_time(flops: Number, moved_bytes: Number, device: Device) -> Number:
    """Seconds when computing and moving bytes overlap fully (paper section 4.2)."""
    _check_device(device)
    return max(flops / device.peak_flops, moved_bytes / device.bandwidth)


def sparse_time(
    layer: Layer,
    sparsity: Number,
    device: Device,
    activation_bytes: int = 4,
    weight_bytes: int = 2,
    index_bytes: int = 2,
) -> Number:
    """Roofline seconds of the sparse convolution (paper equations 7 and 8)."""
    moved = sparse_bytes(layer, sparsity, activation_bytes, weight_bytes, index_bytes)
    return roofline_time(sparse_flops(layer, sparsity), moved, device)


def execution_bound(layer: Layer, nonzeros: int, device: Device) -> Number:
    """Seconds below which no sparse convolution stays: max(FLOP / peak, bytes / bandwidth).

    FLOP: 2 per nonzero and output pixel, borders counted in full. Bytes: input and output in
    FP32, and the words and offsets of the packed weight, each once.
    """
    pixels = layer.batch * layer.out_height * layer.out_width
    blocks = -(-(layer.in_channels // layer.groups) // _BLOCK_CHANNELS)
    numbers = _activation_count(layer) + nonzeros + blocks * (layer.out_channels + 1)
    return roofline_time(2 * pixels * nonzeros, 4 * numbers, device)


def winograd_time(layer: Layer, device: Device, reduction: Number, value_bytes: int = 4) -> Number:
    """Roofline seconds of a dense convolution with its operations divided by `reduction`.

    The bytes are those of equation 5: the model charges Winograd nothing for its transforms.
    Raises ValueError unless the reduction is positive.
    """
    _check_positive("reduction", reduction)
    return roofline_time(dense_flops(layer) / reduction, dense_bytes(layer, value_bytes), device)


def winograd_speedup(
    layer: Layer,
    sparsity: Number,
    device: Device,
    reduction: Number,
    activation_bytes: int = 4,
    weight_bytes: int = 2,
    index_bytes: int = 2,
) -> Number:
    """Model speedup of sparse direct over dense Winograd convolution (paper section 4.2)."""
    sparse = sparse_time(layer, sparsity, device, activation_bytes, weight_bytes, index_bytes)
    return winograd_time(layer, device, reduction, activation_bytes) / sparse


def winograd_reduction(output_tile: int, kernel_size: int) -> fractions.Fraction:
    """Multiplications saved by Winograd F(m × m, k × k): (m k)² / (m + k - 1)² (section 2)."""
    _check_positive("output_tile", output_tile)
    _check_positive("kernel_size", kernel_size)
    ratio = fractions.Fraction(output_tile * kernel_size, output_tile + kernel_size - 1)
    return ratio**2


def im2col_bytes(layer: Layer, value_bytes: int = 4) -> int:
    """Bytes of the matrix that im2col makes from the input (paper section 2)."""
    columns = layer.batch * layer.out_height * layer.out_width
    return columns * layer.kernel_size**2 * layer.in_channels * value_bytes


def im2col_inflation(layer: Layer) -> fractions.Fraction:
    """Size of the im2col matrix over that of the input: K² for stride 1 and same padding."""
    inputs = layer.batch * layer.in_channels * layer.height * layer.width
    return fractions.Fraction(im2col_bytes(layer, 1), inputs)


def pixels_inside(layer: Layer) -> typing.List[typing.List[int]]:
    """Output pixels per kernel position whose input pixel lies inside the image.

    Returns K rows of K counts, [py][px]; the bounds of the sums in paper equation 1.
    """
    rows = _inside_along(layer.height, layer.out_height, layer)
    columns = _inside_along(layer.width, layer.out_width, layer)
    return [[row * column for column in columns] for row in rows]


def border_exact_macs(
    layer: Layer, nonzeros: typing.Optional[typing.Sequence[typing.Sequence[int]]] = None
) -> int:
    """Multiply-adds that fall inside the image, over the whole batch.

    `nonzeros` holds the number of nonzeros at each kernel position, shape (K, K), summed over
    all channels; None counts every weight (dense). The paper's count,
    `dense_flops(layer) // 2`, also charges those on the zero padding.
    Raises ValueError when `nonzeros` has another shape or a count outside
    [0, IC · OC / groups].
    """
    inside = pixels_inside(layer)
    size = layer.kernel_size
    full = layer.in_channels * layer.out_channels // layer.groups
    if nonzeros is None:
        return layer.batch * full * sum(map(sum, inside))
    counts = [[_as_int(count) for count in row] for row in nonzeros]
    if len(counts) != size or any(len(row) != size for row in counts):
        shape = f"rows of lengths {[len(row) for row in counts]}"
        raise ValueError(
            f"nonzeros: expected shape ({size}, {size}), one count per kernel position, "
            f"got {shape}; sum (weight != 0) over its two channel axes"
        )
    total = 0
    for inside_row, count_row in zip(inside, counts):
        for pixels, count in zip(inside_row, count_row):
            if not 0 <= count <= full:
                raise ValueError(
                    f"nonzeros: expected counts in [0, {full}] (IC * OC / groups), got {count}"
                )
            total += pixels * count
    return layer.batch * total


def border_exact_flops(
    layer: Layer, nonzeros: typing.Optional[typing.Sequence[typing.Sequence[int]]] = None
) -> int:
    """Two operations per multiply-add inside the image; see `border_exact_macs`."""
    return 2 * border_exact_macs(layer, nonzeros)


def _inside_along(size: int, out_size: int, layer: Layer) -> typing.List[int]:
    counts = []
    for position in range(layer.kernel_size):
        shift = layer.padding - position * layer.dilation
        # Output o reads input o * stride - shift, which has to lie in [0, size).
        first = max(0, -(-shift // layer.stride))
        last = min(out_size - 1, (size - 1 + shift) // layer.stride)
        counts.append(max(0, last - first + 1))
    return counts


def _activation_count(layer: Layer) -> int:
    inputs = layer.batch * layer.in_channels * layer.height * layer.width
    outputs = layer.batch * layer.out_channels * layer.out_height * layer.out_width
    return inputs + outputs


def _as_int(count: typing.Any) -> int:
    if isinstance(count, bool) or int(count) != count:
        raise ValueError(f"nonzeros: expected whole counts, got {count!r}")
    return int(count)


def _check_sparsity(sparsity: Number) -> None:
    if not isinstance(sparsity, numbers.Real):
        raise TypeError(f"sparsity: expected a number in [0, 1], got {sparsity!r}")
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity: expected a number in [0, 1], got {sparsity}")


def _check_positive(name: str, value: Number) -> None:
    if not value > 0:
        raise ValueError(f"{name}: expected a positive number, got {value}")


def _check_device(device: Device) -> None:
    _check_positive("device.peak_flops", device.peak_flops)
    _check_positive("device.bandwidth", device.bandwidth)
