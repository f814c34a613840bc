"""Whether a layer is faster sparse or dense, by a calibration of the machine at hand."""

import math
import numbers
import os
import typing
import warnings

import numpy as np
import torch

from packedconv import arguments, device, plan
from packedconv.calibration import (
    OTHER_PRECISIONS,
    Calibration,
    Workload,
    terms_of,
    workload_of_call,
)
from packedconv.conv import IntOrPair
from packedconv.layer import Layer, nonzero_count
from packedconv.module import SparseConv2d
from packedconv.packed import PackedWeight, PackWarning, pack_array
from packedconv.schedule import PlanKey

# Without a calibration: a nonzero is assumed to cost as much as so many weights of the dense
# convolution. Assumed, not measured.
ASSUMED_COST = 2.0
# Parts of the expected time that `why` names.
_NAMED_PARTS = 3

_PARTS = {
    "call": "the call itself",
    "flop": "multiply-adds",
    "far_flop": "multiply-adds on input from beyond the first cache",
    "visits": "decoding nonzeros",
    "few_visits": "waiting for multiply-adds",
    "channels": "beginning and ending sums",
    "shifts": "moving sums by a pixel",
    "carried": "sums between blocks of channels",
    "input": "reading the input",
    "copied": "copying the input for tiles",
    "strided_copied": "copying the input with a stride",
    "pieces_copied": "copying several images for one tile",
    "output": "writing the output",
    "far_output": "writing past the caches",
    "pieces_output": "writing several images of one tile",
    "nonzeros": "reading nonzeros",
    "point_flop": "multiply-adds",
    "window_flop": "multiply-adds",
    "strided_flop": "the stride",
    "rows": "reading weights for each row",
    "few_inputs": "few input channels",
    "weight": "reading weights",
}

LayerLike = typing.Union[Layer, torch.nn.Conv2d, SparseConv2d, PackedWeight, typing.Sequence[int]]


class Advice(typing.NamedTuple):
    """What `advise` expects; printed in words.

    choice: "sparse" or "dense", the faster one at FP32. speedup: dense over sparse time, low and
    high its 95 % interval. confidence: probability that the choice is the faster side, 0.5 to 1.
    calibrated: whether any of it rests on measurement; where not, the confidence is 0.5 and the
    interval 0 to inf. sparse_seconds, dense_seconds: expected, None without a calibration. bound:
    what limits the sparse convolution on the roofline, "compute" or "memory", None without
    ceilings; bound_seconds: the least that it takes. other_precisions: of dense contenders of less
    precision that are faster than the sparse convolution (TF32, FP16), how many times. sparsity:
    of the weight. why: the reasons, a sentence each.
    """

    choice: str
    speedup: float
    low: float
    high: float
    confidence: float
    sparse_seconds: typing.Optional[float]
    dense_seconds: typing.Optional[float]
    bound: typing.Optional[str]
    bound_seconds: typing.Optional[float]
    other_precisions: typing.Dict[str, float]
    sparsity: float
    calibrated: bool
    why: typing.List[str]

    def __str__(self) -> str:
        if self.calibrated:
            head = (
                f"{self.choice}: expected speedup of sparse over dense {self.speedup:.2f} "
                f"({self.low:.2f} to {self.high:.2f}), confidence {self.confidence:.2f}"
            )
        else:
            head = f"{self.choice}: assumed speedup {self.speedup:.2f}, nothing measured"
        return "\n".join([head] + ["  " + reason for reason in self.why])


