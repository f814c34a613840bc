"""Arguments of a convolution, checked and brought to one form (as torch's conv2d)."""

import functools
import numbers
import typing

Pair = typing.Tuple[int, int]


def pair(name: str, value: object, minimum: int) -> Pair:
    """`value` as (vertical, horizontal): an int, or a sequence of one or two ints.

    Raises TypeError for another type and ValueError for a value below `minimum`.
    """
    if type(value) is int and value >= minimum:
        return value, value
    if is_integer(value):
        values = (value, value)  # type: typing.Tuple
    elif isinstance(value, (tuple, list)):
        values = tuple(value) * (2 if len(value) == 1 else 1)
    else:
        values = ()
    if len(values) != 2 or not (is_integer(values[0]) and is_integer(values[1])):
        raise TypeError(f"{name}: expected an int or a pair of ints, got {value!r}")
    if values[0] < minimum or values[1] < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {value!r}")
    return int(values[0]), int(values[1])


def is_integer(value: object) -> bool:
    """Whether `value` is an integer and not a bool."""
    return type(value) is int or (
        isinstance(value, numbers.Integral) and not isinstance(value, bool)
    )


def group_count(value: object, out_channels: int) -> int:
    """`value` as the number of groups. Raises TypeError, and ValueError for no divisor of OC."""
    if not is_integer(value):
        raise TypeError(f"groups: expected an int, got {value!r}")
    if value < 1 or out_channels % value:
        raise ValueError(
            f"groups: expected a divisor of the {out_channels} output channels, got {value}"
        )
    return int(value)


def is_relu(activation: object) -> bool:
    """Whether the activation is ReLU. Raises ValueError for what is neither None nor "relu"."""
    if activation is not None and not (isinstance(activation, str) and activation == "relu"):
        raise ValueError(f'activation: expected None or "relu", got {activation!r}')
    return activation is not None


def padding_pairs(
    padding: object, kernel: Pair, stride: Pair, dilation: Pair
) -> typing.Tuple[Pair, Pair]:
    """Padding before (top, left) and after (bottom, right) the image.

    "same" puts the odd pixel of an even kernel after the image, as torch does, and needs
    stride 1; "valid" is none. Raises as `pair`, and ValueError for another word.
    """
    if isinstance(padding, str):
        if padding == "valid":
            return (0, 0), (0, 0)
        if padding != "same":
            raise ValueError(
                f'padding: expected an int, a pair, "same" or "valid", got {padding!r}'
            )
        if stride != (1, 1):
            raise ValueError(f'padding: "same" needs stride 1, got stride {stride}')
        total = [d * (k - 1) for d, k in zip(dilation, kernel)]
        before = (total[0] // 2, total[1] // 2)
        return before, (total[0] - before[0], total[1] - before[1])
    both = pair("padding", padding, 0)
    return both, both


def output_shape(
    size: Pair, kernel: Pair, stride: Pair, before: Pair, after: Pair, dilation: Pair
) -> Pair:
    """(H_out, W_out), paper equation 2. Raises ValueError when the kernel does not fit."""
    result = []
    for axis in range(2):
        padded = size[axis] + before[axis] + after[axis]
        extent = dilation[axis] * (kernel[axis] - 1) + 1
        if size[axis] < 1 or extent > padded:
            raise ValueError(
                "input: expected a padded {} of at least the kernel's {}, got {} (image {}, "
                "padding {} + {})".format(
                    ("height", "width")[axis],
                    extent,
                    padded,
                    size[axis],
                    before[axis],
                    after[axis],
                )
            )
        result.append((padded - extent) // stride[axis] + 1)
    return result[0], result[1]


def check_channels(channels: int, group_channels: int, groups: int) -> None:
    """Refuse an input of another number of channels. Raises ValueError."""
    if channels != group_channels * groups:
        raise ValueError(
            f"input: expected {group_channels * groups} channels ({group_channels} of the weight "
            f"x {groups} groups), got {channels}"
        )


@functools.lru_cache(maxsize=4096)
def output_geometry(
    size: Pair,
    weight: typing.Tuple[int, int, int],
    stride: Pair,
    before: Pair,
    after: Pair,
    dilation: Pair,
) -> typing.Tuple[Pair, Pair]:
    """(H_out, W_out), and the stride in its one form.

    weight: (IC/groups, K_h, K_w). Raises as `output_shape`, and ValueError for what 64-bit
    indices do not reach.
    """
    kernel = (weight[1], weight[2])
    result = output_shape(size, kernel, stride, before, after, dilation)
    # The stride of a single row or column has no meaning, and may be beyond all bounds.
    stride = (stride[0] if result[0] > 1 else 1, stride[1] if result[1] > 1 else 1)
    _check_index_range(weight[0], result, stride, kernel, dilation)
    return result, stride


def _check_index_range(
    channels: int, size: Pair, stride: Pair, kernel: Pair, dilation: Pair
) -> None:
    """Refuse what could overflow the 64-bit indices of the kernels' input tiles."""
    # No tile is larger than 64 x 256 outputs.
    rows = 64 * stride[0] + dilation[0] * kernel[0]
    columns = 256 * stride[1] + dilation[1] * kernel[1]
    if max(channels * rows * columns, size[0] * size[1]) >= 1 << 62:
        raise ValueError(
            f"input: expected a padded image that 64-bit indices reach, got {size[0]} x {size[1]} "
            f"outputs at stride {stride}; use less padding, stride or dilation"
        )
