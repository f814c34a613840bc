"""The packed file: a packed weight on disk, versioned and checksummed (csrc/FORMAT.md)."""

import hashlib
import struct

import numpy as np

from packedconv.files import atomic_write
from packedconv.packed import PackedWeight, block_count

MAGIC = b"\x89PKCONV\n"
VERSION = 1
# Magic, version, OC, IC/groups, K_h, K_w, underflowed, subnormals, nonzeros.
_HEADER = struct.Struct("<8sIIIHHQQQ")
_DIGEST_BYTES = 32


def save(packed: PackedWeight, path: str) -> None:
    """Write `packed` to `path`, whole or not at all. Raises OSError when it cannot."""
    body = to_bytes(packed)
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        file.write(body)


def load(path: str) -> PackedWeight:
    """Read a packed file. Raises OSError, or ValueError naming the file and the fault."""
    with open(path, "rb") as file:
        content = file.read()
    try:
        return from_bytes(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def to_bytes(packed: PackedWeight) -> bytes:
    """The content of the packed file."""
    header = _HEADER.pack(
        MAGIC, VERSION, *packed.shape, packed.underflowed, packed.subnormals, packed.nnz
    )
    offsets = packed.offsets.astype("<u4").tobytes()
    body = header + offsets + packed.words.astype("<u4").tobytes()
    return body + hashlib.sha256(body).digest()


def from_bytes(content: bytes) -> PackedWeight:
    """The packed weight in the content of a packed file. Raises ValueError if damaged."""
    if content[: len(MAGIC)] != MAGIC:
        raise ValueError(f"expected a packed file, which begins with {MAGIC!r}")
    if len(content) < _HEADER.size + _DIGEST_BYTES:
        raise ValueError("truncated: the header is incomplete; copy the file again")
    fields = _HEADER.unpack_from(content)
    version, shape = fields[1], fields[2:6]
    underflowed, subnormals, nonzeros = fields[6:]
    if version != VERSION:
        raise ValueError(
            f"expected format version {VERSION}, got {version}; "
            "read it with the packedconv that wrote it"
        )
    offset_shape = (block_count(shape[1]), shape[0] + 1)
    offset_count = offset_shape[0] * offset_shape[1]
    expected = _HEADER.size + 4 * (offset_count + nonzeros) + _DIGEST_BYTES
    if len(content) != expected:
        raise ValueError(
            f"expected {expected} bytes, got {len(content)}: the file is truncated or damaged; "
            "copy it again"
        )
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("checksum mismatch: the file was changed after writing; copy it again")
    numbers = np.frombuffer(body, dtype="<u4", offset=_HEADER.size).astype(np.uint32)
    offsets = numbers[:offset_count].reshape(offset_shape)
    return PackedWeight(numbers[offset_count:], offsets, shape, underflowed, subnormals)
