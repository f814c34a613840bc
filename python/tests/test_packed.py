"""The packed weight: words, offsets, order, blocks, and what packing refuses."""

import copy
import ctypes
import json
import os
import pathlib
import pickle
import re
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from packedconv.packed import (
    PackedWeight,
    PackWarning,
    decode_word,
    encode_word,
    pack,
    pack_array,
)

CSRC = pathlib.Path(__file__).parents[2] / "csrc"
VECTORS = json.loads(
    re.search(r"```json\n(.*?)```", (CSRC / "FORMAT.md").read_text("utf-8"), re.S).group(1)
)


def vector_ids(vectors):
    return [vector["name"] for vector in vectors]


def dense_of(vector):
    weight = torch.zeros(vector["shape"], dtype=torch.float64)
    for oc, ic, py, px, value in vector["nonzeros"]:
        weight[oc, ic, py, px] = value
    return weight


def packed_of(vector):
    words = np.array([int(word, 16) for word in vector["words"]], dtype=np.uint32)
    offsets = np.array(vector["offsets"], dtype=np.uint32)
    return PackedWeight(
        words, offsets, vector["shape"], vector["underflowed"], vector["subnormals"]
    )


def quietly_pack(weight, expect_warning):
    if not expect_warning:
        return pack(weight)
    with pytest.warns(PackWarning):
        return pack(weight)


def fp16_weight(shape, density, seed):
    """Random float32 weight whose values are FP16 normals, `density` of them nonzero."""
    rng = np.random.default_rng(seed)
    exponent = rng.integers(1, 31, shape)
    bits = rng.integers(0, 2, shape) << 15 | exponent << 10 | rng.integers(0, 1024, shape)
    values = bits.astype(np.uint16).view(np.float16).astype(np.float32)
    return torch.from_numpy(np.where(rng.random(shape) < density, values, np.float32(0)))


def words_by_loops(weight):
    """Words and offsets written out as the specification reads."""
    words, offsets = [], []
    out_channels, in_channels, rows, columns = weight.shape
    for first in range(0, in_channels, 256):
        offsets.append([len(words)])
        for oc in range(out_channels):
            for ic in range(first, min(first + 256, in_channels)):
                for py in range(rows):
                    for px in range(columns):
                        value = np.float16(weight[oc, ic, py, px])
                        if value != 0:
                            fields = (ic - first) * 2**8 + px * 2**4 + py
                            words.append(int(value.view(np.uint16)) * 2**16 + fields)
            offsets[-1].append(len(words))
    return words, offsets


# Test vectors of the specification.


@pytest.mark.parametrize("vector", VECTORS, ids=vector_ids(VECTORS))
def test_vector_packs_to_its_words(vector):
    lossy = vector["underflowed"] or vector["subnormals"]
    packed = quietly_pack(dense_of(vector), lossy)
    assert [f"{word:08x}" for word in packed.words] == vector["words"]
    assert packed.offsets.tolist() == vector["offsets"]
    assert packed.shape == tuple(vector["shape"])
    assert packed.underflowed == vector["underflowed"]
    assert packed.subnormals == vector["subnormals"]


@pytest.mark.parametrize("vector", VECTORS, ids=vector_ids(VECTORS))
def test_vector_unpacks_to_its_weight(vector):
    rounded = dense_of(vector).to(torch.float16).to(torch.float32)
    assert torch.equal(packed_of(vector).unpack(), rounded)


def test_vectors_cover_what_the_specification_names():
    assert len(VECTORS) >= 6
    assert any(len(vector["offsets"]) > 1 for vector in VECTORS)
    assert any(not vector["words"] for vector in VECTORS)
    assert any("file" in vector for vector in VECTORS)
    assert any(vector["underflowed"] and vector["subnormals"] for vector in VECTORS)


# Words.


@given(st.integers(0, 2**16 - 1), st.integers(0, 255), st.integers(0, 15), st.integers(0, 15))
def test_word_round_trip(fp16_bits, channel, px, py):
    word = encode_word(fp16_bits, channel, px, py)
    assert word == fp16_bits * 65536 + channel * 256 + px * 16 + py
    assert decode_word(word) == (fp16_bits, channel, px, py)


