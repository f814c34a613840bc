"""The contenders of the experiment `baselines`, each ready to run, and the choice of variants."""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

import packedconv
from packedconv.bench import contenders as sides
from packedconv.bench.contenders import Contender, UnavailableError
from packedconv.bench.extended import im2col
from packedconv.layer import Layer

# The fastest dense layout is what the others are compared with.
CONTENDERS = ("sparse", "dense", "dense_default", *im2col.VARIANTS)

# How a contender that cannot be had, or that lacks memory, says so.
FAILURES = (UnavailableError, RuntimeError, TypeError, MemoryError)


class Built(NamedTuple):
    """A contender with what its memory is counted from.

    weight_bytes: of the weights as it holds them. allocates_output: whether an execution does.
    """

    contender: Contender
    weight_bytes: int
    allocates_output: bool


def build(
    name: str,
    variant: str,
    layer: Layer,
    image: torch.Tensor,
    packed: "packedconv.PackedWeight",
    out: torch.Tensor,
) -> Built:
    """A contender of `CONTENDERS` that convolves `image` (N, IC, H, W) with the packed weights.

    variant: a dense layout, "packed", or one of `im2col.VARIANTS`. out: (N, OC, H_out, W_out),
    written by those that can. Raises one of FAILURES for what is not there.
    """
    if name == "sparse":
        return Built(sides.sparse_contender(layer, image, packed, out), packed.nbytes, False)
    weight = packed.unpack()
    if name in ("dense", "dense_default"):
        contender = sides.dense_contender(variant, layer, image, weight)
        return Built(contender._replace(implementation=name), weight.nbytes, True)
    convolve = im2col.VARIANTS[name][variant].convolution(layer, weight)
    held = weight.nbytes if name == "im2col_dense" else im2col.csr_bytes(weight)
    return Built(Contender(name, variant, lambda: convolve(image, out)), held, False)


def choose_variants(
    layer: Layer,
    image: torch.Tensor,
    packed: "packedconv.PackedWeight",
    expected: torch.Tensor,
    protocol: Mapping[str, int],
) -> tuple[list[Contender], dict[str, dict[str, Any]]]:
    """The fastest right variant of every im2col contender, by the median of its trials.

    expected: the output (N, OC, H_out, W_out), checked against float64.
    Trials go round the variants of a contender, each execution after an untimed one of the same.
    Returns the contenders that have a variant, and for each of `im2col.VARIANTS` {"seconds":
    {variant: [...]}, "skipped": {variant: reason}}. A variant that fails or is wrong is skipped.
    """
    out = torch.empty(layer.output_shape)
    allowed = _allowed(layer, image, packed.unpack())
    chosen, trials = [], {}
    for name, variants in im2col.VARIANTS.items():
        found: dict[str, Contender] = {}
        skipped: dict[str, str] = {}
        for variant, way in variants.items():
            try:
                way.require(layer)
                contender = build(name, variant, layer, image, packed, out).contender
                # What is not written stays NaN.
                out.fill_(float("nan"))
                for _ in range(1 + protocol["warmup_executions"]):
                    contender.execute()
            except FAILURES as error:
                skipped[variant] = _reason(error)
                continue
            difference = (out - expected).abs_()
            if not bool((difference <= allowed).all()):
                largest = float(difference.max())
                skipped[variant] = f"differs from the checked output by up to {largest:.3g}"
                continue
            found[variant] = contender
        seconds = _trials(found, protocol["trial_executions"])
        trials[name] = {"seconds": seconds, "skipped": skipped}
        if seconds:
            chosen.append(found[min(seconds, key=lambda name: float(np.median(seconds[name])))])
    return chosen, trials


def _trials(found: Mapping[str, Contender], executions: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {variant: [] for variant in found}
    for _ in range(executions):
        for variant, contender in found.items():
            contender.execute()
            begin = time.perf_counter()
            contender.execute()
            seconds[variant].append(time.perf_counter() - begin)
    return seconds


def _allowed(layer: Layer, image: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """How far two right outputs may be apart: twice the bound that each keeps to float64."""
    nonzeros = (weight != 0).flatten(1).sum(1)
    scale = 2 * (4 + nonzeros.sqrt()) * 2.0**-23
    sums = torch.nn.functional.conv2d(image.abs(), weight.abs(), **layer.conv2d_arguments)
    return sums.mul_(scale.reshape(-1, 1, 1))


def _reason(error: BaseException) -> str:
    """The first line of what an error says."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
