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
from packedconv.samples_file import MAPPING_FIELDS

# Slices of the output channels along grid z, a value at run time, that each compiled mapping
# is tried with.
TRIED_SLICES = (1, 2, 4)
# Mappings that are timed again after the first trial of all.
FINALISTS = 8
# What keeps a contender from running: the device or its memory. Anything else is a fault of
# this program, and ends it.
FAILURES = (RuntimeError, MemoryError)
# A copy in the rotation may take no more than this share of the memory that is left.
_ROTATION_MEMORY_SHARE = 0.25

Facts = typing.Dict[str, typing.Any]
# Layout and type of an input.
Form = typing.Tuple[str, torch.dtype]
PLAIN = ("nchw", torch.float32)


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
    """A contender for every sparsity key, the form of its input, and the facts of it."""

    contenders: typing.Dict[str, GpuContender]
    form: Form
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
        self._inputs = {}  # type: typing.Dict[Form, typing.List]
        self._rotation = {}  # type: typing.Dict[str, int]

    @property
    def first_key(self) -> str:
        """The first sparsity of the settings: layouts are tried and kernels named at it."""
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
            self._rotation[f"{layout} {str(dtype).split('.')[-1]}"] = len(copies)
        return self._inputs[layout, dtype]

    def keep_inputs(self, forms: typing.Iterable[Form]) -> None:
        """Drop copies of all other forms; memory of those that nobody holds is given back."""
        wanted = set(forms)
        for form in set(self._inputs) - wanted:
            del self._inputs[form]
        self.accelerator.empty_cache()

    def rotation(self) -> Facts:
        """Number of copies of the input that went round, by layout and type."""
        return {
            "copies": dict(self._rotation),
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
    return [(*mapping[:3], slices) for mapping in accelerator.mappings() for slices in TRIED_SLICES]


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
    """One mapping of the paper's kernel on trial: its pace, seconds by pair of a finalist, or
    why it was skipped."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.pace = None  # type: typing.Optional[events.Pace]
        self.seconds = []  # type: typing.List[float]
        self.skipped = None  # type: typing.Optional[str]

    @property
    def median(self) -> float:
        """Of the pairs; the one that set the pace is none of them."""
        return float(np.median(self.seconds))

    def facts(self) -> Facts:
        facts = dict(mapping_facts(self.mapping), seconds=self.seconds)
        if self.pace is not None:
            facts["pace_seconds"] = self.pace.seconds
        return dict(facts, skipped=self.skipped) if self.skipped else facts


def try_mappings(
    data: LayerData, key: str, pairs: int, finalists: typing.Optional[int] = None
) -> typing.List[MappingTrial]:
    """Time every mapping at one sparsity: a pair of events each, which sets its pace, then
    `pairs` more, of the fastest `finalists` going round them, or without that of each at once.

    A mapping that does not fit the device is skipped with its reason.
    """
    accelerator = data.accelerator
    trials = [MappingTrial(mapping) for mapping in all_mappings(accelerator)]
    timed = []
    for trial in trials:
        try:
            plan(data, key, "paper", trial.mapping)
            execute = sparse_execute(data, key, "paper", trial.mapping)
            trial.pace = events.calibrate(accelerator, execute)
        except FAILURES as error:
            trial.skipped = first_line(error)
        else:
            timed.append((trial.pace, trial, execute))
    timed.sort(key=lambda one: one[0].seconds)
    # One after another for all, since plans are kept for a few dozen of them only.
    rounds, each = (1, pairs) if finalists is None else (pairs, 1)
    for _ in range(rounds):
        for pace, trial, execute in timed[:finalists]:
            execute()
            trial.seconds += events.time_pairs(accelerator, execute, each, pace.executions)
    return trials


def choose_mappings(
    data: LayerData, pairs: int
) -> typing.Tuple[typing.Dict[str, Mapping], typing.Dict[str, Facts]]:
    """The fastest mapping of the paper's kernel for the layer at every sparsity key, by the
    median of its pairs there, and the facts of it: MAPPING_FIELDS, and trials of all mappings.

    Raises UnavailableError where no mapping runs.
    """
    chosen, facts = {}, {}
    for key in data.packed:
        trials = try_mappings(data, key, pairs, FINALISTS)
        finalists = [trial for trial in trials if trial.seconds]
        if not finalists:
            reasons = sorted({trial.skipped or "" for trial in trials})
            raise UnavailableError(f"no mapping of the paper's kernel runs: {reasons[0]}")
        chosen[key] = min(finalists, key=lambda trial: trial.median).mapping
        recorded = [trial.facts() for trial in trials]
        facts[key] = dict(mapping_facts(chosen[key]), trials=recorded)
    return chosen, facts


def plan(
    data: LayerData, key: str, kernel: str, config: typing.Optional[Mapping] = None
) -> SparsePlan:
    """How a kernel runs the layer at a sparsity. Raises UnavailableError where it does not fit."""
    try:
        return data.accelerator.plan(data.layer, data.packed[key], kernel, config)
    except ValueError as error:
        raise UnavailableError(first_line(error)) from error


def prepare_sparse(
    data: LayerData,
    implementation: str,
    kernel: str,
    configs: typing.Optional[typing.Mapping[str, Mapping]] = None,
) -> Prepared:
    """A sparse kernel for every sparsity, planned (and with `configs` mapped) for each.

    Raises UnavailableError, or what else keeps it from running.
    """
    chosen = dict.fromkeys(data.packed) if configs is None else configs
    plans = {key: plan_facts(plan(data, key, kernel, chosen[key])) for key in data.packed}
    executes = {key: sparse_execute(data, key, kernel, chosen[key]) for key in data.packed}
    prepared = _prepare(data, implementation, "packed", PLAIN, executes, None)
    return prepared._replace(facts=dict(prepared.facts, plans=plans))


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
            except FAILURES as error:
                if layout == setting.layouts[-1] and not trials:
                    raise
                skipped[layout] = first_line(error)
            if layout in skipped:
                # Not within the block above, where the error still holds tensors.
                data.accelerator.empty_cache()
    layout = min(trials, key=lambda name: float(np.median(trials[name])))
    executes = {key: _dense_execute(data, key, implementation, layout) for key in data.weights}
    form = layout, setting.dtype
    prepared = _prepare(data, implementation, layout, form, executes, setting.switches)
    facts = dict(prepared.facts, dtype=str(setting.dtype).split(".")[-1])
    facts["conversion_seconds"] = _conversion_seconds(data, layout, setting.dtype)
    if len(setting.layouts) > 1:
        facts["layout_trials"] = {"seconds": trials, "skipped": skipped}
    return prepared._replace(facts=facts)


def _dense_execute(data: LayerData, key: str, implementation: str, layout: str) -> events.Execute:
    dtype, layer = DENSE[implementation].dtype, data.layer
    weight = dense_weight(data.weights[key], implementation, layout)
    following = events.rotate(data.inputs(layout, dtype))

    def execute() -> None:
        torch.nn.functional.conv2d(following(), weight, **layer.conv2d_arguments)

    return execute


def dense_weight(weight: torch.Tensor, implementation: str, layout: str) -> torch.Tensor:
    """A weight as a dense contender has it: in layout and type, "dense_tf32" with an alignment
    of its own."""
    weight = convert(weight, layout, DENSE[implementation].dtype)
    return _apart(weight) if implementation == "dense_tf32" else weight


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
    if (layout, dtype) == PLAIN:
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
    form: Form,
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
        for key, execute in executes.items():
            pace = events.calibrate(accelerator, execute)
            contenders[key] = GpuContender(implementation, layout, execute, switches, pace)
    facts = {
        "layout": layout,
        "switches": dict(switches._asdict()) if switches else None,
        "max_memory_allocated": peak,
        "memory_standing": standing,
        "executions_per_pair": {key: one.pace.executions for key, one in contenders.items()},
        "pace_seconds": {key: one.pace.seconds for key, one in contenders.items()},
        "queue_seconds": {key: one.pace.queue_seconds for key, one in contenders.items()},
        "call_bound": [key for key, one in contenders.items() if one.pace.call_bound],
    }
    accelerator.empty_cache()
    return Prepared(contenders, form, facts)


def kernel_facts(accelerator: typing.Any, contender: GpuContender) -> Facts:
    """Names of the kernels that an execution launches, or why they are not known.

    For after all timing: a profiler may stay attached and slow every launch.
    """
    with switched(contender.switches):
        kernels, reason = accelerator.kernels(contender.execute)
    return {"kernels": kernels, "kernels_unknown": reason}


def reason_of(error: BaseException) -> str:
    """Why a contender was skipped, in one line."""
    if is_out_of_memory(error):
        return f"out of memory: {first_line(error)}"
    return first_line(error)