def test_word_worked_by_hand():
    # 1.5 is 1.1b * 2^0: sign 0, exponent 15 = 01111b, mantissa 1000000000b.
    assert encode_word(0b0011111000000000, channel=0xAB, px=0xC, py=0xD) == 0x3E00ABCD
    assert decode_word(0x3E00ABCD) == (0x3E00, 0xAB, 0xC, 0xD)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ((65536, 0, 0, 0), "fp16_bits"),
        ((-1, 0, 0, 0), "fp16_bits"),
        ((0, 256, 0, 0), "channel"),
        ((0, -1, 0, 0), "channel"),
        ((0, 0, 16, 0), "px"),
        ((0, 0, 0, 16), "py"),
    ],
)
def test_field_that_does_not_fit(fields, name):
    with pytest.raises(ValueError, match=f"{name}: expected 0 to"):
        encode_word(*fields)


@pytest.mark.parametrize("word", [-1, 1 << 32])
def test_word_that_does_not_fit(word):
    with pytest.raises(ValueError, match="word: expected 32"):
        decode_word(word)


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    """packed_word.h, compiled as strict C99 by the compiler that builds the extension."""
    compiler = [*os.environ.get("CXX", "c++").split(), "-x", "c"]
    library = tmp_path_factory.mktemp("header") / "packed_word.so"
    flags = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    source = CSRC / "tests" / "packed_word.c"
    subprocess.run([*compiler, *flags, "-o", str(library), str(source)], check=True)
    functions = ctypes.CDLL(str(library))
    functions.encode.restype = ctypes.c_uint32
    functions.fp16.restype = ctypes.c_uint16
    functions.value.restype = ctypes.c_float
    return functions


def test_header_agrees_on_fields(header):
    @given(st.integers(0, 2**16 - 1), st.integers(0, 255), st.integers(0, 15), st.integers(0, 15))
    def check(fp16_bits, channel, px, py):
        word = header.encode(fp16_bits, channel, px, py)
        assert word == encode_word(fp16_bits, channel, px, py)
        decoded = header.fp16(word), header.channel(word), header.px(word), header.py(word)
        assert decoded == (fp16_bits, channel, px, py)

    check()


def test_header_converts_every_finite_fp16_value(header):
    for bits in range(2**16):
        if bits & 0x7C00 == 0x7C00:
            continue
        expected = np.uint16(bits).view(np.float16).astype(np.float32)
        # Indices in the low bits must not leak into the value.
        value = np.float32(header.value(bits << 16 | 0xFFFF))
        assert value.tobytes() == expected.tobytes(), hex(bits)


# Packing.


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 16), st.integers(1, 16)),
    density=st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
@example(shape=(1, 1, 1, 1), density=1.0, seed=0)
@example(shape=(2, 3, 16, 16), density=1.0, seed=0)
def test_fp16_values_survive(shape, density, seed):
    weight = fp16_weight(shape, density, seed)
    packed = pack(weight)
    assert torch.equal(packed.unpack(), weight)
    assert packed.unpack().dtype == torch.float32
    words, offsets = words_by_loops(weight.numpy())
    assert packed.words.tolist() == words
    assert packed.offsets.tolist() == offsets
    assert packed.nnz == int((weight != 0).sum())
    assert packed.sparsity == pytest.approx(float((weight == 0).double().mean()))
    assert packed.nbytes == 4 * packed.nnz + 4 * (shape[0] + 1)
    assert (packed.underflowed, packed.subnormals) == (0, 0)
    assert pack(packed.unpack()) == packed


@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    ("in_channels", "blocks"), [(255, 1), (256, 1), (257, 2), (512, 2), (513, 3), (600, 3)]
)
def test_blocks(in_channels, blocks, density):
    weight = fp16_weight((3, in_channels, 2, 3), density, in_channels)
    packed = pack(weight)
    assert packed.offsets.shape == (blocks, 4)
    words, offsets = words_by_loops(weight.numpy())
    assert packed.words.tolist() == words
    assert packed.offsets.tolist() == offsets
    assert torch.equal(packed.unpack(), weight)
    assert packed.nbytes == 4 * packed.nnz + 4 * 4 * blocks


def test_a_block_is_packed_as_a_layer_of_its_own():
    weight = fp16_weight((3, 600, 3, 3), 0.2, 1)
    packed = pack(weight)
    alone = [pack(weight[:, first : first + 256]) for first in (0, 256, 512)]
    assert np.array_equal(packed.words, np.concatenate([part.words for part in alone]))
    for row, part, start in zip(packed.offsets, alone, packed.offsets[:, 0]):
        assert (row - start).tolist() == part.offsets[0].tolist()


def test_rows_of_every_kind():
    weight = torch.zeros(5, 2, 2, 2)
    weight[1] = 1.0
    weight[3, 1, 0, 1] = -1.0
    packed = pack(weight)
    assert packed.offsets.tolist() == [[0, 0, 8, 8, 9, 9]]
    assert torch.equal(packed.unpack(), weight)


