"""Lower bounds of the sparse convolution's time on a GPU: nothing is measured.

Every floor is work over the rate of one unit of the device: bytes over the memory bandwidth,
FMAs over the FP32 lanes, loads over what the shared memory serves, instructions over the issue
slots. A bound is the largest of them, as if they overlapped fully and nothing else took time.
"""

import functools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from packedconv import config as configuration
from packedconv.evidence import instructions
from packedconv.evidence.audit import fixed_time
from packedconv.evidence.published import Published
from packedconv.evidence.tables import bandwidth_text
from packedconv.layer import Layer
from packedconv.roofline import sparse_bytes, sparse_flops
from packedconv.weights import make_weight

WARP = 32
BANKS = 32
# From compute capability 7.0 on, loads from global memory pass through the unified L1 cache and
# shared memory.
UNIFIED_SINCE = 70
COL_PER_WARP = (8, 16, 32)
ROWS = (1, 2, 4, 8)
WARPS = (2, 4, 8)
DRAWS = 4  # of the weights that conflicts and imbalance are averaged over, seeds 1 to DRAWS

MEMORY, FP32, SHARED = "memory", "FP32", "one shared load per FMA"
COLUMN = "column kernel"
IMPLIED, FIXED = "implied time", "implied fixed part"

COLUMNS = [
    *("device", "out_channels", "sparsity", "origin", "quantity", "series", "milliseconds"),
    *("configuration", "issue_ms", "loads_ms", "instructions_per_fma", "loads_per_fma"),
    *("wavefronts_per_input_load", "imbalance", "where"),
]


class Gpu(NamedTuple):
    """Rates of a device: bytes/s, Hz, and lanes or slots of one multiprocessor per clock."""

    family: str
    title: str
    architecture: int
    bandwidth: float
    printed: bool  # whether the paper states the bandwidth
    variants: dict[float, list[str]]  # device files by bandwidth, where it is another one
    multiprocessors: int
    clock: float
    fp32_lanes: int
    shared_load_lanes: int
    issue_slots: int

    @property
    def clocks(self) -> float:
        """Clocks per second of all multiprocessors together."""
        return self.multiprocessors * self.clock


class Factors(NamedTuple):
    """What the paper's mapping adds to a warp's work because its lanes walk several lists."""

    wavefronts: float  # of shared memory per load of the input
    imbalance: float  # steps of warps over those of equally long lists


class Candidate(NamedTuple):
    """A kernel's main loop: per FMA, counted or, where nothing was, at least."""

    series: str
    configuration: str
    instructions_per_fma: float  # NaN where not counted
    input_loads: float
    weight_loads: float
    col_per_warp: int
    tile_rows: int
    pitch: int


def load_gpu(root: pathlib.Path, family: str, published: Published) -> Gpu:
    """A family of config/devices with the bandwidth that the paper prints for it, else its own.

    Raises ValueError for a family that has no GPU's device file.
    """
    devices = [
        device
        for device in (
            configuration.load_device(root, name) for name in configuration.device_names(root)
        )
        if device["family"] == family and device.get("gpu")
    ]
    if not devices:
        raise ValueError(
            f"family: expected one of {', '.join(instructions.gpu_devices(root))}, got {family!r}"
        )
    printed = published.devices.get(family)
    gpu = devices[0]["gpu"]
    bandwidth = float(printed["bandwidth"] if printed else devices[0]["bandwidth"])
    variants: dict[float, list[str]] = {}
    for device in devices:
        if device["bandwidth"] != bandwidth:
            variants.setdefault(float(device["bandwidth"]), []).append(device["name"])
    return Gpu(
        family=family,
        title=printed["title"] if printed else devices[0]["title"],
        architecture=round(10 * float(gpu["compute_capability"])),
        bandwidth=bandwidth,
        printed=printed is not None,
        variants=variants,
        multiprocessors=gpu["multiprocessors"],
        clock=float(gpu["clock_hz"]),
        fp32_lanes=gpu["fp32_lanes_per_multiprocessor"],
        shared_load_lanes=gpu["shared_load_lanes_per_clock"],
        issue_slots=gpu["issue_slots_per_clock"],
    )


def memory_floor(layer: Layer, sparsity: float, bandwidth: float) -> float:
    """Seconds to move the bytes of equation 7 once: halos and repeated reads are not counted."""
    return sparse_bytes(layer, sparsity) / bandwidth


def fp32_floor(layer: Layer, sparsity: float, gpu: Gpu) -> float:
    """Seconds of the FMAs of equation 8 (borders in full, as the kernels compute them)."""
    return sparse_flops(layer, sparsity) / 2 / (gpu.fp32_lanes * gpu.clocks)


