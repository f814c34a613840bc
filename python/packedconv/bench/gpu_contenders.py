"""What is timed on a GPU: two sparse kernels, and PyTorch's dense convolution in its settings."""

import contextlib
import typing

import numpy as np
import torch

import packedconv
from packedconv.bench import events
from packedconv.bench.accelerator import Mapping, SparsePlan, first_line, is_out_of_memory
from packedconv.bench.contenders import UnavailableError
from packedconv.layer import Layer

# Slices of the output channels along grid z, a value at run time, that each compiled mapping
# is tried with.
SLICES = (1, 2, 4)
MAPPING_FIELDS = ("col_per_warp", "rows_per_thread", "warps_per_block", "slices")
# Mappings that are timed again after the first trial of all.
FINALISTS = 8
# A copy in the rotation may take no more than this share of the memory that is left.
_ROTATION_MEMORY_SHARE = 0.25

Facts = typing.Dict[str, typing.Any]


class Switches(typing.NamedTuple):
    """PyTorch's global switches for convolutions: TF32 allowed, algorithms benchmarked."""

    allow_tf32: bool
    benchmark: bool


class GpuContender(typing.NamedTuple):
    """One side of a comparison, ready to be queued.

    implementation, layout: as in samples.csv. execute: queues one execution. switches: of
    PyTorch while it executes, None where they are of no matter. pace: of a pair of events.
    """

    implementation: str
    layout: str
    execute: events.Execute
    switches: typing.Optional[Switches]
    pace: events.Pace


class Prepared(typing.NamedTuple):
    """A contender for every sparsity key, and the facts of it."""

    contenders: typing.Dict[str, GpuContender]
    facts: Facts


class Dense(typing.NamedTuple):
    """A setting of PyTorch's convolution; with several layouts the fastest is timed."""

    switches: Switches
    layouts: typing.Tuple[str, ...]
    dtype: torch.dtype


# "dense" are PyTorch's defaults. TF32 rounds products to 10 bits of mantissa and is on by
# default; FP16 is a class of its own. Benchmarking lets cuDNN pick the fastest algorithm.
DENSE = {
    "dense": Dense(Switches(True, False), ("nchw",), torch.float32),
    "dense_fp32": Dense(Switches(False, True), ("nchw",), torch.float32),
    "dense_tf32": Dense(Switches(True, True), ("nchw",), torch.float32),
    "dense_fp16": Dense(Switches(True, True), ("nchw", "channels_last"), torch.float16),
    "dense_channels_last": Dense(Switches(False, True), ("channels_last",), torch.float32),
}


class LayerData:
    """What the contenders of a layer share on a GPU.

    packed and weights (dense, as packed) by sparsity key; image: (N, IC, H, W); out: where
    sparse kernels write. dense weights and all copies of the image lie on the device.
    """

    def __init__(
        self,
        accelerator: typing.Any,
        layer: Layer,
        image: torch.Tensor,
        packed: typing.Mapping[str, "packedconv.PackedWeight"],
    ) -> None:
        self.accelerator = accelerator
        self.layer = layer
        self.packed = packed
        self.image = image.to(accelerator.device)
        self.out = torch.zeros(layer.output_shape, device=accelerator.device)
        self.weights = {key: packed[key].unpack().to(accelerator.device) for key in packed}
        self._inputs = {}  # type: typing.Dict[typing.Tuple[str, torch.dtype], typing.List]

    @property
    def first_key(self) -> str:
        """The sparsity that trials are made at: the first of the settings."""
        return next(iter(self.packed))

    def inputs(self, layout: str = "nchw", dtype: torch.dtype = torch.float32) -> typing.List:
        """Copies of the image to go round, in a layout and type; made once."""
        if (layout, dtype) not in self._inputs:
            first = convert(self.image, layout, dtype)
            size = first.numel() * first.element_size()
            wanted = events.rotation_count(size, self.accelerator.l2_bytes)
            room = int(_ROTATION_MEMORY_SHARE * self.accelerator.free_bytes() / size)
            copies = [first]
            while len(copies) < min(wanted, 1 + room):
                copies.append(first.clone(memory_format=torch.preserve_format))
            self._inputs[layout, dtype] = copies
        return self._inputs[layout, dtype]

    def rotation(self) -> Facts:
        """Number and bytes of the copies of the input, by layout and type."""
        return {
            "copies": {
                f"{layout} {str(dtype).split('.')[-1]}": len(copies)
                for (layout, dtype), copies in self._inputs.items()
            },
            "l2_bytes": self.accelerator.l2_bytes,
            "factor": events.ROTATION_FACTOR,
        }


@contextlib.contextmanager
def switched(switches: typing.Optional[Switches]) -> typing.Iterator[None]:
    """PyTorch's global switches set while the block runs, and put back whatever happens."""
    if switches is None:
        yield
        return
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark
    try:
        cudnn.allow_tf32 = matmul.allow_tf32 = switches.allow_tf32
        cudnn.benchmark = switches.benchmark
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark = before