def test_all_zero_weight():
    packed = pack(torch.zeros(3, 300, 5, 7))
    assert (packed.nnz, packed.sparsity, len(packed.words)) == (0, 1.0, 0)
    assert packed.words.dtype == packed.offsets.dtype == np.uint32
    assert torch.equal(packed.unpack(), torch.zeros(3, 300, 5, 7))


def test_negative_zero_is_no_nonzero():
    assert pack(torch.full((1, 1, 2, 2), -0.0)).nnz == 0


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.permute(3, 2, 1, 0),
        lambda w: w[::2, 1:, :, ::3],
        lambda w: w.to(memory_format=torch.channels_last),
        lambda w: w[:1].expand(4, -1, -1, -1),
        lambda w: torch.nn.Parameter(w),
        lambda w: (w + 0j).conj().imag.add(w)[:, :, 1:],
    ],
)
def test_layout_of_the_weight_does_not_matter(view):
    weight = view(fp16_weight((4, 6, 5, 7), 0.5, 3))
    assert torch.equal(pack(weight).unpack(), weight.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_point_types(dtype):
    weight = torch.tensor([[[[0.5, 0.0, -3.0, 1.25]]]], dtype=dtype)
    assert pack(weight).unpack().tolist() == [[[[0.5, 0.0, -3.0, 1.25]]]]


def test_conjugate_views_pack_as_they_read():
    weight = torch.complex(torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2)).conj().imag
    assert weight.is_neg()
    for dtype in (torch.float32, torch.float64):
        assert pack(weight.to(dtype)).unpack().tolist() == [[[[-1.0, -1.0], [-1.0, -1.0]]]]
    doubles = torch.complex(weight.double(), weight.double()).conj().imag
    assert pack(doubles).unpack().tolist() == [[[[1.0, 1.0], [1.0, 1.0]]]]


def test_float64_is_rounded_once():
    # Just above the tie between 1 and 1 + 2^-10: by way of FP32 it would become the tie.
    value = 1 + 2**-11 + 2**-40
    packed = pack(torch.full((1, 1, 1, 1), value, dtype=torch.float64))
    assert packed.words[0] >> 16 == 0x3C01


@given(st.floats(-65504, 65504, width=32))
@example(65504.0)
@example(-65504.0)
@example(2.0**-14)
@example(2.0**-25)
@example(2.0**-24 + 2.0**-25)
def test_rounding_and_its_counts(value):
    half = np.float32(value).astype(np.float16)
    underflowed = int(value != 0 and half == 0)
    subnormal = int(half != 0 and abs(float(half)) < 2.0**-14)
    packed = quietly_pack(torch.full((1, 1, 1, 1), value), underflowed or subnormal)
    assert packed.unpack().item() == float(half)
    assert packed.nnz == int(half != 0)
    assert (packed.underflowed, packed.subnormals) == (underflowed, subnormal)


def test_underflow_is_counted_and_reported():
    weight = torch.zeros(2, 1, 2, 2)
    weight[0, 0] = torch.tensor([[1e-8, -1e-8], [1e-6, 1.0]])
    weight[1, 0, 0, 0] = 1e-30
    with pytest.warns(PackWarning, match=r"3 weights into zero .* and 1 into subnormals") as log:
        packed = pack(weight)
    assert (packed.underflowed, packed.subnormals, packed.nnz) == (3, 1, 2)
    assert len(log) == 1
    assert log[0].filename == __file__


@pytest.mark.parametrize("value", [65504.0, -65504.0])
def test_largest_value_fits(value):
    assert pack(torch.full((1, 1, 1, 1), value)).unpack().item() == value


