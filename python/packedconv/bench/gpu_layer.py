"""One layer on a GPU: every contender in interleaved rounds, and the facts of it."""

import sys
import time
import typing

import torch

from packedconv.bench import events, gpu_state
from packedconv.bench import gpu_contenders as sides
from packedconv.bench.accelerator import is_out_of_memory
from packedconv.bench.gpu_ceilings import PEAK_OF, Peak
from packedconv.bench.machine import machine_facts, moment
from packedconv.bench.protocol import WARMUP_SECONDS, StopRounds, run_rounds
from packedconv.bench.rows import layer_facts, pack_timed, sample_rows
from packedconv.device import DeviceError
from packedconv.layer import Layer
from packedconv.samples_file import IMPLEMENTATIONS, REQUIRED_IMPLEMENTATIONS
from packedconv.settings import Settings, contenders_of
from packedconv.weights import input_seed, make_input

Facts = typing.Dict[str, typing.Any]


def implementations(settings: Settings) -> typing.Tuple[str, ...]:
    """What a run on a GPU times: all of IMPLEMENTATIONS, or the paper's two sides."""
    if contenders_of(settings) == "paper-protocol":
        return REQUIRED_IMPLEMENTATIONS
    return IMPLEMENTATIONS


def measure_layer(
    settings: Settings,
    layer: Layer,
    weights: typing.Mapping[str, typing.Any],
    threads: int,
    accelerator: typing.Any,
) -> typing.Tuple[typing.List[Facts], Facts]:
    """Rows of the samples file and facts of one layer on a GPU.

    A sample is a pair of events around several executions, its seconds their mean. A
    contender that does not run, or runs out of memory during a round, is left out with its
    reason (facts: skipped). Raises DeviceError when "sparse" or "dense" does not run at all.
    When one of them, or the load between rounds, fails later, the rounds end and the facts say
    why (stopped): the rows are then what was timed until that.
    """
    torch.set_num_threads(threads)
    before, begin = _moment(accelerator), time.perf_counter()
    protocol = settings["protocol"]
    array = make_input(layer, settings["seed"], settings["inputs"])
    with torch.inference_mode():
        packed, packing_seconds = {}, {}
        for key, weight in weights.items():
            packed[key], packing_seconds[key] = pack_timed(torch.from_numpy(weight))
        # Before the device is used: afterwards it may be lost.
        facts = layer_facts(settings, layer, threads, array, packed, packing_seconds)
        data = _layer_data(accelerator, layer, torch.from_numpy(array), packed)
        group = _Contenders(data)
        for implementation in implementations(settings):
            group.prepare(implementation, protocol["trial_executions"])
        peak = Peak(accelerator)
        states = []  # type: typing.List[gpu_state.State]
        measured = run_rounds(
            group.by_key,
            protocol["rounds"],
            protocol["executions"],
            protocol["warmup_executions"],
            input_seed(settings["seed"], layer),
            lambda: _burst(peak, states, layer, accelerator),
            layer.name,
            group.time_block,
        )
        stopped = measured.stopped
        if not stopped:
            try:
                _burst(peak, states, layer, accelerator)
                group.note_kernels()
            except StopRounds as stop:
                stopped = str(stop)
    warn_of_clocks(layer.name, states)
    facts.update(
        stated={key: settings["device"].get(key) for key in ("peak_flops", "bandwidth")},
        peak_of=PEAK_OF,
        timing={
            "by": "pairs of CUDA events; an execution's time is the mean within its pair, and that "
            "of its call where calling takes longer than computing (call_bound)",
            "pair_seconds": events.PAIR_SECONDS,
            "call_bound_share": events.CALL_BOUND_SHARE,
        },
        rotation=data.rotation(),
        mapping=group.mappings,
        implementations=group.facts,
        skipped=group.skipped,
        peak_bursts=measured.peak_bursts,
        gpu_states=states,
        clocks_moved=gpu_state.clocks_moved(states),
        throttled=gpu_state.throttled(states),
        warmup_seconds=WARMUP_SECONDS,
        measuring_seconds=time.perf_counter() - begin,
        before=before,
        after=_moment(accelerator),
        machine=dict(
            machine_facts(),
            tf32={
                name: sides.DENSE[name].switches.allow_tf32
                for name in group.facts
                if name in sides.DENSE
            },
        ),
    )
    if stopped:
        facts["stopped"] = stopped
    samples = [one for one in measured.samples if one.implementation not in group.skipped]
    return sample_rows(settings, layer, packed, threads, samples), facts


