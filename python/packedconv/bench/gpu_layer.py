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
from packedconv.bench.protocol import WARMUP_SECONDS, run_rounds
from packedconv.bench.rows import pack_timed, sample_rows
from packedconv.device import DeviceError
from packedconv.layer import Layer
from packedconv.samples_file import IMPLEMENTATIONS, REQUIRED_IMPLEMENTATIONS
from packedconv.settings import Settings, contenders_of
from packedconv.weights import array_sha256, input_seed, make_input

Facts = typing.Dict[str, typing.Any]
# What keeps a contender from running, rather than being a fault of this program.
FAILURES = (RuntimeError, ValueError, TypeError, MemoryError)


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
    reason (facts: skipped). Raises DeviceError when that happens to "sparse" or "dense".
    """
    torch.set_num_threads(threads)
    before, begin = _moment(accelerator), time.perf_counter()
    protocol = settings["protocol"]
    array = make_input(layer, settings["seed"], settings["inputs"])
    skipped = {}  # type: typing.Dict[str, str]
    with torch.inference_mode():
        packed, packing_seconds = {}, {}
        for key, weight in weights.items():
            packed[key], packing_seconds[key] = pack_timed(torch.from_numpy(weight))
        data = _layer_data(accelerator, layer, torch.from_numpy(array), packed)
        mapping, mapping_facts, prepared = None, {}, {}  # type: ignore[var-annotated]
        for implementation in implementations(settings):
            try:
                if implementation == "sparse":
                    mapping, mapping_facts = sides.choose_mapping(
                        data, protocol["trial_executions"]
                    )
                    prepared[implementation] = sides.prepare_sparse(
                        data, implementation, "paper", mapping
                    )
                elif implementation == "sparse_column":
                    prepared[implementation] = sides.prepare_sparse(data, implementation, "column")
                else:
                    prepared[implementation] = sides.prepare_dense(
                        data, implementation, protocol["trial_executions"]
                    )
            except FAILURES as error:
                _skip(skipped, implementation, error, layer, accelerator)
        peak = Peak(accelerator)
        states = []  # type: typing.List[gpu_state.State]
        measured = run_rounds(
            {key: [prepared[name].contenders[key] for name in prepared] for key in packed},
            protocol["rounds"],
            protocol["executions"],
            protocol["warmup_executions"],
            input_seed(settings["seed"], layer),
            lambda: peak.burst(lambda: states.append(accelerator.state())),
            layer.name,
            _timer(accelerator, skipped, layer),
        )
        peak.burst(lambda: states.append(accelerator.state()))
    warn_of_clocks(layer.name, states)
    facts = {
        "device": settings["device"]["name"],
        "run": settings["run"],
        "layer": dict(layer._asdict()),
        "threads": threads,
        "weights": settings["weights"],
        "inputs": settings["inputs"],
        "input_sha256": array_sha256(array),
        "stated": {key: settings["device"].get(key) for key in ("peak_flops", "bandwidth")},
        "peak_of": PEAK_OF,
        "timing": {
            "by": "pairs of CUDA events; an execution's time is the mean within its pair, and that "
            "of its call where calling takes longer than computing",
            "pair_seconds": events.PAIR_SECONDS,
        },
        "rotation": data.rotation(),
        "mapping": mapping_facts,
        "implementations": {name: one.facts for name, one in prepared.items()},
        "skipped": skipped,
        "packing_seconds": packing_seconds,
        "packed_bytes": {key: weight.nbytes for key, weight in packed.items()},
        "subnormal_weights": {key: weight.subnormals for key, weight in packed.items()},
        "nonzeros_by_kernel_position": {
            key: (weight != 0).sum((0, 1)).tolist() for key, weight in data.weights.items()
        },
        "peak_bursts": measured.peak_bursts,
        "gpu_states": states,
        "clocks_moved": gpu_state.clocks_moved(states),
        "throttled": gpu_state.throttled(states),
        "warmup_seconds": WARMUP_SECONDS,
        "measuring_seconds": time.perf_counter() - begin,
        "before": before,
        "after": _moment(accelerator),
        "machine": dict(
            machine_facts(),
            tf32={
                name: sides.DENSE[name].switches.allow_tf32
                for name in prepared
                if name in sides.DENSE
            },
        ),
    }
    samples = [sample for sample in measured.samples if sample.implementation not in skipped]
    return sample_rows(settings, layer, packed, threads, samples), facts


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
    except FAILURES as error:
        if not is_out_of_memory(error):
            raise
        raise _cannot(layer, accelerator, "input and output", sides.reason_of(error)) from error


def _skip(
    skipped: typing.Dict[str, str],
    implementation: str,
    error: BaseException,
    layer: Layer,
    accelerator: typing.Any,
) -> None:
    """Note why a contender is left out. Raises DeviceError for one that must not be."""
    reason = sides.reason_of(error)
    if implementation in REQUIRED_IMPLEMENTATIONS:
        raise _cannot(layer, accelerator, implementation, reason) from error
    skipped[implementation] = reason
    print(f"layer {layer.name}: skipped {implementation}: {reason}", file=sys.stderr)
    try:
        accelerator.empty_cache()
    except RuntimeError:
        # The context is lost: whatever comes next says so.
        pass


def _cannot(layer: Layer, accelerator: typing.Any, what: str, reason: str) -> DeviceError:
    return DeviceError(
        f"layer {layer.name}: {what} cannot be timed on {accelerator.title}: {reason}; set a "
        "smaller batch or other layers in the configuration, or free the GPU of other work"
    )


def _timer(
    accelerator: typing.Any, skipped: typing.Dict[str, str], layer: Layer
) -> typing.Callable:
    """Times a block for run_rounds: no rows for what is skipped, from its failure on."""

    def time_block(
        contender: sides.GpuContender, executions: int, warmup_executions: int
    ) -> typing.Tuple[typing.List[float], int]:
        if contender.implementation in skipped:
            return [], 0
        try:
            with sides.switched(contender.switches):
                events.warm_up(contender.execute, contender.pace, warmup_executions)
                seconds = events.time_pairs(
                    accelerator, contender.execute, executions, contender.pace.executions
                )
        except FAILURES as error:
            _skip(skipped, contender.implementation, error, layer, accelerator)
            return [], 0
        return seconds, 0

    return time_block


def _moment(accelerator: typing.Any) -> Facts:
    return dict(moment(), gpu=accelerator.state())