@pytest.mark.parametrize("value", [65504.004, 65505.0, 65519.99, 65520.0, -65520.0, 1e30, -1e300])
def test_value_over_the_largest(value):
    weight = torch.full((1, 1, 1, 1), value, dtype=torch.float64)
    with pytest.raises(ValueError, match="weight: expected magnitudes up to 65504"):
        pack(weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_value_that_is_not_finite(value):
    weight = torch.zeros(2, 2, 3, 3)
    weight[1, 0, 2, 1] = value
    with pytest.raises(ValueError, match=r"weight: expected finite values, got 1"):
        pack(weight)


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        ([[[[1.0]]]], TypeError, r"weight: expected a torch.Tensor, got list"),
        (np.ones((1, 1, 1, 1)), TypeError, r"weight: expected a torch.Tensor, got ndarray"),
        (None, TypeError, r"weight: expected a torch.Tensor, got NoneType"),
        (torch.ones(1, 1, 1, 1, dtype=torch.int32), TypeError, r"weight: expected a floating"),
        (torch.ones(1, 1, 1, 1, dtype=torch.bool), TypeError, r"weight: expected a floating"),
        (torch.ones(1, 1, 1, 1) + 0j, TypeError, r"weight: expected a floating"),
        (torch.ones(1, 1, 1, 1).to_sparse(), TypeError, r"weight: expected a dense"),
        (torch.ones(3, 3), ValueError, r"weight: expected 4 axes .* got shape \(3, 3\)"),
        (torch.ones(1, 1, 1, 3, 3), ValueError, r"weight: expected 4 axes"),
        (torch.tensor(1.0), ValueError, r"weight: expected 4 axes"),
        (torch.ones(0, 1, 3, 3), ValueError, r"weight: expected every axis at least 1"),
        (torch.ones(1, 0, 3, 3), ValueError, r"weight: expected every axis at least 1"),
        (torch.ones(1, 1, 3, 0), ValueError, r"weight: expected every axis at least 1"),
        (torch.ones(1, 1, 17, 1), ValueError, r"weight: expected a kernel .* got 17 x 1"),
        (torch.ones(1, 1, 1, 17), ValueError, r"weight: expected a kernel .* got 1 x 17"),
        (torch.ones(1, 1, 3, 3, device="meta"), ValueError, r"weight: expected .* on meta"),
    ],
)
def test_weight_that_cannot_be_packed(weight, error, message):
    with pytest.raises(error, match=message):
        pack(weight)


def test_pack_array():
    weight = np.zeros((2, 3, 2, 2), dtype=np.float32)
    weight[1, 2, 0, 1] = 2.0
    assert pack_array(weight).unpack_array().tolist() == weight.tolist()
    with pytest.raises(TypeError, match="weight: expected a numpy array, got list"):
        pack_array([1.0])
    with pytest.raises(TypeError, match="weight: expected a floating-point array, got int64"):
        pack_array(np.ones((1, 1, 1, 1), dtype=np.int64))


# The packed weight.


SHAPE = (2, 2, 2, 3)
WORDS = [0x3C000010, 0xC0000001, 0x38000120, 0xB4000121, 0x42000111]
OFFSETS = [[0, 4, 5]]


def build(words=WORDS, offsets=OFFSETS, shape=SHAPE, **counts):
    words = np.array(words, dtype=np.uint32)
    return PackedWeight(words, np.array(offsets, dtype=np.uint32), shape, **counts)


def replaced(index, word):
    return WORDS[:index] + [word] + WORDS[index + 1 :]


