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
from packedconv.bench.experiment import SUBNORMAL_SCALE, Experiment
from packedconv.bench.machine import largest_cache_bytes, machine_facts, moment
from packedconv.bench.protocol import (
    PEAK_BURST_SECONDS,
    WARMUP_SECONDS,
    Measurement,
    faults_by_implementation,
    minor_faults,
    run_rounds,
    time_executions,
)
from packedconv.bench.rotation import Rotation, copies, pair_bytes
from packedconv.bench.rows import layer_facts, pack_timed, sample_rows
from packedconv.bench.rungs import SLOW_SECONDS, Rung, climb
from packedconv.bench.spread import repeated
from packedconv.layer import sparsity_key
from packedconv.schedule import Schedule
from packedconv.script import CheckError
from packedconv.settings import Settings
from packedconv.weights import (
    input_seed,
    make_input,
    make_skewed_weight,
    make_weight,
)

Row = typing.Dict[str, typing.Any]
Facts = typing.Dict[str, typing.Any]
Groups = typing.Dict[str, typing.List[Contender]]
# From an input into an output.
ConvolveInto = typing.Callable[[torch.Tensor, torch.Tensor], typing.Any]


class Prepared:
    """A layer at its sparsities on so many threads: input, packed weights, and what a dense side
    computes with; from before its first execution to the facts of its measurement.

    packed, dense: by sparsity key.
    """

    def __init__(self, settings: Settings, experiment: Experiment, threads: int) -> None:
        torch.set_num_threads(threads)
        self._reused = sides.reuse_memory()
        self._before, self._begin = moment(), time.perf_counter()
        layer = experiment.layer
        self.experiment, self.threads = experiment, threads
        self._settings = dict(settings, sparsities=experiment.sparsities)
        self.array = make_input(layer, settings["seed"], settings["inputs"])
        # Cloned, since torch aligns its own memory to cache lines and numpy does not.
        self.image = torch.from_numpy(self.array).clone()
        self.packed = {}  # type: typing.Dict[str, packedconv.PackedWeight]
        self._packing_seconds = {}  # type: typing.Dict[str, float]
        make = make_skewed_weight if experiment.skewed else make_weight
        for sparsity in experiment.sparsities:
            weight = make(layer, sparsity, settings["seed"], settings["weights"])
            key = sparsity_key(sparsity)
            self.packed[key], self._packing_seconds[key] = pack_timed(torch.from_numpy(weight))
        self.dense = {key: packed.unpack() for key, packed in self.packed.items()}

    def plan(
        self, key: str, schedule: typing.Optional[Schedule] = None
    ) -> "packedconv.plan.CpuPlan":
        """The layer's plan at a sparsity. Raises ValueError for a schedule that it has not."""
        layer = self.experiment.layer
        return self.packed[key].plan(
            layer.input_shape, threads=self.threads, schedule=schedule, **layer.conv2d_arguments
        )

    def checked_output(self, key: str, convolve: ConvolveInto, name: str) -> torch.Tensor:
        """What a convolution gives. Raises CheckError where it leaves its bound."""
        layer = self.experiment.layer
        # An output that a kernel does not write stays NaN.
        out = torch.full(layer.output_shape, float("nan"))
        convolve(self.image, out)
        found = compare_with_float64(out, layer, self.image, self.dense[key])
        sparsity = {sparsity_key(value): value for value in self.experiment.sparsities}[key]
        require_within_bound(layer, sparsity, found, name)
        return out

    def measure(
        self, groups: Groups, time_block: typing.Any = None
    ) -> typing.Tuple[typing.List[Row], Facts]:
        """Rows of all attempts, and the facts that every experiment has.

        groups: contenders by sparsity key, which are timed in the same rounds.
        """
        experiment, protocol = self.experiment, self.experiment.protocol

        def time_rounds(groups: typing.Mapping[str, typing.Any], attempt: int) -> Measurement:
            return run_rounds(
                groups,
                protocol["rounds"],
                protocol["executions"],
                protocol["warmup_executions"],
                input_seed(self._settings["seed"], experiment.layer) + attempt,
                lambda: peak_flops(self.threads, PEAK_BURST_SECONDS),
                experiment.layer.name,
                time_block,
            )

        attempts, measured = repeated(
            groups, time_rounds, experiment.widest_spread, experiment.repeats
        )
        rows = [
            row for number, samples in enumerate(attempts) for row in self._rows(samples, number)
        ]
        return rows, self._facts(measured)

    def _rows(self, samples: typing.Iterable[typing.Any], attempt: int) -> typing.List[Row]:
        layer = self.experiment.layer
        rows = sample_rows(self._settings, layer, self.packed, self.threads, samples)
        for row in rows:
            row["attempt"] = attempt
            if row["implementation"] == "sparse_one_thread":
                row["threads"] = 1
        return rows

    def _facts(self, measured: Measurement) -> Facts:
        return dict(
            layer_facts(
                self._settings,
                self.experiment.layer,
                self.threads,
                self.array,
                self.packed,
                self._packing_seconds,
            ),
            peak_bursts=measured.peak_bursts,
            page_faults_per_execution=faults_by_implementation(measured),
            reuses_freed_memory=self._reused,
            warmup_seconds=WARMUP_SECONDS,
            measuring_seconds=time.perf_counter() - self._begin,
            before=self._before,
            after=moment(),
            machine=machine_facts(),
        )


