"""Timing a layer with its weight in every format: conversion, product, and dense beside them."""

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from packedconv.bench.contenders import Contender, in_layout, pack_quietly
from packedconv.bench.cpu_experiments import Facts, Prepared, Row, table_contenders
from packedconv.bench.experiment import Experiment
from packedconv.bench.extended import matrices
from packedconv.bench.protocol import minor_faults, time_executions
from packedconv.bench.rungs import SLOW_SECONDS
from packedconv.formats import BLOCKS, FORMATS, Bitmap, nonzero_blocks
from packedconv.layer import Layer
from packedconv.script import CheckError
from packedconv.settings import Settings

MATRICES = ("coo", "csr", *BLOCKS)
# Layouts of a dense weight that a bitmap can be expanded into: as it lies in memory.
_EXPANDED_LAYOUTS = ("nchw", "channels_last")
# What a library that lacks a format, refuses it, computes wrongly or runs out of memory raises.
_FAILURES = (CheckError, ImportError, MemoryError, NotImplementedError, RuntimeError, ValueError)


def measure(settings: Settings, experiment: Experiment, threads: int) -> tuple[list[Row], Facts]:
    """Rows and facts of one layer (batch 1, no groups) on `threads` threads.

    Implementations: "sparse" (packed words, conv2d), "dense" (PyTorch's fastest layout), "bitmap"
    (expanded into a dense weight, then PyTorch's conv2d), and of MATRICES the product alone of
    the weight with the input's im2col matrix, by the library that was faster in trials (the
    row's layout). All compute the same weights. facts["formats"]: by sparsity key and format the
    bytes held, blocks, trials and seconds of conversions; what failed is in facts["left_out"].
    Raises CheckError when packedconv computes wrongly, ValueError for another batch or groups.
    """
    layer = experiment.layer
    if layer.batch != 1 or layer.groups != 1:
        raise ValueError(
            f"layer {layer.name}: expected batch 1 and groups 1, whose weight is one matrix, "
            f"got {layer.batch} and {layer.groups}"
        )
    both = experiment._replace(contenders=["sparse", "dense"])
    with torch.inference_mode():
        prepared = Prepared(settings, both, threads)
        groups, dense = table_contenders(prepared, None)
        columns = unfolded(prepared.image, layer)
        formats: dict[str, Facts] = {}
        left_out: dict[str, dict[str, str]] = {}
        conversions = {}
        for key in prepared.packed:
            formats[key], left_out[key], conversions[key] = {}, {}, {}
            for name in FORMATS:
                try:
                    contender, facts, convert = _format(prepared, key, name, columns, dense)
                except _FAILURES as error:
                    left_out[key][name] = str(error).partition("\n")[0]
                    continue
                groups[key] += [contender] if contender else []
                formats[key][name], conversions[key][name] = facts, convert
        for key, found in _convert(conversions, experiment.protocol["rounds"]).items():
            for name, seconds in found.items():
                formats[key][name]["conversion_seconds"] = seconds
        im2col = _im2col_seconds(prepared.image, layer, experiment.protocol["rounds"])
        rows, facts = prepared.measure(groups, time_block)
    for row in rows:
        if row["layout"] in matrices.ONE_THREAD:
            row["threads"] = 1
    return rows, dict(facts, dense=dense, formats=formats, left_out=left_out, im2col_seconds=im2col)


