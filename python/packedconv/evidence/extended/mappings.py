"""What each mapping of the paper's kernel does, counted: no GPU is needed, and nothing is timed.

Of every compiled mapping (COL_PER_WARP, R, warps per block), with several numbers of slices, on
the layers of a device file and the nonzeros of fixed-seed weights. The lists that the lanes walk
are those of the kernel's own plan; how a warp walks them and where its lanes read is that of
csrc/cuda/paper_kernel.cuh.
"""

import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from packedconv.evidence import instructions
from packedconv.layer import Layer
from packedconv.packed import PackedWeight, pack_array
from packedconv.weights import make_weight

WARP = 32
BANKS = 32
# Families of config/devices by the paper's names for them.
TITLES = {"a100": "A100", "tegra-x1": "Jetson Nano"}
SPARSITIES = (0.90, 0.98)
SLICES = (1, 2, 4)
SEED = instructions.SEED  # of the weights

# Words that a lane takes at a time (kWords in paper_kernel.cuh); what is left over comes after.
WORDS = 4

# Of a multiprocessor, compute capability 5.3, 8.0 and 9.0 alike, and registers are given to a
# warp in such pieces ("Technical specifications per compute capability" of the CUDA programming
# guide).
MOST_BLOCKS = 32
MOST_WARPS = 64
REGISTERS = 65536
REGISTER_PIECE = 256
# Bytes of shared memory that the system takes of a block, from this compute capability on.
RESERVED, RESERVED_SINCE = 1024, 80

MAPPING = ("col_per_warp", "rows_per_thread", "warps_per_block", "slices")
COLUMNS = [
    *("device", "out_channels", "sparsity", "nonzeros", *MAPPING, "default"),
    *("instructions_per_fma", "transactions_per_load", "warp_imbalance", "slice_imbalance"),
    *("computed_per_pixel", "filled_per_input", "issued_per_fma", "transactions_per_fma"),
    *("shared_bytes", "in_channel_blocks", "blocks", "registers"),
    *("resident_blocks", "resident_warps", "resident_by", "left_out"),
]


class Device(NamedTuple):
    """A family of GPUs: the paper's name for it, 80 for compute capability 8.0, and its layers."""

    title: str
    architecture: int
    layers: list[Layer]


class Walk(NamedTuple):
    """The steps of a warp through the lists of its channel lanes, in each of which every lane
    that has a word left loads R pixels for it.

    words: which of its list's words a lane takes; active: whether it takes one. Both of shape
    (steps, lanes).
    """

    words: np.ndarray
    active: np.ndarray


class Lists(NamedTuple):
    """Packed words of the kernel's table, and where the lists of every block of input channels
    and output channel lie in them; begins, ends: shape (blocks, OC)."""

    words: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


class SliceWalk(NamedTuple):
    """The steps of a warp through all of a slice: the packed words that its lanes take, whether
    they take one, both of shape (steps, lanes), and the block of input channels (steps,)."""

    words: np.ndarray
    active: np.ndarray
    block: np.ndarray


