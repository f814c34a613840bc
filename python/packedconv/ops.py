"""The convolution as a custom op of torch, so that torch.compile and torch.export keep it.

`torch.ops.packedconv.conv2d` is registered from torch 2.4 on by importing this module, as the
import of `packedconv.conv2d` does; a program that only loads an exported file imports it itself.
"""

import collections
import threading
import typing
import weakref

import numpy as np
import torch

from packedconv import arguments
from packedconv.packed import PackedWeight

SUPPORTED = hasattr(getattr(torch, "library", None), "custom_op")

# Packed weights found again from their tensors.
MAX_WEIGHTS = 64

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
    """The packed weight as int32 tensors on the device that computes, made once."""
    place = "cpu"
    if device.type == "cuda" and torch.cuda.is_available():
        place = f"cuda:{device.index}"

    def make():
        # Real ones whatever is being traced, so that they are constants to the tracer.
        jit_trace = torch._C._get_tracing_state()
        torch._C._set_tracing_state(None)
        try:
            with torch.inference_mode(False), _disable_current_modes():
                found = tuple(
                    torch.from_numpy(values.view(np.int32).copy()).to(place)
                    for values in (packed.words, packed.offsets)
                )
            # Weakly, since it holds the tensors and would otherwise keep itself alive.
            _remember(packed, weakref.ref(packed), *found)
        finally:
            torch._C._set_tracing_state(jit_trace)
        return found

    return packed.derived(f"tensors {place}", make)


def _compute(
    input, words, offsets, weight_shape, bias, stride, before, after, dilation, groups, relu
):
    from packedconv import conv

    return conv.compute_padded(
        *(input, _packed_weight(words, offsets, tuple(weight_shape)), bias, tuple(stride)),
        *(tuple(before), tuple(after), tuple(dilation), groups, relu),
    )


def _describe(
    input, words, offsets, weight_shape, bias, stride, before, after, dilation, groups, relu
):
    """Shape, dtype and device of the result."""
    size = arguments.output_shape(
        input.shape[-2:], weight_shape[2:], stride, before, after, dilation
    )
    return input.new_empty((*input.shape[:-3], weight_shape[0], *size))


class _Known:
    """Two tensors, which this does not keep alive, and how to get their packed weight."""

    def __init__(self, get_packed, words, offsets):
        self.get_packed = get_packed
        self.storages = tuple(
            _StorageWeakRef(tensor.untyped_storage()) for tensor in (words, offsets)
        )
        self.versions = tuple(_version(tensor) for tensor in (words, offsets))

    def packed_weight(self, words, offsets):
        """The packed weight, or None if it is gone, or the memory or its content another."""
        for storage, version, tensor in zip(self.storages, self.versions, (words, offsets)):
            # Its address is not given to another storage as long as this refers to it.
            if storage.cdata != tensor.untyped_storage()._cdata:
                return None
            if version is None or version != _version(tensor):
                return None
        return self.get_packed()


_known = collections.OrderedDict()  # type: typing.Dict[typing.Tuple, _Known]
_lock = threading.Lock()


def _packed_weight(words, offsets, shape) -> PackedWeight:
    """The packed weight of two tensors, checked when first seen and after every change.

    Raises as PackedWeight. Tensors on a GPU are read from there once, for which it waits;
    those that do not count their changes (made under torch.inference_mode) in every call.
    """
    for name, tensor in (("words", words), ("offsets", offsets)):
        if tensor.dtype != torch.int32:
            raise TypeError(
                f"{name}: expected int32, the bits of the packed weight, got {tensor.dtype}"
            )
    key = _key(words, offsets, shape)
    with _lock:
        known = _known.get(key)
        packed = None if known is None else known.packed_weight(words, offsets)
        if packed is not None:
            _known.move_to_end(key)
            return packed
    arrays = [
        np.ascontiguousarray(tensor.detach().cpu().numpy()).view(np.uint32)
        for tensor in (words, offsets)
    ]
    packed = PackedWeight(arrays[0], arrays[1], shape)
    before = None if known is None else known.get_packed()
    if before is not None and before == packed:
        packed = before  # and with it what devices hold
    _remember(packed, lambda: packed, words, offsets)
    return packed


def _remember(packed, get_packed, words, offsets) -> None:
    known = _Known(get_packed, words, offsets)
    with _lock:
        for key in [key for key, old in _known.items() if old.storages[0].expired()]:
            del _known[key]
        _known[_key(words, offsets, packed.shape)] = known
        while len(_known) > MAX_WEIGHTS:
            _known.popitem(last=False)


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
