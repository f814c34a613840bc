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
from packedconv.schedule import PlanKey

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
    section=None,
    section_bytes=None,
):
    """A file with a correct checksum, written as FORMAT.md says."""
    nonzeros = len(words) if nonzeros is None else nonzeros
    body = magic + struct.pack("<IIIHHQQQ", version, *shape, 0, 0, nonzeros)
    if section is not None:
        body += struct.pack("<Q", len(section) if section_bytes is None else section_bytes)
    body += struct.pack(f"<{len(offsets)}I", *offsets) + struct.pack(f"<{len(words)}I", *words)
    return with_checksum(body + (section or b""))


def load_bytes(content, path):
    with open(path, "wb") as file:
        file.write(content)
    return PackedWeight.load(path)


def test_vector_file(path):
    text = SPECIFICATION.read_text("utf-8")
    vectors = json.loads(re.search(r"```json\n(.*?)```", text, re.S).group(1))
    with_files = [vector for vector in vectors if "file" in vector]
    assert {"schedules" in vector for vector in with_files} == {False, True}
    for vector in with_files:
        content = bytes.fromhex("".join(vector["file"]))
        packed = load_bytes(content, path)
        assert [f"{word:08x}" for word in packed.words] == vector["words"]
        assert packed.offsets.tolist() == vector["offsets"]
        assert packed.shape == tuple(vector["shape"])
        kept = [
            json.loads(json.dumps(dict(key._asdict(), schedule=schedule)))
            for key, schedule in packed.schedules.items()
        ]
        assert kept == vector.get("schedules", [])
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
        ({"version": 3}, r"expected format version 1 or 2, got 3"),
        ({"version": 0}, r"expected format version 1 or 2, got 0"),
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


# Schedules.

SCHEDULE = {
    "path": "loose",
    "rows": 6,
    "vectors": 2,
    "block_channels": 2,
    "strip": 1,
    "prefetch": False,
    "stream": True,
}


def key(batch=1, **changes):
    """A call with the crafted weight, 2 x 2 channels, 2 x 3."""
    shapes = {"input_shape": (batch, 2, 6, 7), "output_shape": (batch, 2, 5, 5)}
    values = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    return PlanKey(**{**shapes, **values, "threads": 2, "isa": "x86-64-v3", **changes})


def section(**changes):
    """The schedules of a file, one of them, with fields that differ."""
    schedule = {**SCHEDULE, **changes.pop("schedule", {})}
    entry = {**key()._asdict(), "schedule": schedule, **changes}
    return json.dumps([entry], sort_keys=True, separators=(",", ":")).encode()


def scheduled(count=3):
    loaded = packed_file.from_bytes(crafted())
    schedules = {key(batch): {**SCHEDULE, "rows": 1 + batch} for batch in range(count)}
    return PackedWeight(loaded.words, loaded.offsets, loaded.shape, schedules=schedules)


def test_crafted_schedule_is_read(path):
    loaded = load_bytes(crafted(version=2, section=section()), path)
    assert loaded.schedules == {key(): SCHEDULE}
    assert loaded == load_bytes(crafted(), path)


@pytest.mark.parametrize(
    "changes",
    [
        {"padding": [1, 2], "output_shape": [1, 2, 7, 9]},
        # padding="same": one more behind the image where the kernel is even.
        {"padding": [0, 1], "output_shape": [1, 2, 6, 7]},
        {"stride": [2, 3], "output_shape": [1, 2, 3, 2]},
        # The stride of one output is not kept.
        {"output_shape": [1, 2, 1, 1]},
    ],
)
def test_sizes_that_a_convolution_has(changes, path):
    loaded = load_bytes(crafted(version=2, section=section(**changes)), path)
    assert list(loaded.schedules.values()) == [SCHEDULE]


def test_round_trip_of_schedules(path):
    packed = scheduled()
    packed.save(path)
    loaded = PackedWeight.load(path)
    assert loaded == packed
    assert loaded.schedules == packed.schedules
    assert len(loaded.schedules) == 3
    assert packed_file.to_bytes(loaded) == packed_file.to_bytes(packed)


def test_order_of_the_schedules_does_not_matter():
    packed = scheduled()
    turned = dict(reversed(list(packed.schedules.items())))
    other = PackedWeight(packed.words, packed.offsets, packed.shape, schedules=turned)
    assert packed_file.to_bytes(other) == packed_file.to_bytes(packed)


def test_without_schedules_the_file_is_of_version_1():
    packed = scheduled(0)
    assert packed_file.to_bytes(packed) == crafted()


def test_reader_of_version_1_refuses_schedules_by_their_version(monkeypatch):
    content = packed_file.to_bytes(scheduled())
    monkeypatch.setattr(packed_file, "WITH_SCHEDULES", packed_file.PLAIN)
    with pytest.raises(ValueError, match=r"expected format version .*, got 2; read it with"):
        packed_file.from_bytes(content)


