"""Arguments of a convolution, compared with what torch makes of them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packedconv import arguments

PAIRS = st.tuples(st.integers(1, 5), st.integers(1, 5))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2, (2, 2)),
        ((1, 3), (1, 3)),
        ([1, 3], (1, 3)),
        ((4,), (4, 4)),
        (torch.Size((2, 3)), (2, 3)),
        (np.int64(3), (3, 3)),
        ((np.int32(1), 2), (1, 2)),
    ],
)
def test_pair(value, expected):
    result = arguments.pair("stride", value, 1)
    assert result == expected
    assert all(type(item) is int for item in result)


@pytest.mark.parametrize(
    "value", [1.0, "1", None, (), (1, 2, 3), (1, 2.0), (1, "2"), True, (1, False), {1, 2}, [[1, 2]]]
)
def test_pair_of_another_type(value):
    with pytest.raises(TypeError, match=r"stride: expected an int or a pair of ints, got"):
        arguments.pair("stride", value, 1)


@pytest.mark.parametrize("value", [0, -1, (1, 0), (-3, 1), [0]])
def test_pair_below_its_minimum(value):
    with pytest.raises(ValueError, match=r"dilation: expected at least 1, got"):
        arguments.pair("dilation", value, 1)


def test_words_of_padding():
    assert arguments.padding_pairs("valid", (3, 5), (2, 3), (1, 1)) == ((0, 0), (0, 0))
    assert arguments.padding_pairs("same", (3, 5), (1, 1), (1, 1)) == ((1, 2), (1, 2))
    # The odd pixel of an even kernel lies after the image.
    assert arguments.padding_pairs("same", (2, 4), (1, 1), (1, 1)) == ((0, 1), (1, 2))
    assert arguments.padding_pairs("same", (2, 4), (1, 1), (3, 2)) == ((1, 3), (2, 3))
    assert arguments.padding_pairs((2, 7), (3, 3), (2, 2), (1, 1)) == ((2, 7), (2, 7))


@pytest.mark.parametrize("word", ["SAME", "full", "", "reflect"])
def test_another_word_of_padding(word):
    with pytest.raises(ValueError, match=r'padding: expected an int, a pair, "same" or "valid"'):
        arguments.padding_pairs(word, (3, 3), (1, 1), (1, 1))


@pytest.mark.parametrize("stride", [(2, 1), (1, 2), (3, 3)])
def test_same_padding_needs_stride_1(stride):
    with pytest.raises(ValueError, match='padding: "same" needs stride 1, got stride'):
        arguments.padding_pairs("same", (3, 3), stride, (1, 1))


def test_negative_padding():
    with pytest.raises(ValueError, match="padding: expected at least 0, got -1"):
        arguments.padding_pairs(-1, (3, 3), (1, 1), (1, 1))


@given(
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    kernel=PAIRS,
    stride=PAIRS,
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    dilation=PAIRS,
)
def test_output_shape(size, kernel, stride, padding, dilation):
    image, weight = torch.zeros(1, 1, *size), torch.zeros(1, 1, *kernel)
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    try:
        expected = tuple(torch.nn.functional.conv2d(image, weight, **options).shape[2:])
    except RuntimeError:
        with pytest.raises(ValueError, match=r"input: expected a padded (height|width) of at"):
            arguments.output_shape(size, kernel, stride, padding, padding, dilation)
        return
    assert arguments.output_shape(size, kernel, stride, padding, padding, dilation) == expected


@given(
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    kernel=PAIRS,
    dilation=PAIRS,
)
def test_same_padding_keeps_the_size(size, kernel, dilation):
    before, after = arguments.padding_pairs("same", kernel, (1, 1), dilation)
    assert arguments.output_shape(size, kernel, (1, 1), before, after, dilation) == size
    assert all(0 <= last - first <= 1 for first, last in zip(before, after))


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_empty_image(size):
    with pytest.raises(ValueError, match="input: expected"):
        arguments.output_shape(size, (1, 1), (1, 1), (1, 1), (1, 1), (1, 1))


def test_group_count():
    assert arguments.group_count(np.int64(3), 6) == 3
    for value in (0, -1, 4, 7):
        with pytest.raises(ValueError, match="groups: expected a divisor of the 6 output"):
            arguments.group_count(value, 6)
    for value in (1.0, True, None, "1", (1,)):
        with pytest.raises(TypeError, match="groups: expected an int"):
            arguments.group_count(value, 6)


def test_is_relu():
    assert arguments.is_relu("relu")
    assert not arguments.is_relu(None)
    for value in ("RELU", "", True, torch.relu, np.zeros(2), torch.zeros(2)):
        with pytest.raises(ValueError, match='activation: expected None or "relu", got'):
            arguments.is_relu(value)