def walk(lengths: Sequence[int], at_a_time: int = WORDS) -> Walk:
    """The steps of a warp whose lanes walk lists of these lengths.

    Lanes take whole parts of `at_a_time` words while they have them, and wait for the others;
    then the words that are left over, one after another.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    whole, left_over = np.divmod(lengths, at_a_time)
    first = np.arange(whole.max() * at_a_time)[:, None]
    then = np.arange(left_over.max())[:, None]
    words = np.concatenate(
        [np.broadcast_to(first, (len(first), len(lengths))), whole * at_a_time + then]
    )
    active = np.concatenate([first < whole * at_a_time, then < left_over])
    return Walk(words, active)


def transactions(words: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Transactions of shared memory that each load of a warp takes.

    words: the 32-bit word, at least 0, that each lane reads; active: whether it reads; both of
    shape (loads, lanes). A bank serves one word a transaction, to all lanes that want it
    (CUDA programming guide, shared memory of 5.x and later).
    """
    ordered = np.sort(np.where(active, words, -1), axis=1)
    different = ordered >= 0
    different[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    banks = np.arange(len(ordered))[:, None] * BANKS + ordered % BANKS
    served = np.bincount(banks[different], minlength=len(ordered) * BANKS)
    return served.reshape(len(ordered), BANKS).max(axis=1)


def lane_words(taps: np.ndarray, col_per_warp: int) -> np.ndarray:
    """The word that each of the 32 lanes reads: the tap of its channel lane, beside its column.

    taps: (steps, channel lanes). Lane = column · (32 / COL_PER_WARP) + channel lane.
    """
    lanes = np.arange(WARP)
    column, channel_lane = np.divmod(lanes, WARP // col_per_warp)
    return taps[:, channel_lane] + column


def tap(
    words: np.ndarray, first_channel: int | np.ndarray, tile_rows: int, pitch: int
) -> np.ndarray:
    """Where packed words read the tile of a block of input channels, for column and row 0.

    first_channel: of the block. The tile is (channels, tile_rows, pitch). Bits 15 to 8 of a word
    are its input channel, 7 to 4 its column in the kernel, 3 to 0 its row (csrc/packed_word.h).
    """
    words = words.astype(np.int64)
    channel, px, py = words >> 8 & 0xFF, words >> 4 & 0xF, words & 0xF
    return ((channel - first_channel) * tile_rows + py) * pitch + px


def slice_walks(lists: Lists, lanes: int, slices: int) -> list[SliceWalk]:
    """The steps of a warp with so many channel lanes, in each slice that has output channels.

    For every block of input channels it takes the slice's channels, `lanes` at a time.
    """
    blocks, out_channels = lists.begins.shape
    slice_channels = -(-out_channels // slices)
    walks = []
    for begin in range(0, out_channels, slice_channels):
        end = min(begin + slice_channels, out_channels)
        parts = []
        for block in range(blocks):
            for first in range(begin, end, lanes):
                here = slice(first, min(first + lanes, end))
                # Lanes beyond the slice's last channel have nothing to do.
                idle = (0, lanes - (here.stop - here.start))
                begins = np.pad(lists.begins[block, here], idle)
                taken, active = walk(np.pad(lists.ends[block, here], idle) - begins)
                words = lists.words[np.where(active, begins + taken, 0)]
                parts.append(SliceWalk(words, active, np.full(len(taken), block)))
        walks.append(SliceWalk(*map(np.concatenate, zip(*parts, strict=True))))
    return walks


def read_lists(plan: Any, packed: PackedWeight) -> Lists:
    """The lists of a plan of the paper's kernel, of at most 256 input channels.

    Its table is the words and offsets as packed, or the words, all begins and all ends.
    """
    count = len(packed.words)
    words, rest = plan.table[:count], plan.table[count:].astype(np.int64)
    out_channels, blocks = packed.shape[0], plan.facts["in_channel_blocks"]
    if len(rest) == out_channels + 1:
        return Lists(words, rest[None, :-1], rest[None, 1:])
    begins, ends = rest.reshape(2, blocks, out_channels)
    return Lists(words, begins, ends)


def resident(
    architecture: int,
    shared_per_multiprocessor: int,
    shared_bytes: int,
    warps: int,
    registers: float = np.nan,
) -> tuple[int, str]:
    """Blocks that a multiprocessor holds at most, and what it runs out of first.

    shared_bytes, warps: of a block; registers: of a thread, NaN where they are not known.
    """
    reserved = RESERVED if architecture >= RESERVED_SINCE else 0
    limits = {
        "blocks": MOST_BLOCKS,
        "warps": MOST_WARPS // warps,
        "shared memory": shared_per_multiprocessor // (shared_bytes + reserved),
    }
    if not np.isnan(registers):
        of_warp = -(-int(registers) * WARP // REGISTER_PIECE) * REGISTER_PIECE
        limits["registers"] = REGISTERS // of_warp // warps
    scarce = min(limits, key=lambda name: limits[name])
    return limits[scarce], scarce


def devices(root: pathlib.Path) -> dict[str, Device]:
    """The devices of the table by family, from config/devices."""
    found = instructions.gpu_devices(root)
    return {
        family: Device(
            title,
            architecture_of(found[family]["gpu"]),
            instructions.layers_of_device(found[family]),
        )
        for family, title in TITLES.items()
    }


def ranks(rows: pd.DataFrame, column: str) -> pd.Series:
    """Rank of every row by a count, the fewest first; equal counts share the best rank."""
    return rows[column].rank(method="min")


def mapping_table(
    root: pathlib.Path,
    counts: pd.DataFrame,
    families: Sequence[str] = tuple(TITLES),
    sparsities: Sequence[float] = SPARSITIES,
    slices: Sequence[int] = SLICES,
) -> pd.DataFrame:
    """One row per device, layer, sparsity and mapping with `COLUMNS`.

    counts: the table of instructions. Per FMA: of one lane, in the loop over nonzeros.
    instructions_per_fma: of the machine code. transactions_per_load: mean over the loads of the
    input by a warp. warp_imbalance: steps of a warp over those of equally long lists, lanes
    without a channel included; slice_imbalance: steps of the longest slice over their mean.
    computed_per_pixel: pixels that blocks compute, over those of the output; filled_per_input:
    elements that blocks load into shared memory, zeros outside of the image included, over those
    of the input. issued_per_fma, transactions_per_fma: instructions and transactions of a warp
    for 32 FMAs that count: those above times warp_imbalance and computed_per_pixel.
    resident_*: bounds of what a multiprocessor holds at once, by registers only where the table
    of instructions has them. A mapping without a plan has its reason in `left_out`.
    Needs the built extension.
    """
    devices = instructions.gpu_devices(root)
    rows = [
        row
        for family in families
        for row in _device_rows(devices[family], counts, sparsities, slices)
    ]
    table = pd.DataFrame(rows, columns=COLUMNS)
    whole = ("shared_bytes", "in_channel_blocks", "blocks", "registers")
    return table.astype(dict.fromkeys((*whole, "resident_blocks", "resident_warps"), "Int64"))


def _device_rows(
    device: Mapping[str, Any],
    counts: pd.DataFrame,
    sparsities: Sequence[float],
    slices: Sequence[int],
) -> Iterator[dict[str, Any]]:
    from packedconv import _core

    mappings = sorted(_core.cuda_kernels()["paper"])
    for layer in instructions.layers_of_device(device):
        for sparsity in sparsities:
            # Only positions count: ones in place of values that FP16 may drop.
            positions = (make_weight(layer, sparsity, SEED) != 0).astype(np.float32)
            packed = pack_array(positions)
            plan = _Planner(_core, layer, packed, device["gpu"])
            default = plan(None).facts["config"]
            point = {
                "device": device["family"],
                "out_channels": layer.out_channels,
                "sparsity": sparsity,
                "nonzeros": packed.nnz,
            }
            walks: dict[tuple[int, int, int], list[SliceWalk]] = {}
            for (columns, rows, warps, _), count in itertools.product(mappings, slices):
                config = (columns, rows, warps, count)
                mapping = dict(zip(MAPPING, config, strict=True))
                row = {**point, **mapping, "default": config == default}
                try:
                    made = plan(config)
                except ValueError as error:
                    yield {**row, "left_out": str(error)}
                    continue
                key = (made.facts["in_channel_blocks"], columns, count)
                if key not in walks:
                    walks[key] = slice_walks(read_lists(made, packed), WARP // columns, count)
                found = _counted(made.facts, layer, mapping, walks[key])
                yield {**row, **found, **_of_code(device["gpu"], mapping, found, counts)}


class _Planner:
    """Plans of the paper's kernel for a layer on a device, which need not be there."""

    def __init__(
        self, core: Any, layer: Layer, packed: PackedWeight, gpu: Mapping[str, Any]
    ) -> None:
        self._core, self._layer, self._packed = core, layer, packed
        self._limits = (
            architecture_of(gpu),
            gpu["multiprocessors"],
            gpu["shared_memory_per_block_bytes"],
            gpu["shared_memory_per_multiprocessor_bytes"],
        )

    def __call__(self, config: tuple[int, ...] | None) -> Any:
        """Raises ValueError for a mapping that the layer does not have on the device."""
        layer, packed = self._layer, self._packed
        return self._core.cuda_plan(
            *(layer.input_shape, layer.output_shape, packed.words, packed.offsets),
            *((layer.kernel_size,) * 2, (layer.stride,) * 2, (layer.padding,) * 2),
            *((layer.dilation,) * 2, layer.groups, self._limits, "paper", config),
        )


def architecture_of(gpu: Mapping[str, Any]) -> int:
    """80 for compute capability 8.0."""
    return round(10 * float(gpu["compute_capability"]))


def _counted(
    facts: Mapping[str, Any],
    layer: Layer,
    mapping: Mapping[str, int],
    walks: Sequence[SliceWalk],
) -> dict[str, Any]:
    per_slice = [len(one.words) for one in walks]
    words, active, block = map(np.concatenate, zip(*walks, strict=True))
    lanes = words.shape[1]
    grid_x, grid_y, grid_z = facts["grid"]
    tile_rows = mapping["rows_per_thread"] + layer.kernel_size - 1
    columns = mapping["col_per_warp"] * mapping["warps_per_block"]
    pitch = columns + layer.kernel_size - 1
    taps = tap(words, block[:, None] * facts["channels_per_block"], tile_rows, pitch)
    served = transactions(
        lane_words(taps, mapping["col_per_warp"]), active[:, np.arange(WARP) % lanes]
    )
    computed = grid_x * columns * grid_y * mapping["rows_per_thread"]
    # A slice without an output channel fills nothing.
    filled = grid_x * grid_y * len(walks) * tile_rows * pitch
    return {
        "transactions_per_load": served.mean(),
        "warp_imbalance": active.size / active.sum(),
        "slice_imbalance": max(per_slice) / np.mean(per_slice),
        "computed_per_pixel": computed / (layer.out_height * layer.out_width),
        "filled_per_input": filled / (layer.height * layer.width),
        "shared_bytes": facts["shared_bytes"],
        "in_channel_blocks": facts["in_channel_blocks"],
        "blocks": grid_x * grid_y * grid_z,
    }


def _of_code(
    gpu: Mapping[str, Any],
    mapping: Mapping[str, int],
    found: Mapping[str, Any],
    counts: pd.DataFrame,
) -> dict[str, Any]:
    """What the table of instructions adds to a mapping's counts, and what follows from both."""
    architecture, warps = architecture_of(gpu), mapping["warps_per_block"]
    rows = counts[(counts["architecture"] == architecture) & (counts["kernel"] == "paper")]
    for name in MAPPING[:3]:
        rows = rows[rows[name] == mapping[name]]
    per_fma, registers = np.nan, np.nan
    if len(rows):
        per_fma = float(rows["instructions_per_fma"].astype(float).iloc[0])
        registers = float(rows["registers"].astype(float).iloc[0])
    waste = found["warp_imbalance"] * found["computed_per_pixel"]
    blocks, scarce = resident(
        architecture,
        gpu["shared_memory_per_multiprocessor_bytes"],
        found["shared_bytes"],
        warps,
        registers,
    )
    return {
        "instructions_per_fma": per_fma,
        "registers": registers,
        "issued_per_fma": per_fma * waste,
        "transactions_per_fma": found["transactions_per_load"] * waste,
        "resident_blocks": blocks,
        "resident_warps": blocks * warps,
        "resident_by": scarce,
    }
