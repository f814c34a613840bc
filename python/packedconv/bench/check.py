"""Correctness before timing: every output against float64, within the bound."""

import math
import typing

import numpy as np
import torch

import packedconv
from packedconv.bench.contenders import pack_quietly
from packedconv.layer import Layer
from packedconv.samples_file import ERROR_COLUMNS
from packedconv.script import CheckError

Row = typing.Dict[str, typing.Any]
Convolve = typing.Callable[[torch.Tensor, "packedconv.PackedWeight", Layer], torch.Tensor]


class Comparison(typing.NamedTuple):
    """How far outputs lie from the float64 reference.

    max_abs_error: largest |y - ref|. bound_fraction: largest |y - ref| / bound, which must
    not exceed 1. index, value, reference, bound: of the output with the largest fraction.
    """

    max_abs_error: float
    bound_fraction: float
    index: typing.Tuple[int, ...]
    value: float
    reference: float
    bound: float


def compare_with_float64(
    output: torch.Tensor,
    layer: Layer,
    input: torch.Tensor,
    weight: torch.Tensor,
    device: typing.Optional[torch.device] = None,
) -> Comparison:
    """Compare outputs (N, OC, H_out, W_out) with float64 PyTorch, image by image.

    The reference is computed on `device`, by default where the input lies.

    Bound of an output: (4 + sqrt(n)) · 2^-23 · sum |w · x|, n the nonzeros of its channel.
    A NaN or an error where the bound is zero counts as an infinite fraction.
    """
    device = device or input.device
    weight = weight.to(device)
    nonzeros = (weight != 0).flatten(1).sum(1).double()
    scale = ((4 + nonzeros.sqrt()) * 2.0**-23).reshape(-1, 1, 1)
    wide = weight.double()
    worst = Comparison(0.0, -1.0, (), 0.0, 0.0, 0.0)
    max_abs_error = 0.0
    for number in range(layer.batch):
        image = input[number : number + 1].to(device).double()
        reference = _dense(image, wide, layer)[0]
        bound = scale * _dense(image.abs(), wide.abs(), layer)[0]
        error = (output[number].to(device).double() - reference).abs()
        fraction = torch.where(error > 0, error / bound, torch.zeros_like(error))
        fraction[torch.isnan(error)] = math.inf
        max_abs_error = max(max_abs_error, _largest(error))
        position = int(fraction.argmax())
        if float(fraction.flatten()[position]) > worst.bound_fraction:
            index = tuple(int(axis) for axis in np.unravel_index(position, error.shape))
            worst = Comparison(
                0.0,
                float(fraction[index]),
                (number,) + index,
                float(output[number][index]),
                float(reference[index]),
                float(bound[index]),
            )
    return worst._replace(max_abs_error=max_abs_error)


def check_layer(
    device: str,
    run: str,
    layer: Layer,
    weights: typing.Mapping[float, np.ndarray],
    input: np.ndarray,
    convolve: typing.Optional[Convolve] = None,
) -> typing.List[Row]:
    """Rows of the check file for one layer: four comparisons per sparsity.

    sparse and dense PyTorch (NCHW) with float64 on the packed weight; sparse with dense on
    the packed weight (what summation order alone does) and on the original weight (what
    rounding weights to FP16 adds). `convolve` stands in for packedconv.conv2d.
    Raises CheckError when a sparse output leaves its bound. The dense side is not this
    project's to fail: its fraction is in the rows.
    """
    convolve = convolve or _sparse
    image = torch.from_numpy(input)
    rows = []
    for sparsity, array in weights.items():
        original = torch.from_numpy(array)
        packed = pack_quietly(original)
        rounded = packed.unpack()
        base = base_row(device, run, layer, sparsity, packed.nnz)
        with torch.no_grad():
            sparse = convolve(image, packed, layer)
            exact = compare_with_float64(sparse, layer, image, rounded)
            require_within_bound(layer, sparsity, exact)
            dense = _dense(image, rounded, layer)
            dense_exact = compare_with_float64(dense, layer, image, rounded)
            summation = _largest((sparse.double() - dense.double()).abs())
            del dense
            rounding = _largest((sparse.double() - _dense(image, original, layer).double()).abs())
        for values in (
            ("sparse", "float64", "packed", exact.max_abs_error, exact.bound_fraction),
            ("dense", "float64", "packed", dense_exact.max_abs_error, dense_exact.bound_fraction),
            ("sparse", "dense", "packed", summation, None),
            ("sparse", "dense", "original", rounding, None),
        ):
            rows.append(dict(base, **dict(zip(ERROR_COLUMNS[-5:], values))))
    return rows


def base_row(device: str, run: str, layer: Layer, sparsity: float, nonzeros: int) -> Row:
    """What all rows of a layer at a sparsity have in the check file."""
    return {
        "device": device,
        "run": run,
        "layer": layer.name,
        "in_channels": layer.in_channels,
        "out_channels": layer.out_channels,
        "sparsity": sparsity,
        "nonzeros": nonzeros,
    }


def _sparse(image: torch.Tensor, packed: "packedconv.PackedWeight", layer: Layer) -> torch.Tensor:
    return packedconv.conv2d(image, packed, **layer.conv2d_arguments)


def _dense(image: torch.Tensor, weight: torch.Tensor, layer: Layer) -> torch.Tensor:
    return torch.nn.functional.conv2d(image, weight, **layer.conv2d_arguments)


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def require_within_bound(
    layer: Layer, sparsity: float, found: Comparison, kernel: str = ""
) -> None:
    """Raise CheckError when an output lies outside its bound; `kernel` names what made it."""
    if found.bound_fraction <= 1:
        return
    where = f"layer {layer.name}, sparsity {sparsity}{kernel and ', ' + kernel}"
    raise CheckError(
        f"check of {where}: output {found.index} "
        f"(image, channel, row, column) is {found.value!r}, expected {found.reference!r} "
        f"within {found.bound:.3g}; the kernel is wrong on this machine, so nothing is timed; "
        "build again, and report this message if it stays"
    )
