"""Formats of a sparse weight: their bytes, exact, and the bitmap, which no library has.

A weight (OC, IC/groups, K, K) is a matrix of OC rows and IC/groups · K² columns. Values take
2 bytes (FP16) or 4 (FP32), indices INDEX_BYTES, as scipy has them; torch's are twice as long
unless they are converted.
"""

from typing import NamedTuple

import numpy as np

from packedconv.layer import Layer
from packedconv.packed import block_count

INDEX_BYTES = 4
FP16_BYTES, FP32_BYTES = 2, 4

# Rows and columns of a block.
BLOCKS = {"bsr_2x2": (2, 2), "bsr_4x4": (4, 4)}
FORMATS = ("coo", "csr", *BLOCKS, "bitmap", "packed")


def dense_bytes(layer: Layer, value_bytes: int) -> int:
    """Bytes of the dense weight."""
    return layer.weight_count * value_bytes


def stored_bytes(
    name: str,
    layer: Layer,
    nonzeros: int,
    value_bytes: int,
    blocks: int | None = None,
    index_bytes: int = INDEX_BYTES,
) -> int:
    """Bytes of a weight in one of FORMATS.

    coo: row, column and value of every nonzero. csr: column and value, and OC + 1 offsets.
    bsr: column and all values of every block that has a nonzero, and an offset for every row of
    blocks and one more; blocks: their number. bitmap: a bit for every weight and the values.
    packed: csrc/FORMAT.md; its value, FP16, and index share a word of 4 bytes.
    Raises ValueError for another format, and for what a format does not have.
    """
    rows = layer.out_channels
    if name == "coo":
        return nonzeros * (2 * index_bytes + value_bytes)
    if name == "csr":
        return nonzeros * (index_bytes + value_bytes) + (rows + 1) * index_bytes
    if name in BLOCKS:
        if blocks is None:
            raise ValueError(f"blocks: expected the number of blocks that {name} stores, got None")
        height, width = BLOCKS[name]
        block_rows = rows // height
        return (
            blocks * (index_bytes + height * width * value_bytes) + (block_rows + 1) * index_bytes
        )
    if name == "bitmap":
        return -(-layer.weight_count // 8) + nonzeros * value_bytes
    if name == "packed":
        if value_bytes != FP16_BYTES:
            raise ValueError(
                f"value_bytes: expected 2 for a packed word, which holds FP16, got {value_bytes}"
            )
        offsets = block_count(layer.in_channels // layer.groups) * (rows + 1)
        return 4 * (nonzeros + offsets)
    raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {name!r}")


def stored_values(name: str, nonzeros: int, blocks: int | None = None) -> int:
    """Values that a format stores, the zeros in its blocks included."""
    if name not in BLOCKS:
        return nonzeros
    if blocks is None:
        raise ValueError(f"blocks: expected the number of blocks that {name} stores, got None")
    height, width = BLOCKS[name]
    return blocks * height * width


def break_even_nonzeros(name: str, layer: Layer, value_bytes: int, limit: int) -> int | None:
    """The most nonzeros with which a format takes `limit` bytes or fewer; None where even an
    empty weight takes more, all weights where a full one does not.

    For formats whose bytes follow from the number of nonzeros. Raises ValueError for BSR.
    """
    fixed = stored_bytes(name, layer, 0, value_bytes)
    per_nonzero = stored_bytes(name, layer, 1, value_bytes) - fixed
    if fixed > limit:
        return None
    return min(layer.weight_count, (limit - fixed) // per_nonzero)


def nonzero_blocks(matrix: np.ndarray, block: tuple[int, int]) -> int:
    """Blocks of a matrix (rows, columns) that have a nonzero.

    Raises ValueError unless rows and columns are multiples of those of a block.
    """
    (rows, columns), (height, width) = matrix.shape, block
    if rows % height or columns % width:
        raise ValueError(
            f"matrix: expected multiples of {height} rows and {width} columns, "
            f"got {rows} and {columns}"
        )
    tiles = matrix.reshape(rows // height, height, columns // width, width)
    return int(np.count_nonzero(tiles.any(axis=(1, 3))))


class Bitmap(NamedTuple):
    """A bit for every weight, set where it is not zero, and the nonzeros in the same order.

    bits: uint8, the first weight in the highest bit of the first byte, as numpy.packbits has it,
    zeros after the last weight. values: of the array's dtype.
    """

    bits: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, dense: np.ndarray) -> "Bitmap":
        """From an array, in the order of its elements in C."""
        flat = np.ascontiguousarray(dense).reshape(-1)
        kept = flat != 0
        return cls(np.packbits(kept), flat[kept])

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes + self.values.nbytes

    def expand(self, out: np.ndarray) -> None:
        """Write the dense array into `out`, contiguous, of as many elements.

        Raises ValueError for another number of elements, and for an array that is not contiguous.
        """
        if not out.flags.c_contiguous or -(-out.size // 8) != self.bits.size:
            raise ValueError(
                f"out: expected a contiguous array of {8 * self.bits.size - 7} to "
                f"{8 * self.bits.size} elements, got shape {out.shape}, strides {out.strides}"
            )
        flat = out.reshape(-1)
        flat[...] = 0
        flat[np.unpackbits(self.bits, count=out.size).view(np.bool_)] = self.values