def convert(tensor: torch.Tensor, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in a layout and type; itself where it has both already."""
    formats = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}
    return tensor.to(dtype).contiguous(memory_format=formats[layout])


def all_mappings(accelerator: typing.Any) -> typing.List[Mapping]:
    """Mappings of the ablation: every compiled one with every number of slices."""
    return [(*mapping[:3], slices) for mapping in accelerator.mappings() for slices in SLICES]


def mapping_facts(mapping: Mapping) -> Facts:
    return dict(zip(MAPPING_FIELDS, mapping))


def sparse_execute(
    data: LayerData, key: str, implementation: str, config: typing.Optional[Mapping] = None
) -> events.Execute:
    """Queues a sparse kernel on the copies of the image in turn."""
    accelerator, layer, packed, out = data.accelerator, data.layer, data.packed[key], data.out
    following = events.rotate(data.inputs())

    def execute() -> None:
        accelerator.sparse(layer, following(), packed, out, implementation, config)

    return execute


class MappingTrial:
    """One mapping of the paper's kernel on trial: seconds by pair, or why it was skipped."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.seconds = []  # type: typing.List[float]
        self.executions = 0
        self.skipped = None  # type: typing.Optional[str]

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))


def try_mappings(
    data: LayerData, key: str, pairs: int, finalists: typing.Optional[int] = None
) -> typing.List[MappingTrial]:
    """Time every mapping at one sparsity: one pair of events each, then `pairs` more, of the
    fastest `finalists` going round them, or without that of each at once.

    A mapping that does not fit the device is skipped with its reason.
    """
    accelerator = data.accelerator
    trials = [MappingTrial(mapping) for mapping in all_mappings(accelerator)]
    executes = {}
    for trial in trials:
        try:
            accelerator.plan(data.layer, data.packed[key], "paper", trial.mapping)
            execute = sparse_execute(data, key, "paper", trial.mapping)
            pace = events.calibrate(accelerator, execute)
        except (RuntimeError, ValueError, MemoryError) as error:
            trial.skipped = first_line(error)
            continue
        trial.executions, trial.seconds = pace.executions, [pace.seconds]
        executes[trial.mapping] = execute
    timed = sorted((trial for trial in trials if not trial.skipped), key=lambda one: one.median)
    # One after another for all, since plans are kept for a few dozen of them only.
    rounds, each = (1, pairs) if finalists is None else (pairs, 1)
    for _ in range(rounds):
        for trial in timed[:finalists]:
            execute = executes[trial.mapping]
            execute()
            trial.seconds += events.time_pairs(accelerator, execute, each, trial.executions)
    return trials


def choose_mapping(data: LayerData, pairs: int) -> typing.Tuple[Mapping, Facts]:
    """The fastest mapping of the paper's kernel for the layer, by the median of its pairs at
    the first sparsity, and the facts of all trials: MAPPING_FIELDS of the choice, trials.

    Raises UnavailableError where no mapping runs.
    """
    trials = try_mappings(data, data.first_key, pairs, FINALISTS)
    finalists = [trial for trial in trials if len(trial.seconds) > min(1, pairs)]
    if not finalists:
        reasons = sorted({trial.skipped or "" for trial in trials})
        raise UnavailableError(f"no mapping of the paper's kernel runs: {reasons[0]}")
    best = min(finalists, key=lambda trial: trial.median)
    recorded = []
    for trial in trials:
        entry = dict(mapping_facts(trial.mapping), seconds=trial.seconds)
        recorded.append(dict(entry, skipped=trial.skipped) if trial.skipped else entry)
    facts = dict(mapping_facts(best.mapping), key=data.first_key, trials=recorded)
    return best.mapping, facts


def prepare_sparse(
    data: LayerData,
    implementation: str,
    kernel: str,
    config: typing.Optional[Mapping] = None,
) -> Prepared:
    """A sparse kernel for every sparsity. Raises what keeps it from running."""
    plan = data.accelerator.plan(data.layer, data.packed[data.first_key], kernel, config)
    executes = {key: sparse_execute(data, key, kernel, config) for key in data.packed}
    prepared = _prepare(data, implementation, "packed", executes, None)
    return prepared._replace(facts=dict(prepared.facts, plan=plan_facts(plan)))


def plan_facts(plan: SparsePlan) -> Facts:
    """A plan as JSON can hold it."""
    facts = {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in plan.facts.items()
    }
    return dict(facts, kernel=plan.kernel, why=plan.why)