class _Contenders:
    """The contenders of a layer, those that fail left out.

    by_key: those in the rounds, by sparsity key. facts: of those that were prepared, by
    implementation. mappings: of the paper's kernel, by sparsity key. skipped: reasons.
    """

    def __init__(self, data: sides.LayerData) -> None:
        self._data = data
        self._forms = {}  # type: typing.Dict[str, sides.Form]
        self.by_key = {key: [] for key in data.packed}  # type: typing.Dict[str, typing.List]
        self.facts = {}  # type: typing.Dict[str, Facts]
        self.mappings = {}  # type: typing.Dict[str, Facts]
        self.skipped = {}  # type: typing.Dict[str, str]

    def prepare(self, implementation: str, pairs: int) -> None:
        """Add a contender after `pairs` trials, or note why not.

        Raises DeviceError for one that must not be left out.
        """
        reason = None
        try:
            prepared = self._prepared(implementation, pairs)
        except sides.FAILURES as error:
            reason = sides.reason_of(error)
        # Not within the block above, where the error still holds tensors.
        if reason is not None:
            if implementation in REQUIRED_IMPLEMENTATIONS:
                raise self._cannot(implementation, reason)
            self._skip(implementation, reason)
            return
        for key, contender in prepared.contenders.items():
            self.by_key[key].append(contender)
        self.facts[implementation] = prepared.facts
        self._forms[implementation] = prepared.form
        self._data.keep_inputs(self._forms.values())

    def time_block(
        self, contender: sides.GpuContender, executions: int, warmup_executions: int
    ) -> typing.Tuple[typing.List[float], int]:
        """Times a block for run_rounds: no rows for what is skipped, from its failure on.

        Raises StopRounds when "sparse" or "dense" fails.
        """
        if contender.implementation in self.skipped:
            return [], 0
        try:
            with sides.switched(contender.switches):
                events.warm_up(contender.execute, contender.pace, warmup_executions)
                seconds = events.time_pairs(
                    self._data.accelerator,
                    contender.execute,
                    executions,
                    contender.pace.executions,
                )
            return seconds, 0
        except sides.FAILURES as error:
            reason = sides.reason_of(error)
        if contender.implementation in REQUIRED_IMPLEMENTATIONS:
            raise StopRounds(str(self._cannot(contender.implementation, reason)))
        self._skip(contender.implementation, reason)
        return [], 0

    def note_kernels(self) -> None:
        """Add to the facts which kernels each contender launches, at the first sparsity."""
        for contender in self.by_key[self._data.first_key]:
            found = sides.kernel_facts(self._data.accelerator, contender)
            self.facts[contender.implementation].update(found)

    def _prepared(self, implementation: str, pairs: int) -> sides.Prepared:
        if implementation == "sparse":
            mappings, self.mappings = sides.choose_mappings(self._data, pairs)
            return sides.prepare_sparse(self._data, implementation, "paper", mappings)
        if implementation == "sparse_column":
            return sides.prepare_sparse(self._data, implementation, "column")
        return sides.prepare_dense(self._data, implementation, pairs)

    def _skip(self, implementation: str, reason: str) -> None:
        self.skipped[implementation] = reason
        layer = self._data.layer.name
        print(f"layer {layer}: skipped {implementation}: {reason}", file=sys.stderr)
        # A round that is under way holds its blocks until it ends.
        for key, group in self.by_key.items():
            self.by_key[key][:] = [one for one in group if one.implementation != implementation]
        self._forms.pop(implementation, None)
        try:
            self._data.keep_inputs(self._forms.values())
        except RuntimeError:
            # The context is lost: whatever comes next says so.
            pass

    def _cannot(self, implementation: str, reason: str) -> DeviceError:
        return _cannot(self._data.layer, self._data.accelerator, implementation, reason)


def _burst(
    peak: Peak, states: typing.List[gpu_state.State], layer: Layer, accelerator: typing.Any
) -> float:
    try:
        return peak.burst(states)
    except sides.FAILURES as error:
        reason = sides.reason_of(error)
    raise StopRounds(str(_cannot(layer, accelerator, "the load between rounds", reason)))


def warn_of_clocks(title: str, states: typing.Sequence[gpu_state.State]) -> None:
    """Say on stderr that the clocks moved, or that nothing told them."""
    moved = gpu_state.clocks_moved(states)
    slowed = gpu_state.throttled(states)
    if moved or slowed:
        print(
            f"warning: layer {title}: the clocks moved ({gpu_state.describe_clocks(states)}): "
            "times of different rounds are not alike; lock the clocks (nvidia-smi "
            "--lock-gpu-clocks, or jetson_clocks on a Jetson) and measure again",
            file=sys.stderr,
        )
    elif moved is None:
        print(
            f"warning: layer {title}: neither nvidia-smi nor sysfs tells the clocks of this "
            "GPU: whether they moved is not known",
            file=sys.stderr,
        )


def _layer_data(
    accelerator: typing.Any,
    layer: Layer,
    image: torch.Tensor,
    packed: typing.Mapping[str, typing.Any],
) -> sides.LayerData:
    try:
        return sides.LayerData(accelerator, layer, image, packed)
    except sides.FAILURES as error:
        if not is_out_of_memory(error):
            raise
        raise _cannot(layer, accelerator, "input and output", sides.reason_of(error)) from error


def _cannot(layer: Layer, accelerator: typing.Any, what: str, reason: str) -> DeviceError:
    return DeviceError(
        f"layer {layer.name}: {what} cannot be timed on {accelerator.title}: {reason}; set a "
        "smaller batch or other layers in the configuration, or free the GPU of other work"
    )


def _moment(accelerator: typing.Any) -> Facts:
    return dict(moment(), gpu=accelerator.state())
