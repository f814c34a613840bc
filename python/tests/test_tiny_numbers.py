"""Tiny numbers on the CPU: kernels scale them by a power of two, and nobody can tell."""

import warnings

import pytest
import torch
from drawn_layers import reference_and_bound

from packedconv import _core, conv, cpu
from packedconv.packed import PackWarning, pack

LAYERS = {
    "several tiles in a row": ((2, 5, 9, 150), (6, 5, 3, 3), {"padding": 1}),
    "images side by side": ((5, 40, 7, 7), (6, 40, 3, 3), {"padding": 1}),
    "stride 2": ((2, 6, 21, 40), (5, 6, 3, 3), {"padding": 1, "stride": 2}),
    "1 x 1": ((2, 40, 9, 10), (7, 40, 1, 1), {}),
    "groups, dilation": ((1, 8, 12, 70), (6, 4, 3, 3), {"padding": 2, "dilation": 2, "groups": 2}),
}


def random_tensor(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def some(values, other, share, seed):
    """`values` with a share of elements from `other`."""
    draw = torch.rand(values.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(draw < share, other, values)


def images(shape):
    x = random_tensor(*shape)
    last = x.clone()
    last[-1, -1, -1, -1] = 1e-41
    return {
        "all subnormal": x * 1e-40,
        "half subnormal": some(x, x * 1e-40, 0.5, 1),
        "one subnormal, in the last pixel": last,
        "products subnormal": x * 1e-36,
        "up to the limit of scaling": some(x * 2.0**39, x * 1e-40, 0.5, 2),
        "beyond the limit of scaling": some(x * 2.0**60, x * 1e-40, 0.5, 3),
    }


def weight_of(shape):
    weight = random_tensor(*shape, seed=7)
    weight = torch.where(weight.abs() < 0.5, torch.zeros(()), weight * 8)
    # FP16's smallest and largest.
    weight[0, 0, 0, 0], weight[-1, -1, -1, -1] = 2.0**-24, 65504.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PackWarning)
        return pack(weight)


def schedules(packed, shape, options):
    """What may be chosen, and blocks and strips of other sizes, which scale by themselves."""
    plan = packed.plan(shape, **options)
    key = plan.key
    listed = _core.cpu_schedules(
        key.input_shape,
        key.output_shape,
        packed.words,
        packed.offsets,
        packed.shape[2:],
        key.stride,
        key.padding,
        key.dilation,
        key.groups,
        key.threads,
    )
    return [*listed, dict(listed[0], block_channels=2), dict(listed[0], strip=3)]


@pytest.mark.parametrize("isa", _core.isas())
@pytest.mark.parametrize("name", LAYERS)
def test_right_whatever_is_tiny(name, isa, monkeypatch, torch_threads):
    monkeypatch.setenv("PACKEDCONV_ISA", isa)
    shape, weight_shape, options = LAYERS[name]
    packed = weight_of(weight_shape)
    out_channels = weight_shape[0]
    tiny_bias = random_tensor(out_channels, seed=9) * 1e-39
    huge_bias = random_tensor(out_channels, seed=9) * 2.0**90
    for kind, image in images(shape).items():
        for bias in (None, tiny_bias, huge_bias):
            expected, bound = reference_and_bound(image, packed, bias, "relu", options)
            # A subnormal result is off by half the smallest number, whoever computes it; where
            # nothing is scaled, so is each sum on the way.
            bound = bound + (packed.nnz + 1) * 2.0**-150
            for schedule in schedules(packed, shape, options):
                results = []
                for threads in (1, 3):
                    torch_threads(threads)
                    results.append(
                        conv.compute(
                            image,
                            packed,
                            bias,
                            activation="relu",
                            launch=cpu.launcher(schedule),
                            **options,
                        )
                    )
                excess = (results[0].double() - expected).abs() - bound
                assert bool((excess <= 0).all()), (kind, bias, schedule)
                assert torch.equal(*results), (kind, bias, schedule)


@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
def test_infinity_and_nan_beside_tiny_numbers(odd, one_thread):
    """Where a product has one, the sum has it; elsewhere sums are as without it."""
    shape, weight_shape, options = LAYERS["several tiles in a row"]
    packed = weight_of(weight_shape)
    image = random_tensor(*shape) * 1e-40
    plain = conv.conv2d(image, packed, **options)
    image[0, 2, 4, 70] = odd
    result = conv.conv2d(image, packed, **options)
    reached = torch.nn.functional.conv2d(
        (~image.isfinite()).double(), (packed.unpack() != 0).double(), **options
    )
    assert bool((reached > 0).any())
    assert bool((~result[reached > 0].isfinite()).all())
    assert torch.allclose(result[reached == 0], plain[reached == 0], rtol=0, atol=2.0**-140)


def test_scaling_changes_no_bit_of_what_is_not_tiny(one_thread):
    """One tiny number scales its neighbourhood; all sums that it is not part of stay the same."""
    shape, weight_shape, options = LAYERS["several tiles in a row"]
    packed = weight_of(weight_shape)
    image = random_tensor(*shape)
    plain = conv.conv2d(image, packed, **options)
    image[:, :, 4, 70] = 1e-41
    result = conv.conv2d(image, packed, **options)
    far = torch.ones(plain.shape, dtype=torch.bool)
    far[:, :, 3:6, 69:72] = False
    assert torch.equal(result[far], plain[far])
    assert not torch.equal(result, plain)
