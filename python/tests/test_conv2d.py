"""conv2d against float64 PyTorch, over drawn layers and at the edges of its arguments."""

import collections
import concurrent.futures
import itertools
import os
import random
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
from drawn_layers import (
    LAYERS,
    OPTIONS,
    DrawnLayer,
    both,
    check,
    draw_bias,
    draw_input,
    draw_weight,
    laid_out,
    possible,
    reference_and_bound,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from packedconv import _core, conv, cpu
from packedconv.conv import conv2d
from packedconv.packed import PackedWeight, encode_word, pack

pytestmark = pytest.mark.usefixtures("one_thread")

NAN, INF = float("nan"), float("inf")


def random_tensor(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def sparse_weight(*shape, seed=0):
    weight = random_tensor(*shape, seed=seed).clamp(min=1e-3)
    return pack(weight * (random_tensor(*shape, seed=seed + 1) > 0.2))


@pytest.fixture
def packed():
    """3 x 3, 4 channels to 6."""
    return sparse_weight(6, 4, 3, 3)


@pytest.fixture
def image():
    return random_tensor(2, 4, 9, 11)


# Drawn layers.


@pytest.mark.parametrize("layer", LAYERS, ids=[str(index) for index in range(len(LAYERS))])
def test_drawn_layer(layer, torch_threads):
    def run(*arguments, **options):
        torch_threads(1 + layer.seed % 3)
        try:
            return conv2d(*arguments, **options)
        finally:
            torch_threads(1)

    check(layer, run)


def test_every_pair_of_options_is_drawn():
    assert len(LAYERS) >= 500
    for first, second in itertools.combinations(OPTIONS, 2):
        drawn = {(getattr(layer, first), getattr(layer, second)) for layer in LAYERS}
        wanted = {
            pair
            for pair in itertools.product(OPTIONS[first], OPTIONS[second])
            if possible(dict(zip((first, second), pair)))
        }
        assert drawn == wanted, (first, second)


def output_size(layer):
    weight = torch.empty(layer.weight_shape, device="meta")
    image = torch.empty(layer.input_shape, device="meta")
    return tuple(torch.nn.functional.conv2d(image, weight, **layer.options).shape[-2:])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_every_extreme_is_drawn():
    counts = collections.Counter()
    for layer in LAYERS:
        if layer.batch == 0:
            counts["empty batch"] += 1
            continue
        counts["all zero"] += layer.pattern == "zero"
        if layer.pattern == "zero":
            continue
        shape, size = layer.input_shape, output_size(layer)
        empty_rows = layer.pattern == "skewed" and layer.out_channels > 1
        counts["stride 3"] += 3 in both(layer.stride)
        counts["dilation 3"] += 3 in both(layer.dilation)
        counts["unequal stride"] += len(set(both(layer.stride))) > 1
        counts["unequal dilation"] += len(set(both(layer.dilation))) > 1
        counts["groups 4"] += layer.groups == 4
        counts["kernel 16"] += max(layer.kernel) == 16
        counts["kernel 1"] += min(layer.kernel) == 1
        counts["input channels 600"] += layer.group_in_channels == 600
        counts["input channels 257"] += layer.group_in_channels == 257
        counts["output channels 1"] += layer.out_channels == 1
        counts["one pixel"] += size == (1, 1)
        counts["one row"] += shape[-2] == 1 and shape[-1] > 1
        counts["one column"] += shape[-1] == 1 and shape[-2] > 1
        counts["empty rows"] += empty_rows
        counts["full rows"] += layer.pattern == "dense" or empty_rows
        counts["bias with ReLU"] += layer.bias is not None and layer.activation == "relu"
        counts["same, even kernel"] += layer.padding == "same" and 0 in [
            side % 2 for side in layer.kernel
        ]
        counts["padding over kernel"] += layer.padding == "large"
        counts["unbatched"] += layer.batch is None
        counts["several tiles"] += size[0] > 12 or size[1] > 64
    assert len(counts) == 22
    assert not {name: count for name, count in counts.items() if count < 20}


def test_drawn_patterns_hold_what_they_say():
    skewed = [layer for layer in LAYERS if layer.pattern == "skewed" and layer.out_channels > 2]
    for layer in skewed[:30]:
        filled = (draw_weight(layer) != 0).flatten(1).double().mean(1)
        assert filled[0] == 0
        assert filled[1] == 1
    dense = next(layer for layer in LAYERS if layer.pattern == "dense")
    assert bool((draw_weight(dense) != 0).all())


def test_drawn_inputs_have_the_layout_they_say():
    for layer in LAYERS:
        image = draw_input(layer)
        assert image.shape == layer.input_shape
        if layer.input_layout == "sliced" and image.numel():
            memory = torch.empty(0).set_(image.untyped_storage(), 0, (image.storage_offset(),))
            assert bool(memory.isnan().all())


def sample(count, **wanted):
    """Drawn layers spread over the list, with nonempty batches."""
    layers = [
        layer
        for layer in LAYERS
        if layer.batch != 0 and all(getattr(layer, key) == value for key, value in wanted.items())
    ]
    return layers[:: max(1, len(layers) // count)][:count]


def run_layer(layer):
    return conv2d(
        draw_input(layer),
        pack(draw_weight(layer)),
        draw_bias(layer),
        activation=layer.activation,
        **layer.options,
    )


def bits_by_threads(threads, torch_threads, image, packed, bias=None, activation=None, **options):
    """Results of one schedule, that for one thread, on several numbers of threads."""
    schedule = packed.plan(image.shape, threads=1, **options).schedule
    for count in threads:
        torch_threads(count)
        launch = cpu.launcher(schedule)
        result = conv.compute(image, packed, bias, activation=activation, launch=launch, **options)
        yield result.numpy().tobytes()


@pytest.mark.parametrize("layer", sample(60), ids=LAYERS.index)
def test_result_does_not_depend_on_threads(layer, torch_threads):
    arguments = (draw_input(layer), pack(draw_weight(layer)), draw_bias(layer), layer.activation)
    results = bits_by_threads((1, 2, 3, 5), torch_threads, *arguments, **layer.options)
    assert len(set(results)) == 1


def test_larger_image_does_not_depend_on_threads(torch_threads):
    image, packed = random_tensor(2, 8, 61, 67), sparse_weight(10, 4, 3, 3)
    results = set(
        bits_by_threads((1, 2, 3, 5, 16), torch_threads, image, packed, padding=1, groups=2)
    )
    assert len(results) == 1


@pytest.mark.parametrize("isa", _core.isas())
def test_every_isa(isa, monkeypatch):
    monkeypatch.setenv("PACKEDCONV_ISA", isa)
    assert _core.isa() == isa
    for layer in sample(60):
        check(layer, conv2d)


def test_fastest_isa_is_the_default(monkeypatch):
    monkeypatch.delenv("PACKEDCONV_ISA", raising=False)
    assert _core.isa() == _core.isas()[0]


def test_unknown_isa(packed, image, monkeypatch):
    monkeypatch.setenv("PACKEDCONV_ISA", "sse9")
    with pytest.raises(ValueError, match=r"PACKEDCONV_ISA: expected one of .*; got sse9"):
        conv2d(image, packed)


def test_result_does_not_depend_on_layout_or_batch():
    image, packed = random_tensor(3, 5, 13, 21), sparse_weight(7, 5, 3, 3)
    expected = conv2d(image, packed, padding=1)
    for layout in ("channels_last", "transposed", "sliced"):
        assert torch.equal(conv2d(laid_out(image, layout), packed, padding=1), expected)
        out = laid_out(torch.zeros(expected.shape), layout)
        assert torch.equal(conv2d(image, packed, padding=1, out=out), expected)
    for index in range(3):
        assert torch.equal(conv2d(image[index], packed, padding=1), expected[index])
        assert torch.equal(conv2d(image[index : index + 1], packed, padding=1)[0], expected[index])


def test_one_word_at_every_place():
    """Each (ic, py, px) multiplies the pixel that the format says, over a block's border."""
    image = torch.arange(258 * 6 * 7, dtype=torch.float32).view(258, 6, 7)
    for ic, py, px in itertools.product((0, 1, 255, 256, 257), range(4), range(5)):
        word = np.array([encode_word(0x3C00, ic % 256, px, py)], dtype=np.uint32)
        offsets = np.array([[0, 1], [1, 1]] if ic < 256 else [[0, 0], [0, 1]], dtype=np.uint32)
        result = conv2d(image, PackedWeight(word, offsets, (1, 258, 4, 5)))
        assert torch.equal(result[0], image[ic, py : py + 3, px : px + 3])


def test_large_strides_and_dilations():
    image = random_tensor(1, 2, 40, 150)
    for kernel, options in [
        ((1, 1), {"stride": (39, 149)}),
        ((1, 1), {"stride": 1000}),
        ((2, 2), {"dilation": (39, 149)}),
        ((2, 3), {"dilation": (20, 70), "stride": (17, 60), "padding": (5, 90)}),
        ((3, 3), {"padding": 100, "stride": 90}),
    ]:
        packed = sparse_weight(3, 2, *kernel)
        expected, bound = reference_and_bound(image, packed, None, None, options)
        assert bool(((conv2d(image, packed, **options) - expected).abs() <= bound).all()), options


def test_large_stride_needs_little_memory():
    """Rows and columns that a stride skips are not copied."""
    image, packed = random_tensor(1, 96, 1201, 1201), sparse_weight(2, 96, 2, 2)
    options = {"stride": (400, 399)}
    expected, bound = reference_and_bound(image, packed, None, None, options)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = conv2d(image, packed, **options)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    assert bool(((result - expected).abs() <= bound).all())


@pytest.mark.parametrize("stride", [2**20, 2**31, 2**40, 2**62, (2**62, 1), (1, 2**62)])
def test_stride_past_the_image(stride):
    image, packed = random_tensor(1, 2, 3, 3), sparse_weight(2, 2, 3, 3)
    assert torch.equal(conv2d(image, packed, stride=stride), conv2d(image, packed))


def test_many_output_channels_and_images():
    image, packed = random_tensor(33, 2, 5, 5), sparse_weight(131, 2, 3, 3)
    expected, bound = reference_and_bound(image, packed, None, None, {})
    assert bool(((conv2d(image, packed) - expected).abs() <= bound).all())


@pytest.mark.parametrize("layout", [None, "offset", "channels_last", "transposed", "sliced"])
@pytest.mark.parametrize("size", [(260, 261), (259, 272), (33, 2100), (2100, 33)])
def test_output_that_exceeds_the_caches(size, layout):
    image, packed = random_tensor(2, 2, *size), sparse_weight(9, 2, 3, 3)
    bias = random_tensor(9)
    options = {"padding": 1}
    expected, bound = reference_and_bound(image, packed, bias, "relu", options)
    assert 4 * expected.numel() > 1 << 22
    out = None
    if layout == "offset":
        # One float past the alignment, and one float between the rows.
        memory = torch.full((expected[..., 0].numel() * (size[1] + 1) + 2,), -77.0)
        strides = [memory[1:-1].view(*expected.shape[:-1], -1).stride(axis) for axis in range(4)]
        out = memory.as_strided(expected.shape, strides, 1)
    elif layout is not None:
        out = laid_out(torch.zeros(expected.shape), layout)
    result = conv2d(image, packed, bias, activation="relu", out=out, **options)
    assert bool(((result - expected).abs() <= bound).all())
    if layout == "offset":
        out.fill_(-77.0)
        assert bool((memory == -77.0).all())


def test_inside_of_an_image_surrounded_by_nan():
    """Tiles that need no padding are copied another way than those at the border."""
    for size, step in [((60, 200), 1), ((64, 192), 1), ((50, 170), 2)]:
        memory = torch.full((3, 2 * size[0] + 9, 2 * size[1] + 9), NAN)
        view = memory[:, 4 : 4 + step * size[0] : step, 3 : 3 + step * size[1] : step]
        view.copy_(random_tensor(3, *size))
        for kernel in [(1, 1), (3, 3), (2, 5), (7, 4)]:
            packed = sparse_weight(5, 3, *kernel)
            for options in [{}, {"padding": 3}, {"dilation": 2}, {"stride": 2}]:
                expected, bound = reference_and_bound(view, packed, None, None, options)
                result = conv2d(view, packed, **options)
                assert bool(((result - expected).abs() <= bound).all()), (size, kernel, options)


def test_extreme_values():
    image = torch.full((1, 1, 1, 4), 2.0)
    weight = torch.tensor([65504.0, -65504.0, 2.0**-14, 0.0]).view(4, 1, 1, 1)
    assert conv2d(image, pack(weight))[0, :, 0, 0].tolist() == [131008.0, -131008.0, 2.0**-13, 0.0]
    smallest = PackedWeight(
        np.array([0x00010000, 0x83FF0000], dtype=np.uint32),
        np.array([[0, 1, 2]], dtype=np.uint32),
        (2, 1, 1, 1),
    )
    values = conv2d(image, smallest)[0, :, 0, 0].tolist()
    assert values == [2 * 2.0**-24, -2 * 1023 * 2.0**-24]


# Values that are not finite.


def test_nan_and_infinity_pass_as_in_torch():
    image = torch.tensor([NAN, INF, -INF, -1.0, -0.0, 0.0, 1.0, 1e38]).view(1, 1, 1, 8)
    for value in (1.0, -2.0):
        packed = pack(torch.full((1, 1, 1, 1), value))
        for activation in (None, "relu"):
            expected = torch.nn.functional.conv2d(image, packed.unpack())
            if activation == "relu":
                expected = expected.relu()
            result = conv2d(image, packed, activation=activation)
            assert torch.equal(result.isnan(), expected.isnan())
            assert torch.equal(result.nan_to_num(7, 8, 9), expected.nan_to_num(7, 8, 9))


def test_nan_in_the_bias_passes_relu():
    bias = torch.tensor([NAN, -1.0, 2.0])
    result = conv2d(torch.zeros(1, 1, 2, 2), pack(torch.zeros(3, 1, 1, 1)), bias, activation="relu")
    assert bool(result[:, 0].isnan().all())
    assert result[0, 1:, 0, 0].tolist() == [0.0, 2.0]


def test_padding_is_zero_beside_infinities():
    result = conv2d(torch.full((1, 1, 1, 1), INF), pack(torch.ones(1, 1, 3, 3)), padding=2)
    assert bool((result == INF).all())


def test_skipped_zero_times_infinity_adds_nothing():
    weight = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1)
    image = torch.tensor([INF, 3.0]).view(1, 2, 1, 1)
    assert conv2d(image, pack(weight)).item() == 3.0


def test_relu_comes_after_the_bias():
    packed = pack(torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1))
    image = torch.ones(1, 1, 1, 1)
    bias = torch.tensor([3.0, -3.0])
    assert conv2d(image, packed, bias, activation="relu").flatten().tolist() == [2.0, 0.0]


# Views, memory and the state of torch.


def test_neighbours_of_the_views_are_neither_read_nor_written():
    packed = sparse_weight(3, 2, 3, 3)
    memory = torch.full((2, 4, 20, 40), NAN)
    view = memory[:, 1:3, 4:13, 5:24]
    view.copy_(random_tensor(2, 2, 9, 19))
    expected = conv2d(view.clone(), packed, padding=1)
    padded = torch.full((2, 5, 15, 30), -77.0)
    out = padded[:, 1:4, 3:12, 7:26]
    assert torch.equal(conv2d(view, packed, padding=1, out=out), expected)
    outside = torch.ones(padded.shape, dtype=torch.bool)
    outside[:, 1:4, 3:12, 7:26] = False
    assert bool((padded[outside] == -77.0).all())


def test_arguments_are_left_as_they_were(packed, image):
    bias = random_tensor(6)
    before = image.clone(), bias.clone(), packed.words.copy()
    conv2d(image, packed, bias, padding=1, activation="relu")
    assert torch.equal(image, before[0])
    assert torch.equal(bias, before[1])
    assert np.array_equal(packed.words, before[2])


def test_negated_views_count_as_they_read(packed):
    parts = torch.complex(random_tensor(2, 4, 9, 11), random_tensor(2, 4, 9, 11, seed=1))
    image = parts.conj().imag
    biases = torch.complex(random_tensor(6), random_tensor(6, seed=1)).conj().imag
    assert image.is_neg()
    assert biases.is_neg()
    expected = conv2d(image.clone(), packed, biases.clone())
    assert torch.equal(conv2d(image, packed, biases), expected)


def test_negated_out_is_refused(packed, image):
    out = torch.complex(torch.zeros(2, 6, 7, 9), torch.zeros(2, 6, 7, 9)).conj().imag
    with pytest.raises(ValueError, match=r"out: expected .* negated"):
        conv2d(image, packed, out=out)


def test_default_device_of_torch_does_not_matter(packed, image):
    with torch.device("meta"):
        result = conv2d(image, packed)
    assert result.device.type == "cpu"
    assert torch.equal(result, conv2d(image, packed))


def test_default_dtype_of_torch_does_not_matter(packed, image):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        result = conv2d(image, packed)
    finally:
        torch.set_default_dtype(before)
    assert result.dtype == torch.float32


def test_parallel_calls(packed, image):
    expected = conv2d(image, packed, padding=1)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: conv2d(image, packed, padding=1), range(40)))
    assert all(torch.equal(result, expected) for result in results)


