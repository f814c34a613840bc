"""Equations 1 and 3 as written agree with float64 PyTorch and with each other."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packedconv.packed import pack_array
from packedconv.reference import dense_reference, sparse_reference


@st.composite
def cases(draw):
    """(input, weight, stride, padding) of a small layer, the kernel not larger than the image."""
    batch, in_channels, out_channels = (draw(st.integers(1, 2)) for _ in range(3))
    kernel = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    stride, padding = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    size = [draw(st.integers(max(1, axis - 2 * padding), 6)) for axis in kernel]
    generator = np.random.RandomState(draw(st.integers(0, 2**32 - 1)))
    image = generator.standard_normal((batch, in_channels, *size))
    # Values that FP16 holds exactly, half of them zero.
    weight = generator.randint(-8, 9, (out_channels, in_channels, *kernel)) / 8.0
    weight[generator.random_sample(weight.shape) < 0.5] = 0
    return image, weight, stride, padding


@settings(max_examples=40)
@given(cases())
def test_both_agree_with_torch(case):
    image, weight, stride, padding = case
    expected = torch.nn.functional.conv2d(
        torch.from_numpy(image), torch.from_numpy(weight), stride=stride, padding=padding
    ).numpy()
    dense = dense_reference(image, weight, stride, padding)
    sparse = sparse_reference(image, pack_array(weight), stride, padding)
    assert dense.dtype == sparse.dtype == np.float64
    np.testing.assert_allclose(dense, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(sparse, expected, rtol=1e-12, atol=1e-12)


def test_a_corner_by_hand():
    image = np.arange(1.0, 10.0).reshape(1, 1, 3, 3)
    weight = np.zeros((1, 1, 3, 3))
    weight[0, 0, 0, 2] = 2.0
    # Output (1, 0) with padding 1 reads row 0, column 1 only.
    for output in (
        dense_reference(image, weight, padding=1),
        sparse_reference(image, pack_array(weight), padding=1),
    ):
        assert output[0, 0, 1, 0] == 2.0 * image[0, 0, 0, 1]
        assert output[0, 0, 0, 0] == 0.0


def test_blocks_of_256_channels():
    weight = np.zeros((2, 300, 1, 1))
    weight[1, 255], weight[1, 256], weight[0, 299] = 1.0, 2.0, 4.0
    image = np.arange(300.0).reshape(1, 300, 1, 1)
    output = sparse_reference(image, pack_array(weight))
    assert output.ravel().tolist() == [4 * 299.0, 255 + 2 * 256.0]


def test_word_fields_by_hand():
    class Words:
        shape = (1, 2, 2, 3)
        # 1.5 (0x3e00), channel 1, column px = 2, row py = 1.
        words = np.array([0x3E000121], dtype=np.uint32)
        offsets = np.array([[0, 1]], dtype=np.uint32)

    image = np.zeros((1, 2, 2, 3))
    image[0, 1, 1, 2] = 7.0
    assert sparse_reference(image, Words()).item() == pytest.approx(10.5)