def test_every_changed_byte_of_a_file_with_schedules_is_noticed():
    content = packed_file.to_bytes(scheduled(1))
    for index in range(len(content)):
        damaged = bytearray(content)
        damaged[index] ^= 0x10
        with pytest.raises(ValueError, match=r"expected|checksum|truncated"):
            packed_file.from_bytes(bytes(damaged))
    for length in range(len(content)):
        with pytest.raises(ValueError, match=r"expected|truncated"):
            packed_file.from_bytes(content[:length])
    with pytest.raises(ValueError, match=r"expected \d+ bytes, got"):
        packed_file.from_bytes(content + b"]")


@pytest.mark.parametrize("size", [0, 1, 2**32, 2**62, 2**64 - 1])
def test_absurd_sizes_of_schedules_allocate_nothing(size, path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"expected \d+ bytes, got"):
        load_bytes(crafted(version=2, section=section(), section_bytes=size), path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"schedules: expected JSON"),
        (b"[]", r"schedules: expected an array of at least one"),
        (b"{}", r"schedules: expected an array of at least one"),
        (b"[1]", r"schedules: expected the fields .*, got 1"),
        (b"[{}]", r"schedules: expected the fields .*, got \[\]"),
        (b"\xff" * 20, r"schedules: expected JSON in ASCII"),
        (b"[" * 10**6, r"schedules: expected flat JSON"),
        (b"[" * 400 + b"]" * 400, r"schedules: expected the fields"),
        (b"[" + b"9" * 10**4 + b"]", r"schedules: expected"),
        (section() + b" ", r"schedules: expected sorted entries"),
        (section().replace(b",", b", ", 1), r"schedules: expected sorted entries"),
        (b"[" + section()[1:-1] + b"," + section()[1:-1] + b"]", r"expected .* each once"),
        (section(threads=2).replace(b'"threads":2', b'"threads":02'), r"schedules: expected JSON"),
        (section(threads=2.0), r"schedules: expected threads of at least 1 and .*, got 2.0"),
        (section(threads=0), r"schedules: expected threads of at least 1 and .*, got 0"),
        (section(threads=True), r"schedules: expected threads"),
        (section(threads=2**63), r"schedules: expected threads"),
        (section(threads="2"), r"schedules: expected threads"),
        (section(more=1), r"schedules: expected the fields"),
        (section(isa=""), r"schedules: expected isa"),
        (section(isa=4), r"schedules: expected isa"),
        (section(isa="x86 64"), r"schedules: expected isa"),
        (section(isa="x\u00e9"), r"schedules: expected isa"),
        (section(groups=3), r"schedules: expected an input of 6 channels and groups that divide 2"),
        (section(groups=0), r"schedules: expected groups of at least 1 and .*, got 0"),
        (section(stride=1), r"schedules: expected stride of 2 integers, got 1"),
        (section(stride=[1, 0]), r"schedules: expected stride of at least 1 and .*, got 0"),
        (section(padding=[0, -1]), r"schedules: expected padding of at least 0 and .*, got -1"),
        (section(dilation=[1, 1, 1]), r"schedules: expected dilation of 2 integers"),
        (section(input_shape=[1, 3, 6, 7]), r"schedules: expected an input of 2 channels"),
        (section(input_shape=[1, 2, 0, 7]), r"schedules: expected input_shape of at least 1"),
        (section(input_shape=[2, 6, 7]), r"schedules: expected input_shape of 4 integers"),
        (section(threads=2**31), r"schedules: expected threads of at least 1 and below 2\^31"),
        (section(output_shape=[1, 2, 5, 4]), r"schedules: expected the output size that follows"),
        (section(output_shape=[1, 2, 4, 5]), r"schedules: expected the output size that follows"),
        (section(stride=[4, 1], output_shape=[1, 2, 1, 5], input_shape=[1, 2, 2, 7]), r"stride 1"),
        (section(input_shape=[1, 2, 1, 7]), r"schedules: expected an image that the kernel fits"),
        (section(isa="x" * 100 + " "), r"schedules: expected isa .*got 'x{76}\.\.\.$"),
        (section(output_shape=[1, 3, 5, 5]), r"schedules: expected an output of 1 images and 2"),
        (section(output_shape=[2, 2, 5, 5]), r"schedules: expected an output of 1 images"),
        (section(schedule={"rows": 0}), r"schedule: expected rows of at least 1 and .*, got 0"),
        (section(schedule={"rows": 2**31}), r"schedule: expected rows"),
        (section(schedule={"vectors": 1.5}), r"schedule: expected vectors"),
        (section(schedule={"strip": True}), r"schedule: expected strip"),
        (section(schedule={"prefetch": 1}), r"schedule: expected prefetch to be true or false"),
        (section(schedule={"path": "fast"}), r"schedule: expected path to be one of naive, loose"),
        (section(schedule={"path": []}), r"schedule: expected path"),
        (section(schedule={"speed": 1}), r"schedule: expected the fields path, .*, got 'speed'"),
        (section().replace(b'"strip":1,', b""), r"schedule: expected the field strip"),
    ],
)
def test_crafted_schedules_with_a_correct_checksum(content, message, path):
    with pytest.raises(ValueError, match=message) as caught:
        load_bytes(crafted(version=2, section=content), path)
    assert str(caught.value).startswith(path)