def measure_layer(
    settings: Settings, experiment: Experiment, threads: int
) -> typing.Tuple[typing.List[Row], Facts]:
    """Rows of the samples file and facts of one layer of a table, on `threads` threads.

    Raises CheckError when an output is wrong.
    """
    with torch.inference_mode():
        prepared = Prepared(settings, experiment, threads)
        layer, rotation, rotated = experiment.layer, None, None
        if experiment.set_bytes is not None:
            count = copies(layer, experiment.set_bytes)
            rotation = Rotation(layer, prepared.image, count)
            rotated = {
                "copies": count,
                "set_bytes": count * pair_bytes(layer),
                "cache_bytes": largest_cache_bytes(),
            }
        plans = {key: prepared.plan(key) for key in prepared.packed}
        groups, dense = table_contenders(prepared, rotation)
        rows, facts = prepared.measure(groups)
    facts["plans"] = {
        key: {"schedule": plan.schedule, "facts": plan.facts, "why": plan.why}
        for key, plan in plans.items()
    }
    return rows, dict(facts, dense=dense, rotated=rotated)


def measure_ladder(
    settings: Settings, experiment: Experiment, threads: int
) -> typing.Tuple[typing.List[Row], Facts]:
    """Rows and facts of the ladder of one layer: every rung of its plan's schedule, and dense.

    Raises CheckError when an output is wrong.
    """
    layer = experiment.layer
    groups, rungs, left_out = {}, {}, {}  # type: Groups, Facts, Facts
    with torch.inference_mode():
        prepared = Prepared(settings, experiment, threads)
        out = torch.full(layer.output_shape, 0.0)
        make_dense, dense = _dense(prepared, None)
        for key in prepared.packed:
            found, left_out[key] = climb(
                prepared.plan(key).schedule,
                lambda schedule, key=key: prepared.plan(key, schedule).schedule,
                layer.in_channels // layer.groups,
            )
            rungs[key] = [dict(rung._asdict()) for rung in found]
            groups[key] = [_rung_contender(prepared, key, rung, out) for rung in found]
            groups[key].append(make_dense(key))
        rows, facts = prepared.measure(groups, _time_rung)
    return rows, dict(facts, rungs=rungs, left_out=left_out, dense=dense)


