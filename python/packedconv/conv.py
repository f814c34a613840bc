"""Convolution of dense images with a packed sparse weight."""

import typing

import numpy as np
import torch

from packedconv import arguments, cpu, cuda, ops, plan
from packedconv.device import device_limits
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

    All tensors are on the CPU, or all on one NVIDIA GPU.
    On the CPU the first call for a shape of input and a number of threads makes a plan: it
    checks every word, chooses a schedule and decodes the weight into the order of the kernel.
    `packed.plan` does the same ahead of time and shows what it costs and why. The packed weight
    keeps the plan; later calls allocate nothing but the result.
    On a GPU the kernel (paper section 5) runs in the stream that is current there. The first
    call for a shape of input copies what it needs of the weight there and waits; later calls
    wait for nothing, and a CUDA graph can capture them.
    torch.compile and torch.export (torch 2.4 and later) keep the call as one op,
    `packedconv::conv2d`. An exported program holds words and offsets, not what `autotune` kept.

    Products and sums are FP32. On the CPU their order is that of the plan, whichever thread
    computes what; plans for other numbers of threads (torch.get_num_threads()) may have another.
    Skipped zeros differ from a dense product in one way only: a zero weight times an infinite or
    NaN input adds nothing. Inference only.

    Raises TypeError for a wrong type or dtype; ValueError for a wrong device, shape or
    value, and for tensors that would need a gradient; RuntimeError when this build cannot run
    on the GPU, when CUDA refuses the launch, and when a CUDA graph captures the first call.
    """
    return compute(input, packed, bias, stride, padding, dilation, groups, activation, out)


_increment_version = getattr(torch.autograd.graph, "increment_version", None)

# Computes (input, packed, bias, stride, padding before, dilation, groups, relu) into out.
Launch = typing.Callable[..., None]


def compute(
    input: torch.Tensor,
    packed: PackedWeight,
    bias: typing.Optional[torch.Tensor] = None,
    stride: IntOrPair = 1,
    padding: typing.Union[str, IntOrPair] = 0,
    dilation: IntOrPair = 1,
    groups: int = 1,
    activation: typing.Optional[str] = None,
    out: typing.Optional[torch.Tensor] = None,
    launch: typing.Optional[Launch] = None,
) -> torch.Tensor:
    """`conv2d` with the kernel given; None for the one of the input's device."""
    if not isinstance(packed, PackedWeight):
        raise TypeError(
            f"packed: expected a PackedWeight (see packedconv.pack), got {type(packed).__name__}"
        )
    check_input(input)
    relu = arguments.is_relu(activation)
    groups = arguments.group_count(groups, packed.shape[0])
    stride = arguments.pair("stride", stride, 1)
    dilation = arguments.pair("dilation", dilation, 1)
    before, after = arguments.padding_pairs(padding, packed.shape[2:], stride, dilation)
    if launch is None and ops.is_traced(input):
        if bias is not None:
            check_bias(bias, packed.shape[0], input)
        result = ops.conv2d(input, packed, bias, stride, before, after, dilation, groups, relu)
        if out is None:
            return result
        check_tensor("out", out, input)
        if out.shape != result.shape:
            raise ValueError(f"out: expected shape {tuple(result.shape)}, got {tuple(out.shape)}")
        return out.copy_(result)
    return compute_padded(
        input, packed, bias, stride, before, after, dilation, groups, relu, out, launch
    )


