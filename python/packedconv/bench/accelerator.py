"""All that a measurement asks of a GPU, in one place.

Tests run the steps with a stand-in for `Accelerator` that computes on the CPU; what this
module itself calls is seen by a GPU alone.
"""

import os
import typing

import torch

import packedconv
from packedconv.bench import gpu_state
from packedconv.device import Device, DeviceError, device_limits
from packedconv.layer import Layer

# Last-level caches where PyTorch does not tell their size: at least that of any GPU of a
# compute capability (major) that such a PyTorch knows.
_L2_BYTES = {5: 4 * 2**20, 6: 4 * 2**20, 7: 6 * 2**20}
_LARGEST_L2_BYTES = 64 * 2**20

Mapping = typing.Tuple[int, int, int, int]


class SparsePlan(typing.NamedTuple):
    """How a kernel runs a layer: its name, why this tile, and the facts of the plan."""

    kernel: str
    why: str
    facts: typing.Dict[str, typing.Any]


class Accelerator:
    """One GPU through PyTorch and this project's kernels; work is queued on its stream.

    device: where tensors of a measurement lie. title: name that the driver gives.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._properties = torch.cuda.get_device_properties(self.device)
        self.title = self._properties.name

    @property
    def compute_capability(self) -> typing.Tuple[int, int]:
        return self._properties.major, self._properties.minor

    @property
    def l2_bytes(self) -> int:
        """Size of the L2 cache; where PyTorch does not tell, no less than that."""
        known = getattr(self._properties, "L2_cache_size", None)
        return known or _L2_BYTES.get(self._properties.major, _LARGEST_L2_BYTES)

    @property
    def memory_bytes(self) -> int:
        return self._properties.total_memory

    def comparable(self) -> typing.Dict[str, typing.Any]:
        """What must be the same for all measurements of a run, since they are compared."""
        return {
            "gpu": self.title,
            "driver": gpu_state.driver_version(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }

    def record(self) -> typing.Any:
        """An event behind all that is queued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed(self, begin: typing.Any, end: typing.Any) -> float:
        """Seconds between two events that have passed."""
        return begin.elapsed_time(end) / 1e3

    def pending(self, event: typing.Any) -> bool:
        """Whether the work before an event is still going on."""
        return not event.query()

    def synchronize(self) -> None:
        """Wait for all that is queued. Raises RuntimeError for an error of any of it.

        An error of a launch itself is raised where it is launched.
        """
        torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        """Memory that can still be had, PyTorch's unused blocks included."""
        reserved = torch.cuda.memory_reserved(self.device)
        unused = reserved - torch.cuda.memory_allocated(self.device)
        try:
            return torch.cuda.mem_get_info(self.device)[0] + unused
        except AttributeError:  # before PyTorch 1.11
            return self.memory_bytes - reserved + unused

    def empty_cache(self) -> None:
        """Give memory that is not in use back to the device."""
        torch.cuda.empty_cache()

    def start_memory(self) -> int:
        """Begin to watch the most memory in use; returns what is in use now, bytes."""
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def peak_memory(self) -> int:
        """Most memory of tensors in use since `start_memory`, bytes."""
        return torch.cuda.max_memory_allocated(self.device)

    def state(self) -> gpu_state.State:
        """Clocks, temperature, power and throttling now."""
        return gpu_state.read_state(self._identity())

    def mappings(self) -> typing.List[Mapping]:
        """The mappings of the paper's kernel that are compiled, with one slice each."""
        from packedconv import _core

        return [tuple(mapping) for mapping in _core.cuda_kernels()["paper"]]

    def plan(
        self,
        layer: Layer,
        packed: "packedconv.PackedWeight",
        implementation: str,
        config: typing.Optional[typing.Sequence[int]] = None,
    ) -> SparsePlan:
        """How a kernel would run the layer. Raises ValueError when it does not fit the device."""
        from packedconv import _core

        plan = _core.cuda_plan(
            input_shape=layer.input_shape,
            output_shape=layer.output_shape,
            words=packed.words,
            offsets=packed.offsets,
            kernel=packed.shape[2:],
            stride=(layer.stride, layer.stride),
            padding=(layer.padding, layer.padding),
            dilation=(layer.dilation, layer.dilation),
            groups=layer.groups,
            limits=device_limits(self.device.index),
            implementation=implementation,
            config=config,
        )
        return SparsePlan(plan.kernel, plan.why, dict(plan.facts))

    def sparse(
        self,
        layer: Layer,
        input: torch.Tensor,
        packed: "packedconv.PackedWeight",
        out: torch.Tensor,
        implementation: str,
        config: typing.Optional[typing.Sequence[int]] = None,
    ) -> None:
        """Queue one sparse convolution into `out`, (N, OC, H_out, W_out)."""
        from packedconv import cuda

        cuda.conv2d(
            input,
            packed,
            out=out,
            implementation=implementation,
            config=config,
            **layer.conv2d_arguments,
        )

    def kernels(
        self, execute: typing.Callable[[], None]
    ) -> typing.Tuple[typing.Optional[typing.List[str]], typing.Optional[str]]:
        """Names of the kernels that an execution launches, in order, and None; or None and
        the reason where they cannot be had."""
        try:
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                execute()
                self.synchronize()
            events = [event for event in profiler.events() if _on_gpu(event)]
            events.sort(key=lambda event: event.time_range.start)
        except (ImportError, RuntimeError, AttributeError, OSError) as error:
            return None, f"no profiler: {first_line(error)}"
        names = [event.name for event in events if not event.name.startswith(("Mem", "Sync"))]
        return (names, None) if names else (None, "the profiler saw no kernel")

    def _identity(self) -> str:
        """The GPU as nvidia-smi's --id takes it, whatever is made visible to this process."""
        uuid = getattr(self._properties, "uuid", None)
        if uuid is not None:
            return f"GPU-{uuid}"
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        index = self.device.index
        return visible[index] if index < len(visible) else str(index)


def find(device: Device) -> Accelerator:
    """The GPU that `packedconv.device.require` has found. Raises DeviceError without it."""
    if not torch.cuda.is_available():
        raise DeviceError(
            f"device: expected a PyTorch that reaches {device.title}, got {torch.__version__}, "
            "which finds no GPU; install a build with CUDA that fits the driver"
        )
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        if (properties.name, properties.multi_processor_count) == (device.title, device.cores):
            return Accelerator(index)
        names.append(properties.name)
    raise DeviceError(
        f"device: expected {device.title} among the GPUs that PyTorch reaches, found "
        f"{', '.join(names) or 'none'}; check CUDA_VISIBLE_DEVICES"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of the host or the device ran out."""
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "ALLOC_FAILED" in text or "allocate memory" in text
    )


def first_line(error: BaseException) -> str:
    """What an error says, without the lines of advice that PyTorch adds."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _on_gpu(event: typing.Any) -> bool:
    return str(getattr(event, "device_type", "")).endswith("CUDA")