def prepare_dense(data: LayerData, implementation: str, pairs: int) -> Prepared:
    """A setting of PyTorch's convolution for every sparsity; of several layouts the fastest
    by the median of `pairs` pairs at the first one.

    Input and weight are brought into layout and type outside an execution; how long that
    takes for input and output is in the facts (conversion_seconds). The output is allocated
    by each execution: PyTorch's allocator hands out the same memory again.
    Raises UnavailableError, or what keeps it from running.
    """
    setting = DENSE[implementation]
    capability = tuple(data.accelerator.compute_capability)
    if implementation == "dense_tf32" and capability < (8, 0):
        raise UnavailableError(
            "TF32 needs compute capability 8.0, this GPU has {}.{}".format(*capability)
        )
    trials, skipped = {}, {}
    with switched(setting.switches):
        for layout in setting.layouts:
            try:
                execute = _dense_execute(data, data.first_key, implementation, layout)
                pace = events.calibrate(data.accelerator, execute)
                trials[layout] = events.time_pairs(
                    data.accelerator, execute, pairs, pace.executions
                )
            except (RuntimeError, MemoryError) as error:
                if layout == setting.layouts[-1] and not trials:
                    raise
                skipped[layout] = first_line(error)
    layout = min(trials, key=lambda name: float(np.median(trials[name])))
    executes = {key: _dense_execute(data, key, implementation, layout) for key in data.weights}
    prepared = _prepare(data, implementation, layout, executes, setting.switches)
    facts = dict(prepared.facts, dtype=str(setting.dtype).split(".")[-1])
    facts["conversion_seconds"] = _conversion_seconds(data, layout, setting.dtype)
    if len(setting.layouts) > 1:
        facts["layout_trials"] = {"seconds": trials, "skipped": skipped}
    return prepared._replace(facts=facts)


def _dense_execute(data: LayerData, key: str, implementation: str, layout: str) -> events.Execute:
    dtype, layer = DENSE[implementation].dtype, data.layer
    weight = convert(data.weights[key], layout, dtype)
    if implementation == "dense_tf32":
        weight = _apart(weight)
    following = events.rotate(data.inputs(layout, dtype))

    def execute() -> None:
        torch.nn.functional.conv2d(following(), weight, stride=layer.stride, padding=layer.padding)

    return execute


def _apart(weight: torch.Tensor) -> torch.Tensor:
    """A copy of the weight, 16 bytes behind the start of its memory.

    PyTorch keeps the algorithm of a convolution by its shape, type, alignment and whether
    TF32 is allowed, but not by whether it was benchmarked: without another alignment the
    first of "dense" and "dense_tf32" would pick for both. 16 bytes are what a kernel loads
    at once.
    """
    items = 16 // weight.element_size()
    room = torch.empty(weight.numel() + items, dtype=weight.dtype, device=weight.device)
    return room[items:].view(weight.shape).copy_(weight)


def _conversion_seconds(
    data: LayerData, layout: str, dtype: torch.dtype
) -> typing.Optional[typing.Dict[str, float]]:
    """Seconds to bring an input there and an output back; None where nothing is converted."""
    if (layout, dtype) == ("nchw", torch.float32):
        return None
    accelerator, image = data.accelerator, data.image
    output = convert(data.out, layout, dtype)
    seconds = {}
    for name, execute in (
        ("input", lambda: convert(image, layout, dtype)),
        ("output", lambda: convert(output, "nchw", torch.float32)),
    ):
        pace = events.calibrate(accelerator, execute)
        seconds[name] = float(
            np.median(events.time_pairs(accelerator, execute, 5, pace.executions))
        )
    return seconds


def _prepare(
    data: LayerData,
    implementation: str,
    layout: str,
    executes: typing.Mapping[str, events.Execute],
    switches: typing.Optional[Switches],
) -> Prepared:
    """Contenders with their pace, and the facts that all kinds have."""
    accelerator = data.accelerator
    contenders = {}
    with switched(switches):
        first = executes[data.first_key]
        first()
        accelerator.synchronize()
        accelerator.empty_cache()
        standing = accelerator.start_memory()
        first()
        accelerator.synchronize()
        peak = accelerator.peak_memory()
        kernels, reason = accelerator.kernels(first)
        for key, execute in executes.items():
            pace = events.calibrate(accelerator, execute)
            contenders[key] = GpuContender(implementation, layout, execute, switches, pace)
    facts = {
        "layout": layout,
        "switches": dict(switches._asdict()) if switches else None,
        "kernels": kernels,
        "kernels_unknown": reason,
        "max_memory_allocated": peak,
        "memory_standing": standing,
        "executions_per_pair": {key: one.pace.executions for key, one in contenders.items()},
    }
    accelerator.empty_cache()
    return Prepared(contenders, facts)


def reason_of(error: BaseException) -> str:
    """Why a contender was skipped, in one line."""
    if is_out_of_memory(error):
        return f"out of memory: {first_line(error)}"
    return first_line(error)
