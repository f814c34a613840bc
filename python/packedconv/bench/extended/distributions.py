"""Fixed-seed draws of inputs and weights from several distributions, the same on every machine.

"uniform" is the run's own distribution, drawn by packedconv.weights. Every other value is a
transform of numbers uniform on (0, 1), whose generator is seeded with the SHA-256 digest of the
ASCII text

    inputs/<seed>/<layer name>/<N>x<IC>x<H>x<W>/<distribution>
    weights/<seed>/<layer name>/<OC>x<IC>x<K>x<K>/<sparsity key>/<distribution>
"""

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import ndtri

from packedconv.layer import Layer, sparsity_key
from packedconv.weights import make_input, make_weight

# Half of the range of log_uniform, in decades.
DECADES = 3
# Half of the smallest FP16 number: what is not larger becomes zero when packed.
_SMALLEST = 2.0**-25

# In words, for captions; of "uniform" the settings of the run say what it is.
INPUTS = {
    "uniform": None,
    "normal": "standard normal",
    "relu_normal": "standard normal after ReLU (half of them zero)",
    "log_uniform": f"± 10^u with u uniform on [−{DECADES}, {DECADES})",
}
WEIGHTS = {
    "uniform": None,
    "he_normal": "normal with standard deviation sqrt(2/(K²·IC)) (He)",
}


def draw_input(layer: Layer, seed: int, distribution: str, spec: Mapping[str, Any]) -> np.ndarray:
    """Input of shape (N, IC, H, W), float32; `spec` is the run's own distribution.

    Raises ValueError for a distribution that is not one of INPUTS.
    """
    _require_known("inputs", distribution, INPUTS)
    if distribution == "uniform":
        return make_input(layer, seed, spec)
    shape = "x".join(map(str, layer.input_shape))
    draw = _generator(f"inputs/{seed}/{layer.name}/{shape}/{distribution}")
    uniform = _open_uniform(draw, layer.input_shape)
    if distribution == "log_uniform":
        # The first half of (0, 1) is negative, and each half gives the exponent again.
        sign = np.where(uniform < 0.5, -1.0, 1.0)
        exponent = DECADES * (2 * (2 * uniform % 1) - 1)
        return (sign * 10.0**exponent).astype(np.float32)
    normal = ndtri(uniform)
    if distribution == "relu_normal":
        normal = np.maximum(normal, 0)
    return normal.astype(np.float32)


def draw_weight(
    layer: Layer, sparsity: float, seed: int, distribution: str, spec: Mapping[str, Any]
) -> np.ndarray:
    """Weight of shape (OC, IC, K, K), float32, with exactly round((1 - S) · n) nonzeros.

    Whatever the distribution, the nonzeros are where the run's own weight has them. A value that
    FP16 would turn into zero is drawn again.
    Raises ValueError for a distribution that is not one of WEIGHTS.
    """
    _require_known("weights", distribution, WEIGHTS)
    weight = make_weight(layer, sparsity, seed, spec)
    if distribution == "uniform":
        return weight
    shape = "x".join(map(str, layer.weight_shape))
    draw = _generator(
        f"weights/{seed}/{layer.name}/{shape}/{sparsity_key(sparsity)}/{distribution}"
    )
    deviation = np.sqrt(2 / (layer.kernel_size**2 * layer.in_channels))
    values = np.zeros(np.count_nonzero(weight), np.float32)
    tiny = np.abs(values) <= _SMALLEST
    while tiny.any():
        values[tiny] = deviation * ndtri(_open_uniform(draw, int(tiny.sum())))
        tiny = np.abs(values) <= _SMALLEST
    weight[weight != 0] = values
    return weight


def _generator(text: str) -> np.random.RandomState:
    """Python's generator, whose sequence is guaranteed, at NumPy's speed."""
    seed = int.from_bytes(hashlib.sha256(text.encode("ascii")).digest(), "big")
    state = random.Random(seed).getstate()[1]
    generator = np.random.RandomState()
    generator.set_state(("MT19937", np.array(state[:-1], dtype=np.uint32), state[-1]))
    return generator


def _open_uniform(draw: np.random.RandomState, shape: int | tuple[int, ...]) -> np.ndarray:
    """Multiples of 2^-53 in (0, 1), with half a step for zero, which no transform may see."""
    return np.maximum(draw.random_sample(shape), 2.0**-54)


def _require_known(key: str, distribution: str, known: Mapping[str, Any]) -> None:
    if distribution not in known:
        raise ValueError(f"{key}: expected some of {', '.join(known)}, got {distribution!r}")
