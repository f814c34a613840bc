"""What the paper's statements speak of, computed from the model or from measured results.

`COMPUTED` quantities need the printed numbers and the model only, `MEASURED` ones a set of
results; those in `SWEEPS` are about all sparsities of an experiment. config/paper.yaml names one
for every statement, with its parameters. Each returns a `Measurement`; it raises
`NotMeasuredError` when the results do not hold what the statement is about.
"""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from packedconv import roofline
from packedconv.evidence import statistics, tables
from packedconv.evidence.published import Published
from packedconv.evidence.samples import Results, against_dense
from packedconv.layer import Layer, sparsity_key


class NotMeasuredError(Exception):
    """A statement cannot be judged with what there is; the message says why."""


class Part(NamedTuple):
    """One value of a quantity with its interval; low == high where there is none."""

    label: str
    value: float
    low: float
    high: float


class Measurement(NamedTuple):
    """What a statement is judged by: one part, or one for each of several out_channels.

    sparsities: those that it was measured at, ascending; empty when that is of no matter.
    note: what a reader should know beside the value.
    """

    parts: Sequence[Part]
    sparsities: Sequence[float] = ()
    note: str = ""


class Measured:
    """A set of results as the quantities see it: all of it, or a part (`narrowed`).

    judging: the section of that name in config/paper.yaml.
    """

    def __init__(self, results: Results, judging: Mapping[str, Any]):
        self.results = results
        self.judging = judging
        self.layers: Mapping[str, Layer] = results.layers
        # Measured sparsities, ascending.
        self.sparsities = np.sort(results.samples["sparsity"].unique())
        # Shared by all that are narrowed from this one.
        self.medians = functools.cache(
            lambda: statistics.resampled_medians(results.samples, self.between_runs)
        )
        self.times = functools.cache(lambda: statistics.times(results.samples))

    def narrowed(
        self, layers: Mapping[str, Layer], sparsities: Sequence[float] | None = None
    ) -> "Measured":
        """The same results with these layers and those of the sparsities that were measured.

        Raises NotMeasuredError when none of the sparsities was.
        """
        other = copy.copy(self)
        other.layers = layers
        if sparsities is not None:
            other.sparsities = self.sparsities[np.isin(self.sparsities, np.round(sparsities, 6))]
            if not len(other.sparsities):
                raise NotMeasuredError("not measured in this run: any of the paper's sparsities")
        return other

    @property
    def between_runs(self) -> float:
        """How far the times of another run may lie off: standard deviation of the logarithm."""
        return self.judging["between_runs"][self.results.settings["device"]["kind"]]

    def part(self, values: np.ndarray, label: str = "") -> Part:
        """A part from an estimate (first entry) and its resamples (the others)."""
        return Part(
            label, float(values[0]), *statistics.interval(values, self.judging["confidence"])
        )

    @functools.cached_property
    def roofs(self) -> roofline.Device:
        """Stated peaks of the device, or measured ones where none are stated."""
        stated, measured = self.results.settings["device"], self.results.peaks
        return roofline.Device(
            self.results.device,
            stated.get("peak_flops") or measured["peak_flops"],
            stated.get("bandwidth") or measured["bandwidth"],
        )

    @property
    def roof_factors(self) -> np.ndarray:
        """Factors by which the roofs of another run may differ: none where they are stated."""
        stated = self.results.settings["device"]
        certain = stated.get("peak_flops") and stated.get("bandwidth")
        return statistics.run_factors("roofs", 0.0 if certain else self.between_runs)

    def layer(self, out_channels: int) -> Layer:
        """The layer of that many output channels. Raises NotMeasuredError."""
        found = [layer for layer in self.layers.values() if layer.out_channels == out_channels]
        if not found:
            raise NotMeasuredError(f"not measured in this run: {out_channels} output channels")
        if len(found) > 1:
            names = ", ".join(layer.name for layer in found)
            raise NotMeasuredError(
                f"not clear in this run: {names} have {out_channels} output channels"
            )
        return found[0]

    def seconds(self, implementation: str, out_channels: int, sparsity: float) -> np.ndarray:
        """Median seconds and its resamples. Raises NotMeasuredError."""
        layer = self.layer(out_channels)
        try:
            return self.medians()[implementation, layer.name, round(sparsity, 6)]
        except KeyError:
            raise NotMeasuredError(f"not measured in this run: S {sparsity:.2f}") from None

    def all_seconds(self, implementation: str, out_channels: int) -> np.ndarray:
        """Median seconds at every sparsity, (1 + resamples, sparsities)."""
        columns = [self.seconds(implementation, out_channels, value) for value in self.sparsities]
        return np.stack(columns, axis=1)

    def all_speedups(self, out_channels: int) -> np.ndarray:
        """Speedups at every sparsity, (1 + resamples, sparsities)."""
        return self.all_seconds("dense", out_channels) / self.all_seconds("sparse", out_channels)