def test_gradients_are_refused(packed, image):
    bias = random_tensor(6)
    out = torch.empty(2, 6, 7, 9)
    for name, tensor in (("input", image), ("bias", bias), ("out", out)):
        tensor.requires_grad_(True)
        with pytest.raises(ValueError, match=f"{name}: expected no gradient"):
            conv2d(image, packed, bias, out=out)
        with torch.no_grad():
            conv2d(image, packed, bias, out=out)
        tensor.requires_grad_(False)
    assert not conv2d(image, packed, bias).requires_grad


# out


def test_out_may_be_another_view_of_the_same_storage(packed):
    memory = torch.zeros(2, 10, 9, 11)
    memory[:, :4] = random_tensor(2, 4, 9, 11)
    expected = conv2d(memory[:, :4].clone(), packed, padding=1)
    # Images of input and output alternate in memory without sharing an element.
    conv2d(memory[:, :4], packed, padding=1, out=memory[:, 4:])
    assert torch.equal(memory[:, 4:], expected)


def test_out_may_lie_beside_the_input(packed):
    memory = torch.zeros(20, 9, 11)
    memory[:4] = random_tensor(4, 9, 11)
    expected = conv2d(memory[:4].clone(), packed, padding=1)
    conv2d(memory[:4], packed, padding=1, out=memory[4:10])
    assert torch.equal(memory[4:10], expected)