def test_built_by_hand():
    packed = build()
    assert packed.unpack()[0, 1, 1, 2] == -0.25
    assert packed.nnz == 5
    assert repr(packed).startswith("PackedWeight(shape=(2, 2, 2, 3), nnz=5, sparsity=0.79")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"offsets": [[0, 6, 5]]}, r"offsets: expected rising values, got 5 after 6"),
        ({"offsets": [[0, 2**32 - 1, 5]]}, r"offsets: expected rising values"),
        ({"offsets": [[1, 4, 5]]}, r"offsets: expected to run from 0 to 5"),
        ({"offsets": [[0, 4, 4]]}, r"offsets: expected to run from 0 to 5 words, got 0 to 4"),
        ({"offsets": [[0, 4, 6]]}, r"offsets: expected to run from 0 to 5"),
        ({"offsets": [[0, 5]]}, r"offsets: expected shape .* \(1, 3\), got \(1, 2\)"),
        ({"offsets": [0, 4, 5]}, r"offsets: expected shape"),
        ({"offsets": [[0, 4, 5], [5, 5, 5]]}, r"offsets: expected shape"),
        ({"words": replaced(2, 0x38000131)}, r"words: expected a column px below 3, got 3"),
        ({"words": replaced(3, 0xB4000122)}, r"words: expected a row py below 2, got 2"),
        ({"words": replaced(3, 0xB4000221)}, r"words: expected a input channel below 2, got 2"),
        ({"words": replaced(0, 0x00000010)}, r"words: expected finite nonzero .* word 0"),
        ({"words": replaced(0, 0x80000010)}, r"words: expected finite nonzero"),
        ({"words": replaced(4, 0x7C000111)}, r"words: expected finite nonzero .* word 4"),
        ({"words": replaced(4, 0xFE000111)}, r"words: expected finite nonzero"),
        ({"words": replaced(1, 0xC0000010)}, r"words: expected to ascend .* word 1 .* order"),
        ({"words": [WORDS[1], WORDS[0], *WORDS[2:]]}, r"words: expected to ascend"),
        ({"words": [WORDS[0], WORDS[2], WORDS[1], *WORDS[3:]]}, r"words: expected to ascend"),
        # (py, px) = (0, 1) must come before (1, 0): rows are outside columns.
        ({"words": [0xC0000001, 0x3C000010, *WORDS[2:]]}, r"words: expected to ascend"),
        ({"shape": (2, 2, 3)}, r"weight: expected 4 axes"),
        ({"shape": (2, 2, 2, 17)}, r"weight: expected a kernel of at most"),
        ({"shape": (2, 0, 2, 3)}, r"weight: expected every axis at least 1"),
        ({"shape": (2, -2, 2, 3)}, r"weight: expected every axis at least 1"),
        ({"underflowed": -1}, r"underflowed: expected"),
        ({"subnormals": -1}, r"subnormals: expected"),
    ],
)
def test_contents_that_are_no_packed_weight(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_blocks_must_join():
    words = [0x3C000000, 0x3C000000, 0x3C000000]
    assert build(words, [[0, 1, 2], [2, 3, 3]], (2, 257, 1, 1)).nnz == 3
    with pytest.raises(ValueError, match="offsets: expected each block to begin"):
        build(words, [[0, 1, 1], [2, 3, 3]], (2, 257, 1, 1))
    with pytest.raises(ValueError, match="words: expected a input channel below 257, got 257"):
        build([0x3C000000, 0x3C000000, 0x3C000100], [[0, 1, 2], [2, 3, 3]], (2, 257, 1, 1))


def test_the_same_indices_in_two_blocks_or_channels_are_no_duplicates():
    words = [0x3C000000] * 4
    packed = build(words, [[0, 1, 2], [2, 3, 4]], (2, 257, 1, 1))
    assert torch.equal(packed.unpack()[:, [0, 256]], torch.ones(2, 2, 1, 1))


@pytest.mark.parametrize("dtype", [np.int32, np.uint64, np.uint16, np.float32])
@pytest.mark.parametrize("name", ["words", "offsets"])
def test_arrays_of_another_type(name, dtype):
    arrays = {
        "words": np.array([0x3C00], dtype=np.uint32),
        "offsets": np.array([[0, 1]], dtype=np.uint32),
    }
    arrays[name] = arrays[name].astype(dtype)
    with pytest.raises(TypeError, match=f"{name}: expected a numpy array of uint32, got"):
        PackedWeight(shape=(1, 1, 1, 1), **arrays)


def test_arrays_of_another_rank():
    words = np.array([[0x3C000000]], dtype=np.uint32)
    with pytest.raises(ValueError, match="words: expected one axis"):
        PackedWeight(words, np.array([[0, 1]], dtype=np.uint32), (1, 1, 1, 1))


def test_lists_are_no_arrays():
    with pytest.raises(TypeError, match="words: expected a numpy array of uint32, got list"):
        PackedWeight([0x3C000000], np.array([[0, 1]], dtype=np.uint32), (1, 1, 1, 1))


def test_immutable():
    words = np.array(WORDS, dtype=np.uint32)
    packed = PackedWeight(words, np.array(OFFSETS, dtype=np.uint32), SHAPE)
    words[:] = 0
    assert packed.words.tolist() == WORDS
    with pytest.raises(ValueError, match="read-only"):
        packed.words[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        packed.offsets[0, 0] = 1
    with pytest.raises(AttributeError):
        packed.shape = (1, 1, 1, 1)
    with pytest.raises(AttributeError):
        packed.extra = 1
    packed.unpack()[:] = 7.0
    assert packed.unpack()[1, 1, 1, 1] == 3.0


def test_words_stay_read_only():
    with pytest.raises(ValueError, match="WRITEABLE"):
        build().words.setflags(write=True)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda packed: pickle.loads(pickle.dumps(packed))]
)
def test_copies(copied):
    packed = build(underflowed=3, subnormals=2)
    other = copied(packed)
    assert other == packed
    assert (other.underflowed, other.subnormals) == (3, 2)
    assert not other.words.flags.writeable


def test_equality():
    assert build() == build()
    assert build() != build(words=replaced(4, 0x42010111)[:4] + [0x42000110])
    assert build() != build(shape=(2, 2, 2, 4))
    assert build() != "packed"
    with pytest.raises(TypeError, match="unhashable"):
        hash(build())
