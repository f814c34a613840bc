"""Layers beside the paper's on a CPU: their tables, warm and cold, and the ladder of schedules."""

import functools
import time
import typing

import numpy as np
import torch

import packedconv
from packedconv import conv, cpu
from packedconv.bench import contenders as sides
from packedconv.bench.ceilings import peak_flops
from packedconv.bench.check import compare_with_float64, require_within_bound
from packedconv.bench.contenders import Contender
from packedconv.bench.experiment import Experiment
from packedconv.bench.machine import largest_cache_bytes, machine_facts, moment
from packedconv.bench.protocol import (
    PEAK_BURST_SECONDS,
    WARMUP_SECONDS,
    Measurement,
    minor_faults,
    run_rounds,
    time_executions,
)
from packedconv.bench.rotation import Rotation, copies, pair_bytes
from packedconv.bench.rows import layer_facts, pack_timed, sample_rows
from packedconv.bench.rungs import Rung, climb
from packedconv.bench.spread import spread
from packedconv.script import CheckError
from packedconv.settings import Settings
from packedconv.weights import input_seed, make_input, make_weight, sparsity_key

Row = typing.Dict[str, typing.Any]
Facts = typing.Dict[str, typing.Any]
Groups = typing.Dict[str, typing.List[Contender]]
# From an input into an output.
Convolve = typing.Callable[[torch.Tensor, torch.Tensor], typing.Any]

# An execution that takes longer is timed once a round: the ladder's lowest rungs.
SLOW_SECONDS = 0.05


class Prepared:
    """A layer at its sparsities: input, packed weights, and what a dense side computes with.

    packed, dense: by sparsity key.
    """

    def __init__(self, settings: Settings, experiment: Experiment, threads: int) -> None:
        layer = experiment.layer
        self.settings, self.experiment, self.threads = settings, experiment, threads
        self.array = make_input(layer, settings["seed"], settings["inputs"])
        # Cloned, since torch aligns its own memory to cache lines and numpy does not.
        self.image = torch.from_numpy(self.array).clone()
        self.packed = {}  # type: typing.Dict[str, packedconv.PackedWeight]
        self.packing_seconds = {}  # type: typing.Dict[str, float]
        for sparsity in experiment.sparsities:
            weight = make_weight(layer, sparsity, settings["seed"], settings["weights"])
            key = sparsity_key(sparsity)
            self.packed[key], self.packing_seconds[key] = pack_timed(torch.from_numpy(weight))
        self.dense = {key: packed.unpack() for key, packed in self.packed.items()}

    def checked_output(self, key: str, convolve: Convolve, name: str) -> torch.Tensor:
        """What a convolution gives. Raises CheckError where it leaves its bound."""
        layer = self.experiment.layer
        # An output that a kernel does not write stays NaN.
        out = torch.full(layer.output_shape, float("nan"))
        convolve(self.image, out)
        found = compare_with_float64(out, layer, self.image, self.dense[key])
        sparsity = {sparsity_key(value): value for value in self.experiment.sparsities}[key]
        require_within_bound(layer, sparsity, found, name)
        return out

    def rows(self, samples: typing.Iterable[typing.Any], attempt: int) -> typing.List[Row]:
        """Rows of the samples file."""
        settings = dict(self.settings, sparsities=self.experiment.sparsities)
        rows = sample_rows(settings, self.experiment.layer, self.packed, self.threads, samples)
        for row in rows:
            row["attempt"] = attempt
            if row["implementation"] == "sparse_one_thread":
                row["threads"] = 1
        return rows

    def facts(self) -> Facts:
        """What the facts of every experiment have."""
        settings = dict(self.settings, sparsities=self.experiment.sparsities)
        return layer_facts(
            settings,
            self.experiment.layer,
            self.threads,
            self.array,
            self.packed,
            self.packing_seconds,
        )


def measure_layer(
    settings: Settings, experiment: Experiment, threads: int
) -> typing.Tuple[typing.List[Row], Facts]:
    """Rows of the samples file and facts of one layer of a table, on `threads` threads.

    Raises CheckError when an output is wrong.
    """
    torch.set_num_threads(threads)
    reused = sides.reuse_memory()
    before, begin = moment(), time.perf_counter()
    layer = experiment.layer
    with torch.inference_mode():
        prepared = Prepared(settings, experiment, threads)
        rotation, rotated = None, None
        if experiment.set_bytes is not None:
            count = copies(layer, experiment.set_bytes)
            rotation = Rotation(layer, prepared.image, count)
            rotated = {
                "copies": count,
                "set_bytes": count * pair_bytes(layer),
                "cache_bytes": largest_cache_bytes(),
            }
        plans = {
            key: packed.plan(layer.input_shape, threads=threads, **layer.conv2d_arguments)
            for key, packed in prepared.packed.items()
        }
        groups, dense = _table_contenders(prepared, rotation)
        rows, measured = _rounds(prepared, groups)
    facts = {
        "plans": {
            key: {"schedule": plan.schedule, "facts": plan.facts, "why": plan.why}
            for key, plan in plans.items()
        },
        "dense": dense,
        "rotated": rotated,
    }
    return rows, dict(_facts(prepared, measured, before, begin, reused), **facts)