def test_out_may_alternate_columns_with_the_input():
    packed = sparse_weight(4, 4, 3, 3)
    memory = torch.zeros(1, 4, 9, 22)
    memory[..., ::2] = random_tensor(1, 4, 9, 11)
    expected = conv2d(memory[..., ::2].clone(), packed, padding=1)
    conv2d(memory[..., ::2], packed, padding=1, out=memory[..., 1::2])
    assert torch.equal(memory[..., 1::2], expected)


@pytest.mark.parametrize(
    "views",
    [
        lambda m: (m[:4], m[:6]),
        lambda m: (m[:4], m[3:9]),
        lambda m: (m[5:9], m[:6]),
        lambda m: (m[::2][:4], m[6:12]),
        lambda m: (m[:1].expand(4, 9, 11), m[:6]),
    ],
)
def test_out_that_overlaps_the_input(packed, views):
    image, out = views(torch.zeros(12, 9, 11))
    with pytest.raises(ValueError, match="out: expected memory apart from input, got tensors"):
        conv2d(image, packed, padding=1, out=out)


def test_out_that_is_the_input():
    image = random_tensor(1, 4, 5, 5)
    with pytest.raises(ValueError, match="out: expected memory apart from input"):
        conv2d(image, sparse_weight(4, 4, 3, 3), padding=1, out=image)


