"""Correctness on a GPU before timing: both kernels, every mapping, against float64."""

import sys
import typing

import numpy as np
import torch

import packedconv
from packedconv.bench.accelerator import first_line, is_out_of_memory
from packedconv.bench.check import (
    Comparison,
    base_row,
    compare_with_float64,
    require_within_bound,
)
from packedconv.bench.contenders import pack_quietly
from packedconv.bench.gpu_contenders import (
    DENSE,
    FAILURES,
    all_mappings,
    convert,
    dense_weight,
    reason_of,
    switched,
)
from packedconv.layer import Layer
from packedconv.samples_file import ERROR_COLUMNS
from packedconv.script import CheckError

Row = typing.Dict[str, typing.Any]


def check_layer(
    accelerator: typing.Any,
    device: str,
    run: str,
    layer: Layer,
    weights: typing.Mapping[float, np.ndarray],
    input: np.ndarray,
) -> typing.List[Row]:
    """Rows of the check file for one layer on a GPU.

    Per sparsity, on the packed weight with float64: "sparse" (the paper's kernel in its
    default mapping), "sparse_column", and each dense setting; and "sparse" with "dense"
    (PyTorch's default, TF32 allowed) and with "dense_fp32", on the packed weight (what
    summation order does, and TF32 where it was used) and on the original one (what rounding
    weights to FP16 adds). Dense settings are the timed ones, benchmarking included, but it
    picks the algorithm anew, and of several layouts the last is used. A setting that fails at
    any sparsity has no rows at all, and stderr says why; "sparse" and "dense" must run.
    At the first and the last sparsity every mapping that a measurement may choose is compared
    as well, on the first image.
    Raises CheckError when an output of a sparse kernel leaves its bound, or a mapping that
    fits does not run. The dense side is not this project's to fail: its fraction is in the
    rows.
    """
    image = torch.from_numpy(input).to(accelerator.device)
    sparsities = list(weights)
    rows = []
    missing = {}  # type: typing.Dict[str, str]
    for sparsity, array in weights.items():
        original = torch.from_numpy(array)
        packed = pack_quietly(original)
        rounded = packed.unpack().to(accelerator.device)
        original = original.to(accelerator.device)
        base = base_row(device, run, layer, sparsity, packed.nnz)
        found = []  # type: typing.List[typing.Tuple]
        with torch.no_grad():
            sparse = _sparse(accelerator, layer, image, packed, "paper")
            exact = _compare(sparse, layer, image, rounded)
            require_within_bound(layer, sparsity, exact, "sparse")
            found.append(_exact_row("sparse", exact))
            column = _column_row(accelerator, layer, sparsity, image, packed, rounded)
            found += [column] if column else []
            for implementation in DENSE:
                if implementation in missing:
                    continue
                try:
                    found += _dense_rows(layer, image, rounded, original, sparse, implementation)
                except FAILURES as error:
                    if implementation == "dense":
                        raise
                    missing[implementation] = reason_of(error)
                    print(
                        f"layer {layer.name}: no errors of {implementation}: it failed at "
                        f"sparsity {sparsity}: {missing[implementation]}",
                        file=sys.stderr,
                    )
                accelerator.empty_cache()
            if sparsity in (sparsities[0], sparsities[-1]):
                _check_mappings(accelerator, layer, sparsity, image, packed, rounded)
        rows += [dict(base, **dict(zip(ERROR_COLUMNS[-5:], values))) for values in found]
    return [
        row
        for row in rows
        if row["implementation"] not in missing and row["reference"] not in missing
    ]


def _dense_rows(
    layer: Layer,
    image: torch.Tensor,
    rounded: torch.Tensor,
    original: torch.Tensor,
    sparse: torch.Tensor,
    implementation: str,
) -> typing.List[typing.Tuple]:
    """All rows that a dense setting has at a sparsity."""
    dense = _dense(layer, image, rounded, implementation)
    found = [_exact_row(implementation, _compare(dense, layer, image, rounded))]
    if implementation in ("dense", "dense_fp32"):
        found.append(_difference_row(sparse, dense, implementation, "packed"))
        del dense
        dense = _dense(layer, image, original, implementation)
        found.append(_difference_row(sparse, dense, implementation, "original"))
    return found


def _check_mappings(
    accelerator: typing.Any,
    layer: Layer,
    sparsity: float,
    image: torch.Tensor,
    packed: "packedconv.PackedWeight",
    weight: torch.Tensor,
) -> None:
    single = layer._replace(batch=1)
    first = image[:1].contiguous()
    for mapping in all_mappings(accelerator):
        try:
            accelerator.plan(single, packed, "paper", mapping)
        except ValueError:
            # Does not fit the device: a measurement skips it with its reason.
            continue
        try:
            output = _sparse(accelerator, single, first, packed, "paper", mapping)
        except RuntimeError as error:
            raise CheckError(
                f"check of layer {layer.name}, sparsity {sparsity}, sparse, mapping {mapping}: "
                f"expected it to run, got: {first_line(error)}; nothing is timed: report this "
                "message"
            ) from error
        compared = _compare(output, single, first, weight)
        require_within_bound(layer, sparsity, compared, f"sparse, mapping {mapping}")


def _column_row(
    accelerator: typing.Any,
    layer: Layer,
    sparsity: float,
    image: torch.Tensor,
    packed: "packedconv.PackedWeight",
    weight: torch.Tensor,
) -> typing.Optional[typing.Tuple]:
    try:
        accelerator.plan(layer, packed, "column")
    except ValueError:
        return None
    output = _sparse(accelerator, layer, image, packed, "column")
    compared = _compare(output, layer, image, weight)
    require_within_bound(layer, sparsity, compared, "sparse_column")
    return _exact_row("sparse_column", compared)


def _sparse(
    accelerator: typing.Any,
    layer: Layer,
    image: torch.Tensor,
    packed: "packedconv.PackedWeight",
    kernel: str,
    config: typing.Optional[typing.Tuple[int, ...]] = None,
) -> torch.Tensor:
    # An output that a kernel does not write stays NaN.
    out = torch.full(layer.output_shape, float("nan"), device=image.device)
    accelerator.sparse(layer, image, packed, out, kernel, config)
    accelerator.synchronize()
    return out


def _dense(
    layer: Layer, image: torch.Tensor, weight: torch.Tensor, implementation: str
) -> torch.Tensor:
    setting = DENSE[implementation]
    layout = setting.layouts[-1]
    with switched(setting.switches):
        output = torch.nn.functional.conv2d(
            convert(image, layout, setting.dtype),
            dense_weight(weight, implementation, layout),
            **layer.conv2d_arguments,
        )
    return output.float()


def _compare(
    output: torch.Tensor, layer: Layer, image: torch.Tensor, weight: torch.Tensor
) -> Comparison:
    """compare_with_float64 where the image lies, or on the CPU where memory is short there."""
    try:
        return compare_with_float64(output, layer, image, weight)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return compare_with_float64(output, layer, image, weight, torch.device("cpu"))


def _exact_row(implementation: str, found: Comparison) -> typing.Tuple:
    return implementation, "float64", "packed", found.max_abs_error, found.bound_fraction


def _difference_row(
    sparse: torch.Tensor, dense: torch.Tensor, reference: str, weights: str
) -> typing.Tuple:
    # Image by image, since float64 takes twice the memory.
    largest = max(
        float((one.double() - other.double()).abs().max()) for one, other in zip(sparse, dense)
    )
    return "sparse", reference, weights, largest, None