Computed = Callable[..., Measurement]
COMPUTED: dict[str, Computed] = {}
MEASURED: dict[str, Computed] = {}

# Measured quantities over all sparsities of an experiment: with fewer they are about less.
SWEEPS: set[str] = set()


def computed(function: Computed) -> Computed:
    COMPUTED[function.__name__] = function
    return function


def measured(*, sweep: bool = False) -> Callable[[Computed], Computed]:
    def register(function: Computed) -> Computed:
        MEASURED[function.__name__] = function
        if sweep:
            SWEEPS.add(function.__name__)
        return function

    return register


def point(value: float, label: str = "") -> Part:
    """A part without an interval."""
    return Part(label, float(value), float(value), float(value))


def highest(values: np.ndarray) -> np.ndarray:
    """The column of the highest estimate: its estimate (first entry) and its resamples.

    The highest of each resample would lie above the estimate's, as noise adds to the highest of
    several values.
    """
    return values[:, values[0].argmax()]


def oc(out_channels: int) -> str:
    return f"OC {out_channels}"


@measured()
def speedup(data: Measured, out_channels: int, sparsity: float) -> Measurement:
    """Dense median time over sparse median time."""
    dense = data.seconds("dense", out_channels, sparsity)
    return Measurement([data.part(dense / data.seconds("sparse", out_channels, sparsity))])


@measured(sweep=True)
def highest_speedup(data: Measured, out_channels: Sequence[int]) -> Measurement:
    """The largest speedup over all sparsities and channel counts."""
    ratios = np.stack([data.all_speedups(count) for count in out_channels], axis=1)
    row, column = np.unravel_index(ratios[0].argmax(), ratios[0].shape)
    note = f"the highest is at OC {out_channels[row]}, S {data.sparsities[column]:.2f}"
    return Measurement([data.part(ratios[:, row, column])], tuple(data.sparsities), note)


@measured(sweep=True)
def highest_speedup_of(data: Measured, out_channels: int) -> Measurement:
    """The largest speedup of one channel count over all sparsities."""
    return Measurement(
        [data.part(highest(data.all_speedups(out_channels)))], tuple(data.sparsities)
    )


@measured(sweep=True)
def crossover(data: Measured, out_channels: int) -> Measurement:
    """Sparsity at which the speedup reaches 1, between measured neighbours."""
    values = statistics.crossover(data.sparsities, data.all_speedups(out_channels))
    return Measurement([data.part(values)], tuple(data.sparsities))


@measured(sweep=True)
def speedup_trend(data: Measured, out_channels: Sequence[int]) -> Measurement:
    """Rank correlation of the speedup with sparsity, for each channel count."""
    return _trend(data, out_channels, data.all_speedups)


@measured(sweep=True)
def time_trend(data: Measured, out_channels: Sequence[int], implementation: str) -> Measurement:
    """Rank correlation of the execution time with sparsity, for each channel count."""
    return _trend(data, out_channels, functools.partial(data.all_seconds, implementation))


@measured(sweep=True)
def throughput_trend(data: Measured, out_channels: int, implementation: str) -> Measurement:
    """Rank correlation of the throughput on the nonzeros with sparsity."""
    throughputs = _throughputs(data, out_channels, implementation)
    part = data.part(statistics.rank_correlation(data.sparsities, throughputs))
    return Measurement([part], tuple(data.sparsities))