def compute_padded(
    input: torch.Tensor,
    packed: PackedWeight,
    bias: typing.Optional[torch.Tensor],
    stride: arguments.Pair,
    before: arguments.Pair,
    after: arguments.Pair,
    dilation: arguments.Pair,
    groups: int,
    relu: bool,
    out: typing.Optional[torch.Tensor] = None,
    launch: typing.Optional[Launch] = None,
) -> torch.Tensor:
    """`compute` for arguments in their one form: pairs, and padding before and after."""
    if input.is_cuda:
        device_limits(input.device.index)  # raises before anything is allocated there
    if launch is None:
        launch = cuda.launch if input.is_cuda else cpu.launch
    # A negated view (such as the imaginary part of a conjugate) holds the opposite values.
    batched = input.resolve_neg()
    if input.dim() == 3:
        batched = batched.unsqueeze(0)
    images, channels, height, width = batched.shape
    out_channels, group_channels = packed.shape[:2]
    arguments.check_channels(channels, group_channels, groups)
    size, stride = arguments.output_geometry(
        (height, width), packed.shape[1:], stride, before, after, dilation
    )
    if bias is not None:
        check_bias(bias, out_channels, input)
        bias = bias.resolve_neg().contiguous()

    shape = (images, out_channels) + size
    if out is None:
        result = plan.empty("out", shape if input.dim() == 4 else shape[1:], input.device)
    else:
        _check_out(out, shape if input.dim() == 4 else shape[1:], batched, bias)
        result = out
    target = result if input.dim() == 4 else result.unsqueeze(0)
    launch(batched, packed, bias, stride, before, dilation, groups, relu, target)
    if out is not None:
        _count_write(out)
    return result


def check_input(input: torch.Tensor) -> None:
    """Refuse an input that is none for any layer. Raises TypeError and ValueError."""
    check_tensor("input", input)
    if input.dim() not in (3, 4):
        raise ValueError(
            f"input: expected (N, IC, H, W) or (IC, H, W), got shape {tuple(input.shape)}"
        )


def check_tensor(
    name: str, tensor: torch.Tensor, input: typing.Optional[torch.Tensor] = None
) -> None:
    """Refuse what no kernel takes, and a device other than the input's."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name}: expected float32, got {tensor.dtype}; convert it with .float()")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense (strided) tensor, got {tensor.layout}")
    if input is None:
        if not tensor.is_cuda and tensor.device.type != "cpu":
            raise ValueError(
                f"{name}: expected a tensor on the CPU or an NVIDIA GPU, the devices that there "
                f"are kernels for, got {tensor.device}; move it with .cpu() or .cuda()"
            )
    elif tensor.device != input.device:
        raise ValueError(
            f"{name}: expected a tensor on {input.device}, where the input is, got "
            f'{tensor.device}; move it with .to("{input.device}")'
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: expected no gradient, since conv2d is for inference; call it under "
            f"torch.no_grad() or pass {name}.detach()"
        )


def check_bias(bias: torch.Tensor, out_channels: int, input: torch.Tensor) -> None:
    check_tensor("bias", bias, input)
    if tuple(bias.shape) != (out_channels,):
        raise ValueError(f"bias: expected shape ({out_channels},), got {tuple(bias.shape)}")


def _count_write(tensor: torch.Tensor) -> None:
    """Let autograd notice that the kernel wrote into a tensor that a graph may have saved."""
    if _increment_version is not None and not tensor.is_inference():
        _increment_version(tensor)


def _check_out(
    out: torch.Tensor,
    shape: typing.Tuple[int, ...],
    input: torch.Tensor,
    bias: typing.Optional[torch.Tensor],
) -> None:
    check_tensor("out", out, input)
    if out.is_neg():
        raise ValueError("out: expected a tensor of its own, got a negated view")
    if tuple(out.shape) != shape:
        raise ValueError(f"out: expected shape {shape}, got {tuple(out.shape)}")
    if not out.is_contiguous() and _overlaps_itself(out):
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
    if a.numel() == 0 or b.numel() == 0:
        return False
    if a.is_contiguous() and b.is_contiguous():
        first, second = a.data_ptr(), b.data_ptr()
        return first < second + 4 * b.numel() and second < first + 4 * a.numel()
    try:
        return np.shares_memory(_as_array(a), _as_array(b), max_work=100000)
    except RuntimeError:  # numpy's TooHardError
        return True


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as numpy sees it. One on a GPU has its addresses, and must not be read."""
    if tensor.device.type == "cpu":
        return tensor.detach().numpy()
    return np.asarray(_Addresses(tensor))


class _Addresses:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "=f4",
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(4 * step for step in tensor.stride()),
        }
