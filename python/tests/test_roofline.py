import fractions

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packedconv import roofline
from packedconv.layer import Layer
from packedconv.roofline import Device, exact

# 2 images of 3 channels, 4×5, to 4 channels: 60 inputs and 80 outputs per image, 108 weights.
SMALL = Layer("small", batch=2, in_channels=3, out_channels=4, height=4, width=5)
TABLE1 = Layer("table1", batch=32, in_channels=32, out_channels=64, height=256, width=256)
A100 = Device("a100", 19.5e12, 2.0e12)
TEN = Device("ten", 100, 10)


@st.composite
def layers(draw):
    size = draw(st.integers(1, 5))
    padding = draw(st.integers(0, size))
    least = max(1, size - 2 * padding)
    return Layer(
        "drawn",
        batch=draw(st.integers(1, 3)),
        in_channels=draw(st.integers(1, 3)),
        out_channels=draw(st.integers(1, 3)),
        height=draw(st.integers(least, 9)),
        width=draw(st.integers(least, 9)),
        kernel_size=size,
        stride=draw(st.integers(1, 4)),
        padding=padding,
    )


def test_bytes_and_flops_of_a_hand_worked_layer():
    assert roofline.dense_bytes(SMALL) == (2 * 60 + 2 * 80 + 108) * 4
    assert roofline.dense_flops(SMALL) == 2 * 2 * 20 * 108
    half = fractions.Fraction(1, 2)
    assert roofline.sparse_bytes(SMALL, half) == (120 + 160) * 4 + 54 * 4
    assert roofline.sparse_bytes(SMALL, half, 8, 4, 1) == (120 + 160) * 8 + 54 * 5
    assert roofline.sparse_flops(SMALL, half) == 2 * 2 * 20 * 54


def test_intensities_of_table_1():
    assert float(roofline.dense_arithmetic_intensity(TABLE1)) == pytest.approx(95.9912, abs=1e-4)
    value = roofline.sparse_arithmetic_intensity(TABLE1, exact(0.9))
    assert isinstance(value, fractions.Fraction)
    # 0.1 · 2 · 9 · 32 · 64 per output pixel over 4 · (32 + 64) + 0.1 · 9 · 32 · 64 · 4 / (N H W).
    pixels = 32 * 256 * 256
    assert value == fractions.Fraction(36864, 10) / (
        384 + fractions.Fraction(9 * 32 * 64 * 4, 10 * pixels)
    )
    assert roofline.sparse_arithmetic_intensity(TABLE1, 0.9) == pytest.approx(float(value))


@pytest.mark.parametrize(
    ("device", "ridge"),
    [
        (A100, "9.75"),
        (Device("agx", 5.32e12, 204.8e9), "25.98"),
        (Device("orin", 5.0e12, 68e9), "73.53"),
        (Device("nano", 0.236e12, 25.6e9), "9.22"),
    ],
)
def test_ridge_points(device, ridge):
    assert f"{device.ridge_point:.2f}" == ridge
    assert float(roofline.exact_device(device).ridge_point) == pytest.approx(device.ridge_point)


def test_attainable_and_bound_meet_at_the_ridge_point():
    assert roofline.attainable(4, TEN) == 40
    assert roofline.attainable(10, TEN) == 100
    assert roofline.attainable(25, TEN) == 100
    assert roofline.bound(9.99, TEN) == "memory"
    assert roofline.bound(10, TEN) == "compute"


def test_roofline_time_is_the_longer_side():
    assert roofline.roofline_time(1000, 50, TEN) == 10
    assert roofline.roofline_time(1000, 200, TEN) == 20


@given(layers(), st.integers(0, 100))
def test_time_is_work_over_attainable(layer, percent):
    sparsity = fractions.Fraction(percent, 100)
    flops = roofline.sparse_flops(layer, sparsity)
    moved = roofline.sparse_bytes(layer, sparsity)
    time = roofline.sparse_time(layer, sparsity, TEN)
    intensity = roofline.arithmetic_intensity(flops, moved)
    if flops:
        assert time == flops / roofline.attainable(intensity, roofline.exact_device(TEN))
    assert time >= moved / fractions.Fraction(10)


@given(layers())
def test_sparsity_scales_the_work_and_only_the_weight_bytes(layer):
    assert roofline.sparse_flops(layer, 0) == roofline.dense_flops(layer)
    assert roofline.sparse_bytes(layer, 0) == roofline.dense_bytes(layer)
    weights = roofline.sparse_bytes(layer, 0) - roofline.sparse_bytes(layer, 1)
    assert weights == 4 * layer.weight_count


