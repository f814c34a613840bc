"""Calls of the CUDA kernels: plans made once per layer, their tables kept on the device."""

import collections
import hashlib
import threading
import typing

import numpy as np
import torch

from packedconv import _core, device
from packedconv.arguments import Pair
from packedconv.packed import PackedWeight

# Plans kept per packed weight: a plan belongs to one shape of input on one device.
MAX_PLANS = 64


def conv2d(
    input: torch.Tensor,
    packed: PackedWeight,
    bias: typing.Optional[torch.Tensor] = None,
    stride: typing.Union[int, Pair] = 1,
    padding: typing.Union[str, int, Pair] = 0,
    dilation: typing.Union[int, Pair] = 1,
    groups: int = 1,
    activation: typing.Optional[str] = None,
    out: typing.Optional[torch.Tensor] = None,
    implementation: str = "auto",
    config: typing.Optional[typing.Sequence[int]] = None,
) -> torch.Tensor:
    """`packedconv.conv2d` on CUDA tensors with the kernel named, for measurements.

    implementation: "auto" (the column kernel where a tile of it fits the device, otherwise
    the general one), "column", "paper" (Algorithm 1 of the paper, section 5.2) or "general".
    config: of the paper's kernel (col_per_warp, rows_per_thread, warps_per_block, slices); of
    the column kernel the fields of ColumnConfig in csrc/cuda/column_config.h; None to have it
    chosen.

    Raises as `packedconv.conv2d`, and ValueError for a kernel or configuration that does not
    exist or whose tile does not fit the device.
    """
    from packedconv import conv

    if isinstance(input, torch.Tensor) and input.device.type != "cuda":
        raise ValueError(f"input: expected a CUDA tensor, got {input.device}; move it with .cuda()")

    def launch_this(*arguments: typing.Any) -> None:
        launch(*arguments, implementation=implementation, config=config)

    return conv.compute(
        input, packed, bias, stride, padding, dilation, groups, activation, out, launch_this
    )


def launch(
    input: torch.Tensor,
    packed: PackedWeight,
    bias: typing.Optional[torch.Tensor],
    stride: Pair,
    before: Pair,
    dilation: Pair,
    groups: int,
    relu: bool,
    out: torch.Tensor,
    implementation: str = "auto",
    config: typing.Optional[typing.Sequence[int]] = None,
) -> None:
    """Compute into `out` on the input's GPU, in the stream that is current there.

    Raises RuntimeError when this build cannot run on that GPU, and with what CUDA says when
    the launch fails.
    """
    index = input.device.index
    limits = device.device_limits(index)
    with torch.cuda.device(index):
        convolve(
            _core,
            limits,
            index,
            torch.cuda.current_stream().cuda_stream,
            *(input, packed, bias, stride, before, dilation, groups, relu, out),
            implementation=implementation,
            config=config,
        )


