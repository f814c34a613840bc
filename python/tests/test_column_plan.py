"""The column kernel's plan: what it puts where, without running it."""

import numpy as np
import pytest

from packedconv import _core
from packedconv.packed import pack_array

A100 = (80, 108, 166912, 167936)
H200 = (90, 132, 232448, 233472)
TEGRA_X1 = (53, 1, 49152, 65536)

# Batch, in_channels, out_channels, height and width, kernel, stride, groups.
LAYERS = [
    (32, 32, 128, 256, 3, 1, 1),
    (8, 16, 48, 128, 3, 1, 1),
    (1, 64, 64, 56, 3, 1, 1),
    (4, 256, 256, 56, 3, 1, 1),
    (32, 512, 512, 7, 3, 1, 1),
    (1, 512, 512, 7, 3, 1, 1),
    (32, 128, 128, 56, 3, 2, 1),
    (1, 256, 512, 28, 1, 2, 1),
    (2, 3, 64, 224, 7, 2, 1),
    (3, 64, 60, 33, 5, 1, 4),
]


def draw_weight(out_channels, in_channels, kernel, density):
    generator = np.random.default_rng([out_channels, in_channels, kernel])
    weight = generator.uniform(0.5, 1, (out_channels, in_channels, kernel, kernel))
    weight[generator.random(weight.shape) >= density] = 0
    return weight.astype(np.float32)


def make_plan(layer, weight, limits, implementation="auto", **changes):
    batch, in_channels, out_channels, size, kernel, stride, groups = layer
    packed = pack_array(weight)
    padding = changes.pop("padding", (kernel // 2, kernel // 2))
    out_size = (size + 2 * (kernel // 2) - kernel) // stride + 1
    arguments = {
        "input_shape": (batch, in_channels, size, size),
        "output_shape": (batch, out_channels, out_size, out_size),
        "words": packed.words,
        "offsets": packed.offsets,
        "kernel": (kernel, kernel),
        "stride": (stride, stride),
        "padding": padding,
        "dilation": (1, 1),
        "groups": groups,
        "limits": limits,
        "implementation": implementation,
    }
    return _core.cuda_plan(**dict(arguments, **changes))


def layer_weight(layer, density=0.1):
    return draw_weight(layer[2], layer[1] // layer[6], layer[4], density)


@pytest.mark.parametrize("limits", [A100, H200, TEGRA_X1], ids=["a100", "h200", "tegra-x1"])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_the_choice_fits_the_device_and_fills_it_once(layer, limits):
    facts = make_plan(layer, layer_weight(layer), limits).facts
    _, multiprocessors, shared_per_block, shared_per_multiprocessor = limits
    assert 0 < facts["shared_bytes"] <= shared_per_block
    assert facts["threads"] <= 512
    at_once = min(
        shared_per_multiprocessor // (facts["shared_bytes"] + 1024), 1024 // facts["threads"]
    )
    wave = multiprocessors * max(1, at_once)
    # A block that starts when others have finished would double the time.
    assert facts["grid"][0] * facts["parts"] <= wave or facts["grid"][0] == 1
    assert facts["grid"][0] <= facts["items"]
    if limits[0] < 80:
        assert facts["buffers"] == 1


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_the_table_holds_every_nonzero_once(layer):
    weight = layer_weight(layer)
    plan = make_plan(layer, weight, A100)
    facts, table = plan.facts, plan.table
    found = np.zeros(weight.shape[:1] + (weight[0].size,), dtype=np.float32)
    counted = 0
    for channel, values, _ in records(facts, table):
        found[channel, counted_per(found, channel) :][: len(values)] = values
        counted += len(values)
    assert counted == np.count_nonzero(weight)
    for channel in range(len(weight)):
        expected = weight[channel][weight[channel] != 0].astype(np.float16).astype(np.float32)
        # Blocks of input channels keep the order of the words.
        np.testing.assert_array_equal(found[channel, : len(expected)], expected)


def counted_per(found, channel):
    return int(np.count_nonzero(found[channel]))


def records(facts, table):
    """(output channel, values, warp) of every record, part by part, block by block."""
    units = table.reshape(-1, 4)
    segments = facts["parts"] * facts["in_channel_blocks"] * facts["chunks"]
    warps = facts["warps"] // facts["row_warps"]
    for begin, end, first_nonzero, _ in units[:segments]:
        segment = units[begin:end]
        starts = segment.reshape(-1)[: warps + 1]
        rows = segment[(warps + 4) // 4 :]
        for warp in range(warps):
            for channel, pair, count, _ in rows[starts[warp] : starts[warp + 1]]:
                words = segment[first_nonzero + pair :].reshape(-1, 2)[:count]
                yield int(channel), words[:, 0].view(np.float32), warp


def test_a_skewed_weight_is_dealt_evenly():
    """Every fourth channel holds ten times the nonzeros of the others."""
    layer = (32, 32, 128, 256, 3, 1, 1)
    weight = draw_weight(128, 32, 3, 0.05)
    weight[::4] = draw_weight(32, 32, 3, 0.5)
    plan = make_plan(layer, weight, A100)
    facts = plan.facts
    assert facts["in_channel_blocks"] == facts["chunks"] == facts["slices"] == 1
    load = np.zeros(facts["warps"] // facts["row_warps"])
    for _, values, warp in records(facts, plan.table):
        load[warp] += len(values)
    assert load.max() / load.mean() < 1.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": (17, 3)}, r"shape: expected a kernel of 1 to 16 x 1 to 16"),
        ({"groups": 3}, r"shape: expected groups that divide the channels"),
        ({"stride": (0, 1)}, r"shape: expected strides and dilations of at least 1"),
        ({"dilation": (1, 0)}, r"shape: expected strides and dilations of at least 1"),
        ({"padding": (-1, 0)}, r"shape: expected padding of at least 0"),
    ],
)
@pytest.mark.parametrize("implementation", ["auto", "column", "paper", "general"])
def test_a_shape_that_no_kernel_computes_is_refused(implementation, changes, message):
    layer = (1, 8, 8, 20, 3, 1, 1)
    with pytest.raises(ValueError, match=message):
        make_plan(layer, layer_weight(layer), A100, implementation, **changes)


@pytest.mark.parametrize("dilation", [(2**33 - 2, 2**29 - 32), (2**62, 1), (1, 2**62)])
def test_positions_beyond_32_bits_are_left_to_the_general_kernel(dilation):
    layer = (1, 8, 8, 20, 3, 1, 1)
    changes = {"dilation": dilation, "padding": dilation}
    assert make_plan(layer, layer_weight(layer), A100, **changes).kernel == "general"
    for implementation, message in (
        ("paper", "expected a tile that fits shared memory"),
        ("column", "no tile of the column kernel for this layer"),
    ):
        with pytest.raises(ValueError, match=message):
            make_plan(layer, layer_weight(layer), A100, implementation, **changes)