def test_out_that_overlaps_the_bias(packed, image):
    memory = torch.zeros(2 * 6 * 7 * 9)
    with pytest.raises(ValueError, match="out: expected memory apart from bias"):
        conv2d(image, packed, memory[100:106], out=memory.view(2, 6, 7, 9))


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(1, 6, 7, 9).expand(2, 6, 7, 9),
        torch.zeros(2, 1, 7, 9).expand(2, 6, 7, 9),
        torch.zeros(2, 6, 7, 1).expand(2, 6, 7, 9),
        torch.zeros(4000).as_strided((2, 6, 7, 9), (378, 63, 9, 0)),
        torch.zeros(4000).as_strided((2, 6, 7, 9), (378, 63, 8, 1)),
    ],
)
def test_out_that_overlaps_itself(packed, image, out):
    with pytest.raises(ValueError, match="out: expected elements with memory of their own"):
        conv2d(image, packed, out=out)


@pytest.mark.parametrize("shape", [(2, 6, 7, 8), (2, 6, 9, 7), (6, 7, 9), (2, 6, 63), (0,)])
def test_out_of_another_shape(packed, image, shape):
    with pytest.raises(ValueError, match=r"out: expected shape \(2, 6, 7, 9\), got \("):
        conv2d(image, packed, out=torch.empty(shape))