def convolve(
    core: typing.Any,
    limits: typing.Tuple[int, int, int, int],
    device_index: int,
    stream: int,
    input: torch.Tensor,
    packed: PackedWeight,
    bias: typing.Optional[torch.Tensor],
    stride: Pair,
    before: Pair,
    dilation: Pair,
    groups: int,
    relu: bool,
    out: torch.Tensor,
    implementation: str = "auto",
    config: typing.Optional[typing.Sequence[int]] = None,
) -> None:
    """Launch the kernel of `core`, the extension module or an emulated one, for one layer.

    input (N, IC, H, W), out (N, OC, H_out, W_out): float32 of any strides on one device, not
    overlapping; bias contiguous. before: padding above and left of the image. limits: as
    `device_limits` gives them. stream: the handle of a stream of that device.

    The first call for a layer makes its plan and copies the plan's table to the device,
    which waits for the copy. Later ones copy nothing, allocate nothing and wait for nothing,
    so that a CUDA graph can capture them; it replays with the packed weight as it is, which
    has to live as long as the graph.
    Raises RuntimeError when the first call is a captured one, ValueError for words and offsets
    that do not fit the layer.
    """
    if out.numel() == 0:
        return
    capturing = _capturing(input)
    kept = packed.derived("cuda", _Plans)
    key = (
        *(core, implementation, None if config is None else tuple(config), device_index, limits),
        *(tuple(input.shape), tuple(out.shape), stride, before, dilation, groups),
    )
    with kept.lock:
        entry = kept.find(key)
        if entry is None:
            if capturing:
                raise RuntimeError(
                    "conv2d: expected a layer that has run on this device before, got its first "
                    "call under CUDA graph capture, where its weight cannot be copied to the "
                    "device; call conv2d once before capturing"
                )
            plan = core.cuda_plan(
                input_shape=tuple(input.shape),
                output_shape=tuple(out.shape),
                words=packed.words,
                offsets=packed.offsets,
                kernel=packed.shape[2:],
                stride=stride,
                padding=before,
                dilation=dilation,
                groups=groups,
                limits=limits,
                implementation=implementation,
                config=config,
            )
            entry = kept.add(key, plan, input.device, stream)
        # A graph holds the table's address and not the table.
        entry.captured = entry.captured or capturing
    table = entry.table
    if stream != table.stream:
        # The allocator then waits for this stream, too, before it gives the memory away.
        _record_stream(table.memory)
    core.cuda_conv2d(
        plan=entry.plan,
        device=device_index,
        stream=stream,
        input=input.data_ptr(),
        input_strides=input.stride(),
        table=table.memory.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        relu=relu,
        output=out.data_ptr(),
        output_strides=out.stride(),
    )


def plans(packed: PackedWeight) -> typing.List[typing.Any]:
    """The plans that calls with this weight have made, the last used one last.

    Each tells its `kernel`, `why` it was chosen, and in `facts` its configuration, tile, grid
    and shared memory in bytes.
    """
    kept = packed.derived("cuda", _Plans)
    with kept.lock:
        return [entry.plan for entry in kept.entries.values()]


def is_captured(packed: PackedWeight) -> bool:
    """Whether a CUDA graph may have captured a call with this weight, and reads its tables."""
    kept = packed.derived("cuda", _Plans)
    with kept.lock:
        return any(entry.captured for entry in kept.entries.values())


class _Table:
    """A plan's table in the memory of a device, and the stream that this was allocated for."""

    def __init__(self, values: np.ndarray, digest: bytes, place: torch.device, stream: int) -> None:
        self.digest = digest
        self.stream = stream
        self.memory = torch.empty(len(values), dtype=torch.int32, device=place)
        # From ordinary host memory: returns when the values are there, for every stream.
        self.memory.copy_(torch.from_numpy(values.view(np.int32)))


class _Entry:
    def __init__(self, plan: typing.Any, table: _Table) -> None:
        self.plan = plan
        self.table = table
        self.captured = False


class _Plans:
    """The plans of one packed weight, least recently used first. Its user holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entries = collections.OrderedDict()  # type: typing.Dict[typing.Tuple, _Entry]

    def find(self, key: typing.Tuple) -> typing.Optional[_Entry]:
        entry = self.entries.get(key)
        if entry is not None:
            self.entries.move_to_end(key)
        return entry

    def add(self, key: typing.Tuple, plan: typing.Any, place: torch.device, stream: int) -> _Entry:
        values = plan.table
        digest = hashlib.sha256(values.tobytes()).digest()
        # Plans for other sizes of image often read the same table.
        same = (
            entry.table
            for entry in self.entries.values()
            if entry.table.digest == digest and entry.table.memory.device == place
        )
        entry = _Entry(plan, next(same, None) or _Table(values, digest, place, stream))
        self.entries[key] = entry
        unused = [key for key, entry in self.entries.items() if not entry.captured]
        for old in unused[: max(0, len(self.entries) - MAX_PLANS)]:
            if self.entries[old] is not entry:
                del self.entries[old]
        return entry


def _capturing(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph records what the current stream of the current device is given."""
    if not tensor.is_cuda:
        return False
    # PyTorch 1.10, the newest one for a Jetson Nano, cannot say; its CUDA there has no graphs.
    probe = getattr(torch.cuda, "is_current_stream_capturing", None)
    return probe is not None and probe()


def _record_stream(memory: torch.Tensor) -> None:
    memory.record_stream(torch.cuda.current_stream())
