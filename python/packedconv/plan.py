"""CPU plans: a layer prepared for the CPU, made once per call's shape and kept with the weight."""

import collections
import functools
import operator
import threading
import typing

import torch

from packedconv import _core, arguments
from packedconv.packed import PackedWeight
from packedconv.schedule import PlanKey, Quad, Schedule, checked_schedule

# Kept per packed weight: a plan belongs to one shape of input. The newest one always stays.
MAX_PLANS = 64
MAX_PLAN_BYTES = 256 << 20


class CpuPlan:
    """A layer prepared for the CPU: its schedule, what this means, and why it was chosen.

    Made by `PackedWeight.plan` and by the first `conv2d` of a shape; immutable. `print` shows it,
    and `describe(peak_flops, bandwidth)` with the time that no kernel falls below.
    core: the compiled plan, which computes between addresses that it does not check.
    """

    __slots__ = ("_facts", "_key", "_schedule", "_why", "core")

    def __init__(self, key: PlanKey, core: typing.Any, note: str = "") -> None:
        self.core = core
        self._key = key
        self._schedule = dict(core.schedule)  # type: Schedule
        self._facts = dict(core.facts)  # type: typing.Dict[str, typing.Any]
        self._why = note + core.why

    @property
    def key(self) -> PlanKey:
        """The call that the plan is for."""
        return self._key

    @property
    def schedule(self) -> Schedule:
        """How the kernel goes through the layer.

        path: "naive", "loose" or "aligned" (the naive one has no tiles). rows, vectors: output
        pixels held in registers, rows x vectors x `facts["lanes"]`. block_channels: input
        channels of a group summed at a time. strip: tiles that a thread computes one after the
        other. prefetch: the input of the next strip is fetched meanwhile. stream: the output is
        written past the caches.
        """
        return dict(self._schedule)

    @property
    def facts(self) -> typing.Dict[str, typing.Any]:
        """What follows from the schedule, and what the layer needs.

        isa, lanes: instruction set, and pixels of a vector. pieces_per_tile: images or blocks of
        rows side by side in a tile. lanes_used: computed pixels that are part of the output, 0 to
        1. tile_bytes: input that a block of channels reads of a tile. items: pieces of work that
        threads draw. slices: of the output channels of a group, among items. plan_bytes,
        workspace_bytes: memory that the plan keeps, and that each thread has for all plans.
        flop: 2 for each nonzero and output pixel. bytes: input, output and packed weight, once.
        """
        return dict(self._facts)

    @property
    def why(self) -> str:
        """Why this schedule."""
        return self._why

    @property
    def threads(self) -> int:
        """Number of threads that the plan is made for."""
        return self._key.threads

    def bound(self, peak_flops: float, bandwidth: float) -> float:
        """Seconds below which no kernel stays: max(FLOP / peak, bytes / bandwidth).

        peak_flops: FLOP/s of so many threads; bandwidth: bytes/s. Paper section 4, the roofline.
        Raises ValueError unless both are positive.
        """
        for name, value in (("peak_flops", peak_flops), ("bandwidth", bandwidth)):
            if not value > 0:
                raise ValueError(f"{name}: expected a positive number, got {value!r}")
        return max(self._facts["flop"] / peak_flops, self._facts["bytes"] / bandwidth)

    def describe(
        self,
        peak_flops: typing.Optional[float] = None,
        bandwidth: typing.Optional[float] = None,
    ) -> str:
        """The plan in lines, with the bound where the ceilings are given (see `bound`).

        Raises ValueError for one of the two alone.
        """
        if (peak_flops is None) != (bandwidth is None):
            raise ValueError(
                "peak_flops and bandwidth: expected both or neither, got "
                f"{peak_flops!r} and {bandwidth!r}"
            )
        key, schedule, facts = self._key, self._schedule, self._facts
        group_channels = key.input_shape[1] // key.groups
        needs = "{:.4g} GFLOP, {:.4g} MB".format(facts["flop"] / 1e9, facts["bytes"] / 1e6)
        if peak_flops is not None and bandwidth is not None:
            needs += f": at least {1e3 * self.bound(peak_flops, bandwidth):.4g} ms"
        lines = [
            ("layer", f"{_times(key.input_shape)} to {_times(key.output_shape)}"),
            ("path", f"{schedule['path']}, {facts['isa']}"),
        ]
        if schedule["path"] != "naive":  # which has no tiles
            tile = "{} rows x {} vectors of {} pixels, {:.0f} % of them used".format(
                schedule["rows"], schedule["vectors"], facts["lanes"], 100 * facts["lanes_used"]
            )
            lines += [
                ("tile", tile),
                ("block", f"{schedule['block_channels']} of {group_channels} input channels"),
                ("strip", f"{schedule['strip']} tiles" + _extras(schedule)),
            ]
        lines += [
            ("threads", f"{key.threads}, for {facts['items']} items"),
            ("bound", needs),
            ("why", self._why),
        ]
        return "\n".join(f"{name:8}{text}" for name, text in lines)

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._schedule.items())
        return f"CpuPlan(input_shape={self._key.input_shape}, threads={self.threads}, {fields})"