def shared_floor(layer: Layer, sparsity: float, gpu: Gpu, loads_per_fma: float = 1.0) -> float:
    """Seconds of so many conflict-free 32-bit loads per lane and FMA."""
    fma = sparse_flops(layer, sparsity) / 2
    return fma * loads_per_fma / (gpu.shared_load_lanes * gpu.clocks)


def issue_floor(layer: Layer, sparsity: float, gpu: Gpu, instructions_per_fma: float) -> float:
    """Seconds to issue so many instructions per FMA of a whole warp."""
    fma = sparse_flops(layer, sparsity) / 2 / WARP
    return fma * instructions_per_fma / (gpu.issue_slots * gpu.clocks)


@functools.cache
def mapping_factors(
    layer: Layer, sparsity: float, col_per_warp: int, tile_rows: int, pitch: int, draws: int = DRAWS
) -> Factors:
    """Bank conflicts and imbalance of the paper's mapping, averaged over draws of the weights.

    Each of the 32 / COL_PER_WARP channel lanes of a column walks the list of its own output
    channel, and a warp steps until the longest ends. At a step, a lane loads the tile's word
    (ic · tile_rows + py) · pitch + px + column; different words of one bank take a wavefront
    each. `pitch` is the tile's columns with halo. Exactly (1, 1) where lanes share a list.
    """
    lanes = WARP // col_per_warp
    if lanes == 1:
        return Factors(1.0, 1.0)
    steps = wavefronts = ideal = 0.0
    for seed in range(1, draws + 1):
        starts, active = _lists(_nonzeros(layer, sparsity, seed), tile_rows, pitch, lanes)
        steps += len(starts)
        ideal += active.sum() / lanes
        wavefronts += _wavefronts(starts, active, col_per_warp).sum()
    return Factors(float(wavefronts / steps), float(steps / ideal))


def bounds_table(
    gpu: Gpu,
    layers: Sequence[Layer],
    sparsities: Sequence[float],
    counts: pd.DataFrame,
    published: Published,
) -> pd.DataFrame:
    """COLUMNS, for every layer and sparsity: floors, bounds of kernels, and what is implied by
    the printed throughputs (`origin` printed; none for a device that the paper does not have)."""
    rows = []
    for layer in layers:
        for sparsity in sparsities:
            point = {
                "device": gpu.family,
                "out_channels": layer.out_channels,
                "sparsity": sparsity,
                "origin": "model",
            }
            floors = {
                MEMORY: memory_floor(layer, sparsity, gpu.bandwidth),
                FP32: fp32_floor(layer, sparsity, gpu),
                SHARED: shared_floor(layer, sparsity, gpu),
            }
            for bandwidth in gpu.variants:
                series = f"{MEMORY}, {bandwidth_text(bandwidth)}"
                floors[series] = memory_floor(layer, sparsity, bandwidth)
            for series, seconds in floors.items():
                rows.append(
                    {**point, "quantity": "floor", "series": series, "milliseconds": 1e3 * seconds}
                )
            for series, candidates in _by_series(gpu, layer, sparsity, counts):
                bounds = [_bound(gpu, layer, sparsity, candidate) for candidate in candidates]
                best = min(bounds, key=lambda bound: bound["milliseconds"])
                rows.append({**point, "quantity": "bound", "series": series, **best})
    rows.extend(_implied(gpu, published))
    return pd.DataFrame(rows, columns=COLUMNS)