def advise(
    layer: LayerLike,
    input_shape: typing.Optional[typing.Sequence[int]] = None,
    sparsity: typing.Optional[float] = None,
    stride: typing.Optional[IntOrPair] = None,
    padding: typing.Union[str, IntOrPair, None] = None,
    dilation: typing.Optional[IntOrPair] = None,
    groups: typing.Optional[int] = None,
    calibration: typing.Union[str, "os.PathLike[str]", Calibration, None] = None,
) -> Advice:
    """Whether a convolution is faster sparse (`packedconv.conv2d`) or in PyTorch's best layout.

    layer: a torch.nn.Conv2d or SparseConv2d; a PackedWeight; the shape of a weight,
    (OC, IC/groups, Kh, Kw); or a packedconv.layer.Layer, which has the shape of its input.
    input_shape: (N, IC, H, W) or (IC, H, W). sparsity: 0 to 1; by default that of the layer's own
    weight, and to be given where it has none; nonzeros are then taken to be spread evenly.
    stride, padding, dilation, groups: as `conv2d`, for a PackedWeight or a shape alone.

    calibration: what `packedconv.calibrate()` measured on this machine, what the workflow fitted
    to its crossover map (figures/<device>/crossover.json), or the file of either. Without one the
    answer rests on an assumption that it states, and its confidence is 0.5. On a CPU the answer is
    for as many threads as were calibrated; it makes the layer's plan, as the first `conv2d` does.

    Raises TypeError and ValueError for wrong arguments, as `conv2d`, and ValueError for a file
    that is no calibration.
    """
    if isinstance(calibration, (str, os.PathLike)):
        calibration = Calibration.load(os.fspath(calibration))
    if calibration is not None and not isinstance(calibration, Calibration):
        raise TypeError(
            "calibration: expected what packedconv.calibrate() returns, or the file that it was "
            f"saved to, got {type(calibration).__name__}"
        )
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    packed, shape, options = _described(layer, input_shape, sparsity, options)
    threads = None if calibration is None else calibration.threads
    key = plan.plan_key(packed, shape, threads=threads, **options)
    if min(key.output_shape) == 0:
        raise ValueError(f"input_shape: expected a layer with an output, got {tuple(shape)}")
    if calibration is None:
        return _assumed(packed.sparsity)
    return _calibrated(calibration, packed, key)


def _calibrated(calibration: Calibration, packed: PackedWeight, key: PlanKey) -> Advice:
    schedule, facts = None, None
    elsewhere = []  # type: typing.List[str]
    if calibration.kind == "cpu":
        made = plan.find(packed, tuple(key))
        schedule, facts = made.schedule, made.facts
        here = (("processor", device.cpu_title(), calibration.title),)
        here += (("instruction set", key.isa, calibration.isa),)
        here += (("number of threads", torch.get_num_threads(), calibration.threads),)
        elsewhere = [
            f"{name}: {found} (calibrated: {wanted})"
            for name, found, wanted in here
            if found != wanted
        ]
    work = workload_of_call(key, packed.shape[2:], packed.nnz, schedule, facts)
    found = calibration.predict(work, elsewhere)
    bound, bound_seconds, roofline_text = _roofline(calibration, work, packed)
    others = {
        name: found.sparse_seconds / seconds
        for name, seconds in found.others.items()
        if seconds < found.sparse_seconds
    }
    sides = [
        f"{side} {_time(seconds)} ({_parts(calibration, contender, work)})"
        for side, seconds, contender in (
            ("sparse", found.sparse_seconds, found.sparse),
            ("dense", found.dense_seconds, found.dense),
        )
    ]
    why = [
        f"Expected: {'; '.join(sides)}.",
        *roofline_text,
        *(
            f"At less precision dense is faster: {OTHER_PRECISIONS[name]}, {ratio:.2f} times as "
            "fast as sparse."
            for name, ratio in sorted(others.items(), key=lambda item: -item[1])
        ),
        f"Calibrated on {calibration.title}: {calibration.source}.",
    ]
    if found.outside:
        outside = "; ".join(found.outside)
        why.append(f"Outside what was calibrated, so that the interval is wider: {outside}.")
    return Advice(
        found.choice,
        found.speedup,
        found.low,
        found.high,
        found.confidence,
        found.sparse_seconds,
        found.dense_seconds,
        bound,
        bound_seconds,
        others,
        packed.sparsity,
        True,
        why,
    )


def _assumed(sparsity: float) -> Advice:
    """The answer of the assumption."""
    # A weight of zeros alone would be infinitely fast.
    speedup = 1 / (ASSUMED_COST * max(1 - sparsity, 1e-3))
    reason = (
        "Not calibrated: this assumes that a nonzero costs as much as "
        f"{ASSUMED_COST:g} weights of the dense convolution, whatever the layer. For an answer "
        "that rests on measurement, pass calibration=packedconv.calibrate(), which takes some "
        "tens of seconds and can be saved."
    )
    return Advice(
        "sparse" if speedup > 1 else "dense",
        speedup,
        0.0,
        math.inf,
        0.5,
        None,
        None,
        None,
        None,
        {},
        sparsity,
        False,
        [reason],
    )


