"""The packed file: whatever is damaged is noticed."""

import hashlib
import json
import os
import pathlib
import re
import resource
import struct

import numpy as np
import pytest
import torch

from packedconv import packed_file
from packedconv.packed import PackedWeight, PackWarning, pack

HEADER_BYTES = 48
DIGEST_BYTES = 32
SPECIFICATION = pathlib.Path(__file__).parents[2] / "csrc" / "FORMAT.md"


def weight(shape=(3, 4, 3, 2), seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(shape, generator=generator) + 0.5
    return values * (torch.rand(shape, generator=generator) < 0.3)


@pytest.fixture
def packed():
    return pack(weight())


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "layer.packed")


def with_checksum(body):
    return body + hashlib.sha256(body).digest()


def crafted(
    shape=(2, 2, 2, 3),
    offsets=(0, 1, 2),
    words=(0x3C000010, 0x3C000111),
    nonzeros=None,
    version=1,
    magic=b"\x89PKCONV\n",
):
    """A file with a correct checksum, written as FORMAT.md says."""
    nonzeros = len(words) if nonzeros is None else nonzeros
    body = magic + struct.pack("<IIIHHQQQ", version, *shape, 0, 0, nonzeros)
    body += struct.pack(f"<{len(offsets)}I", *offsets) + struct.pack(f"<{len(words)}I", *words)
    return with_checksum(body)


def load_bytes(content, path):
    with open(path, "wb") as file:
        file.write(content)
    return PackedWeight.load(path)


def test_vector_file(path):
    text = SPECIFICATION.read_text("utf-8")
    vectors = json.loads(re.search(r"```json\n(.*?)```", text, re.S).group(1))
    with_files = [vector for vector in vectors if "file" in vector]
    assert with_files
    for vector in with_files:
        content = bytes.fromhex("".join(vector["file"]))
        packed = load_bytes(content, path)
        assert [f"{word:08x}" for word in packed.words] == vector["words"]
        assert packed.offsets.tolist() == vector["offsets"]
        assert packed.shape == tuple(vector["shape"])
        assert packed_file.to_bytes(packed) == content


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (3, 4, 3, 2), (2, 5, 16, 16), (2, 257, 1, 3), (1, 600, 2, 2)]
)
def test_round_trip(shape, path):
    packed = pack(weight(shape))
    packed.save(path)
    loaded = PackedWeight.load(path)
    assert loaded == packed
    assert torch.equal(loaded.unpack(), packed.unpack())
    assert os.path.getsize(path) == HEADER_BYTES + packed.nbytes + DIGEST_BYTES


def test_round_trip_without_nonzeros(path):
    packed = pack(torch.zeros(3, 4, 3, 3))
    packed.save(path)
    assert PackedWeight.load(path) == packed


def test_round_trip_of_counts(path):
    with pytest.warns(PackWarning):
        packed = pack(torch.tensor([[[[1e-9, 1e-9, 1e-6, 1.0]]]]))
    packed.save(path)
    loaded = PackedWeight.load(path)
    assert (loaded.underflowed, loaded.subnormals) == (2, 1)


def test_paths_of_other_types(packed, tmp_path):
    packed.save(tmp_path / "layer.packed")
    assert PackedWeight.load(tmp_path / "layer.packed") == packed