def test_out_is_left_alone_when_an_argument_is_refused(packed, image):
    out = torch.full((2, 6, 7, 9), -77.0)
    with pytest.raises(ValueError, match="bias"):
        conv2d(image, packed, torch.zeros(5), out=out)
    assert bool((out == -77.0).all())


# Arguments that are refused.


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"packed": torch.ones(6, 4, 3, 3)}, TypeError, r"packed: expected .* got Tensor"),
        ({"packed": None}, TypeError, r"packed: expected a PackedWeight .* got NoneType"),
        ({"input": np.zeros((2, 4, 9, 11))}, TypeError, r"input: .* got ndarray"),
        ({"input": None}, TypeError, r"input: expected a torch.Tensor, got NoneType"),
        ({"input": torch.zeros(2, 4, 9, 11).double()}, TypeError, r"input: .* got torch.float64"),
        ({"input": torch.zeros(2, 4, 9, 11).half()}, TypeError, r"input: .* got torch.float16"),
        ({"input": torch.zeros(2, 4, 9, 11).int()}, TypeError, r"input: .* got torch.int32"),
        ({"input": torch.zeros(2, 4, 9, 11) + 0j}, TypeError, r"input: .* got torch.complex64"),
        ({"input": torch.zeros(2, 4, 9, 11).to_sparse()}, TypeError, r"input: .* got torch.spar"),
        ({"input": torch.zeros(2, 4, 9, 11, device="meta")}, ValueError, r"input: .* got meta"),
        ({"input": torch.zeros(9, 11)}, ValueError, r"input: .* got shape \(9, 11\)"),
        ({"input": torch.zeros(1, 2, 4, 9, 11)}, ValueError, r"input: expected \(N, IC, H, W\)"),
        ({"input": torch.tensor(1.0)}, ValueError, r"input: .* got shape \(\)"),
        ({"input": torch.zeros(2, 3, 9, 11)}, ValueError, r"input: expected 4 channels .* got 3"),
        ({"input": torch.zeros(2, 8, 9, 11)}, ValueError, r"input: expected 4 channels .* got 8"),
        ({"input": torch.zeros(2, 0, 9, 11)}, ValueError, r"input: expected 4 channels .* got 0"),
        ({"input": torch.zeros(4, 2, 11)}, ValueError, r"input: expected a padded height .* got 2"),
        ({"input": torch.zeros(2, 4, 9, 2)}, ValueError, r"input: expected a padded width .* 2"),
        ({"input": torch.zeros(2, 4, 0, 11), "padding": 5}, ValueError, r"input: expected"),
        ({"groups": 2}, ValueError, r"input: expected 8 channels \(4 .* x 2 groups\), got 4"),
        ({"groups": 4}, ValueError, r"groups: expected a divisor of the 6 output channels, got 4"),
        ({"groups": 0}, ValueError, r"groups: expected a divisor .* got 0"),
        ({"groups": -1}, ValueError, r"groups: expected a divisor .* got -1"),
        ({"groups": 1.0}, TypeError, r"groups: expected an int, got 1.0"),
        ({"groups": True}, TypeError, r"groups: expected an int, got True"),
        ({"groups": None}, TypeError, r"groups: expected an int, got None"),
        ({"bias": torch.zeros(5)}, ValueError, r"bias: expected shape \(6,\), got \(5,\)"),
        ({"bias": torch.zeros(6, 1)}, ValueError, r"bias: expected shape \(6,\), got \(6, 1\)"),
        ({"bias": torch.tensor(1.0)}, ValueError, r"bias: expected shape \(6,\), got \(\)"),
        ({"bias": torch.zeros(6).double()}, TypeError, r"bias: expected float32, got .*float64"),
        ({"bias": [0.0] * 6}, TypeError, r"bias: expected a torch.Tensor, got list"),
        ({"bias": torch.zeros(6, device="meta")}, ValueError, r"bias: .* got meta"),
        ({"stride": 0}, ValueError, r"stride: expected at least 1, got 0"),
        ({"stride": (1, 0)}, ValueError, r"stride: expected at least 1, got \(1, 0\)"),
        ({"stride": -2}, ValueError, r"stride: expected at least 1, got -2"),
        ({"stride": 1.5}, TypeError, r"stride: expected an int or a pair of ints, got 1.5"),
        ({"stride": None}, TypeError, r"stride: expected an int or a pair"),
        ({"stride": (1, 1, 1)}, TypeError, r"stride: expected an int or a pair"),
        ({"dilation": 0}, ValueError, r"dilation: expected at least 1, got 0"),
        ({"dilation": (0, 1)}, ValueError, r"dilation: expected at least 1"),
        ({"dilation": "2"}, TypeError, r"dilation: expected an int or a pair"),
        ({"dilation": 5}, ValueError, r"input: expected a padded height .* kernel's 11, got 9"),
        ({"dilation": 2**63}, ValueError, r"input: expected a padded height"),
        ({"padding": -1}, ValueError, r"padding: expected at least 0, got -1"),
        ({"padding": (0, -1)}, ValueError, r"padding: expected at least 0"),
        ({"padding": 0.5}, TypeError, r"padding: expected an int or a pair"),
        ({"padding": "full"}, ValueError, r'padding: expected an int, a pair, "same" or "valid"'),
        ({"padding": "same", "stride": 2}, ValueError, r'padding: "same" needs stride 1'),
        ({"activation": "gelu"}, ValueError, r'activation: expected None or "relu", got \'gelu\''),
        ({"activation": torch.relu}, ValueError, r'activation: expected None or "relu"'),
        ({"activation": True}, ValueError, r'activation: expected None or "relu", got True'),
        ({"activation": np.zeros(3)}, ValueError, r'activation: expected None or "relu"'),
        ({"activation": torch.zeros(3)}, ValueError, r'activation: expected None or "relu"'),
        ({"out": np.zeros((2, 6, 7, 9))}, TypeError, r"out: expected a torch.Tensor"),
        ({"out": torch.zeros(2, 6, 7, 9).double()}, TypeError, r"out: expected float32"),
        ({"out": torch.zeros(2, 6, 7, 9, device="meta")}, ValueError, r"out: .* got meta"),
    ],
)
def test_refused(packed, image, changes, error, message):
    arguments = {"input": image, "packed": packed, **changes}
    with pytest.raises(error, match=message):
        conv2d(**arguments)


