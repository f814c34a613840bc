"""The convolution as a custom op of torch, so that torch.compile and torch.export keep it.

`torch.ops.packedconv.conv2d` is registered from torch 2.4 on by importing this module, as the
import of `packedconv.conv2d` does; a program that only loads an exported file imports it itself.
"""

import threading
import typing
import weakref

import numpy as np
import torch

from packedconv import arguments, cuda
from packedconv.packed import PackedWeight, checked_shape

SUPPORTED = hasattr(getattr(torch, "library", None), "custom_op")

_SCHEMA = (
    "(Tensor input, Tensor words, Tensor offsets, int[] weight_shape, Tensor? bias, int[] stride, "
    "int[] before, int[] after, int[] dilation, int groups, bool relu) -> Tensor"
)


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a call is being recorded or its result only described, and not computed."""
    if not SUPPORTED:
        return False
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or (
        type(tensor) is not torch.Tensor and isinstance(tensor, _FakeTensor)
    )


def conv2d(
    input: torch.Tensor,
    packed: PackedWeight,
    bias: typing.Optional[torch.Tensor],
    stride: arguments.Pair,
    before: arguments.Pair,
    after: arguments.Pair,
    dilation: arguments.Pair,
    groups: int,
    relu: bool,
) -> torch.Tensor:
    """One call of the op, for arguments that are checked and in their one form."""
    words, offsets = _tensors(packed, input.device)
    if not torch.compiler.is_compiling():
        mode = _detect_fake_mode(input)
        # Where results are only described, and not recorded, real tensors may be refused.
        if mode is not None and not mode.allow_non_fake_inputs and _get_proxy_mode() is None:
            words, offsets = mode.from_tensor(words), mode.from_tensor(offsets)
    return torch.ops.packedconv.conv2d(
        input, words, offsets, packed.shape, bias, stride, before, after, dilation, groups, relu
    )


def _tensors(
    packed: PackedWeight, device: torch.device
) -> typing.Tuple[torch.Tensor, torch.Tensor]:
    """The packed weight as int32 tensors on the device that computes.

    The same ones as long as someone, such as a recorded graph, keeps them.
    """
    place = "cpu"
    if device.type == "cuda" and torch.cuda.is_available():
        place = f"cuda:{device.index}"
    kept = packed.derived(f"tensors {place}", list)
    found = tuple(reference() for reference in kept)
    if found and None not in found:
        return found
    # Real ones whatever is being traced, so that they are constants to the tracer.
    jit_trace = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)
    try:
        with torch.inference_mode(False), _disable_current_modes():
            words, offsets = (
                torch.from_numpy(values.view(np.int32).copy()).to(place)
                for values in (packed.words, packed.offsets)
            )
        # Weakly, as the tensors may stay in a compiler's cache after their layer is gone.
        versions = (_version(words), _version(offsets))
        _remember(weakref.ref(packed), packed.shape, words, offsets, versions)
    finally:
        torch._C._set_tracing_state(jit_trace)
    kept[:] = [_TensorWeakRef(words), _TensorWeakRef(offsets)]
    return words, offsets


def _compute(
    input, words, offsets, weight_shape, bias, stride, before, after, dilation, groups, relu
):
    from packedconv import conv

    call = _Call(input, words, offsets, weight_shape, bias, stride, before, after, dilation, groups)
    packed = _packed_weight(words, offsets, call.shape)
    result = conv.compute_padded(
        *(input, packed, bias, call.stride, call.before, call.after, call.dilation),
        *(call.groups, relu),
    )
    if input.is_cuda and cuda.is_captured(packed):
        _keep_captured(packed, words, offsets)
    return result


def _describe(
    input, words, offsets, weight_shape, bias, stride, before, after, dilation, groups, relu
):
    """Shape, dtype and device of the result."""
    call = _Call(input, words, offsets, weight_shape, bias, stride, before, after, dilation, groups)
    size = arguments.output_shape(
        *(input.shape[-2:], call.shape[2:], call.stride, call.before, call.after),
        call.dilation,
    )
    return input.new_empty((*input.shape[:-3], call.shape[0], *size))


class _Call:
    """A call's numbers in their one form, and its tensors checked.

    Anyone may call the op, and with tensors other than those it was traced with.
    Raises as `packedconv.conv2d`; the content of words and offsets is not looked at.
    """

    def __init__(
        self, input, words, offsets, weight_shape, bias, stride, before, after, dilation, groups
    ):
        from packedconv import conv

        conv.check_input(input)
        for name, tensor in (("words", words), ("offsets", offsets)):
            if tensor.dtype != torch.int32:
                raise TypeError(
                    f"{name}: expected int32, the bits of the packed weight, got {tensor.dtype}"
                )
        self.shape = checked_shape(tuple(weight_shape))
        self.stride = arguments.pair("stride", stride, 1)
        self.before = arguments.pair("padding before", before, 0)
        self.after = arguments.pair("padding after", after, 0)
        self.dilation = arguments.pair("dilation", dilation, 1)
        self.groups = arguments.group_count(groups, self.shape[0])
        arguments.check_channels(input.shape[-3], self.shape[1], self.groups)
        if bias is not None:
            conv.check_bias(bias, self.shape[0], input)


def _refuse_gradient(ctx, inputs, output):
    """Called where autograd would record the call, so before anyone asks for the gradient."""
    names = [argument.name for argument in torch.ops.packedconv.conv2d.default._schema.arguments]
    for name, value in zip(names, inputs):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise ValueError(
                f"{name}: expected no gradient, since conv2d is for inference; call it under "
                f"torch.no_grad() or pass {name}.detach()"
            )


def _no_backward(ctx, gradient):
    raise NotImplementedError("conv2d: no gradient, since it is for inference")


class _Known:
    """The packed weight of two tensors, which this does not keep alive.

    get_packed: gives it, or None when it is gone. versions: of the tensors when they held it.
    captured: packed weights, this one or earlier ones, whose tables CUDA graphs may read.
    """

    def __init__(self, words, offsets):
        self.storages = tuple(
            _StorageWeakRef(tensor.untyped_storage()) for tensor in (words, offsets)
        )
        self.get_packed = lambda: None
        self.versions = (None, None)
        self.captured = []

    def has(self, words, offsets):
        """Whether the memory is still that of the same tensors."""
        # Its address is not given to another storage as long as this refers to it.
        return all(
            storage.cdata == tensor.untyped_storage()._cdata
            for storage, tensor in zip(self.storages, (words, offsets))
        )


# An entry goes with the memory of its tensors, and not before.
_known = {}  # type: typing.Dict[typing.Tuple, _Known]
# Reentrant, since memory may be freed, and its entry dropped, at any point.
_lock = threading.RLock()


def _packed_weight(words, offsets, shape) -> PackedWeight:
    """The packed weight of two tensors, checked when first seen and after every change.

    Raises as PackedWeight. Tensors on a GPU are read from there once, for which it waits;
    those that do not count their changes (made under torch.inference_mode) in every call.
    """
    versions = (_version(words), _version(offsets))
    with _lock:
        known = _known.get(_key(words, offsets, shape))
        if known is not None and not known.has(words, offsets):
            known = None
        before = None if known is None else known.get_packed()
        if before is not None and None not in versions and known.versions == versions:
            return before
    arrays = [
        np.ascontiguousarray(tensor.detach().cpu().numpy()).view(np.uint32)
        for tensor in (words, offsets)
    ]
    packed = PackedWeight(arrays[0], arrays[1], shape)
    if before is not None and before == packed:
        packed = before  # and with it what devices hold
    _remember(lambda: packed, shape, words, offsets, versions)
    return packed


def _remember(get_packed, shape, words, offsets, versions) -> None:
    key = _key(words, offsets, shape)
    with _lock:
        known = _known.get(key)
        if known is None or not known.has(words, offsets):
            known = _known[key] = _Known(words, offsets)
            for tensor in (words, offsets):
                # The storage's Python object lives as long as the memory.
                end = weakref.finalize(tensor.untyped_storage(), _forget, key, weakref.ref(known))
                end.atexit = False
        known.get_packed, known.versions = get_packed, versions


def _forget(key, get_known) -> None:
    with _lock:
        known = get_known()
        if known is not None and _known.get(key) is known:
            del _known[key]


def _keep_captured(packed, words, offsets) -> None:
    """Keep the tables that a CUDA graph reads as long as the tensors it was captured with."""
    with _lock:
        known = _known.get(_key(words, offsets, packed.shape))
        if known is not None and not any(kept is packed for kept in known.captured):
            known.captured.append(packed)


def _key(words, offsets, shape) -> typing.Tuple:
    views = tuple(
        (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        for tensor in (words, offsets)
    )
    return (*views, shape)


def _version(tensor) -> typing.Optional[int]:
    return None if tensor.is_inference() else tensor._version


if SUPPORTED:
    from torch._guards import detect_fake_mode as _detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensor as _FakeTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode as _get_proxy_mode
    from torch.multiprocessing.reductions import StorageWeakRef as _StorageWeakRef
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils.weak import TensorWeakRef as _TensorWeakRef

    # As torch.compiler.assume_constant_result does, without the seconds of its import.
    _tensors._dynamo_marked_constant = True  # type: ignore[attr-defined]
    _op = torch.library.custom_op(
        "packedconv::conv2d",
        _compute,
        mutates_args=(),
        device_types=("cpu", "cuda"),
        schema=_SCHEMA,
    )
    _op.register_fake(_describe)
    _op.register_autograd(_no_backward, setup_context=_refuse_gradient)
