"""The CUDA kernels' source on the CPU under sanitizers, and what planning refuses."""

import pytest
from emulation import A100, ADDRESS, TEGRA_X1, THREAD, Case, build_sanitized, run_cases
from odd_layers import (
    ALL_LIMITS,
    COLUMN_KERNELS,
    LAYERS,
    MAPPINGS,
    ONE_BLOCK,
    TINY_LAYERS,
    assert_right,
    column_config,
    little_memory_for_column,
    little_memory_for_paper,
    new_call,
    paper_config,
    run_right,
)
from tampered import TAMPERED, tampered

pytestmark = pytest.mark.usefixtures("one_thread")

TINY, TINY_STRIDED, TINY_COPIES = TINY_LAYERS


@pytest.fixture
def address_sanitized():
    return build_sanitized("emulated-address", ADDRESS, "emulated_conv2d")


@pytest.fixture
def thread_sanitized():
    return build_sanitized("emulated-thread", THREAD, "emulated_conv2d")


# Every compiled kernel.


def test_column_kernels_under_address_sanitizer(address_sanitized):
    cases = []
    for at, kernel in enumerate(COLUMN_KERNELS):
        fitting = [layer for layer in LAYERS if column_config(kernel, layer) is not None]
        for number, layer in enumerate(fitting):
            config = column_config(kernel, layer)
            limits = ALL_LIMITS[(at + number) % len(ALL_LIMITS)]
            # A memory that begins at another alignment every time.
            before = ((at + number) % 4, number % 3)
            cases.append((layer, Case(new_call(layer), "column", config, limits, before)))
        layer = LAYERS[0]
        config = column_config(kernel, layer)
        limits = little_memory_for_column(config, layer, 5, 2000)
        cases.append((layer, Case(new_call(layer), "column", config, limits)))
    run_right(address_sanitized, cases)


def test_paper_kernels_under_address_sanitizer(address_sanitized):
    cases = []
    for at, mapping in enumerate(MAPPINGS):
        # One layer of each kind of tile at least; coprime steps make the pairs differ.
        for layer in {LAYERS[at % 7], LAYERS[7 + at % 5], LAYERS[(5 * at + 2) % len(LAYERS)]}:
            config = paper_config(mapping, layer)
            cases.append((layer, Case(new_call(layer), "paper", config, A100, (at % 4, 1))))
        limits = little_memory_for_paper(mapping, 5)
        cases.append((LAYERS[0], Case(new_call(LAYERS[0]), "paper", mapping, limits)))
    run_right(address_sanitized, cases)


def test_general_kernel_under_address_sanitizer(address_sanitized):
    run_right(address_sanitized, [(layer, Case(new_call(layer), "general")) for layer in LAYERS])


def test_column_kernels_under_thread_sanitizer(thread_sanitized):
    """Two blocks of input channels and several tiles a block, with one buffer and with two.

    With one buffer also as before sm_80, where copies land at once.
    """
    cases = []
    for kernel in COLUMN_KERNELS:
        for buffers in (1, 2):
            config = (*kernel, 8 if kernel[2] < 40 else 32, 2, 1, buffers, 1)
            for layer in (TINY, TINY_COPIES):
                # With room for all nonzeros, and for those of an output channel or two.
                for limits in (ONE_BLOCK, little_memory_for_column(config, layer, 3, 200)):
                    cases.append((layer, Case(new_call(layer), "column", config, limits)))
        config = (*config[:6], 1, 1)
        cases.append((TINY_COPIES, Case(new_call(TINY_COPIES), "column", config, TEGRA_X1)))
    run_right(thread_sanitized, cases)


def test_paper_and_general_kernels_under_thread_sanitizer(thread_sanitized):
    cases = [(layer, Case(new_call(layer), "general")) for layer in (TINY, TINY_STRIDED)]
    for mapping in MAPPINGS:
        limits = little_memory_for_paper(mapping, 3)
        cases.append((TINY, Case(new_call(TINY), "paper", mapping, limits)))
        if mapping[2] == 2:
            cases.append((TINY_STRIDED, Case(new_call(TINY_STRIDED), "paper", mapping, A100)))
    run_right(thread_sanitized, cases)


# Bad input: an error from planning, nothing read or written out of bounds.

IMPLEMENTATIONS = {"auto": (), "column": (4, 1, 40, 32, 4, 1, 1, 1), "paper": (8, 2, 4, 1)}
IMPLEMENTATIONS["general"] = ()


def tampered_call(name):
    call = new_call(LAYERS[0])
    words, offsets = tampered(call.words, call.offsets, name)
    return call._replace(words=words, offsets=offsets)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tampered_weights_are_refused(address_sanitized, implementation):
    config = IMPLEMENTATIONS[implementation]
    cases = [Case(tampered_call(name), implementation, config) for name in TAMPERED]
    for message, result in zip(TAMPERED.values(), run_cases(address_sanitized, cases)):
        assert result.kernel == "error"
        assert message in result.sentence
        assert result.output.isnan().all()


def test_tiles_that_do_not_fit_the_device_are_refused(address_sanitized):
    call = new_call(LAYERS[0])
    tiny = (80, 1, 1024, 2048)
    column, paper, auto = run_cases(
        address_sanitized,
        [
            Case(call, "column", (8, 2, 72, 32, 4, 1, 1, 1), tiny),
            Case(call, "paper", (32, 8, 8, 1), tiny),
            Case(call, "auto", (), (80, 1, 64, 128)),
        ],
    )
    assert column.kernel == "error"
    assert "do not fit the 1024 bytes of shared memory" in column.sentence
    assert paper.kernel == "error"
    assert "expected a tile that fits shared memory" in paper.sentence
    assert auto.kernel == "general"
    assert_right(LAYERS[0], auto.output, "no tile fits")


@pytest.mark.parametrize(
    ("implementation", "config"),
    [
        ("column", (8, 2, 72, 16, 4, 1, 1, 1)),  # two column groups of less than a warp
        ("column", (3, 2, 72, 32, 4, 1, 1, 1)),
        ("column", (8, 2, 71, 32, 4, 1, 1, 1)),
        ("column", (8, 2, 72, 32, 0, 1, 1, 1)),
        ("column", (8, 2, 72, 32, 4, 3, 1, 1)),
        ("column", (8, 2, 72, 32, 64, 1, 1, 1)),
        ("column", (8, 2, 72, 32, 4, 1, 3, 1)),
        ("column", (8, 2, 72, 32, 4, 1, 1, 0)),
        ("column", (8, 2, 72, 32, 4, 1, 1, 2**31 - 1)),
        ("paper", (5, 2, 4, 1)),
        ("paper", (8, 3, 4, 1)),
        ("paper", (8, 2, 3, 1)),
        ("paper", (8, 2, 4, 0)),
        ("paper", (8, 2, 4, -1)),
    ],
)
def test_configurations_that_are_not_compiled_are_refused(
    address_sanitized, implementation, config
):
    case = Case(new_call(LAYERS[0]), implementation, config)
    (result,) = run_cases(address_sanitized, [case])
    assert result.kernel == "error"
    assert result.sentence.startswith(("config: expected", "mapping: expected"))
    assert result.output.isnan().all()
