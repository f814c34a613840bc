"""How long dense and sparse convolutions take on one machine: a model with few coefficients.

The seconds of a contender are a sum of counts (operations, bytes, ...), each times a coefficient
that is not negative. The counts follow from the shapes and, for the sparse convolution on a CPU,
from the plan that computes it. `fit` finds the coefficients from times that were measured here;
what is left over, on layers that the fit did not see, says how far a prediction may be off.
Needs numpy alone.
"""

import json
import math
import typing

import numpy as np

from packedconv import roofline
from packedconv.files import atomic_write
from packedconv.layer import Layer
from packedconv.schedule import PlanKey, Schedule

SCHEMA = 1
# What times are measured of, as a run on a GPU names them; a CPU has "sparse" and "dense".
SPARSE = ("sparse", "sparse_column")
FP32 = ("dense_fp32", "dense_channels_last")
# Dense contenders of less precision than the sparse convolution. PyTorch's default is one on a
# GPU only, where it may take TF32.
OTHER_PRECISIONS = {
    "dense": "PyTorch's default, which may take TF32",
    "dense_tf32": "TF32",
    "dense_fp16": "FP16",
}
# Of a prediction, in words and figures; in standard deviations.
INTERVAL = 1.96
# The standard deviation of a logarithm is at least this: two runs differ by as much.
LEAST_SPREAD = 0.03
# What a prediction outside the calibrated range may be off, over one inside.
OUTSIDE = 2.0
# Channels that a vector or tile of dense kernels holds; fewer cost as much.
_CHANNEL_TILE = 16
# Vectors of sums below which a multiply-add waits for the one before: its latency, 4 cycles, times
# the 2 that begin in each.
_FEW_SUMS = 8
# Bytes of a tile that the first cache holds, and numbers of an output that some cache holds.
_NEAR_BYTES = 32 << 10
_NEAR_OUTPUTS = 1 << 20
_STEPS = 12
# Fits with weights by how far points lie away, and in how many standard deviations that is far.
_REWEIGHTINGS = 8
_FAR = 1.5

Terms = typing.Dict[str, float]