@pytest.mark.parametrize("name", ["stride", "padding", "dilation", "groups"])
@pytest.mark.parametrize("value", [2**31, 2**62, 2**63, 2**64, 2**200])
def test_huge_arguments(packed, image, name, value):
    """No crash and no overflow: a clear error, but for a stride, which passes over the image."""
    if name == "stride":
        assert conv2d(image, packed, stride=value).shape == (2, 6, 1, 1)
        return
    with pytest.raises(ValueError, match=f"^({name}|input): expected"):
        conv2d(image, packed, **{name: value})


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 6),
    st.sampled_from([2**31, 2**40, 2**62, 2**63, 2**64, 2**70, -(2**31), -(2**70)]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["same", "valid", "relu"]),
    st.lists(st.integers(-2, 5), max_size=3),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.integers(1, 3), st.sampled_from([2**12, 2**44, 2**62, 2**64])),
    st.lists(st.integers(0, 6), max_size=5).map(lambda shape: torch.zeros(shape)),
    st.sampled_from([np.zeros((1, 4, 5, 5), np.float32), object(), torch.float32, torch.relu]),
)
NAMES = ("input", "packed", "bias", "stride", "padding", "dilation", "groups", "activation", "out")
SMALL = sparse_weight(2, 4, 2, 3)


