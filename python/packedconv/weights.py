"""Fixed-seed sparse weights and inputs, the same on every machine and Python version.

Every random number is one `random.Random(seed).random()`, whose sequence Python
guarantees, so nothing here depends on the version of Python or NumPy. The seed of
a draw is the SHA-256 digest, read as a big-endian integer, of the ASCII text

    weights/<seed>/<layer name>/<OC>x<IC>x<K>x<K>/<sparsity key>
    inputs/<seed>/<layer name>/<N>x<IC>x<H>x<W>

for example `weights/1/oc64/64x32x3x3/s90`.
"""

import hashlib
import io
import json
import math
import random
import typing
import zipfile

import numpy as np

from packedconv.files import atomic_write
from packedconv.layer import Layer, nonzero_count, sparsity_key
from packedconv.settings import BOUND_FORMULA, UNIFORM_INPUTS, UNIFORM_WEIGHTS

# Half of the smallest FP16 number: what is not larger becomes zero when packed.
_SMALLEST = 2.0**-25


def weight_seed(seed: int, layer: Layer, sparsity: float) -> int:
    """Seed of one layer's weights at one sparsity (see the module's text)."""
    shape = "x".join(str(size) for size in layer.weight_shape)
    return _digest("weights/%d/%s/%s/%s" % (seed, layer.name, shape, sparsity_key(sparsity)))


def input_seed(seed: int, layer: Layer) -> int:
    """Seed of one layer's input (see the module's text)."""
    shape = "x".join(str(size) for size in layer.input_shape)
    return _digest("inputs/%d/%s/%s" % (seed, layer.name, shape))


def weight_bound(layer: Layer, spec: typing.Mapping[str, typing.Any] = UNIFORM_WEIGHTS) -> float:
    """Half width of the weights' distribution: a number, or sqrt(6 / (K² · IC))."""
    if spec.get("distribution") != "uniform":
        raise ValueError(
            "weights.distribution: expected 'uniform', got {!r}".format(spec.get("distribution"))
        )
    bound = spec.get("bound", BOUND_FORMULA)
    if bound == BOUND_FORMULA:
        return math.sqrt(6.0 / (layer.kernel_size**2 * layer.in_channels))
    if isinstance(bound, bool) or not isinstance(bound, (int, float)):
        raise ValueError(f"weights.bound: expected a number or {BOUND_FORMULA!r}, got {bound!r}")
    if not 2.0**-14 <= bound <= 65504:
        raise ValueError(
            "weights.bound: expected a number from 2^-14 to 65504, the normal range of FP16, "
            f"got {bound!r}"
        )
    return float(bound)


def make_weight(
    layer: Layer,
    sparsity: float,
    seed: int,
    spec: typing.Mapping[str, typing.Any] = UNIFORM_WEIGHTS,
) -> np.ndarray:
    """Weight of shape (OC, IC, K, K), float32, with exactly round((1 - S) · n) nonzeros.

    Positions come from a partial Fisher-Yates shuffle, values in ascending order of
    position, uniform on ± `weight_bound`. A value that FP16 would turn into zero is
    drawn again, so the packed weight has as many nonzeros as this one.
    """
    count = layer.weight_count
    draw = random.Random(weight_seed(seed, layer, sparsity)).random
    positions = _drawn(draw, count, nonzero_count(count, sparsity))
    return _filled(layer, positions, draw, weight_bound(layer, spec))