def test_same_weight_same_bytes(packed, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    packed.save(first)
    pack(weight()).save(second)
    assert first.read_bytes() == second.read_bytes()
    PackedWeight.load(first).save(second)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("pattern", [0x01, 0x80, 0xFF, 0x10, 0x24])
def test_every_changed_byte_is_noticed(packed, pattern):
    content = packed_file.to_bytes(packed)
    for index in range(len(content)):
        damaged = bytearray(content)
        damaged[index] ^= pattern
        with pytest.raises(ValueError, match=r"expected|checksum|truncated"):
            packed_file.from_bytes(bytes(damaged))


def test_every_truncation_is_noticed(packed):
    content = packed_file.to_bytes(packed)
    for length in range(len(content)):
        with pytest.raises(ValueError, match=r"expected|truncated"):
            packed_file.from_bytes(content[:length])


@pytest.mark.parametrize("extra", [1, 3, 4, 8, 32, 4096])
def test_every_extension_is_noticed(packed, extra):
    content = packed_file.to_bytes(packed)
    for byte in (b"\0", b"\xff"):
        with pytest.raises(ValueError, match=r"expected \d+ bytes, got"):
            packed_file.from_bytes(content + byte * extra)


def test_swapped_words_are_noticed(packed):
    content = bytearray(packed_file.to_bytes(packed))
    first = HEADER_BYTES + 4 * packed.offsets.size
    content[first : first + 8] = content[first + 4 : first + 8] + content[first : first + 4]
    with pytest.raises(ValueError, match="checksum"):
        packed_file.from_bytes(bytes(content))


def test_crafted_file_is_read(path):
    loaded = load_bytes(crafted(), path)
    assert loaded.nnz == 2
    assert loaded.unpack()[1, 1, 1, 1] == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"\x89PKCONW\n"}, r"expected a packed file"),
        ({"magic": b"\x89PNG\r\n\x1a\n"}, r"expected a packed file"),
        ({"version": 2}, r"expected format version 1, got 2"),
        ({"version": 0}, r"expected format version 1, got 0"),
        ({"offsets": (0, 2, 1)}, r"offsets: expected rising"),
        ({"offsets": (0, 2**32 - 1, 2)}, r"offsets: expected rising"),
        ({"offsets": (0, 1, 1)}, r"offsets: expected to run from 0 to 2"),
        ({"offsets": (1, 1, 2)}, r"offsets: expected to run from 0 to 2"),
        ({"words": (0x3C000030, 0x3C000111)}, r"words: expected a column px below 3"),
        ({"words": (0x3C000002, 0x3C000111)}, r"words: expected a row py below 2"),
        ({"words": (0x3C000010, 0x3C000211)}, r"words: expected a input channel below 2"),
        ({"words": (0x00000010, 0x3C000111)}, r"words: expected finite nonzero"),
        ({"words": (0x3C000010, 0x7C000111)}, r"words: expected finite nonzero"),
        (
            {"offsets": (0, 2, 2), "words": (0x3C000111, 0x3C000010)},
            r"words: expected to ascend",
        ),
        (
            {"offsets": (0, 2, 2), "words": (0x3C000111, 0x3C000111)},
            r"words: expected to ascend",
        ),
        ({"shape": (2, 2, 2, 17)}, r"kernel of at most 16"),
        ({"shape": (2, 2, 0, 3)}, r"every axis at least 1"),
        ({"shape": (2, 0, 2, 3), "offsets": (), "words": ()}, r"every axis at least 1"),
        ({"shape": (0, 2, 2, 3), "offsets": (0,), "words": ()}, r"every axis at least 1"),
    ],
)
def test_crafted_file_with_a_correct_checksum(changes, message, path):
    with pytest.raises(ValueError, match=message) as caught:
        load_bytes(crafted(**changes), path)
    assert str(caught.value).startswith(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"nonzeros": 2**64 - 1},
        {"nonzeros": 2**62},
        {"nonzeros": 2**32},
        {"nonzeros": 1},
        {"nonzeros": 3},
        {"shape": (2**32 - 1, 2, 2, 3)},
        {"shape": (2**31, 2, 2, 3)},
        {"shape": (2, 2**32 - 1, 2, 3)},
        {"shape": (2**32 - 1, 2**32 - 1, 16, 16), "nonzeros": 2**64 - 1},
        {"shape": (1, 2, 2, 3)},
    ],
)
def test_absurd_sizes_allocate_nothing(changes, path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"expected \d+ bytes, got 100"):
        load_bytes(crafted(**changes), path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_a_small_file_of_a_huge_weight_unpacks_nothing_on_load(path):
    # 2^32 dense weights, one nonzero: the file is small, so loading must stay small.
    shape = (1, 2**16 * 256, 16, 16)
    offsets = np.zeros((2**16, 2), dtype=np.uint32)
    offsets[-1, 1] = 1
    loaded = load_bytes(crafted(shape, tuple(offsets.ravel().tolist()), (0x3C000000,)), path)
    assert loaded.nnz == 1
    assert 1.0 - loaded.sparsity == pytest.approx(2.0**-32, rel=1e-6)


def test_missing_file(path):
    with pytest.raises(FileNotFoundError, match=r"layer\.packed"):
        PackedWeight.load(path)


def test_folder_instead_of_a_file(tmp_path):
    with pytest.raises(IsADirectoryError):
        PackedWeight.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x89PKC", b"\0" * 200, b"weights" * 100])
def test_other_files(content, path):
    with pytest.raises(ValueError, match=r"layer\.packed: expected a packed file"):
        load_bytes(content, path)


def test_failed_rename_leaves_the_old_file(packed, path, tmp_path, monkeypatch):
    packed.save(path)
    before = pathlib.Path(path).read_bytes()

    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        pack(weight(seed=1)).save(path)
    monkeypatch.undo()
    assert pathlib.Path(path).read_bytes() == before
    assert os.listdir(tmp_path) == ["layer.packed"]


def test_failed_write_leaves_the_old_file(packed, path, tmp_path):
    packed.save(path)
    before = pathlib.Path(path).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            pack(weight(seed=1)).save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert pathlib.Path(path).read_bytes() == before
    assert os.listdir(tmp_path) == ["layer.packed"]