@measured(sweep=True)
def time_spread(data: Measured, out_channels: Sequence[int], implementation: str) -> Measurement:
    """Longest over shortest median time over the sparsities, for each channel count."""
    parts = []
    for count in out_channels:
        seconds = data.all_seconds(implementation, count)
        parts.append(data.part(highest(seconds) * highest(1 / seconds), oc(count)))
    return Measurement(parts, tuple(data.sparsities))


@measured()
def throughput(
    data: Measured, out_channels: int, sparsity: float, implementation: str
) -> Measurement:
    """Work on the nonzeros (paper equation 8) over the median time, FLOP/s."""
    flops = roofline.sparse_flops(data.layer(out_channels), sparsity)
    return Measurement([data.part(flops / data.seconds(implementation, out_channels, sparsity))])


@measured(sweep=True)
def roof_fraction(
    data: Measured, out_channels: Sequence[int] | None, implementation: str = "sparse"
) -> Measurement:
    """Largest share of the attainable throughput over all sparsities and these channel counts
    (None: all that were measured)."""
    chosen = data.layers
    if out_channels is not None:
        chosen = {layer.name: layer for layer in map(data.layer, out_channels)}
    shares = []
    for name, layer in chosen.items():
        limits = [
            roofline.attainable(roofline.sparse_arithmetic_intensity(layer, value), data.roofs)
            for value in data.sparsities
        ]
        alone = data.narrowed({name: layer})
        reached = _throughputs(alone, layer.out_channels, implementation)
        shares.append(reached / np.array(limits))
    share = highest(np.concatenate(shares, axis=1))
    return Measurement([data.part(share * data.roof_factors)], tuple(data.sparsities))


@measured(sweep=True)
def sem_share(data: Measured, out_channels: Sequence[int], relative: float) -> Measurement:
    """Share of all points of these channel counts, both implementations, whose standard error
    is at most `relative` of their mean.

    How noisy a machine is differs from run to run: the interval is that of the share for limits
    `noise_factor` (of config/paper.yaml) times lower and higher.
    """
    times = data.times()
    names = [data.layer(count).name for count in out_channels]
    times = times[times["layer"].isin(names) & times["sparsity"].isin(data.sparsities)]
    errors = times["sem"] / times["mean"]
    if errors.isna().any():
        note = "a standard error needs two rounds"
        return Measurement([point(math.nan)], tuple(data.sparsities), note)
    factor = data.judging["noise_factor"]
    value, low, high = (
        float((errors <= limit).mean())
        for limit in (relative, relative / factor, relative * factor)
    )
    note = f"the largest standard error is {100 * errors.max():.2g} % of its mean"
    return Measurement([Part("", value, low, high)], tuple(data.sparsities), note)


@measured(sweep=True)
def error_trend(data: Measured, out_channels: Sequence[int], weights: str) -> Measurement:
    """Rank correlation of the maximum absolute error against dense with sparsity."""
    parts = []
    for count in out_channels:
        rho = statistics.spearman(data.sparsities, _errors(data, count, weights))
        parts.append(point(rho, oc(count)))
    return Measurement(parts, tuple(data.sparsities))


@measured(sweep=True)
def error_range(data: Measured, out_channels: Sequence[int], weights: str) -> Measurement:
    """Smallest and largest maximum absolute error against dense."""
    errors = np.concatenate([_errors(data, count, weights) for count in out_channels])
    parts = [point(errors.min(), "smallest"), point(errors.max(), "largest")]
    return Measurement(parts, tuple(data.sparsities))


@measured()
def one_block_ratio(data: Measured, out_channels: Sequence[int], sparsity: float) -> Measurement:
    """Best speedup of channel counts in one block over the best of those that are split, as
    the paper's kernel was mapped at that sparsity."""
    ratios: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for count in out_channels:
        facts = data.results.facts[data.layer(count).name]
        slices = facts.get("mapping", {}).get(sparsity_key(sparsity), {}).get("slices")
        if slices is None:
            raise NotMeasuredError(
                "not measured in this run: no split of the channels along grid z"
            )
        dense = data.seconds("dense", count, sparsity)
        ratios[slices == 1].append(dense / data.seconds("sparse", count, sparsity))
    if not all(ratios.values()):
        raise NotMeasuredError("not measured in this run: channels both split and in one block")
    best = {whole: highest(np.stack(found, axis=1)) for whole, found in ratios.items()}
    return Measurement([data.part(best[True] / best[False])])