def table_contenders(
    prepared: Prepared, rotation: typing.Optional[Rotation]
) -> typing.Tuple[Groups, Facts]:
    """Contenders by sparsity key, and the trials of the dense layouts."""
    experiment = prepared.experiment
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
                convolve, image = _variant(prepared, key, name, threads, checked)
                contender = Contender(
                    name,
                    "packed",
                    rotation.sparse(convolve)
                    if rotation
                    else functools.partial(convolve, image, out),
                )
            groups[key].append(_on_threads(contender, threads))
    return groups, trials


def _convolution(prepared: Prepared, key: str, **more: typing.Any) -> ConvolveInto:
    """packedconv.conv2d from an input into an output."""
    packed = prepared.packed[key]
    arguments = dict(prepared.experiment.layer.conv2d_arguments, **more)

    def convolve(input: torch.Tensor, out: torch.Tensor) -> None:
        packedconv.conv2d(input, packed, out=out, **arguments)

    return convolve


def _variant(
    prepared: Prepared, key: str, name: str, threads: int, checked: torch.Tensor
) -> typing.Tuple[ConvolveInto, torch.Tensor]:
    """A sparse contender of CONTENDERS and its input.

    Raises CheckError unless its output is the checked one, with what PyTorch makes of it.
    """
    image, expected = prepared.image, checked
    allowed = 1e-5 * (1 + checked.abs())
    more = {}  # type: typing.Dict[str, typing.Any]
    if name == "sparse_bias_relu":
        channels = prepared.experiment.layer.out_channels
        bias = torch.from_numpy(np.linspace(-1, 1, channels).astype(np.float32))
        more = {"bias": bias, "activation": "relu"}
        expected = (checked + bias.reshape(-1, 1, 1)).clamp(min=0)
    if name == "sparse_subnormal":
        image, expected, allowed = _scaled(prepared, key, checked)
    convolve = _convolution(prepared, key, **more)
    found = torch.full(checked.shape, float("nan"))
    torch.set_num_threads(threads)
    convolve(image, found)
    torch.set_num_threads(prepared.threads)
    difference = (found - expected).abs()
    if not bool((difference <= allowed).all()):
        raise CheckError(
            f"check of layer {prepared.experiment.layer.name}: {name} differs from what it should "
            f"be by up to {float(difference.max()):.3g}; the kernel is wrong on this machine, so "
            "nothing is timed; build again, and report this message if it stays"
        )
    return convolve, image


def _scaled(
    prepared: Prepared, key: str, checked: torch.Tensor
) -> typing.Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An input of which every value is subnormal, what it gives, and how far off that may be."""
    image = (prepared.image.double() * SUBNORMAL_SCALE).float()
    if not float(image.abs().max()) < np.finfo(np.float32).tiny:
        raise CheckError(
            f"layer {prepared.experiment.layer.name}: expected an input below 100, of which "
            f"{SUBNORMAL_SCALE:g} is subnormal, got {float(prepared.image.abs().max()):g}"
        )
    # Inputs and sums are whole multiples of 2^-149.
    nonzeros = int((prepared.dense[key] != 0).flatten(1).sum(1).max())
    checked = checked.double() * SUBNORMAL_SCALE
    largest = float(checked.abs().max())
    allowed = torch.full(checked.shape, 1e-5 * largest + (1 + nonzeros) * 2.0**-149).double()
    return image, checked, allowed


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


def _time_rung(
    contender: Contender, executions: int, warmup_executions: int
) -> typing.Tuple[typing.List[float], int]:
    """As time_executions; of a slow rung one execution after an untimed one."""
    if contender.prepare is not None:
        contender.prepare()
    seconds = []
    for _ in range(2):
        faults, begin = minor_faults(), time.perf_counter()
        contender.execute()
        seconds.append(time.perf_counter() - begin)
        if seconds[0] <= SLOW_SECONDS:
            return time_executions(contender, executions, warmup_executions)
    return seconds[1:], minor_faults() - faults