def unfolded(image: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The im2col matrix (IC · K², output pixels) of an image (1, IC, H, W)."""
    return torch.nn.functional.unfold(
        image, layer.kernel_size, layer.dilation, layer.padding, layer.stride
    )[0]


def time_block(
    contender: Contender, executions: int, warmup_executions: int
) -> tuple[list[float], int]:
    """As time_executions; of what is slow one execution after an untimed one."""
    if contender.prepare is not None:
        contender.prepare()
    if _timed(contender.execute) <= SLOW_SECONDS:
        return time_executions(contender, executions, warmup_executions)
    faults = minor_faults()
    return [_timed(contender.execute)], minor_faults() - faults


def _format(
    prepared: Prepared, key: str, name: str, columns: torch.Tensor, dense: Facts
) -> tuple[Contender | None, Facts, Callable[[], Any]]:
    """A format's contender, checked, its facts, and what converts the dense weight into it.

    The packed word has no contender of its own: it is the "sparse" one.
    """
    weight = prepared.dense[key]
    if name == "packed":
        return (
            None,
            {"bytes": prepared.packed[key].nbytes, "library": "packedconv"},
            functools.partial(pack_quietly, weight),
        )
    if name == "bitmap":
        return _bitmap(prepared, key, dense)
    matrix = weight.reshape(len(weight), -1)
    library, stored, trials, failed = _fastest(prepared, key, name, matrix, columns)
    facts = {
        "bytes": sum(array.nbytes for array in matrices.matrix_arrays(stored)),
        "library": library,
        "trial_seconds": trials,
        "failed": failed,
    }
    if name in BLOCKS:
        facts["blocks"] = nonzero_blocks(matrix.numpy(), BLOCKS[name])
    contender = Contender(name, library, functools.partial(matrices.multiply, stored, columns))
    return contender, facts, functools.partial(matrices.make_matrix, name, library, matrix)


def _fastest(
    prepared: Prepared, key: str, name: str, matrix: torch.Tensor, columns: torch.Tensor
) -> tuple[str, Any, dict[str, list[float]], dict[str, str]]:
    """The library with the least median trial, the matrix in it, all trials, and what failed.

    Raises RuntimeError, with all reasons, where every library fails.
    """
    trials: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    made: dict[str, Any] = {}
    for library in matrices.LIBRARIES:
        try:
            stored = matrices.make_matrix(name, library, matrix)

            def convolve(_: torch.Tensor, out: torch.Tensor, stored: Any = stored) -> None:
                out.copy_(matrices.multiply(stored, columns).reshape(out.shape))

            prepared.checked_output(key, convolve, f"{name} of {library}")
            trials[library] = _trial(
                functools.partial(matrices.multiply, stored, columns),
                prepared.experiment.protocol["trial_executions"],
            )
        except _FAILURES as error:
            failed[library] = str(error).partition("\n")[0]
            continue
        made[library] = stored
    if not made:
        raise RuntimeError("; ".join(f"{library}: {text}" for library, text in failed.items()))
    library = min(trials, key=lambda library: float(np.median(trials[library])))
    return library, made[library], trials, failed


def _bitmap(
    prepared: Prepared, key: str, dense: Facts
) -> tuple[Contender, Facts, Callable[[], Any]]:
    """The bitmap in the order of the faster layout's memory, so that it expands in one pass."""
    layer, weight = prepared.experiment.layer, prepared.dense[key]
    tried = {name: dense["seconds"][name] for name in _EXPANDED_LAYOUTS if name in dense["seconds"]}
    if not tried:
        raise RuntimeError(f"no dense layout of {', '.join(_EXPANDED_LAYOUTS)} could be timed")
    layout = min(tried, key=lambda name: float(np.median(tried[name])))
    # A view of the weight's memory, in order, and the weight that this memory is.
    arranged = in_layout(layout, weight).clone()
    memory = arranged.permute(0, 2, 3, 1) if layout == "channels_last" else arranged
    bitmap = Bitmap.of(memory.numpy())
    arranged.fill_(float("nan"))

    def convolve_in_layout(image: torch.Tensor) -> torch.Tensor:
        bitmap.expand(memory.numpy())
        return torch.nn.functional.conv2d(image, arranged, **layer.conv2d_arguments)

    def convolve(image: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(convolve_in_layout(in_layout(layout, image)))

    prepared.checked_output(key, convolve, "bitmap")
    image = in_layout(layout, prepared.image)
    source = in_layout(layout, weight)
    source = source.permute(0, 2, 3, 1) if layout == "channels_last" else source
    contender = Contender("bitmap", layout, functools.partial(convolve_in_layout, image))
    facts = {"bytes": bitmap.nbytes, "library": "numpy, torch"}
    return contender, facts, functools.partial(Bitmap.of, source.numpy())


def _convert(
    conversions: dict[str, dict[str, Callable[[], Any]]], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every conversion in so many interleaved rounds, each after an untimed one."""
    seconds: dict[str, dict[str, list[float]]] = {
        key: {name: [] for name in found} for key, found in conversions.items()
    }
    for _ in range(rounds):
        for key, found in conversions.items():
            for name, convert in found.items():
                convert()
                seconds[key][name].append(_timed(convert))
    return seconds


def _im2col_seconds(image: torch.Tensor, layer: Layer, rounds: int) -> list[float]:
    """Seconds of making the im2col matrix, each after an untimed time."""
    seconds = []
    for _ in range(rounds):
        unfolded(image, layer)
        seconds.append(_timed(lambda: unfolded(image, layer)))
    return seconds


def _trial(execute: Callable[[], Any], executions: int) -> list[float]:
    """Seconds of so many executions after an untimed one; of what is slow, that one."""
    first = _timed(execute)
    return [first] if first > SLOW_SECONDS else [_timed(execute) for _ in range(executions)]


def _timed(execute: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    execute()
    return time.perf_counter() - begin