def measure_ladder(
    settings: Settings, experiment: Experiment, threads: int
) -> typing.Tuple[typing.List[Row], Facts]:
    """Rows and facts of the ladder of one layer: every rung of its plan's schedule, and dense.

    Raises CheckError when an output is wrong.
    """
    torch.set_num_threads(threads)
    reused = sides.reuse_memory()
    before, begin = moment(), time.perf_counter()
    layer = experiment.layer
    out = torch.full(layer.output_shape, 0.0)
    groups, rungs, left_out = {}, {}, {}  # type: Groups, Facts, Facts
    with torch.inference_mode():
        prepared = Prepared(settings, experiment, threads)
        make_dense, dense = _dense(prepared, None)
        for key, packed in prepared.packed.items():
            found, left_out[key] = climb(
                packed.plan(layer.input_shape, threads=threads, **layer.conv2d_arguments).schedule,
                functools.partial(_require_plan, prepared, key),
                layer.in_channels // layer.groups,
            )
            rungs[key] = [dict(rung._asdict()) for rung in found]
            groups[key] = [_rung_contender(prepared, key, rung, out) for rung in found]
            groups[key].append(make_dense(key))
        rows, measured = _rounds(prepared, groups, _time_rung)
    facts = {"rungs": rungs, "left_out": left_out, "dense": dense}
    return rows, dict(_facts(prepared, measured, before, begin, reused), **facts)


def _table_contenders(
    prepared: Prepared, rotation: typing.Optional[Rotation]
) -> typing.Tuple[Groups, Facts]:
    """Contenders by sparsity key, and the trials of the dense layouts."""
    experiment, image = prepared.experiment, prepared.image
    out = torch.full(experiment.layer.output_shape, 0.0)
    make_dense, trials = None, {}  # type: typing.Any, Facts
    if "dense" in experiment.contenders:
        make_dense, trials = _dense(prepared, rotation)
    groups = {}  # type: Groups
    for key in prepared.packed:
        checked = prepared.checked_output(key, _convolution(prepared, key), "")
        groups[key] = []
        for name in experiment.contenders:
            threads = 1 if name == "sparse_one_thread" else prepared.threads
            if name == "dense":
                contender = make_dense(key)
            else:
                convolve = _variant(prepared, key, name, threads, checked)
                contender = Contender(
                    name,
                    "packed",
                    rotation.sparse(convolve)
                    if rotation
                    else functools.partial(convolve, image, out),
                )
            groups[key].append(_on_threads(contender, threads))
    return groups, trials


def _convolution(prepared: Prepared, key: str, **more: typing.Any) -> Convolve:
    """packedconv.conv2d from an input into an output."""
    packed = prepared.packed[key]
    arguments = dict(prepared.experiment.layer.conv2d_arguments, **more)

    def convolve(input: torch.Tensor, out: torch.Tensor) -> None:
        packedconv.conv2d(input, packed, out=out, **arguments)

    return convolve


def _variant(
    prepared: Prepared, key: str, name: str, threads: int, checked: torch.Tensor
) -> Convolve:
    """A sparse contender of CONTENDERS. Raises CheckError unless its output is the checked one,
    with what PyTorch adds to it."""
    expected, more = checked, {}  # type: torch.Tensor, typing.Dict[str, typing.Any]
    if name == "sparse_bias_relu":
        channels = prepared.experiment.layer.out_channels
        bias = torch.from_numpy(np.linspace(-1, 1, channels).astype(np.float32))
        more = {"bias": bias, "activation": "relu"}
        expected = (checked + bias.reshape(-1, 1, 1)).clamp(min=0)
    convolve = _convolution(prepared, key, **more)
    found = torch.full(checked.shape, float("nan"))
    torch.set_num_threads(threads)
    convolve(prepared.image, found)
    torch.set_num_threads(prepared.threads)
    difference = (found - expected).abs()
    if not bool((difference <= 1e-5 * (1 + checked.abs())).all()):
        raise CheckError(
            f"check of layer {prepared.experiment.layer.name}: {name} differs from what it should "
            f"be by up to {float(difference.max()):.3g}; the kernel is wrong on this machine, so "
            "nothing is timed; build again, and report this message if it stays"
        )
    return convolve