def _times(shape: typing.Sequence[int]) -> str:
    return " x ".join(str(size) for size in shape)


def _extras(schedule: Schedule) -> str:
    extras = {"prefetch": "the next one's input prefetched", "stream": "written past the caches"}
    return "".join(", " + text for name, text in extras.items() if schedule[name])


class _Plans:
    """The plans of one packed weight, least recently used first. Its user holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # By call and, where one was asked for, schedule.
        entries = collections.OrderedDict()  # type: collections.OrderedDict[typing.Tuple, CpuPlan]
        self.entries = entries

    def add(self, key: typing.Tuple, plan: CpuPlan) -> None:
        self.entries[key] = plan
        kept_bytes = sum(plan._facts["plan_bytes"] for plan in self.entries.values())
        while len(self.entries) > 1 and (
            len(self.entries) > MAX_PLANS or kept_bytes > MAX_PLAN_BYTES
        ):
            _, oldest = self.entries.popitem(last=False)
            kept_bytes -= oldest._facts["plan_bytes"]


def find(
    packed: PackedWeight, call: typing.Tuple, schedule: typing.Optional[typing.Tuple] = None
) -> CpuPlan:
    """The plan for a call, from those that the weight keeps or made now.

    call: the fields of a PlanKey. schedule: as `frozen` gives it; None for the one that
    autotune kept for this call, or else the one that is fastest by estimate.
    Raises ValueError for a schedule that the build or layer does not have.
    """
    kept = packed.derived("cpu", _Plans)
    name = (call, schedule)
    with kept.lock:
        plan = kept.entries.get(name)
        if plan is not None:
            kept.entries.move_to_end(name)
            return plan
        key = PlanKey(tuple(call[0]), tuple(call[1]), *call[2:])
        plan = _make(packed, key, None if schedule is None else dict(schedule))
        kept.add((key, schedule), plan)
        return plan


def keep(packed: PackedWeight, key: PlanKey, core: typing.Any, note: str) -> CpuPlan:
    """Make a compiled plan the weight's own for its call, as autotune does in the end.

    note: why this one.
    """
    plan = CpuPlan(key, core, note)
    kept = packed.derived("cpu", _Plans)
    with kept.lock:
        # Whatever interrupts this leaves the weight as it was, or done.
        kept.entries.pop((key, None), None)
        packed._keep_schedule(key, plan.schedule)
        kept.add((key, None), plan)
    return plan


def _make(packed: PackedWeight, key: PlanKey, schedule: typing.Optional[Schedule]) -> CpuPlan:
    tuned = packed.schedules.get(key) if schedule is None else None
    note = ""
    if tuned is not None:
        try:
            core = compiled(packed, key, tuned)
            return CpuPlan(key, core, "autotune chose it, perhaps on another processor; ")
        except ValueError as error:
            # It may come from a file, and from another build; its layer is computed all the same.
            note = f"not as autotune chose ({error}); "
    return CpuPlan(key, compiled(packed, key, schedule), note)


def compiled(packed: PackedWeight, key: PlanKey, schedule: typing.Optional[Schedule]) -> typing.Any:
    """The compiled plan, new; with the schedule that is fastest by estimate where None is given.

    Raises ValueError for a schedule that the build or layer does not have.
    """
    core = _core.CpuPlan(schedule=schedule, **core_arguments(packed, key))
    if core.facts["isa"] != key.isa:
        raise ValueError(
            f"PACKEDCONV_ISA: expected {key.isa} as when the plan was asked for, got "
            f"{core.facts['isa']}; it changed while a plan was made: call again"
        )
    return core


def core_arguments(packed: PackedWeight, key: PlanKey) -> typing.Dict[str, typing.Any]:
    """What the extension module wants to know of a call, to plan it."""
    return {
        "input_shape": key.input_shape,
        "output_shape": key.output_shape,
        "words": packed.words,
        "offsets": packed.offsets,
        "kernel": packed.shape[2:],
        "stride": key.stride,
        "padding": key.padding,
        "dilation": key.dilation,
        "groups": key.groups,
        "threads": key.threads,
    }


def frozen(schedule: object) -> typing.Tuple:
    """A schedule as part of a key. Raises TypeError and ValueError as `checked_schedule`."""
    return tuple(checked_schedule(schedule).items())


def plan_key(
    packed: PackedWeight,
    input_shape: typing.Sequence[int],
    stride: typing.Union[int, arguments.Pair] = 1,
    padding: typing.Union[str, int, arguments.Pair] = 0,
    dilation: typing.Union[int, arguments.Pair] = 1,
    groups: int = 1,
    threads: typing.Optional[int] = None,
) -> PlanKey:
    """The key of a call; arguments and errors are those of `PackedWeight.plan`."""
    shape = _checked_input_shape(input_shape)
    groups = arguments.group_count(groups, packed.shape[0])
    stride = arguments.pair("stride", stride, 1)
    dilation = arguments.pair("dilation", dilation, 1)
    before, after = arguments.padding_pairs(padding, packed.shape[2:], stride, dilation)
    arguments.check_channels(shape[1], packed.shape[1], groups)
    size, stride = arguments.output_geometry(
        shape[2:], packed.shape[1:], stride, before, after, dilation
    )
    if threads is None:
        threads = torch.get_num_threads()
    if not arguments.is_integer(threads):
        raise TypeError(f"threads: expected an int, got {threads!r}")
    if not 1 <= threads < 1 << 31:
        raise ValueError(f"threads: expected 1 to 2^31 - 1, got {threads}")
    output_shape = (shape[0], packed.shape[0]) + size
    for name, sizes in (("input_shape", shape), ("output", output_shape)):
        # What the kernel counts, in bytes too, stays within 64 bits.
        if functools.reduce(operator.mul, sizes) >= 1 << 61:
            raise ValueError(
                f"{name}: expected fewer than 2^61 elements, got {sizes}; use fewer images"
            )
    return PlanKey(shape, output_shape, stride, before, dilation, groups, int(threads), _core.isa())


def _checked_input_shape(shape: object) -> Quad:
    if not isinstance(shape, (tuple, list)) or not all(map(arguments.is_integer, shape)):
        raise TypeError(f"input_shape: expected a sequence of ints, got {shape!r}")
    values = tuple(int(size) for size in shape)
    if len(values) == 3:
        values = (1,) + values
    if len(values) != 4:
        raise ValueError(f"input_shape: expected (N, IC, H, W) or (IC, H, W), got {tuple(shape)}")
    if not (min(values) >= 0 and max(values) < 1 << 63):
        raise ValueError(f"input_shape: expected sizes from 0 to 2^63 - 1, got {tuple(shape)}")
    return typing.cast(Quad, values)


def empty(name: str, shape: typing.Tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A tensor that holds anything. Raises MemoryError, which names it, where there is no memory
    on the CPU."""
    try:
        return torch.empty(shape, dtype=torch.float32, device=device)
    except RuntimeError as error:
        if device.type != "cpu":  # torch says which GPU, and how much memory it has left
            raise
        raise MemoryError(f"{name}: no memory for a tensor of shape {shape}: {error}") from None
