"""The packed file: a packed weight on disk, versioned and checksummed (csrc/FORMAT.md)."""

import hashlib
import struct

import numpy as np

from packedconv import schedule
from packedconv.files import atomic_write
from packedconv.packed import PackedWeight, block_count, checked_shape

MAGIC = b"\x89PKCONV\n"
# Without schedules, and with them.
PLAIN, WITH_SCHEDULES = 1, 2
# Magic, version, OC, IC/groups, K_h, K_w, underflowed, subnormals, nonzeros.
_HEADER = struct.Struct("<8sIIIHHQQQ")
# Bytes of the schedules, in version 2.
_LENGTH = struct.Struct("<Q")
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
    schedules = packed.schedules
    version = WITH_SCHEDULES if schedules else PLAIN
    header = _HEADER.pack(
        MAGIC, version, *packed.shape, packed.underflowed, packed.subnormals, packed.nnz
    )
    section = schedule.to_bytes(schedules) if schedules else b""
    if schedules:
        header += _LENGTH.pack(len(section))
    offsets = packed.offsets.astype("<u4").tobytes()
    body = header + offsets + packed.words.astype("<u4").tobytes() + section
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
    if version not in (PLAIN, WITH_SCHEDULES):
        raise ValueError(
            f"expected format version {PLAIN} or {WITH_SCHEDULES}, got {version}; "
            "read it with the packedconv that wrote it"
        )
    start, section_bytes = _HEADER.size, 0
    if version == WITH_SCHEDULES:
        start += _LENGTH.size
        if len(content) < start + _DIGEST_BYTES:
            raise ValueError("truncated: the header is incomplete; copy the file again")
        (section_bytes,) = _LENGTH.unpack_from(content, _HEADER.size)
    offset_shape = (block_count(shape[1]), shape[0] + 1)
    offset_count = offset_shape[0] * offset_shape[1]
    section = start + 4 * (offset_count + nonzeros)
    expected = section + section_bytes + _DIGEST_BYTES
    if len(content) != expected:
        raise ValueError(
            f"expected {expected} bytes, got {len(content)}: the file is truncated or damaged; "
            "copy it again"
        )
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("checksum mismatch: the file was changed after writing; copy it again")
    count = offset_count + nonzeros
    numbers = np.frombuffer(body, dtype="<u4", offset=start, count=count).astype(np.uint32)
    offsets = numbers[:offset_count].reshape(offset_shape)
    words, schedules = numbers[offset_count:], None
    if version == WITH_SCHEDULES:
        schedules = schedule.from_bytes(body[section:], checked_shape(shape))
    return PackedWeight(words, offsets, shape, underflowed, subnormals, schedules)