def assumptions(gpu: Gpu, data: pd.DataFrame, counts: pd.DataFrame) -> list[str]:
    """What the bounds of a device rest on, in lines for its page."""
    missing = instructions.is_missing(counts, gpu.architecture)
    bounds = data[data["quantity"] == "bound"]
    lines = [
        f"{gpu.multiprocessors} multiprocessor{'s' if gpu.multiprocessors > 1 else ''} at "
        f"{gpu.clock / 1e9:g} GHz; per multiprocessor and clock {gpu.fp32_lanes} FP32 FMAs, "
        f"{gpu.shared_load_lanes} shared loads of 32 bits, {gpu.issue_slots} instructions of "
        "warps.",
        f"Memory: bytes of equation\u00a07, each moved once at {bandwidth_text(gpu.bandwidth)}, as "
        f"the {'paper states' if gpu.printed else 'data sheet has it'}; halos, repeated reads and "
        "caches not counted. FMAs: equation\u00a08, borders in full.",
    ]
    if gpu.variants:
        others = "; ".join(
            f"{bandwidth_text(value)} ({', '.join(names)})"
            for value, names in sorted(gpu.variants.items())
        )
        lines.append(f"Bandwidth of the variants, not in the bounds: {others}.")
    lines.append(
        "Bound: the largest of memory, FP32, shared loads and issue, overlapped fully. Not "
        "counted: filling the tile, barriers, latency, lists' bounds, stores, launch, waves of "
        "blocks."
    )
    if missing:
        lines.append(
            f"No instructions counted, hence no issue floor and no loads of weights: {missing}."
        )
    else:
        picked = bounds.loc[bounds["series"] == COLUMN, "configuration"].unique()
        compilers = counts.loc[counts["architecture"] == gpu.architecture, "compiler"]
        lines.append(
            f"Issue: instructions per FMA of the loop over nonzeros, sm_{gpu.architecture}, "
            f"{compilers.iloc[0]} (figures/instructions.csv). Loads of weights take one wavefront "
            "each"
            + (
                ", from shared or from global memory."
                if gpu.architecture >= UNIFIED_SINCE
                else " from shared memory, and none of its time from global memory."
            )
            + f" Column kernel: {' or '.join(picked)}."
        )
    factors = []
    for series, part in bounds.groupby("series", sort=False):
        if (part["imbalance"] > 1).any():
            first = part[part["sparsity"] == part["sparsity"].min()].iloc[-1]
            factors.append(
                f"{first['wavefronts_per_input_load']:.2f} wavefronts per load of the input and "
                f"{first['imbalance']:.2f} × the steps of equal lists ({series.split(', ')[1]})"
            )
    if factors:
        point = bounds.iloc[-1]
        chosen = "R with the fewest instructions, warps per block"
        if missing:
            chosen = "R and warps per block"
        lines.append(
            "Conflicts and imbalance of the paper's mapping: Monte Carlo, "
            f"{DRAWS} draws of weights (seeds 1 to {DRAWS}) in the kernel's tile; at OC "
            f"{point['out_channels']}, S {bounds['sparsity'].min():.2f}: {', '.join(factors)}. "
            f"{chosen} with the lowest bound."
        )
    return lines


def implied_lines(gpu: Gpu, published: Published) -> list[str]:
    """What the printed throughputs imply, in words."""
    panel = published.devices.get(gpu.family, {}).get("panel")
    if panel is None:
        return ["The paper prints nothing for this device."]
    split = fixed_time(published, panel)
    return [
        f"Hollow: times implied by the printed sparse throughputs (section "
        f"{_where(published, panel)}) at OC {split.out_channels}, "
        f"{1e3 * split.times[0]:.3g} ms at S {split.sparsities[0]:.2f} and "
        f"{1e3 * split.times[1]:.3g} ms at {split.sparsities[1]:.2f}. A line through both in the "
        f"number of nonzeros leaves {1e3 * split.fixed:.2g} ms at none: the fixed part."
    ]


def _by_series(
    gpu: Gpu, layer: Layer, sparsity: float, counts: pd.DataFrame
) -> Iterator[tuple[str, list[Candidate]]]:
    """The kernels that are bounded at a point, each with the configurations to choose from."""
    key = instructions.Point(gpu.family, gpu.architecture, layer.out_channels, sparsity, None).key
    rows = counts[counts["architecture"] == gpu.architecture]
    counted = not instructions.is_missing(counts, gpu.architecture)
    if counted:
        columns = rows[rows["kernel"] == "column"]
        picked = columns[[key in text.split("; ") for text in columns["picked"]]]
        chosen = (picked if len(picked) else columns).to_dict("records")
        yield COLUMN, [_counted(gpu, COLUMN, row, WARP, 0, 0) for row in chosen]
    else:
        yield COLUMN, [Candidate(COLUMN, "any, not counted", np.nan, 1.0, 0.0, WARP, 0, 0)]
    halo = layer.kernel_size - 1
    for col_per_warp in COL_PER_WARP:
        series = f"paper, COL_PER_WARP {col_per_warp}"
        if counted:
            mine = rows[(rows["kernel"] == "paper") & (rows["col_per_warp"] == col_per_warp)]
            fewest = mine.groupby("rows_per_thread")["instructions_per_fma"].min().idxmin()
            chosen = mine[mine["rows_per_thread"] == fewest].to_dict("records")
            yield (
                series,
                [
                    _counted(
                        gpu,
                        series,
                        row,
                        col_per_warp,
                        int(row["rows_per_thread"]) + halo,
                        col_per_warp * int(row["warps_per_block"]) + halo,
                    )
                    for row in chosen
                ],
            )
        else:
            yield (
                series,
                [
                    Candidate(
                        series,
                        f"R {row_count}, {warps} warps",
                        np.nan,
                        1.0,
                        0.0,
                        col_per_warp,
                        row_count + halo,
                        col_per_warp * warps + halo,
                    )
                    for row_count in ROWS
                    for warps in WARPS
                ],
            )