@settings(max_examples=1500)
@given(st.dictionaries(st.sampled_from(NAMES), ANYTHING, min_size=1, max_size=4))
def test_random_arguments_are_computed_or_refused(changes):
    arguments = {"input": torch.ones(1, 4, 5, 6), "packed": SMALL, **changes}
    try:
        result = conv2d(**arguments)
    except (TypeError, ValueError) as error:
        assert str(error).split(":")[0] in NAMES  # noqa: PT017
        return
    except MemoryError:
        return
    options = {
        name: value
        for name, value in arguments.items()
        if name in ("stride", "padding", "dilation", "groups")
    }
    if "stride" in options:  # torch cannot count as far
        stride = options["stride"]
        sides = [stride] if isinstance(stride, int) else stride
        options["stride"] = [min(side, 2**20) for side in sides]
    expected, bound = reference_and_bound(
        arguments["input"], SMALL, arguments.get("bias"), arguments.get("activation"), options
    )
    assert bool(((result - expected).abs() <= bound).all())


def test_drawn_layer_fields_are_the_options():
    assert set(DrawnLayer._fields) == set(OPTIONS)


def test_address_space_limit_is_an_error_not_a_crash():
    """An image that fits, a tile buffer that does not."""
    script = """
import random, resource, torch
from packedconv.conv import conv2d
from packedconv.packed import pack
image = torch.zeros(1, 1, 1, 1).expand(1, 4096, 600, 600)
packed = pack(torch.ones(1, 4096, 1, 1))
limit = int(open("/proc/self/statm").read().split()[0]) * 4096 + (8 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
out = torch.empty(1, 1, 150, 150)
try:
    conv2d(image, packed, stride=4, out=out)
except MemoryError:
    print("no memory")
else:
    print("computed")
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("no memory", "computed")


def test_shuffled_order_of_calls_changes_nothing():
    """No state is kept between calls of different layers."""
    layers = sample(40)
    first = [run_layer(layer) for layer in layers]
    order = list(range(len(layers)))
    random.Random(0).shuffle(order)
    for index in order:
        assert torch.equal(run_layer(layers[index]), first[index])


def test_autograd_notices_a_write_into_what_it_saved(image, packed):
    out = conv2d(image, packed)
    factor = torch.ones(1, requires_grad=True)
    product = factor * out  # saves `out` for the gradient of `factor`
    with torch.no_grad():
        conv2d(image, packed, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("width", [64, 63])
def test_output_between_two_floats(width, one_thread):
    """Streamed stores need whole vectors, which such an output never has."""
    packed, image = sparse_weight(4, 4, 1, 1), random_tensor(1, 4, 16384, width)
    expected = conv2d(image, packed)
    memory = bytearray(4 * expected.numel() + 1)
    out = torch.frombuffer(memory, dtype=torch.float32, offset=1).view(expected.shape)
    assert torch.equal(conv2d(image, packed, out=out), expected)
