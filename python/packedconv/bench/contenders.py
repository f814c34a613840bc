"""What is timed: the sparse convolution, and PyTorch's dense one in every layout."""

import time
import typing
import warnings

import numpy as np
import torch

import packedconv
from packedconv.layer import Layer


class Contender(typing.NamedTuple):
    """One side of a comparison, ready to run.

    implementation: "sparse" or "dense"; layout: "packed", or the dense layout's name.
    execute: one execution, which leaves no memory behind. prepare: what comes before the
    executions of a block and is not timed; None for nothing.
    """

    implementation: str
    layout: str
    execute: typing.Callable[[], None]
    prepare: typing.Optional[typing.Callable[[], None]] = None


class UnavailableError(RuntimeError):
    """A dense layout that this PyTorch does not have."""


def sparse_contender(
    layer: Layer, input: torch.Tensor, packed: "packedconv.PackedWeight", out: torch.Tensor
) -> Contender:
    """packedconv.conv2d into `out`, which every execution writes again."""

    def execute() -> None:
        packedconv.conv2d(input, packed, out=out, **layer.conv2d_arguments)

    return Contender("sparse", "packed", execute)


def pack_quietly(weight: torch.Tensor) -> "packedconv.PackedWeight":
    """packedconv.pack without its warning: subnormal weights are counted in the facts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", packedconv.PackWarning)
        return packedconv.pack(weight)


def dense_contender(
    layout: str, layer: Layer, input: torch.Tensor, weight: torch.Tensor
) -> Contender:
    """PyTorch's conv2d in one of `DENSE_LAYOUTS`. Raises UnavailableError.

    Input and weight are brought into the layout here, outside an execution; the output
    stays in the layout that PyTorch gives it. PyTorch has no `out=` for it, so each
    execution allocates its output and frees it: allocated memory must be kept for reuse
    (see `reuse_memory`), or page faults make the dense side slow.
    """
    convolve = DENSE_LAYOUTS[layout](layer, input, weight)

    def execute() -> None:
        convolve()

    return Contender("dense", layout, execute)


def reuse_memory() -> bool:
    """Make the C library keep freed memory, so that a dense output costs no page faults."""
    from packedconv import _core

    return bool(_core.keep_freed_memory())


def choose_dense(
    layer: Layer,
    input: torch.Tensor,
    weight: torch.Tensor,
    trial_executions: int,
    warmup_executions: int,
    make: typing.Optional[typing.Callable[[str], Contender]] = None,
) -> typing.Tuple[str, typing.Dict[str, typing.Any]]:
    """The fastest dense layout by the median of its trial executions, and all trials.

    Trials go round the layouts, each execution after an untimed one of the same layout,
    so that a disturbance does not fall on one layout alone. A layout that fails, or that
    computes something else than NCHW does, is skipped with its reason. `make` gives the
    contender of a layout, by default `dense_contender`.
    Returns (layout, {"seconds": {layout: [...]}, "skipped": {layout: reason}}).
    """
    contenders, skipped = {}, {}
    expected, allowed = _expected_output(layer, input, weight)
    for layout in DENSE_LAYOUTS:
        try:
            difference = (DENSE_LAYOUTS[layout](layer, input, weight)() - expected).abs()
            if not bool((difference <= allowed).all()):
                skipped[layout] = f"differs from NCHW by up to {float(difference.max()):.3g}"
                continue
            contenders[layout] = (
                make(layout) if make else dense_contender(layout, layer, input, weight)
            )
            for _ in range(1 + warmup_executions):
                contenders[layout].execute()
        except (UnavailableError, RuntimeError, TypeError) as error:
            skipped[layout] = str(error)
    del expected, allowed
    seconds = {layout: [] for layout in contenders}  # type: typing.Dict[str, typing.List[float]]
    for _ in range(trial_executions):
        for layout, contender in contenders.items():
            contender.execute()
            begin = time.perf_counter()
            contender.execute()
            seconds[layout].append(time.perf_counter() - begin)
    fastest = min(seconds, key=lambda layout: float(np.median(seconds[layout])))
    return fastest, {"seconds": seconds, "skipped": skipped}


def _expected_output(
    layer: Layer, input: torch.Tensor, weight: torch.Tensor
) -> typing.Tuple[torch.Tensor, torch.Tensor]:
    """NCHW's output, and how far that of another order of summation may be from it.

    Each is within (4 + sqrt(n)) * 2^-23 * sum |w x| of the exact value, n the weights of a
    channel.
    """
    terms = layer.weight_count // layer.out_channels
    scale = 2 * (4 + terms**0.5) * 2.0**-23
    return (
        _nchw(layer, input, weight)(),
        _nchw(layer, input.abs(), weight.abs())().mul_(scale),
    )


def in_layout(layout: str, input: torch.Tensor) -> torch.Tensor:
    """An input as a layout of `DENSE_LAYOUTS` takes it."""
    return _to_channels_last(input) if layout.endswith("channels_last") else input.contiguous()


# Computes the input that it was made for, or another one in the same layout.
Convolve = typing.Callable[..., torch.Tensor]


def _nchw(layer: Layer, input: torch.Tensor, weight: torch.Tensor) -> Convolve:
    return _conv2d(layer, input.contiguous(), weight.contiguous())


def _channels_last(layer: Layer, input: torch.Tensor, weight: torch.Tensor) -> Convolve:
    return _conv2d(layer, _to_channels_last(input), _to_channels_last(weight))


def _prepacked_nchw(layer: Layer, input: torch.Tensor, weight: torch.Tensor) -> Convolve:
    return _prepacked(layer, input.contiguous(), weight)


def _prepacked_channels_last(layer: Layer, input: torch.Tensor, weight: torch.Tensor) -> Convolve:
    return _prepacked(layer, _to_channels_last(input), weight)


def _to_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _conv2d(layer: Layer, input: torch.Tensor, weight: torch.Tensor) -> Convolve:
    arguments = layer.conv2d_arguments
    return lambda given=input: torch.nn.functional.conv2d(given, weight, **arguments)


def _prepacked(layer: Layer, input: torch.Tensor, weight: torch.Tensor) -> Convolve:
    """Weights reordered once by oneDNN, as torch.compile does when it freezes them."""
    if not torch.backends.mkldnn.is_available():
        raise UnavailableError("this PyTorch has no oneDNN")
    stride, padding, dilation = [layer.stride] * 2, [layer.padding] * 2, [layer.dilation] * 2
    groups = layer.groups
    try:
        convolve = torch.ops.mkldnn._convolution_pointwise
        reordered = torch.ops.mkldnn._reorder_convolution_weight(
            weight, padding, stride, dilation, groups, list(input.shape)
        )
    except (RuntimeError, TypeError, AttributeError) as error:
        raise UnavailableError(f"this PyTorch has no prepacked convolution: {error}") from error
    return lambda given=input: convolve(
        given, reordered, None, padding, stride, dilation, groups, "none", [], ""
    )


# Layout of input and weight by name.
DENSE_LAYOUTS = {
    "nchw": _nchw,
    "channels_last": _channels_last,
    "prepacked_nchw": _prepacked_nchw,
    "prepacked_channels_last": _prepacked_channels_last,
}