def make_skewed_weight(
    layer: Layer,
    sparsity: float,
    seed: int,
    spec: typing.Mapping[str, typing.Any] = UNIFORM_WEIGHTS,
) -> np.ndarray:
    """As `make_weight`, but an eighth of the output channels has ten times the nonzeros of the
    others, as near as whole numbers come. Which ones, is drawn first.

    Raises ValueError for fewer than 8 output channels, and where a channel has too few weights.
    """
    channels = layer.out_channels
    size, nonzeros = layer.weight_count // channels, nonzero_count(layer.weight_count, sparsity)
    draw = random.Random(weight_seed(seed, layer, sparsity)).random
    heavy = set(_drawn(draw, channels, channels // 8))
    shares = [10 if channel in heavy else 1 for channel in range(channels)]
    positions, begin, done = [], 0, 0  # type: typing.List[int], int, int
    for channel, share in enumerate(shares):
        done += share
        end = nonzeros * done // sum(shares)
        if not heavy or end - begin > size:
            raise ValueError(
                f"layer {layer.name}: expected 8 output channels or more, and weights for ten "
                f"times the nonzeros of others in one, got {channels} channels of {size} weights "
                f"at sparsity {sparsity}; use a higher sparsity or a larger layer"
            )
        positions += [channel * size + place for place in _drawn(draw, size, end - begin)]
        begin = end
    return _filled(layer, positions, draw, weight_bound(layer, spec))


def _drawn(draw: typing.Callable[[], float], count: int, wanted: int) -> typing.List[int]:
    """So many of range(count), ascending."""
    order = list(range(count))
    for index in range(wanted):
        other = index + int(draw() * (count - index))
        order[index], order[other] = order[other], order[index]
    return sorted(order[:wanted])


def _filled(
    layer: Layer, positions: typing.List[int], draw: typing.Callable[[], float], bound: float
) -> np.ndarray:
    """A weight with a value at each position, drawn in their order."""
    weight = np.zeros(layer.weight_count, dtype=np.float32)
    for position in positions:
        value = 0.0
        while abs(value) <= _SMALLEST:
            value = (2.0 * draw() - 1.0) * bound
        weight[position] = value
    return weight.reshape(layer.weight_shape)


def make_input(
    layer: Layer, seed: int, spec: typing.Mapping[str, typing.Any] = UNIFORM_INPUTS
) -> np.ndarray:
    """Input of shape (N, IC, H, W), float32, uniform on [low, high).

    Values that float32 would round up to `high` become the number below it.
    """
    if spec.get("distribution") != "uniform":
        raise ValueError(
            "inputs.distribution: expected 'uniform', got {!r}".format(spec.get("distribution"))
        )
    low, high = float(spec.get("low", 0.0)), float(spec.get("high", 1.0))
    if not (math.isfinite(low) and math.isfinite(high) and np.float32(low) < np.float32(high)):
        raise ValueError(f"inputs: expected finite low < high, got {low!r} and {high!r}")
    # The state of Python's generator in NumPy's: the same numbers, at NumPy's speed.
    state = random.Random(input_seed(seed, layer)).getstate()[1]
    generator = np.random.RandomState()
    generator.set_state(("MT19937", np.array(state[:-1], dtype=np.uint32), state[-1]))
    values = np.empty(layer.input_shape, dtype=np.float32)
    below_high = np.nextafter(np.float32(high), np.float32(low))
    for image in values:
        image[...] = low + (high - low) * generator.random_sample(image.shape)
        np.minimum(image, below_high, out=image)
    return values


def array_sha256(array: np.ndarray) -> str:
    """SHA-256 of an array's little-endian float32 bytes in C order."""
    return hashlib.sha256(np.ascontiguousarray(array, dtype="<f4").tobytes()).hexdigest()


def make_weights(
    settings: typing.Mapping[str, typing.Any], layer: Layer
) -> typing.Dict[str, np.ndarray]:
    """One weight per sparsity of the settings, by sparsity key."""
    return {
        sparsity_key(sparsity): make_weight(
            layer, sparsity, settings["seed"], settings.get("weights", UNIFORM_WEIGHTS)
        )
        for sparsity in settings["sparsities"]
    }


def manifest(
    settings: typing.Mapping[str, typing.Any],
    layer: Layer,
    weights: typing.Mapping[str, np.ndarray],
) -> typing.Dict[str, typing.Any]:
    """What a weight file holds: per sparsity the nonzeros and the SHA-256 of the bytes."""
    return {
        "schema": 1,
        "seed": settings["seed"],
        "layer": dict(layer._asdict()),
        "weights": dict(settings.get("weights", UNIFORM_WEIGHTS)),
        "sparsities": {
            sparsity_key(sparsity): {
                "sparsity": sparsity,
                "nonzeros": int(np.count_nonzero(weights[sparsity_key(sparsity)])),
                "sha256": array_sha256(weights[sparsity_key(sparsity)]),
            }
            for sparsity in settings["sparsities"]
        },
    }


def save_weights(path: str, weights: typing.Mapping[str, np.ndarray]) -> None:
    """Write weights as an .npz file whose bytes depend on the weights alone."""
    with atomic_write(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for key in sorted(weights):
            # Stored, not deflated: zlib versions differ. ZipInfo's date is 1980-01-01.
            info = zipfile.ZipInfo(key + ".npy")
            content = io.BytesIO()
            array = np.ascontiguousarray(weights[key], dtype="<f4")
            np.lib.format.write_array(content, array, version=(1, 0), allow_pickle=False)
            archive.writestr(info, content.getvalue())


def save_manifest(path: str, content: typing.Mapping[str, typing.Any]) -> None:
    """Write a manifest as JSON."""
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=2, sort_keys=True)
        stream.write("\n")


def load_weights(
    path: str, layer: Layer, sparsities: typing.Iterable[float]
) -> typing.Dict[str, np.ndarray]:
    """Read weights of a layer, float32 (OC, IC, K, K), by sparsity key.

    Raises ValueError when a sparsity is missing, or a shape, dtype or number of
    nonzeros is not the layer's.
    """
    weights = {}
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as archive:
            for sparsity in sparsities:
                key = sparsity_key(sparsity)
                if key not in archive.files:
                    raise ValueError(f"no array {key!r}; it holds {archive.files}")
                weights[key] = archive[key]
                _check_weight(weights[key], key, layer, sparsity)
    except (FileNotFoundError, PermissionError, MemoryError):
        raise
    # Of a spoiled file zipfile and numpy raise whatever comes: a flipped bit may say "encrypted".
    except Exception as error:
        raise ValueError(f"weights file {path}: {error}; delete it and make it again") from error
    return weights


def _check_weight(weight: np.ndarray, key: str, layer: Layer, sparsity: float) -> None:
    if weight.dtype != np.float32 or weight.shape != layer.weight_shape:
        raise ValueError(
            f"{key}: expected float32 of shape {layer.weight_shape}, "
            f"got {weight.dtype} of shape {weight.shape}"
        )
    nonzeros = int(np.count_nonzero(weight))
    expected = nonzero_count(layer.weight_count, sparsity)
    if nonzeros != expected:
        raise ValueError(f"{key}: expected {expected} nonzeros, got {nonzeros}")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest(), "big")
