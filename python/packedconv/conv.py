"""Convolution of dense images with a packed sparse weight."""

import typing

import numpy as np
import torch

from packedconv import _core, arguments
from packedconv.packed import PackedWeight

IntOrPair = typing.Union[int, typing.Tuple[int, int]]


def conv2d(
    input: torch.Tensor,
    packed: PackedWeight,
    bias: typing.Optional[torch.Tensor] = None,
    stride: IntOrPair = 1,
    padding: typing.Union[str, IntOrPair] = 0,
    dilation: IntOrPair = 1,
    groups: int = 1,
    activation: typing.Optional[str] = None,
    out: typing.Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """What torch.nn.functional.conv2d computes on `packed.unpack()` (paper equation 3).

    input: float32 (N, IC, H, W) or (IC, H, W), any strides, N = 0 included.
    bias: float32 (OC,) or None. stride, padding, dilation: int or (vertical, horizontal);
    padding also "same" or "valid". activation: None or "relu", applied to the sum and bias.
    out: float32 tensor of the result's shape to write into, any strides; it must not
    share memory with the other arguments. Returns `out`, or a new contiguous tensor.

    Products and sums are FP32, in an order that does not depend on the number of threads
    (torch.get_num_threads()). Skipped zeros differ from a dense product in one way only:
    a zero weight times an infinite or NaN input adds nothing. Inference only.

    Raises TypeError for a wrong type or dtype; ValueError for a wrong device, shape or
    value, and for tensors that would need a gradient.
    """
    if not isinstance(packed, PackedWeight):
        raise TypeError(
            f"packed: expected a PackedWeight (see packedconv.pack), got {type(packed).__name__}"
        )
    _check_tensor("input", input)
    if input.dim() not in (3, 4):
        raise ValueError(
            f"input: expected (N, IC, H, W) or (IC, H, W), got shape {tuple(input.shape)}"
        )
    relu = arguments.is_relu(activation)
    # A negated view (such as the imaginary part of a conjugate) holds the opposite values.
    batched = input.resolve_neg()
    if input.dim() == 3:
        batched = batched.unsqueeze(0)
    out_channels, group_channels = packed.shape[:2]
    kernel = packed.shape[2:]
    groups = arguments.group_count(groups, out_channels)
    if batched.shape[1] != group_channels * groups:
        raise ValueError(
            f"input: expected {group_channels * groups} channels ({group_channels} of the weight "
            f"x {groups} groups), got {batched.shape[1]}"
        )

    stride = arguments.pair("stride", stride, 1)
    dilation = arguments.pair("dilation", dilation, 1)
    before, after = arguments.padding_pairs(padding, kernel, stride, dilation)
    size = arguments.output_shape(
        (batched.shape[2], batched.shape[3]), kernel, stride, before, after, dilation
    )
    # The stride of a single row or column has no meaning, and may be beyond all bounds.
    stride = (stride[0] if size[0] > 1 else 1, stride[1] if size[1] > 1 else 1)
    _check_index_range(group_channels, size, stride, kernel, dilation)
    if bias is not None:
        _check_tensor("bias", bias)
        if tuple(bias.shape) != (out_channels,):
            raise ValueError(f"bias: expected shape ({out_channels},), got {tuple(bias.shape)}")
        bias = bias.resolve_neg().contiguous()

    shape = (batched.shape[0], out_channels) + size
    if out is None:
        result = _empty(shape if input.dim() == 4 else shape[1:])
    else:
        _check_out(out, shape if input.dim() == 4 else shape[1:], batched, bias)
        result = out
    target = result if input.dim() == 4 else result.unsqueeze(0)

    _core.conv2d(
        input=batched.data_ptr(),
        input_shape=tuple(batched.shape),
        input_strides=batched.stride(),
        words=packed.words,
        offsets=packed.offsets,
        kernel=kernel,
        bias=0 if bias is None else bias.data_ptr(),
        stride=stride,
        padding=before,
        dilation=dilation,
        groups=groups,
        relu=relu,
        output=target.data_ptr(),
        output_shape=shape,
        output_strides=target.stride(),
        threads=torch.get_num_threads(),
    )
    if out is not None:
        _count_write(out)
    return result


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name}: expected float32, got {tensor.dtype}; convert it with .float()")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense (strided) tensor, got {tensor.layout}")
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{name}: expected a tensor on the CPU, the only device that this build has kernels "
            f"for, got {tensor.device}; move it with .cpu()"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: expected no gradient, since conv2d is for inference; call it under "
            f"torch.no_grad() or pass {name}.detach()"
        )


def _check_index_range(
    channels: int,
    size: arguments.Pair,
    stride: arguments.Pair,
    kernel: arguments.Pair,
    dilation: arguments.Pair,
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


def _count_write(tensor: torch.Tensor) -> None:
    """Let autograd notice that the kernel wrote into a tensor that a graph may have saved."""
    increment_version = getattr(torch.autograd.graph, "increment_version", None)
    if increment_version is not None and not tensor.is_inference():
        increment_version(tensor)


def _empty(shape: typing.Tuple[int, ...]) -> torch.Tensor:
    try:
        # The device is named, since torch's default may be another.
        return torch.empty(shape, dtype=torch.float32, device="cpu")
    except RuntimeError as error:
        raise MemoryError(f"out: no memory for a result of shape {shape}: {error}") from None


def _check_out(
    out: torch.Tensor,
    shape: typing.Tuple[int, ...],
    input: torch.Tensor,
    bias: typing.Optional[torch.Tensor],
) -> None:
    _check_tensor("out", out)
    if out.is_neg():
        raise ValueError("out: expected a tensor of its own, got a negated view")
    if tuple(out.shape) != shape:
        raise ValueError(f"out: expected shape {shape}, got {tuple(out.shape)}")
    if _overlaps_itself(out):
        raise ValueError(
            f"out: expected elements with memory of their own, got strides {out.stride()}"
        )
    for name, other in (("input", input), ("bias", bias)):
        if other is not None and _share_memory(out, other):
            raise ValueError(
                f"out: expected memory apart from {name}, got tensors that overlap; "
                "write into another tensor"
            )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory: by stride, an axis must span those below it."""
    reach = 1
    axes = [(step, size) for step, size in zip(tensor.stride(), tensor.shape) if size > 1]
    for step, size in sorted(axes):
        if step < reach:
            return True
        reach = step * (size - 1) + reach
    return False


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have an element in common; True where that is too hard to tell."""
    try:
        return np.shares_memory(a.detach().numpy(), b.detach().numpy(), max_work=100000)
    except RuntimeError:  # numpy's TooHardError
        return True