class Workload(typing.NamedTuple):
    """What one execution has to compute.

    channels are those of all groups; nonzeros those of the whole weight. inside: share of the
    multiply-adds of a dense convolution that fall on the image, not on the padding. schedule,
    facts: of the CPU's plan (`CpuPlan.schedule`, `CpuPlan.facts`); None on a GPU.
    """

    batch: int
    in_channels: int
    out_channels: int
    height: int
    width: int
    out_height: int
    out_width: int
    kernel_height: int
    kernel_width: int
    stride: int
    dilation: int
    groups: int
    inside: float
    nonzeros: int
    threads: int = 1
    schedule: typing.Optional[Schedule] = None
    facts: typing.Optional[typing.Dict[str, typing.Any]] = None

    @property
    def weights(self) -> int:
        """Number of weights, zeros included."""
        positions = self.kernel_height * self.kernel_width
        return positions * (self.in_channels // self.groups) * self.out_channels

    @property
    def sparsity(self) -> float:
        """Share of the weights that are zero."""
        return 1 - self.nonzeros / self.weights

    @property
    def pixels(self) -> int:
        """Output pixels of all images."""
        return self.batch * self.out_height * self.out_width

    @property
    def inputs(self) -> int:
        """Numbers of the input."""
        return self.batch * self.in_channels * self.height * self.width

    @property
    def outputs(self) -> int:
        """Numbers of the output."""
        return self.pixels * self.out_channels


def workload_of_layer(
    layer: Layer,
    nonzeros: int,
    threads: int = 1,
    schedule: typing.Optional[Schedule] = None,
    facts: typing.Optional[typing.Dict[str, typing.Any]] = None,
) -> Workload:
    """The workload of a layer as the workflow measures it."""
    return Workload(
        layer.batch,
        layer.in_channels,
        layer.out_channels,
        layer.height,
        layer.width,
        layer.out_height,
        layer.out_width,
        layer.kernel_size,
        layer.kernel_size,
        layer.stride,
        layer.dilation,
        layer.groups,
        roofline.border_exact_flops(layer) / max(1, roofline.dense_flops(layer)),
        nonzeros,
        threads,
        schedule,
        facts,
    )


def workload_of_call(
    key: PlanKey,
    kernel: typing.Sequence[int],
    nonzeros: int,
    schedule: typing.Optional[Schedule] = None,
    facts: typing.Optional[typing.Dict[str, typing.Any]] = None,
) -> Workload:
    """The workload of a call of `packedconv.conv2d`."""
    batch, in_channels, height, width = key.input_shape
    _, out_channels, out_height, out_width = key.output_shape
    return Workload(
        batch,
        in_channels,
        out_channels,
        height,
        width,
        out_height,
        out_width,
        kernel[0],
        kernel[1],
        max(key.stride),
        max(key.dilation),
        key.groups,
        _inside(key, kernel, 0) * _inside(key, kernel, 1),
        nonzeros,
        key.threads,
        schedule,
        facts,
    )


def _inside(key: PlanKey, kernel: typing.Sequence[int], axis: int) -> float:
    """Share of the reads along an axis that fall on the image."""
    size, outputs = key.input_shape[2 + axis], key.output_shape[2 + axis]
    firsts = np.arange(outputs) * key.stride[axis] - key.padding[axis]
    reads = firsts[:, np.newaxis] + np.arange(kernel[axis]) * key.dilation[axis]
    return float(np.mean((reads >= 0) & (reads < size))) if outputs else 1.0


def dense_terms(work: Workload) -> Terms:
    """Counts that the time of a dense convolution is made of.

    call: 1. point_flop, window_flop: operations of 1x1 and of larger kernels, those on the padding
    left out, output channels rounded up to whole vectors. strided_flop: those of a stride above 1,
    once more. rows: weights read for each row of the output, by which narrow images cost more.
    few_inputs: operations over the input channels of a group. input, output, weight: numbers moved;
    far_output: those of an output that no cache holds.
    """
    ins = work.in_channels // work.groups
    outs = work.groups * _up(work.out_channels // work.groups)
    positions = work.kernel_height * work.kernel_width
    flop = 2.0 * work.pixels * positions * ins * outs * work.inside
    return {
        "call": 1.0,
        "point_flop": flop if positions == 1 else 0.0,
        "window_flop": flop if positions > 1 else 0.0,
        "strided_flop": flop if work.stride > 1 else 0.0,
        "rows": float(work.batch * work.out_height * positions * ins * outs),
        "few_inputs": flop / ins,
        "input": float(work.inputs),
        "output": float(work.outputs),
        "far_output": float(max(0, work.outputs - _NEAR_OUTPUTS)),
        "weight": float(work.weights),
    }


def sparse_terms(work: Workload) -> Terms:
    """Counts that the time of a sparse convolution is made of.

    call: 1. flop: operations, those on the padding included. input, output, nonzeros: numbers
    moved; far_output: those of an output that no cache holds. With a plan, whose tiles have unused
    lanes too, also: visits: nonzeros of all tiles, each of which is decoded; few_visits: of tiles
    with so few sums that a multiply-add waits for the one before; channels: output channels of all
    tiles and blocks of input channels, where sums begin and end; shifts: their vectors that are
    moved by a pixel; carried: sums that pass through memory between two blocks; far_flop:
    operations on input that the first cache does not hold; copied: numbers of input copied for the
    tiles, strided_copied: with a stride, pieces_copied: from several images or blocks of rows for
    one tile; pieces_output: output of such tiles. All but the first are those of the thread that
    has most.
    """
    terms = {
        "call": 1.0,
        "flop": 2.0 * work.nonzeros * work.pixels,
        "input": float(work.inputs),
        "output": float(work.outputs),
        "far_output": float(max(0, work.outputs - _NEAR_OUTPUTS)),
        "nonzeros": float(work.nonzeros),
    }
    if work.schedule is None or work.facts is None:
        return terms
    schedule, facts = work.schedule, work.facts
    sums = schedule["rows"] * schedule["vectors"]
    computed = work.pixels / max(facts["lanes_used"], 1e-9)
    tiles = computed / (sums * facts["lanes"])
    blocks = -(-(work.in_channels // work.groups) // schedule["block_channels"])
    flop = 2.0 * work.nonzeros * computed
    channels = work.out_channels * tiles * blocks
    copied = work.groups * tiles * blocks * facts["tile_bytes"] / 4
    pieces = facts["pieces_per_tile"] > 1
    terms.update(
        flop=flop,
        far_flop=flop if facts["tile_bytes"] > _NEAR_BYTES else 0.0,
        visits=work.nonzeros * tiles,
        few_visits=work.nonzeros * tiles if sums < _FEW_SUMS else 0.0,
        channels=channels,
        shifts=channels * sums * (work.kernel_width - 1) * (schedule["path"] == "aligned"),
        carried=work.out_channels * computed * (blocks - 1),
        copied=copied,
        strided_copied=copied if work.stride > 1 else 0.0,
        pieces_copied=copied if pieces else 0.0,
        pieces_output=float(work.outputs) if pieces else 0.0,
    )
    items, threads = max(1, facts["items"]), work.threads
    uneven = -(-items // threads) * threads / items
    return {name: value if name == "call" else value * uneven for name, value in terms.items()}


def terms_of(contender: str, work: Workload) -> Terms:
    """`sparse_terms` or `dense_terms`, by the contender's name."""
    return sparse_terms(work) if contender in SPARSE else dense_terms(work)


def _up(channels: int) -> int:
    return -(-channels // _CHANNEL_TILE) * _CHANNEL_TILE


class Point(typing.NamedTuple):
    """One measured time. layer: which belong together, for judging the fit."""

    layer: str
    work: Workload
    contender: str
    seconds: float


class Model(typing.NamedTuple):
    """The time of one contender.

    seconds: of each count of `terms_of`. spread: standard deviation of the logarithm of measured
    over predicted time, of layers that the fit did not see. points: measured times behind it.
    """

    seconds: typing.Dict[str, float]
    spread: float
    points: int

    def predict(self, terms: typing.Mapping[str, float]) -> float:
        """Seconds. Raises KeyError for a count that the terms lack."""
        return sum(value * terms[name] for name, value in self.seconds.items())


# What of a workload has to lie within the calibrated range, and how a reader knows it.
_RANGES = {
    "pixels": "output pixels",
    "group_in_channels": "input channels of a group",
    "group_out_channels": "output channels of a group",
    "kernel_area": "weights of a kernel",
    "stride": "stride",
    "dilation": "dilation",
    "groups": "groups",
}


def _measures(work: Workload) -> typing.Dict[str, int]:
    return {
        "pixels": work.pixels,
        "group_in_channels": work.in_channels // work.groups,
        "group_out_channels": work.out_channels // work.groups,
        "kernel_area": work.kernel_height * work.kernel_width,
        "stride": work.stride,
        "dilation": work.dilation,
        "groups": work.groups,
    }


class Prediction(typing.NamedTuple):
    """What a calibration expects of a workload.

    speedup: dense over sparse time; low, high: its 95 % interval. confidence: probability that
    the faster side is the one that is predicted to be, 0.5 to 1. dense, sparse: the contenders
    compared, the fastest of their kind. others: seconds of dense contenders of less precision.
    outside: in what the workload lies outside the calibrated range.
    """

    speedup: float
    low: float
    high: float
    confidence: float
    dense: str
    sparse: str
    dense_seconds: float
    sparse_seconds: float
    others: typing.Dict[str, float]
    outside: typing.List[str]

    @property
    def choice(self) -> str:
        """ "sparse" or "dense": the faster one at FP32."""
        return "sparse" if self.speedup > 1 else "dense"


class Calibration(typing.NamedTuple):
    """What was measured of one machine, for `packedconv.advise`.

    kind: "cpu" or "cuda". title: of the processor. threads: None on a GPU. isa: instruction set of
    the sparse kernel on a CPU. peak_flops (FLOP/s), bandwidth (bytes/s): measured ceilings, or
    None. source: where the times come from. models: by contender. ranges: least and most of what
    the calibrated workloads have.
    """

    kind: str
    title: str
    threads: typing.Optional[int]
    isa: typing.Optional[str]
    peak_flops: typing.Optional[float]
    bandwidth: typing.Optional[float]
    source: str
    models: typing.Dict[str, Model]
    ranges: typing.Dict[str, typing.Tuple[int, int]]

    def predict(self, work: Workload, also_outside: typing.Sequence[str] = ()) -> Prediction:
        """What to expect of a workload, with the plan of this machine where it is a CPU.

        also_outside: in what else, beside its sizes, it is not what was calibrated.
        """
        seconds = {name: model.predict(terms_of(name, work)) for name, model in self.models.items()}
        others = OTHER_PRECISIONS if self.kind == "cuda" else {}
        exact = [name for name in seconds if name not in SPARSE and name not in others]
        # Where a GPU was measured without FP32, PyTorch's default is what there is to compare.
        exact = exact or ["dense"]
        dense = min(exact, key=seconds.__getitem__)
        sparse = min((name for name in seconds if name in SPARSE), key=seconds.__getitem__)
        outside = self.outside(work) + list(also_outside)
        spread = math.hypot(self.models[dense].spread, self.models[sparse].spread)
        spread *= OUTSIDE if outside else 1.0
        speedup = seconds[dense] / seconds[sparse]
        away = abs(math.log(speedup)) / spread
        return Prediction(
            speedup,
            speedup * math.exp(-INTERVAL * spread),
            speedup * math.exp(INTERVAL * spread),
            (1 + math.erf(away / math.sqrt(2))) / 2,
            dense,
            sparse,
            seconds[dense],
            seconds[sparse],
            {name: seconds[name] for name in seconds if name in others and name != dense},
            outside,
        )

    def outside(self, work: Workload) -> typing.List[str]:
        """In what a workload lies outside the calibrated range, in words."""
        found = []
        for name, value in _measures(work).items():
            least, most = self.ranges[name]
            if not least <= value <= most:
                found.append(f"{_RANGES[name]} of {value} (calibrated: {least} to {most})")
        return found

    def save(self, path: str) -> None:
        """Write as JSON, atomically."""
        record = dict(self._asdict(), schema=SCHEMA)
        record["models"] = {name: dict(model._asdict()) for name, model in self.models.items()}
        record["ranges"] = {name: list(ends) for name, ends in self.ranges.items()}
        text = json.dumps(record, indent=1, sort_keys=True) + "\n"
        with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as stream:
            stream.write(text)

    @staticmethod
    def load(path: str) -> "Calibration":
        """Read what `save` wrote. Raises OSError, and ValueError for another content."""
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
        try:
            return _from_record(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}: expected a calibration that Calibration.save wrote, schema {SCHEMA}, "
                f"got another content ({type(error).__name__}: {error}); calibrate again"
            ) from None


def _from_record(record: typing.Dict[str, typing.Any]) -> Calibration:
    if record["schema"] != SCHEMA:
        raise ValueError("schema {!r}".format(record["schema"]))
    if record["kind"] not in ("cpu", "cuda"):
        raise ValueError("kind {!r}".format(record["kind"]))
    models = {}
    for name, model in record["models"].items():
        seconds = {term: float(value) for term, value in model["seconds"].items()}
        if not all(math.isfinite(value) and value >= 0 for value in seconds.values()):
            raise ValueError(f"seconds of {name}")
        if not (seconds and sum(seconds.values()) > 0 and 0 < model["spread"] < math.inf):
            raise ValueError(f"model of {name}")
        models[name] = Model(seconds, float(model["spread"]), int(model["points"]))
    _require_both_sides(models)
    return Calibration(
        record["kind"],
        str(record["title"]),
        record["threads"],
        record["isa"],
        record["peak_flops"],
        record["bandwidth"],
        str(record["source"]),
        models,
        {
            name: (int(record["ranges"][name][0]), int(record["ranges"][name][1]))
            for name in _RANGES
        },
    )


def _require_both_sides(names: typing.Iterable[str]) -> None:
    names = list(names)
    if not ("sparse" in names and {"dense", *FP32} & set(names)):
        raise ValueError(
            f"points: expected times of sparse and of a dense contender, got {sorted(names)}"
        )


def fit(
    points: typing.Iterable[Point],
    kind: str,
    title: str,
    threads: typing.Optional[int] = None,
    isa: typing.Optional[str] = None,
    peak_flops: typing.Optional[float] = None,
    bandwidth: typing.Optional[float] = None,
    source: str = "",
) -> Calibration:
    """The calibration that measured times give; for the other arguments see Calibration.

    Raises ValueError for points without a sparse and a dense contender, of fewer than two layers,
    or of times that are not positive.
    """
    points = list(points)
    groups = {}  # type: typing.Dict[str, typing.List[Point]]
    for point in points:
        if not 0 < point.seconds < math.inf:
            raise ValueError(
                f"points: expected positive seconds, got {point.seconds} of {point.contender}, "
                f"layer {point.layer}"
            )
        groups.setdefault(point.contender, []).append(point)
    _require_both_sides(groups)
    layers = len({point.layer for point in points})
    if layers < 2:
        raise ValueError(f"points: expected two layers or more, got {layers}")
    measures = [_measures(point.work) for point in points]
    ranges = {
        name: (min(each[name] for each in measures), max(each[name] for each in measures))
        for name in _RANGES
    }
    models = {name: _fit_model(group) for name, group in groups.items()}
    return Calibration(kind, title, threads, isa, peak_flops, bandwidth, source, models, ranges)


def _fit_model(points: typing.List[Point]) -> Model:
    terms = [terms_of(point.contender, point.work) for point in points]
    names = sorted(terms[0])
    counts = np.array([[row[name] for name in names] for row in terms])
    seconds = np.array([point.seconds for point in points])
    layers = np.array([point.layer for point in points])
    found = fit_sum(counts, seconds)
    # Each layer is predicted by a fit to the others.
    left = np.zeros(len(points))
    for layer in np.unique(layers):
        own = layers == layer
        others = fit_sum(counts[~own], seconds[~own])
        left[own] = np.log(np.maximum(counts[own] @ others, 1e-12) / seconds[own])
    # A layer counts once, however often it was measured.
    squares = [np.mean(left[layers == layer] ** 2) for layer in np.unique(layers)]
    spread = max(LEAST_SPREAD, float(np.sqrt(np.mean(squares))))
    kept = {name: float(value) for name, value in zip(names, found) if value > 0}
    return Model(kept, spread, len(points))


def fit_sum(counts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients that are not negative, so that log(counts @ coefficients) is near log(seconds).

    counts (points, terms), not negative; seconds (points,), positive. Least squares of the
    relative error, then of the logarithm by Gauss-Newton steps; after these again, with less
    weight on points that lie far from the rest, as disturbed ones do (Huber 1981, section 7.8).
    """
    counts, seconds = np.asarray(counts, dtype=float), np.asarray(seconds, dtype=float)
    scale = (counts / seconds[:, np.newaxis]).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = counts / scale
    found = nonnegative_least_squares(scaled / seconds[:, np.newaxis], np.ones(len(seconds)))
    weights = np.ones(len(seconds))
    for _ in range(_REWEIGHTINGS):
        found = _fit_logarithms(scaled, seconds, found, weights)
        away = np.abs(np.log(scaled @ found / seconds))
        # 1.4826 times the median is the standard deviation of normal errors.
        usual = _FAR * max(LEAST_SPREAD, 1.4826 * float(np.median(away)))
        weights = np.minimum(1.0, usual / np.maximum(away, 1e-12))
        if weights.min() == 1.0:
            break
    return found / scale


def _fit_logarithms(
    counts: np.ndarray, seconds: np.ndarray, found: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Gauss-Newton steps from `found` for the least weighted squares of the logarithm."""
    best = _log_error(counts, seconds, found, weights)
    roots = np.sqrt(weights)
    for _ in range(_STEPS):
        predicted = counts @ found
        target = 1 + np.log(seconds / predicted)
        rows = counts * (roots / predicted)[:, np.newaxis]
        step = nonnegative_least_squares(rows, target * roots)
        # A whole step may go too far.
        for share in (1.0, 0.5, 0.25, 0.1):
            tried = found + share * (step - found)
            error = _log_error(counts, seconds, tried, weights)
            if error < best:
                break
        else:
            break
        close = error > best * (1 - 1e-9)
        found, best = tried, error
        if close:
            break
    return found


def _log_error(
    counts: np.ndarray, seconds: np.ndarray, coefficients: np.ndarray, weights: np.ndarray
) -> float:
    predicted = counts @ coefficients
    if not (predicted > 0).all():
        return math.inf
    return float(np.sum(weights * np.log(predicted / seconds) ** 2))


def nonnegative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least |matrix @ x - target| (Lawson and Hanson 1974, chapter 23)."""
    terms = matrix.shape[1]
    x = np.zeros(terms)
    free = np.zeros(terms, dtype=bool)
    gradient = matrix.T @ target
    tolerance = 1e-10 * max(1.0, float(np.abs(gradient).max()))
    for _ in range(3 * terms):
        if free.all() or gradient[~free].max() <= tolerance:
            break
        free[np.flatnonzero(~free)[np.argmax(gradient[~free])]] = True
        while True:
            solution = np.zeros(terms)
            solution[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            if (solution[free] > 0).all():
                break
            wrong = free & (solution <= 0)
            step = np.min(x[wrong] / np.maximum(x[wrong] - solution[wrong], 1e-300))
            x += step * (solution - x)
            free &= x > 1e-14
            x[~free] = 0.0
        x = solution
        gradient = matrix.T @ (target - matrix @ x)
    return x
