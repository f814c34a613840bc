"""The CUDA kernels' source on the CPU, against float64 PyTorch: every kernel that is compiled."""

import pytest
import torch
from drawn_layers import LAYERS as DRAWN_LAYERS
from drawn_layers import check
from emulation import A100, TEGRA_X1, emulated_core, make_call, make_plan, run_plan
from odd_layers import (
    ALL_LIMITS,
    COLUMN_KERNELS,
    LAYERS,
    MAPPINGS,
    ONE_BLOCK,
    assert_right,
    column_config,
    new_call,
    paper_config,
)

pytestmark = pytest.mark.usefixtures("one_thread")


PAPER_CASES = [
    (mapping, layer)
    for index, mapping in enumerate(MAPPINGS)
    for at, layer in enumerate(LAYERS)
    # The number of warps is a run-time value in a tile of any shape.
    if layer.paper_shape or (index + at) % 3 == 0
]
COLUMN_CASES = [
    (kernel, layer)
    for kernel in COLUMN_KERNELS
    for layer in LAYERS
    if column_config(kernel, layer) is not None
]


def case_ids(cases):
    return ["{} {}".format("-".join(str(v) for v in values), layer.name) for values, layer in cases]


def run(layer, implementation, config=None, limits=A100):
    """Plan and launch; returns the plan, whose output was found right."""
    call = new_call(layer)
    plan = make_plan(call, limits, implementation, config)
    assert plan.kernel == implementation
    run_plan(plan, call)
    assert_right(layer, call.output, f"{implementation} {config}, limits {limits}")
    return plan


def least_memory(layer, implementation, config):
    """The limits of a device on which a configuration just fits the layer."""
    call = new_call(layer)
    fits, too_small = A100[2], 0
    while fits - too_small > 64:
        size = (fits + too_small) // 128 * 64
        limits = (80, 1, size, 0)
        try:
            make_plan(call, limits, implementation, config)
            fits = size
        except ValueError:
            too_small = size
    return (80, 1, fits, 0)


def test_every_compiled_kernel_is_tested():
    compiled = emulated_core().cuda_kernels()
    assert compiled["column"] == COLUMN_KERNELS
    assert compiled["paper"] == MAPPINGS
    for kernel in COLUMN_KERNELS:
        assert sum(case[0] == kernel for case in COLUMN_CASES) >= 4


# Odd layers.


@pytest.mark.parametrize(("mapping", "layer"), PAPER_CASES, ids=case_ids(PAPER_CASES))
def test_paper_kernel(mapping, layer):
    plan = run(layer, "paper", paper_config(mapping, layer))
    assert plan.facts["paper_shape"] == layer.paper_shape


@pytest.mark.parametrize(("kernel", "layer"), COLUMN_CASES, ids=case_ids(COLUMN_CASES))
def test_column_kernel(kernel, layer):
    limits = ALL_LIMITS[(COLUMN_KERNELS.index(kernel) + LAYERS.index(layer)) % len(ALL_LIMITS)]
    run(layer, "column", column_config(kernel, layer), limits)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_general_kernel(layer):
    run(layer, "general")


@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_paper_kernel_in_blocks_of_input_channels(mapping):
    for layer in (LAYERS[0], LAYERS[2]):
        limits = least_memory(layer, "paper", mapping)
        plan = run(layer, "paper", mapping, limits)
        assert plan.facts["in_channel_blocks"] == layer.in_channels
        # Blocks that hold more than one channel and do not divide the 256 of a packed block.
        limits = (80, 1, 7 * limits[2], 0)
        plan = run(layer, "paper", mapping, limits)
        assert 1 < plan.facts["channels_per_block"] < layer.in_channels


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("kernel", COLUMN_KERNELS, ids=str)
def test_column_kernel_in_blocks_of_input_channels(kernel, buffers):
    lanes = 8 if kernel[2] < 40 else 32
    config = (*kernel, lanes, 4, 2, buffers, 1)
    if column_config(kernel, LAYERS[0]) is None:
        pytest.fail("every column kernel has room for a 3 x 3 layer")
    for layer in LAYERS[:3]:
        limits = least_memory(layer, "column", config)
        plan = run(layer, "column", config, limits)
        assert plan.facts["in_channel_blocks"] > 1
        assert plan.facts["chunks"] > 1
        assert not plan.facts["resident"]
        limits = (80, 1, 3 * limits[2], 0)
        run(layer, "column", config, limits)


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("kernel", COLUMN_KERNELS, ids=str)
def test_column_kernel_with_several_tiles_a_block(kernel, buffers):
    lanes = 8 if kernel[2] < 40 else 32
    layer = LAYERS[1]
    plan = run(layer, "column", (*kernel, lanes, 2, 1, buffers, 2), ONE_BLOCK)
    assert plan.facts["grid"][0] == 1
    assert plan.facts["items"] > 2


# Drawn layers.


@pytest.mark.parametrize("first", range(0, len(DRAWN_LAYERS), 59))
@pytest.mark.parametrize(
    ("implementation", "limits", "step"),
    [("auto", A100, 1), ("auto", TEGRA_X1, 3), ("general", A100, 5), ("paper", A100, 7)],
    ids=["auto-a100", "auto-tegra-x1", "general", "paper"],
)
def test_drawn_layers(first, implementation, limits, step):
    for layer in DRAWN_LAYERS[first : first + 59 : step]:

        def run_emulated(input, packed, bias, **options):
            call = make_call(input, packed, bias, **options)
            try:
                plan = make_plan(call, limits, implementation)
            except ValueError as error:
                # The tile of one input channel may be too large for the paper's kernel.
                if implementation != "paper" or "fits shared memory" not in str(error):
                    raise
                plan = make_plan(call, limits, "general")
            run_plan(plan, call)
            if options["out"] is not None:
                return options["out"]
            return call.output if input.dim() == 4 else call.output[0]

        check(layer, run_emulated)


# Memory that is not aligned.


@pytest.mark.parametrize("first", [0, 1, 2, 3])
@pytest.mark.parametrize("kernel", COLUMN_KERNELS, ids=str)
def test_column_kernel_reads_inputs_from_any_element_on(kernel, first):
    """Rows are copied four columns at a time only where the input lies on 16 bytes."""
    layer = LAYERS[1]
    call = new_call(layer)
    memory = torch.full((call.input.numel() + 7,), float("nan"))
    begin = -(memory.data_ptr() // 4) % 4 + first
    shifted = memory[begin : begin + call.input.numel()].view(call.input.shape)
    shifted.copy_(call.input)
    call = call._replace(input=shifted)
    lanes = 8 if kernel[2] < 40 else 32
    run_plan(make_plan(call, ONE_BLOCK, "column", (*kernel, lanes, 4, 2, 2, 1)), call)
    assert_right(layer, call.output, f"{kernel} from element {first} on")


# Launching.


def test_a_plan_for_a_larger_device_is_an_error_at_launch():
    call = new_call(LAYERS[0])
    limits = (90, 132, 400_000, 400_000)
    plan = make_plan(call, limits, "column", (8, 2, 72, 32, 4, 4, 2, 1))
    assert plan.facts["shared_bytes"] > 232448
    with pytest.raises(RuntimeError, match=r"was not launched.*invalid argument"):
        run_plan(plan, call)
    assert call.output.isnan().all()