@computed
def table_cells(published: Published, table: str) -> Measurement:
    """Number of cells of Table 1, 2 or 3 that come out as printed."""
    result = tables.agreement(published, table)
    notes = [result.note] if result.note else []
    cells = tables.recomputed(published, table)
    others = cells[(cells["assumption"] == tables.AS_STATED) & ~cells["agrees"]]
    if len(others) <= 3:
        for cell in others.to_dict("records"):
            names = {"sparsity": "S", "in_channels": "IC", "out_channels": "OC"}
            where = ", ".join(f"{name} {cell[key]}" for key, name in names.items() if key in cell)
            notes.append(f"{where}: {cell['rounded']} follows, {cell['printed']} is printed")
    return Measurement([point(result.agreeing)], note="; ".join(notes))


@computed
def table_reduction(published: Published, table: str) -> Measurement:
    """Reduction of operations by Winograd with which most cells of Table 2 or 3 come out."""
    best = max(
        tables.assumptions(published, table),
        key=lambda entry: tables.agreement(published, table, entry.name).agreeing,
    )
    found = tables.agreement(published, table, best.name)
    note = f"{found.agreeing} of {found.cells} cells with {best.name}"
    return Measurement([point(best.reduction)], note=note)


@computed
def ridge_point(published: Published, device: str) -> Measurement:
    """FLOP/byte."""
    return Measurement([point(published.device(device).ridge_point)])


@computed
def ridge_ratio(published: Published, device: str, other: str) -> Measurement:
    """Ridge point of a device over that of another."""
    ratio = published.device(device).ridge_point / published.device(other).ridge_point
    return Measurement([point(ratio)])


@computed
def peak_ratio(published: Published, device: str, other: str) -> Measurement:
    """FP32 peak of a device over that of another."""
    ratio = published.device(device).peak_flops / published.device(other).peak_flops
    return Measurement([point(ratio)])


@computed
def sparse_intensity(published: Published, sparsity: float) -> Measurement:
    """Arithmetic intensity of the sparse convolution of Table 1's layer, FLOP/byte."""
    value = roofline.sparse_arithmetic_intensity(published.table1_layer(), sparsity)
    return Measurement([point(value)])


@computed
def dense_intensity(published: Published) -> Measurement:
    """Arithmetic intensity of the dense convolution of Table 1's layer, FLOP/byte."""
    return Measurement([point(roofline.dense_arithmetic_intensity(published.table1_layer()))])


@computed
def dense_over_sparse(published: Published, sparsity: float) -> Measurement:
    """Dense over sparse arithmetic intensity of Table 1's layer."""
    layer = published.table1_layer()
    sparse = roofline.sparse_arithmetic_intensity(layer, sparsity)
    return Measurement([point(roofline.dense_arithmetic_intensity(layer) / sparse)])


@computed
def dense_over_ridge(published: Published, device: str) -> Measurement:
    """Dense arithmetic intensity of Table 1's layer over the ridge point."""
    intensity = roofline.dense_arithmetic_intensity(published.table1_layer())
    return Measurement([point(intensity / published.device(device).ridge_point)])


@computed
def sparse_over_ridge(
    published: Published, device: str, sparsities: Sequence[float]
) -> Measurement:
    """Sparse arithmetic intensity of Table 1's layer over the ridge point."""
    ridge, layer = published.device(device).ridge_point, published.table1_layer()
    parts = [
        point(roofline.sparse_arithmetic_intensity(layer, value) / ridge, f"S {value:.2f}")
        for value in sparsities
    ]
    workload = published.workloads[device]
    above = [
        count
        for count in [*workload["out_channels"], *workload["out_channels_text"]]
        if roofline.sparse_arithmetic_intensity(published.layer(device, count), sparsities[0])
        > ridge
    ]
    note = ""
    if above:
        listed = ", ".join(str(count) for count in above)
        note = (
            f"holds for OC {layer.out_channels}, the layer of Table 1;"
            f" at S {sparsities[0]:.2f} OC {listed} lie above the ridge point"
        )
    return Measurement(parts if len(parts) > 1 else [point(parts[0].value)], note=note)


