"""Errors of a sparse convolution by cause, and what other dense baselines would show.

The sparse and the dense side are this library's and PyTorch's own, on the CPU. TF32, Winograd and
the summation in word order are emulated with evidence.numerics, which has them element by element
in a fixed order. Nothing is timed.
"""

import math
import platform
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import scipy
import torch

import packedconv
from packedconv.bench.check import compare_with_float64, require_within_bound
from packedconv.bench.contenders import pack_quietly
from packedconv.bench.extended import distributions
from packedconv.bench.extended.numerics_rows import COMPARISONS, Comparison
from packedconv.evidence.numerics import convolve, to_tf32, winograd
from packedconv.layer import Layer
from packedconv.settings import Settings

# A set of outputs, (OC, H, W), by implementation and stored weight.
Outputs = Mapping[tuple[str, str], np.ndarray]
Row = dict[str, Any]


def measure(settings: Settings, experiment: Mapping[str, Any]) -> tuple[list[Row], dict[str, Any]]:
    """Rows with numerics_rows.COLUMNS, and facts: versions, seed, distributions in words.

    experiment: sparsities; names of the distributions of inputs and weights; layers with name,
    in_channels, out_channels, height, width: one image, 3×3, stride 1, padding 1.
    Raises CheckError when a sparse output is wrong, ValueError for a height or width that is no
    multiple of 4, which F(4×4, 3×3) needs, or an unknown distribution.
    """
    rows = []
    for record in experiment["layers"]:
        layer = _layer(record)
        images = {
            name: distributions.draw_input(layer, settings["seed"], name, settings["inputs"])
            for name in experiment["inputs"]
        }
        for weight_name in experiment["weights"]:
            for sparsity in experiment["sparsities"]:
                weight = distributions.draw_weight(
                    layer, sparsity, settings["seed"], weight_name, settings["weights"]
                )
                for input_name, image in images.items():
                    base = {
                        "device": settings["device"]["name"],
                        "run": settings["run"],
                        "layer": layer.name,
                        **{
                            key: getattr(layer, key)
                            for key in ("in_channels", "out_channels", "height", "width")
                        },
                        "sparsity": sparsity,
                        "nonzeros": int(np.count_nonzero(weight)),
                        "input_distribution": input_name,
                        "weight_distribution": weight_name,
                    }
                    rows += [{**base, **found} for found in compare(layer, sparsity, image, weight)]
    facts = {
        "seed": settings["seed"],
        "threads": torch.get_num_threads(),
        "distributions": {
            "inputs": {name: distributions.INPUTS[name] for name in experiment["inputs"]},
            "weights": {name: distributions.WEIGHTS[name] for name in experiment["weights"]},
        },
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "scipy": scipy.__version__,
            "torch": torch.__version__,
        },
    }
    return rows, facts


def compare(layer: Layer, sparsity: float, image: np.ndarray, weight: np.ndarray) -> list[Row]:
    """Every comparison of numerics_rows for an input (1, IC, H, W) and a weight (OC, IC, 3, 3)."""
    packed = pack_quietly(torch.from_numpy(weight))
    stored = {"fp16": packed.unpack().numpy(), "bf16": to_bf16(weight), "fp32": weight}
    with torch.inference_mode():
        sparse = packedconv.conv2d(torch.from_numpy(image), packed, **layer.conv2d_arguments)
        checked = compare_with_float64(sparse, layer, torch.from_numpy(image), packed.unpack())
        require_within_bound(layer, sparsity, checked)
    outputs: dict[tuple[str, str], np.ndarray] = {("sparse", "fp16"): sparse[0].numpy()}
    for implementation, name in _needed() - {("sparse", "fp16")}:
        outputs[implementation, name] = _COMPUTED[implementation](image, stored[name])
    return [_row(comparison, outputs) for comparison in COMPARISONS]


def to_bf16(values: np.ndarray) -> np.ndarray:
    """FP32 values rounded to the 7 mantissa bits of BF16, ties to even."""
    return torch.from_numpy(values).bfloat16().float().numpy()


def _needed() -> set[tuple[str, str]]:
    """What has to be computed: implementation and stored weight of both sides of every row."""
    found = set()
    for implementation, stored, reference, reference_weights in COMPARISONS:
        found.add((implementation, stored))
        found.add((reference, _reference_stored(stored, reference_weights)))
    return found | {("float64", "fp32")}


def _reference_stored(stored: str, reference_weights: str) -> str:
    return stored if reference_weights == "stored" else "fp32"


def _row(comparison: Comparison, outputs: Outputs) -> Row:
    implementation, stored, reference, reference_weights = comparison
    reference_stored = _reference_stored(stored, reference_weights)
    difference = outputs[implementation, stored].astype(np.float64)
    difference -= outputs[reference, reference_stored]
    return {
        "implementation": implementation,
        "stored": stored,
        "reference": reference,
        "reference_weights": reference_weights,
        "max_abs_error": _largest(difference),
        "largest_output": _largest(outputs["float64", reference_stored]),
    }


def _largest(values: np.ndarray) -> float:
    largest = float(np.abs(values).max())
    if not math.isfinite(largest):
        raise ValueError(f"outputs: expected finite ones, got {largest}")
    return largest


def _dense(image: np.ndarray, weight: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    with torch.inference_mode():
        arrays = (torch.from_numpy(array).to(dtype) for array in (image, weight))
        return torch.nn.functional.conv2d(*arrays, padding=1)[0].numpy()


_COMPUTED: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "float64": lambda image, weight: _dense(image, weight, torch.float64),
    "dense": lambda image, weight: _dense(image, weight, torch.float32),
    # Products of two TF32 numbers are exact in FP32, and only their sum is rounded.
    "tf32": lambda image, weight: convolve(to_tf32(image[0]), to_tf32(weight)),
    "winograd2": lambda image, weight: winograd(image[0], weight, 2),
    "winograd4": lambda image, weight: winograd(image[0], weight, 4),
    "word_order": lambda image, weight: convolve(image[0], weight),
}


def _layer(record: Mapping[str, Any]) -> Layer:
    fields = {key: value for key, value in record.items() if key != "panel"}
    layer = Layer(batch=1, **fields)
    for key in ("height", "width"):
        if fields[key] % 4:
            raise ValueError(
                f"layer {layer.name}: {key}: expected a multiple of 4, which F(4×4, 3×3) needs, "
                f"got {fields[key]}"
            )
    return layer
