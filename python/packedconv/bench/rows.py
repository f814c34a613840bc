"""Rows of the samples file, and the cost of packing that its facts state."""

import time
import typing

import numpy as np

from packedconv.bench.contenders import pack_quietly
from packedconv.layer import Layer, sparsity_key
from packedconv.settings import Settings
from packedconv.weights import array_sha256

PACKING_REPEATS = 5

Row = typing.Dict[str, typing.Any]


def sample_rows(
    settings: Settings,
    layer: Layer,
    packed: typing.Mapping[str, typing.Any],
    threads: int,
    samples: typing.Iterable[typing.Any],
) -> typing.List[Row]:
    """Rows of samples.csv, by sparsity, implementation, round and execution."""
    shape = dict(layer._asdict())
    shape["layer"] = shape.pop("name")
    sparsity_of = {sparsity_key(sparsity): sparsity for sparsity in settings["sparsities"]}
    rows = [
        dict(
            shape,
            device=settings["device"]["name"],
            run=settings["run"],
            sparsity=sparsity_of[sample.key],
            nonzeros=packed[sample.key].nnz,
            implementation=sample.implementation,
            layout=sample.layout,
            threads=threads,
            round=sample.round,
            execution=sample.execution,
            seconds="%.9f" % sample.seconds,
        )
        for sample in samples
    ]
    rows.sort(
        key=lambda row: (row["sparsity"], row["implementation"], row["round"], row["execution"])
    )
    return rows


def layer_facts(
    settings: Settings,
    layer: Layer,
    threads: int,
    input: np.ndarray,
    packed: typing.Mapping[str, typing.Any],
    packing_seconds: typing.Mapping[str, float],
) -> Row:
    """What the facts of a layer state on every device: what was asked for, its input, and by
    sparsity key what the packed weights are."""
    weights = {key: weight.unpack() for key, weight in packed.items()}
    return {
        "device": settings["device"]["name"],
        "run": settings["run"],
        "layer": dict(layer._asdict()),
        "threads": threads,
        "weights": settings["weights"],
        "inputs": settings["inputs"],
        "input_sha256": array_sha256(input),
        "packing_seconds": dict(packing_seconds),
        "packed_bytes": {key: weight.nbytes for key, weight in packed.items()},
        "subnormal_weights": {key: weight.subnormals for key, weight in packed.items()},
        "nonzeros_by_kernel_position": {
            key: (weight != 0).sum((0, 1)).tolist() for key, weight in weights.items()
        },
    }


def pack_timed(weight: typing.Any) -> typing.Tuple[typing.Any, float]:
    """The packed weight and the median seconds of packing it."""
    seconds = []
    for _ in range(PACKING_REPEATS):
        begin = time.perf_counter()
        packed = pack_quietly(weight)
        seconds.append(time.perf_counter() - begin)
    return packed, float(np.median(seconds))