def _dense(
    prepared: Prepared, rotation: typing.Optional[Rotation]
) -> typing.Tuple[typing.Callable[[str], Contender], Facts]:
    """The dense contender of a sparsity key, and the trials that chose its layout.

    Tried as it will be timed, with one weight: its zeros do not change its time.
    """
    layer, protocol = prepared.experiment.layer, prepared.experiment.protocol
    first = next(iter(prepared.dense))

    def make(layout: str, key: str) -> Contender:
        if rotation is None:
            return sides.dense_contender(layout, layer, prepared.image, prepared.dense[key])
        return rotation.dense(layout, prepared.dense[key])

    layout, trials = sides.choose_dense(
        layer,
        prepared.image,
        prepared.dense[first],
        protocol["trial_executions"],
        protocol["warmup_executions"],
        functools.partial(make, key=first),
    )
    return functools.partial(make, layout), dict(trials, layout=layout)


def _on_threads(contender: Contender, threads: int) -> Contender:
    return contender._replace(prepare=functools.partial(torch.set_num_threads, threads))


def _rung_contender(prepared: Prepared, key: str, rung: Rung, out: torch.Tensor) -> Contender:
    """One rung, checked."""
    layer, packed = prepared.experiment.layer, prepared.packed[key]
    launch = cpu.launcher(rung.schedule)

    def convolve(input: torch.Tensor, output: torch.Tensor) -> None:
        conv.compute(input, packed, out=output, launch=launch, **layer.conv2d_arguments)

    prepared.checked_output(key, convolve, f"rung {rung.name}")
    return Contender(rung.name, "packed", functools.partial(convolve, prepared.image, out))


def _require_plan(prepared: Prepared, key: str, schedule: typing.Dict[str, typing.Any]) -> None:
    """Raise ValueError unless the layer has a plan with this schedule."""
    layer = prepared.experiment.layer
    prepared.packed[key].plan(
        layer.input_shape, threads=prepared.threads, schedule=schedule, **layer.conv2d_arguments
    )


def _time_rung(
    contender: Contender, executions: int, warmup_executions: int
) -> typing.Tuple[typing.List[float], int]:
    """As time_executions; of a slow rung one execution after an untimed one."""
    seconds = []
    for _ in range(2):
        faults, begin = minor_faults(), time.perf_counter()
        contender.execute()
        seconds.append(time.perf_counter() - begin)
        if seconds[0] <= SLOW_SECONDS:
            return time_executions(contender, executions, warmup_executions)
    return seconds[1:], minor_faults() - faults


def _rounds(
    prepared: Prepared, groups: Groups, time_block: typing.Any = None
) -> typing.Tuple[typing.List[Row], Measurement]:
    """Rows of all attempts, and the last of what was measured, with the bursts of all."""
    experiment = prepared.experiment
    rows = []  # type: typing.List[Row]
    bursts = []  # type: typing.List[float]
    for attempt in range(1 + experiment.repeats):
        measured = run_rounds(
            groups,
            experiment.protocol["rounds"],
            experiment.protocol["executions"],
            experiment.protocol["warmup_executions"],
            input_seed(prepared.settings["seed"], experiment.layer) + attempt,
            lambda: peak_flops(prepared.threads, PEAK_BURST_SECONDS),
            experiment.layer.name,
            time_block,
        )
        rows += prepared.rows(measured.samples, attempt)
        bursts += measured.peak_bursts
        wide = wide_points(measured.samples, experiment.widest_spread)
        groups = {key: group for key, group in groups.items() if key in wide}
        if not groups:
            break
    return rows, measured._replace(peak_bursts=bursts)


def wide_points(samples: typing.Iterable[typing.Any], widest: float) -> typing.Set[str]:
    """Sparsity keys where the round medians of any contender spread by more than `widest`."""
    rounds = {}  # type: typing.Dict[typing.Tuple[str, str], typing.Dict[int, typing.List[float]]]
    for sample in samples:
        found = rounds.setdefault((sample.key, sample.implementation), {})
        found.setdefault(sample.round, []).append(sample.seconds)
    return {
        key
        for (key, _), values in rounds.items()
        if spread([float(np.median(seconds)) for seconds in values.values()]) > widest
    }


def _facts(
    prepared: Prepared, measured: Measurement, before: Facts, begin: float, reused: bool
) -> Facts:
    faults = {}  # type: typing.Dict[str, typing.Dict[str, float]]
    for (key, implementation), count in measured.page_faults.items():
        faults.setdefault(implementation, {})[key] = count
    return dict(
        prepared.facts(),
        peak_bursts=measured.peak_bursts,
        page_faults_per_execution=faults,
        reuses_freed_memory=reused,
        warmup_seconds=WARMUP_SECONDS,
        measuring_seconds=time.perf_counter() - begin,
        before=before,
        after=moment(),
        machine=machine_facts(),
    )