def _roofline(
    calibration: Calibration, work: Workload, packed: PackedWeight
) -> typing.Tuple[typing.Optional[str], typing.Optional[float], typing.List[str]]:
    """Bound of the sparse side, its seconds, and a sentence on both sides (paper section 4)."""
    peak, bandwidth = calibration.peak_flops, calibration.bandwidth
    if not (peak and bandwidth):
        return None, None, []
    sides = []
    for flop, moved in (
        (2 * work.nonzeros * work.pixels, 4 * (work.inputs + work.outputs) + packed.nbytes),
        (2 * work.weights * work.pixels, 4 * (work.inputs + work.outputs + work.weights)),
    ):
        kind = "compute" if flop / peak >= moved / bandwidth else "memory"
        sides.append((kind, max(flop / peak, moved / bandwidth), flop / moved))
    (bound, seconds, intensity), (dense_bound, dense_seconds, dense_intensity) = sides
    text = (
        f"Roofline, ridge point {peak / bandwidth:.1f} FLOP/byte: sparse has {intensity:.1f} and "
        f"is {bound}-bound, at least {_time(seconds)}; dense has {dense_intensity:.1f} and is "
        f"{dense_bound}-bound, at least {_time(dense_seconds)}."
    )
    return bound, seconds, [text]


def _parts(calibration: Calibration, contender: str, work: Workload) -> str:
    """The largest parts of an expected time, in words."""
    terms = terms_of(contender, work)
    shares = {}  # type: typing.Dict[str, float]
    for name, value in calibration.models[contender].seconds.items():
        shares[_PARTS[name]] = shares.get(_PARTS[name], 0.0) + value * terms[name]
    whole = sum(shares.values())
    largest = sorted(shares, key=lambda name: -shares[name])[:_NAMED_PARTS]
    return ", ".join(
        f"{name} {shares[name] / whole:.0%}" for name in largest if shares[name] > 0.05 * whole
    )


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _described(
    layer: LayerLike,
    input_shape: typing.Optional[typing.Sequence[int]],
    sparsity: typing.Optional[float],
    options: typing.Dict[str, typing.Any],
) -> typing.Tuple[PackedWeight, typing.Sequence[int], typing.Dict[str, typing.Any]]:
    """Weight, shape of the input, and options of `conv2d`, of whatever describes a layer."""
    if isinstance(layer, (Layer, torch.nn.Conv2d, SparseConv2d)):
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise TypeError(f"{given[0]}: expected none beside a layer that has its own")
    if isinstance(layer, Layer):
        if input_shape is not None:
            raise TypeError("input_shape: expected none beside a Layer, which has its own")
        return _spread(layer.weight_shape, sparsity), layer.input_shape, layer.conv2d_arguments
    if input_shape is None:
        raise TypeError("input_shape: expected (N, IC, H, W) or (IC, H, W), got None")
    if isinstance(layer, torch.nn.Conv2d):
        options = {name: getattr(layer, name) for name in options}
        if sparsity is not None:
            return _spread(tuple(layer.weight.shape), sparsity), input_shape, options
        with warnings.catch_warnings():
            # How long a layer takes does not depend on how its weights are rounded.
            warnings.simplefilter("ignore", PackWarning)
            return SparseConv2d.from_dense(layer).packed, input_shape, options
    if isinstance(layer, SparseConv2d):
        packed, options = layer.packed, layer._options()
    else:
        defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
        options = {
            name: defaults[name] if value is None else value for name, value in options.items()
        }
        if not isinstance(layer, PackedWeight):
            return _spread(_weight_shape(layer), sparsity), input_shape, options
        packed = layer
    if sparsity is not None:
        packed = _spread(packed.shape, sparsity)
    return packed, input_shape, options


def _weight_shape(layer: object) -> typing.Tuple[int, ...]:
    good = isinstance(layer, (tuple, list)) and len(layer) == 4
    if not (good and all(arguments.is_integer(size) and size > 0 for size in layer)):
        raise TypeError(
            "layer: expected a torch.nn.Conv2d, a SparseConv2d, a PackedWeight, a "
            f"packedconv.layer.Layer or a weight's shape (OC, IC/groups, Kh, Kw), got {layer!r}"
        )
    return tuple(int(size) for size in layer)


def _spread(shape: typing.Sequence[int], sparsity: typing.Optional[float]) -> PackedWeight:
    """A weight whose nonzeros, all 1, are spread evenly."""
    if sparsity is None:
        raise TypeError("sparsity: expected a number from 0 to 1 for a layer without weights")
    if isinstance(sparsity, bool) or not isinstance(sparsity, numbers.Real):
        raise TypeError(f"sparsity: expected a number from 0 to 1, got {sparsity!r}")
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity: expected a number from 0 to 1, got {sparsity!r}")
    weight = np.zeros(shape, dtype=np.float32)
    count = nonzero_count(weight.size, sparsity)
    if count:
        places = np.arange(count, dtype=np.int64) * weight.size // count
        weight.reshape(-1)[places] = 1.0
    return pack_array(weight)