@computed
def winograd_speedups(published: Published, table: str, in_channels: int) -> Measurement:
    """Model speedup over Winograd for one row of Table 2 or 3, as stated in section 4.2."""
    speedups = _speedups_as_stated(published, table)
    return Measurement(
        [
            point(value, oc(layer.out_channels))
            for layer, value in speedups
            if layer.in_channels == in_channels
        ]
    )


@computed
def practical_speedups(published: Published, table: str, least: int) -> Measurement:
    """Smallest and largest model speedup over Winograd for at least so many input and output
    channels in Table 2 or 3, as stated in section 4.2."""
    cells = [
        (value, printed)
        for (layer, value), (_, printed) in zip(
            _speedups_as_stated(published, table),
            tables.winograd_cells(published, table),
            strict=True,
        )
        if min(layer.in_channels, layer.out_channels) >= least
    ]
    values, printed = zip(*cells, strict=True)
    title = published.tables[table]["where"]
    span = " to ".join(dict.fromkeys(f"{value:.1f}" for value in (min(printed), max(printed))))
    return Measurement(
        [point(min(values), "smallest"), point(max(values), "largest")],
        note=f"{title} prints {span} for these {len(cells)} cells;"
        " the paper does not name the channel counts it means",
    )


@computed
def winograd_over_ridge(published: Published, table: str, in_channels: int) -> Measurement:
    """Largest arithmetic intensity of both sides in one row of Table 2 or 3, over the ridge
    point: below 1 both are memory-bound."""
    entry = published.tables[table]
    ridge = published.device(entry["device"]).ridge_point
    dense, sparse = [], []
    for layer, _ in tables.winograd_cells(published, table):
        if layer.in_channels != in_channels:
            continue
        dense.append(roofline.dense_arithmetic_intensity(layer) / entry["reduction"] / ridge)
        sparse.append(roofline.sparse_arithmetic_intensity(layer, entry["sparsity"]) / ridge)
    return Measurement([point(max(dense), "Winograd"), point(max(sparse), "sparse")])


@computed
def winograd_reduction(published: Published, output_tile: int, kernel_size: int) -> Measurement:
    """Multiplications of direct over Winograd convolution."""
    return Measurement([point(roofline.winograd_reduction(output_tile, kernel_size))])


@computed
def im2col_inflation(published: Published, workload: str, kernel_size: int) -> Measurement:
    """Size of the im2col matrix over the input's, same padding."""
    layer = published.layer(workload, published.workloads[workload]["out_channels"][0])
    layer = layer._replace(kernel_size=kernel_size, padding=kernel_size // 2)
    return Measurement([point(roofline.im2col_inflation(layer))])


def _speedups_as_stated(published: Published, table: str) -> list[tuple[Layer, float]]:
    entry = published.tables[table]
    device = published.device(entry["device"])
    return [
        (layer, roofline.winograd_speedup(layer, entry["sparsity"], device, entry["reduction"]))
        for layer, _ in tables.winograd_cells(published, table)
    ]


def _trend(
    data: Measured, out_channels: Sequence[int], values: Callable[[int], np.ndarray]
) -> Measurement:
    parts = [
        data.part(statistics.rank_correlation(data.sparsities, values(count)), oc(count))
        for count in out_channels
    ]
    return Measurement(parts, tuple(data.sparsities))


def _throughputs(data: Measured, out_channels: int, implementation: str) -> np.ndarray:
    layer = data.layer(out_channels)
    flops = np.array([roofline.sparse_flops(layer, value) for value in data.sparsities])
    return flops / data.all_seconds(implementation, out_channels)


def _errors(data: Measured, out_channels: int, weights: str) -> np.ndarray:
    errors = against_dense(data.results.errors)
    wanted = errors[
        (errors["layer"] == data.layer(out_channels).name)
        & (errors["weights"] == weights)
        & errors["sparsity"].isin(data.sparsities)
    ].sort_values("sparsity")
    if list(wanted["sparsity"]) != list(data.sparsities):
        raise NotMeasuredError(f"not measured in this run: errors against dense, {weights} weights")
    return wanted["max_abs_error"].to_numpy()
