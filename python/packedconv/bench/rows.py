"""Rows of the samples file, and the cost of packing that its facts state."""

import time
import typing

import numpy as np

from packedconv.bench.contenders import pack_quietly
from packedconv.layer import Layer
from packedconv.settings import Settings
from packedconv.weights import sparsity_key

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


def pack_timed(weight: typing.Any) -> typing.Tuple[typing.Any, float]:
    """The packed weight and the median seconds of packing it."""
    seconds = []
    for _ in range(PACKING_REPEATS):
        begin = time.perf_counter()
        packed = pack_quietly(weight)
        seconds.append(time.perf_counter() - begin)
    return packed, float(np.median(seconds))
