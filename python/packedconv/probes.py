"""Calibrating `packedconv.advise` on the machine at hand: a few layers, timed both ways."""

import typing

import numpy as np
import torch

from packedconv import _core, device
from packedconv.bench import ceilings
from packedconv.bench.check import compare_with_float64, require_within_bound
from packedconv.bench.contenders import (
    choose_dense,
    dense_contender,
    pack_quietly,
    reuse_memory,
    sparse_contender,
)
from packedconv.bench.protocol import run_rounds
from packedconv.calibration import Calibration, Point, fit, workload_of_layer
from packedconv.layer import Layer, nonzero_count, sparsity_key

# They span the sizes of a CNN's layers; few operations each, so that all take tens of seconds.
PROBES = (
    Layer("probe_k3_256", 1, 16, 16, 256, 256),
    Layer("probe_k3_112", 1, 32, 64, 112, 112),
    Layer("probe_k3_56", 1, 64, 64, 56, 56),
    Layer("probe_k3_28", 1, 128, 128, 28, 28),
    Layer("probe_k3_28_n8", 8, 64, 32, 28, 28),
    Layer("probe_k3_14", 1, 256, 64, 14, 14),
    Layer("probe_k3_7", 1, 256, 128, 7, 7),
    Layer("probe_k3_7_n16", 16, 128, 64, 7, 7),
    Layer("probe_k3_s2", 1, 64, 64, 56, 56, stride=2),
    Layer("probe_k3_s2_n4", 4, 128, 64, 14, 14, stride=2),
    Layer("probe_k1_112", 1, 16, 96, 112, 112, 1, padding=0),
    Layer("probe_k1_56", 1, 128, 64, 56, 56, 1, padding=0),
    Layer("probe_k1_28", 1, 128, 512, 28, 28, 1, padding=0),
    Layer("probe_k1_14", 1, 1024, 256, 14, 14, 1, padding=0),
    Layer("probe_k1_7", 8, 512, 256, 7, 7, 1, padding=0),
    Layer("probe_k1_s2", 1, 128, 256, 28, 28, 1, 2, 0),
    Layer("probe_k5_112", 1, 16, 16, 112, 112, 5, padding=2),
    Layer("probe_k5_28", 1, 64, 64, 28, 28, 5, padding=2),
    Layer("probe_k5_14", 4, 64, 32, 14, 14, 5, padding=2),
)
SPARSITIES = (0.2, 0.6, 0.9, 0.98)
_EXECUTIONS = 3
_WARMUP_EXECUTIONS = 1
_TRIAL_EXECUTIONS = 3
_PEAK_SECONDS = 0.2
_COPY_REPEATS = 2
_SEED = 1


def calibrate(threads: typing.Optional[int] = None, rounds: int = 5) -> Calibration:
    """Measure this machine's CPU for `packedconv.advise`, in some tens of seconds.

    threads: that layers will run on, by default torch.get_num_threads(). rounds: how often each
    side of each of PROBES is timed, in turn; more give a better answer and take longer. The
    machine should do nothing else meanwhile. Every output is checked before it is timed.

    From now on the C library of this process keeps memory that is freed, as in the workflow, so
    that PyTorch's outputs cost no page faults. A GPU is calibrated by the workflow's run there.
    Raises TypeError and ValueError for wrong arguments, CheckError when an output is wrong.
    """
    for name, value in (("threads", threads), ("rounds", rounds)):
        if value is None and name == "threads":
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{name}: expected 1 or more, got {value}")
    before = torch.get_num_threads()
    threads = threads or before
    torch.set_num_threads(threads)
    reuse_memory()
    try:
        with torch.no_grad():
            points = [point for layer in PROBES for point in _probe(layer, threads, rounds)]
        peak = ceilings.peak_flops(threads, _PEAK_SECONDS)
        bandwidth = _core.copy_bandwidth(threads, ceilings.copy_bytes(), _COPY_REPEATS)
    finally:
        torch.set_num_threads(before)
    return fit(
        points,
        "cpu",
        device.cpu_title(),
        threads,
        _core.isa(),
        peak,
        bandwidth,
        f"{len(PROBES)} probes at {len(SPARSITIES)} sparsities, {rounds} rounds, "
        f"{threads} thread{'s' * (threads != 1)}",
    )


def _probe(layer: Layer, threads: int, rounds: int) -> typing.List[Point]:
    """Median times of both sides of a layer."""
    draw = np.random.RandomState(_SEED)
    image = torch.from_numpy(draw.random_sample(layer.input_shape).astype(np.float32)).clone()
    out = torch.empty(layer.output_shape)
    groups, works = {}, {}  # type: typing.Dict[str, typing.List], typing.Dict[str, typing.Any]
    for sparsity in SPARSITIES:
        packed = pack_quietly(torch.from_numpy(_drawn_weight(layer, sparsity, draw)))
        weight, key = packed.unpack(), sparsity_key(sparsity)
        groups[key] = [sparse_contender(layer, image, packed, out)]
        out.fill_(float("nan"))
        groups[key][0].execute()
        require_within_bound(
            layer, sparsity, compare_with_float64(out, layer, image, weight), "sparse"
        )
        made = packed.plan(layer.input_shape, threads=threads, **layer.conv2d_arguments)
        works[key] = workload_of_layer(layer, packed.nnz, threads, made.schedule, made.facts)
    # Its time does not depend on the zeros.
    layout, _ = choose_dense(layer, image, weight, _TRIAL_EXECUTIONS, _WARMUP_EXECUTIONS)
    groups["dense"] = [dense_contender(layout, layer, image, weight)]
    works["dense"] = works[key]
    measured = run_rounds(
        groups, rounds, _EXECUTIONS, _WARMUP_EXECUTIONS, _SEED, lambda: 0.0, layer.name
    )
    times = {}  # type: typing.Dict[typing.Tuple[str, str], typing.List[float]]
    for sample in measured.samples:
        times.setdefault((sample.key, sample.implementation), []).append(sample.seconds)
    return [
        Point(layer.name, works[key], implementation, float(np.median(seconds)))
        for (key, implementation), seconds in times.items()
    ]


def _drawn_weight(layer: Layer, sparsity: float, draw: typing.Any) -> np.ndarray:
    """A weight with round((1 - S) n) nonzeros at drawn places, of values from 0.5 to 1."""
    weight = np.zeros(layer.weight_count, dtype=np.float32)
    count = nonzero_count(layer.weight_count, sparsity)
    places = draw.permutation(layer.weight_count)[:count]
    weight[places] = 0.5 + 0.5 * draw.random_sample(count)
    return weight.reshape(layer.weight_shape)
