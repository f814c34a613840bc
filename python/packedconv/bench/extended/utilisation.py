"""Timing matrix times vector, sparse and dense, for the bandwidth that each of them uses."""

import copy
import functools
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import packedconv
from packedconv.bench.check import Comparison, require_within_bound
from packedconv.bench.contenders import Contender, pack_quietly
from packedconv.bench.cpu_experiments import Facts, Groups, Prepared, Row
from packedconv.bench.experiment import Experiment
from packedconv.bench.extended.matrices import ONE_THREAD, copied, make_matrix, multiply
from packedconv.bench.machine import available_memory_bytes, largest_cache_bytes
from packedconv.formats import dense_bytes, stored_bytes
from packedconv.layer import Layer, nonzero_count, sparsity_key
from packedconv.script import CheckError
from packedconv.settings import Settings
from packedconv.weights import weight_bound, weight_seed

# What of a matrix is read in turn: copies that take so many last-level caches, and no more than
# so many bytes and that share of the memory that can be had.
_CACHES = 4
_SET_BYTES = 2**30
_MEMORY_SHARE = 8
# At the most, of setting up a layer: draws and their order, dense weights of all sparsities, and
# copies in every format.
_BYTES_PER_WEIGHT = 80
_CHECKED_ROWS = 256
_FAILURES = (CheckError, ImportError, MemoryError, NotImplementedError, RuntimeError, ValueError)

# Multiplies one copy of the matrix with the vector.
Execute = Callable[[], Any]


def measure(settings: Settings, experiment: Experiment, threads: int) -> tuple[list[Row], Facts]:
    """Rows and facts of one layer of one pixel on `threads` threads.

    Implementations: "sparse" (packed words, conv2d), "torch_csr" and "scipy_csr" (FP32 values,
    32-bit indices), "dense" (torch.mv) and "dense_linear" (torch.nn.functional.linear). A layer
    whose dense matrix exceeds the last-level cache is read from memory: every contender takes
    copies of its matrix in turn. facts["bytes"]: what one execution moves, by sparsity key and
    implementation; facts["copies"] likewise; what failed is in facts["left_out"].
    A layer without memory has no rows, and facts["skipped"] says so.
    Raises CheckError when packedconv computes wrongly, ValueError for another kind of layer.
    """
    layer = experiment.layer
    _require_vector(layer)
    available = available_memory_bytes()
    needed = _BYTES_PER_WEIGHT * layer.weight_count
    if available is not None and needed > available:
        reason = f"needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} can be had"
        return [], {"skipped": reason, "page_faults_per_execution": {}}
    cache = largest_cache_bytes()
    past_caches = dense_bytes(layer, 4) > cache
    groups: Groups = {}
    moved: dict[str, dict[str, int]] = {}
    copies: dict[str, dict[str, int]] = {}
    left_out: dict[str, dict[str, str]] = {}
    with torch.inference_mode():
        prepared = _PreparedMatrix(settings, experiment, threads)
        for key, packed in prepared.packed.items():
            matrix = prepared.dense[key].reshape(layer.out_channels, layer.in_channels)
            moved[key] = moved_bytes(layer, packed.nnz)
            require_right = _checker(prepared, key, matrix)
            groups[key], copies[key], left_out[key] = [], {}, {}
            for name, layout, make in _contenders(prepared, key, matrix):
                count = copies_of(moved[key][name], cache) if past_caches else 1
                try:
                    executions = make(count)
                    for execute in executions:
                        require_right(execute(), name)
                except _FAILURES as error:
                    if name == "sparse":
                        raise
                    left_out[key][name] = str(error).partition("\n")[0]
                    continue
                copies[key][name] = count
                groups[key].append(Contender(name, layout, _in_turn(executions)))
        rows, facts = prepared.measure(groups)
    for row in rows:
        if row["layout"] in ONE_THREAD:
            row["threads"] = 1
    more = {"bytes": moved, "copies": copies, "left_out": left_out, "cache_bytes": cache}
    return rows, dict(facts, **more, past_caches=past_caches, dense={"layout": "mv"})


def moved_bytes(layer: Layer, nonzeros: int) -> dict[str, int]:
    """Bytes that one product of matrix and vector moves, by implementation.

    The matrix as it is stored, the vector and the product (FP32), each once. What a library
    reads twice, or not at all, does not count: this is the usual formula.
    """
    vectors = 4 * (layer.in_channels + layer.out_channels)
    dense = dense_bytes(layer, 4) + vectors
    csr = stored_bytes("csr", layer, nonzeros, 4) + vectors
    return {
        "sparse": stored_bytes("packed", layer, nonzeros, 2) + vectors,
        "torch_csr": csr,
        "scipy_csr": csr,
        "dense": dense,
        "dense_linear": dense,
    }