def _counted(
    gpu: Gpu, series: str, row: Mapping[str, Any], col_per_warp: int, tile_rows: int, pitch: int
) -> Candidate:
    weight_loads = row["weight_shared_loads"]
    if gpu.architecture >= UNIFIED_SINCE:
        weight_loads += row["weight_global_loads"]
    if row["kernel"] == "column":
        configuration_text = instructions.column_text(row)
    else:
        configuration_text = f"R {row['rows_per_thread']}, {row['warps_per_block']} warps"
    return Candidate(
        series,
        configuration_text,
        row["instructions_per_fma"],
        row["input_loads"] / row["fma"],
        weight_loads / row["fma"],
        col_per_warp,
        tile_rows,
        pitch,
    )


def _bound(gpu: Gpu, layer: Layer, sparsity: float, candidate: Candidate) -> dict[str, Any]:
    factors = mapping_factors(
        layer, sparsity, candidate.col_per_warp, candidate.tile_rows, candidate.pitch
    )
    loads = candidate.input_loads * factors.wavefronts + candidate.weight_loads
    loads_time = shared_floor(layer, sparsity, gpu, loads * factors.imbalance)
    issue_time = issue_floor(
        layer, sparsity, gpu, candidate.instructions_per_fma * factors.imbalance
    )
    floors = [
        memory_floor(layer, sparsity, gpu.bandwidth),
        fp32_floor(layer, sparsity, gpu),
        loads_time,
        issue_time,
    ]
    return {
        "milliseconds": 1e3 * float(np.nanmax(floors)),
        "configuration": candidate.configuration,
        "issue_ms": 1e3 * issue_time,
        "loads_ms": 1e3 * loads_time,
        "instructions_per_fma": candidate.instructions_per_fma,
        "loads_per_fma": loads,
        "wavefronts_per_input_load": factors.wavefronts,
        "imbalance": factors.imbalance,
    }


def _implied(gpu: Gpu, published: Published) -> Iterator[dict[str, Any]]:
    panel = published.devices.get(gpu.family, {}).get("panel")
    if panel is None:
        return
    split = fixed_time(published, panel)
    common = {
        "device": gpu.family,
        "out_channels": split.out_channels,
        "origin": "printed",
        "where": _where(published, panel),
    }
    for sparsity, seconds in zip(split.sparsities, split.times, strict=True):
        yield {
            **common,
            "sparsity": sparsity,
            "quantity": IMPLIED,
            "series": IMPLIED,
            "milliseconds": 1e3 * seconds,
        }
    yield {**common, "quantity": FIXED, "series": FIXED, "milliseconds": 1e3 * split.fixed}


def _where(published: Published, panel: str) -> str:
    places = [point["where"] for point in published.points(panel, 7)]
    return ", ".join(dict.fromkeys(places))


@functools.lru_cache(maxsize=4 * DRAWS)
def _nonzeros(layer: Layer, sparsity: float, seed: int) -> np.ndarray:
    return make_weight(layer, sparsity, seed) != 0


def _lists(
    mask: np.ndarray, tile_rows: int, pitch: int, lanes: int
) -> tuple[np.ndarray, np.ndarray]:
    """The tile's word that every channel lane of a warp starts from at every step, and whether
    the lane still has a nonzero; both of shape (steps of all warps, lanes)."""
    starts, active = [], []
    for first in range(0, len(mask), lanes):
        lists = []
        for channel in mask[first : first + lanes]:
            ic, py, px = np.nonzero(channel)
            lists.append((ic * tile_rows + py) * pitch + px)
        steps = max(map(len, lists))
        words = np.zeros((steps, lanes), dtype=np.int64)
        there = np.zeros((steps, lanes), dtype=bool)
        for lane, positions in enumerate(lists):
            words[: len(positions), lane] = positions
            there[: len(positions), lane] = True
        starts.append(words)
        active.append(there)
    return np.concatenate(starts), np.concatenate(active)


def _wavefronts(starts: np.ndarray, active: np.ndarray, col_per_warp: int) -> np.ndarray:
    """Wavefronts of every step: the most different words that one bank has to serve."""
    # A lane without a nonzero loads nothing: as if it asked for what an active one does.
    some = np.take_along_axis(starts, active.argmax(axis=1)[:, None], axis=1)
    words = np.where(active, starts, some)[:, :, None] + np.arange(col_per_warp)
    words = np.sort(words.reshape(len(starts), -1), axis=1)
    different = np.ones(words.shape, dtype=bool)
    different[:, 1:] = words[:, 1:] != words[:, :-1]
    banks = np.arange(len(words))[:, None] * BANKS + words % BANKS
    served = np.bincount(banks[different], minlength=len(words) * BANKS)
    return served.reshape(len(words), BANKS).max(axis=1)
