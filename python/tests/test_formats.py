"""Bytes of a sparse weight in each format, against the objects that hold it."""

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st

from packedconv import formats
from packedconv.bench.contenders import pack_quietly
from packedconv.layer import Layer
from packedconv.weights import make_weight

LAYERS = [
    Layer("plain", 1, 8, 12, 9, 9),
    # 300 input channels are two blocks of the packed format; 1x1 is not a multiple of 8 weights.
    Layer("deep", 1, 300, 4, 5, 5, 1, 1, 0),
    Layer("grouped", 1, 16, 8, 5, 5, groups=2),
]


def matrix_of(layer, sparsity):
    weight = make_weight(layer, sparsity, seed=1)
    return weight, weight.reshape(layer.out_channels, -1)


def held(*arrays):
    return sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.99])
def test_bytes_are_those_of_the_objects(layer, sparsity):
    weight, matrix = matrix_of(layer, sparsity)
    nonzeros = int(np.count_nonzero(matrix))
    coo, csr = scipy.sparse.coo_array(matrix), scipy.sparse.csr_array(matrix)
    bitmap = formats.Bitmap.of(matrix)
    for name, found in (
        ("coo", held(coo.data, *coo.coords)),
        ("csr", held(csr.data, csr.indices, csr.indptr)),
        ("bitmap", bitmap.nbytes),
    ):
        assert formats.stored_bytes(name, layer, nonzeros, 4) == found
    half = formats.Bitmap.of(matrix.astype(np.float16))
    assert formats.stored_bytes("bitmap", layer, nonzeros, 2) == half.nbytes
    packed = pack_quietly(torch.from_numpy(weight))
    assert formats.stored_bytes("packed", layer, packed.nnz, 2) == packed.nbytes
    assert formats.dense_bytes(layer, 4) == weight.nbytes
    for name, block in formats.BLOCKS.items():
        bsr = scipy.sparse.bsr_array(matrix, blocksize=block)
        blocks = formats.nonzero_blocks(matrix, block)
        assert blocks == len(bsr.indices)
        assert formats.stored_values(name, nonzeros, blocks) == bsr.data.size
        found = held(bsr.data, bsr.indices, bsr.indptr)
        assert formats.stored_bytes(name, layer, nonzeros, 4, blocks) == found
        half_bytes = bsr.data.size * 2 + held(bsr.indices, bsr.indptr)
        assert formats.stored_bytes(name, layer, nonzeros, 2, blocks) == half_bytes


@pytest.mark.filterwarnings("ignore:Sparse")
def test_bytes_of_torch_with_its_longer_indices():
    layer = LAYERS[0]
    _, matrix = matrix_of(layer, 0.9)
    dense = torch.from_numpy(matrix)
    nonzeros = int(np.count_nonzero(matrix))
    coo, csr = dense.to_sparse_coo(), dense.to_sparse_csr()
    assert formats.stored_bytes("coo", layer, nonzeros, 4, index_bytes=8) == held(
        coo.indices(), coo.values()
    )
    assert formats.stored_bytes("csr", layer, nonzeros, 4, index_bytes=8) == held(
        csr.crow_indices(), csr.col_indices(), csr.values()
    )


@pytest.mark.parametrize("name", ["coo", "csr", "bitmap", "packed"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_where_bytes_break_even(name, layer):
    value_bytes = 2
    limit = formats.dense_bytes(layer, value_bytes)
    most = formats.break_even_nonzeros(name, layer, value_bytes, limit)
    assert formats.stored_bytes(name, layer, most, value_bytes) <= limit
    assert formats.stored_bytes(name, layer, most + 1, value_bytes) > limit


def test_formats_that_never_or_always_break_even():
    layer = LAYERS[0]
    assert formats.break_even_nonzeros("csr", layer, 4, 4 * layer.out_channels) is None
    assert formats.break_even_nonzeros("csr", layer, 4, 10**9) == layer.weight_count


def test_break_even_sparsities_by_hand():
    """With many columns offsets do not count: a half for CSR, two thirds for COO with FP32."""
    layer = Layer("wide", 1, 4096, 4, 1, 1, 1, 1, 0)
    for name, expected in (("coo", 2 / 3), ("csr", 1 / 2), ("bitmap", 1 / 32)):
        most = formats.break_even_nonzeros(name, layer, 4, formats.dense_bytes(layer, 4))
        assert 1 - most / layer.weight_count == pytest.approx(expected, abs=1e-3)


@given(st.integers(1, 70), st.data())
def test_a_bitmap_gives_back_what_it_was_made_of(count, data):
    values = data.draw(st.lists(st.sampled_from([0.0, 1.0, -2.5]), min_size=count, max_size=count))
    dense = np.array(values, dtype=np.float32)
    bitmap = formats.Bitmap.of(dense)
    assert bitmap.nbytes == -(-count // 8) + 4 * np.count_nonzero(dense)
    out = np.full(count, np.nan, dtype=np.float32)
    bitmap.expand(out)
    np.testing.assert_array_equal(out, dense)


def test_a_bitmap_by_hand():
    bitmap = formats.Bitmap.of(np.array([0, 3, 0, 0, 0, 0, 0, 5, 7], dtype=np.float32))
    assert bitmap.bits.tolist() == [0b01000001, 0b10000000]
    assert bitmap.values.tolist() == [3, 5, 7]


def test_what_a_format_does_not_have():
    layer = LAYERS[0]
    with pytest.raises(ValueError, match="value_bytes: expected 2 for a packed word"):
        formats.stored_bytes("packed", layer, 1, 4)
    with pytest.raises(ValueError, match="blocks: expected the number"):
        formats.stored_bytes("bsr_2x2", layer, 1, 4)
    with pytest.raises(ValueError, match="format: expected one of coo"):
        formats.stored_bytes("ell", layer, 1, 4)
    with pytest.raises(ValueError, match="matrix: expected multiples of 2 rows"):
        formats.nonzero_blocks(np.ones((3, 4)), (2, 2))
    with pytest.raises(ValueError, match="out: expected a contiguous array of 9 to 16"):
        formats.Bitmap.of(np.ones(16)).expand(np.ones(8))
    with pytest.raises(ValueError, match="out: expected a contiguous array"):
        formats.Bitmap.of(np.ones(16)).expand(np.ones(32)[::2])