def test_winograd_speedup_in_its_limits():
    wide = Layer("wide", batch=32, in_channels=128, out_channels=512, height=256, width=256)
    thin = wide._replace(in_channels=1)
    device = roofline.exact_device(A100)
    # Both compute-bound: only the numbers of operations count.
    assert roofline.winograd_speedup(wide, exact(0.9), device, exact(1.5)) == fractions.Fraction(
        20, 3
    )
    assert roofline.winograd_speedup(wide, exact(0.9), device, exact(2)) == 5
    # Both memory-bound: the bytes are nearly the same.
    assert float(roofline.winograd_speedup(thin, exact(0.9), device, exact(1.5))) == pytest.approx(
        1, abs=1e-4
    )


@pytest.mark.parametrize(("tile", "reduction"), [(2, "9/4"), (4, "4"), (6, "81/16"), (1, "1")])
def test_winograd_reduction(tile, reduction):
    assert roofline.winograd_reduction(tile, 3) == fractions.Fraction(reduction)


def test_im2col():
    assert roofline.im2col_bytes(SMALL) == 2 * 20 * 9 * 3 * 4
    assert roofline.im2col_inflation(SMALL) == 9
    assert roofline.im2col_inflation(TABLE1._replace(kernel_size=5, padding=2)) == 25
    strided = TABLE1._replace(stride=2)
    assert roofline.im2col_inflation(strided) == fractions.Fraction(9, 4)


def brute_force_macs(layer, counts):
    total = 0
    for h in range(layer.out_height):
        for w in range(layer.out_width):
            for ky in range(layer.kernel_size):
                for kx in range(layer.kernel_size):
                    row = h * layer.stride + ky - layer.padding
                    column = w * layer.stride + kx - layer.padding
                    if 0 <= row < layer.height and 0 <= column < layer.width:
                        total += counts[ky][kx]
    return total * layer.batch


@given(layers(), st.data())
def test_border_exact_macs_match_brute_force(layer, data):
    size, full = layer.kernel_size, layer.in_channels * layer.out_channels
    row = st.lists(st.integers(0, full), min_size=size, max_size=size)
    counts = data.draw(st.lists(row, min_size=size, max_size=size))
    macs = roofline.border_exact_macs(layer, counts)
    assert macs == brute_force_macs(layer, counts)
    assert roofline.border_exact_flops(layer, counts) == 2 * macs
    dense = brute_force_macs(layer, [[full] * size] * size)
    assert roofline.border_exact_macs(layer) == dense
    assert 2 * dense <= roofline.dense_flops(layer)


def test_border_exact_macs_by_hand():
    # 4×5 with padding 1: the kernel's first and last rows miss 1 of 4, its columns 1 of 5.
    assert roofline.pixels_inside(SMALL) == [[12, 15, 12], [16, 20, 16], [12, 15, 12]]
    assert roofline.border_exact_macs(SMALL) == 2 * 12 * 130
    valid = SMALL._replace(padding=0)
    assert roofline.border_exact_flops(valid) == roofline.dense_flops(valid)


def test_border_exact_macs_take_an_array():
    numpy = pytest.importorskip("numpy")
    counts = numpy.full((3, 3), 12)
    assert roofline.border_exact_macs(SMALL, counts) == roofline.border_exact_macs(SMALL)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([[1, 1], [1, 1]], r"nonzeros: expected shape \(3, 3\)"),
        ([[1, 1, 1]] * 2 + [[1]], r"nonzeros: expected shape \(3, 3\)"),
        ([[13, 0, 0]] * 3, r"nonzeros: expected counts in \[0, 12\]"),
        ([[-1, 0, 0]] * 3, r"nonzeros: expected counts in \[0, 12\]"),
        ([[0.5, 0, 0]] * 3, "nonzeros: expected whole counts"),
    ],
)
def test_border_exact_macs_refuse_other_counts(counts, message):
    with pytest.raises(ValueError, match=message):
        roofline.border_exact_macs(SMALL, counts)


@pytest.mark.parametrize("sparsity", [-0.1, 1.1, float("nan")])
def test_sparsity_outside_its_range(sparsity):
    with pytest.raises(ValueError, match="sparsity: expected a number"):
        roofline.sparse_flops(SMALL, sparsity)


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="sparsity: expected a number"):
        roofline.sparse_bytes(SMALL, "0.9")
    with pytest.raises(ValueError, match=r"device\.bandwidth: expected a positive"):
        roofline.attainable(1, Device("none", 1, 0))
    with pytest.raises(ValueError, match="reduction: expected a positive"):
        roofline.winograd_time(SMALL, TEN, 0)
    with pytest.raises(ValueError, match="moved_bytes: expected a positive"):
        roofline.arithmetic_intensity(1, 0)


def test_exact_reads_numbers_as_written():
    assert exact(0.9) == fractions.Fraction(9, 10)
    assert exact(19.5e12) == 19500000000000
    assert exact("1.555e12") == 1555000000000
    assert exact(3) == 3