def copies_of(matrix_bytes: int, cache_bytes: int) -> int:
    """How many copies of a matrix to read in turn, so that the last-level cache holds none."""
    limits = [_SET_BYTES]
    if cache_bytes:
        limits.append(_CACHES * cache_bytes)
    available = available_memory_bytes()
    if available is not None:
        limits.append(available // _MEMORY_SHARE)
    return max(1, -(-min(limits) // matrix_bytes))


def make_matrix_weight(
    layer: Layer, sparsity: float, seed: int, spec: dict[str, Any]
) -> np.ndarray:
    """As weights.make_weight, of the same seed and at NumPy's speed, but other places and values.

    One draw for each weight: those with the least keep their place. Then a value for each of
    them in ascending order of place, uniform on ± weight_bound; a value that FP16 would turn into
    zero becomes the bound.
    """
    generator = np.random.RandomState()
    # The state of Python's generator in NumPy's: the same numbers.
    state = random.Random(weight_seed(seed, layer, sparsity)).getstate()[1]
    generator.set_state(("MT19937", np.array(state[:-1], dtype=np.uint32), state[-1]))
    count, bound = layer.weight_count, weight_bound(layer, spec)
    nonzeros = nonzero_count(count, sparsity)
    draws = generator.random_sample(count)
    places = np.sort(np.argpartition(draws, nonzeros - 1)[:nonzeros])
    del draws
    values = ((2 * generator.random_sample(nonzeros) - 1) * bound).astype(np.float32)
    values[values.astype(np.float16) == 0] = bound
    weight = np.zeros(count, dtype=np.float32)
    weight[places] = values
    return weight.reshape(layer.weight_shape)


class _PreparedMatrix(Prepared):
    """As Prepared, with the weights of make_matrix_weight, packed once."""

    def __init__(self, settings: Settings, experiment: Experiment, threads: int) -> None:
        super().__init__(settings, experiment._replace(sparsities=[]), threads)
        self.experiment = experiment
        self._settings = dict(self._settings, sparsities=experiment.sparsities)
        for sparsity in experiment.sparsities:
            weight = make_matrix_weight(
                experiment.layer, sparsity, settings["seed"], settings["weights"]
            )
            begin = time.perf_counter()
            packed = pack_quietly(torch.from_numpy(weight))
            key = sparsity_key(sparsity)
            self.packed[key], self._packing_seconds[key] = packed, time.perf_counter() - begin
            self.dense[key] = packed.unpack()


def _require_vector(layer: Layer) -> None:
    """Raises ValueError unless a layer is the product of a matrix and a vector."""
    shape = layer._replace(name="", in_channels=1, out_channels=1)
    if shape != Layer("", 1, 1, 1, 1, 1, 1, 1, 0):
        raise ValueError(
            f"layer {layer.name}: expected a 1x1 kernel on one pixel, batch 1, no padding and no "
            f"groups, got {dict(layer._asdict())}"
        )


def _contenders(
    prepared: Prepared, key: str, matrix: torch.Tensor
) -> list[tuple[str, str, Callable[[int], list[Execute]]]]:
    """Name, layout, and what makes so many executions, each with a matrix of its own."""
    layer, packed = prepared.experiment.layer, prepared.packed[key]
    vector = prepared.image.reshape(layer.in_channels)
    row = vector.reshape(1, -1)
    image_out = torch.full(layer.output_shape, 0.0)
    out = torch.full((layer.out_channels,), 0.0)

    def sparse(count: int) -> list[Execute]:
        # A plan belongs to its packed weight, and is what the kernel reads.
        return [
            functools.partial(packedconv.conv2d, prepared.image, copy.copy(packed), out=image_out)
            for _ in range(count)
        ]

    def csr(library: str, count: int) -> list[Execute]:
        made = make_matrix("csr", library, matrix)
        every = [made, *(copied(made) for _ in range(count - 1))]
        return [functools.partial(multiply, one, vector) for one in every]

    def dense(one_product: Callable[[torch.Tensor], Any], count: int) -> list[Execute]:
        every = [matrix, *(matrix.clone() for _ in range(count - 1))]
        return [functools.partial(one_product, one) for one in every]

    mv = functools.partial(dense, lambda one: torch.mv(one, vector, out=out))
    linear = functools.partial(dense, lambda one: torch.nn.functional.linear(row, one))
    return [
        ("sparse", "packed", sparse),
        ("torch_csr", "torch", functools.partial(csr, "torch")),
        ("scipy_csr", "scipy", functools.partial(csr, "scipy")),
        ("dense", "mv", mv),
        ("dense_linear", "linear", linear),
    ]


def _in_turn(executions: list[Execute]) -> Callable[[], None]:
    if len(executions) == 1:
        return executions[0]
    following = itertools.cycle(executions)
    return lambda: next(following)()


def _checker(prepared: Prepared, key: str, matrix: torch.Tensor) -> Callable[[Any, str], None]:
    """Raises CheckError for a product that leaves the bound of check.compare_with_float64."""
    experiment = prepared.experiment
    layer, vector = experiment.layer, prepared.image.reshape(-1)
    sparsity = {sparsity_key(value): value for value in experiment.sparsities}[key]
    # A part of the rows at a time: the matrix in float64 would need more than all else.
    reference, magnitude, nonzeros = (
        torch.cat([compute(part) for part in matrix.split(_CHECKED_ROWS)])
        for compute in (
            lambda part: part.double() @ vector.double(),
            lambda part: part.double().abs() @ vector.double().abs(),
            lambda part: (part != 0).sum(1).double(),
        )
    )
    bound = (4 + nonzeros.sqrt()) * 2.0**-23 * magnitude

    def require_right(product: torch.Tensor, name: str) -> None:
        found = product.reshape(-1).double()
        error = (found - reference).abs()
        fraction = torch.where(error > 0, error / bound, torch.zeros_like(error))
        fraction[torch.isnan(error)] = float("inf")
        worst = int(fraction.argmax())
        values = (found, reference, bound)
        comparison = Comparison(
            float(error.max()),
            float(fraction[worst]),
            (0, worst, 0, 0),
            *(float(value[worst]) for value in values),
        )
        require_within_bound(layer, sparsity, comparison, name)

    return require_right
