"""The CPU kernels and plans under sanitizers, and what planning refuses.

Arrays are heap blocks of their exact size; images begin in them at any multiple of 4 bytes.
"""

import pytest
from cpu_program import (
    DEFAULT,
    EVERY,
    PATHS,
    Case,
    assert_untouched,
    build_sanitized,
    isas,
    paths,
    prepare_drawn,
    run_cases,
    run_right,
    whole_cases,
)
from drawn_layers import LAYERS
from emulation import ADDRESS, StoppedError
from tampered import TAMPERED, tampered

pytestmark = pytest.mark.usefixtures("one_thread")

# Threads of the standard library: TSan does not see how those of OpenMP wait for one another.
THREAD = ("-O1", "-g1", "-fsanitize=thread", "-DPACKEDCONV_STD_THREADS")


@pytest.fixture(scope="module")
def address_sanitized():
    return build_sanitized("cpu-address", (*ADDRESS, "-DPACKEDCONV_STD_THREADS"))


@pytest.fixture(scope="module")
def thread_sanitized():
    return build_sanitized("cpu-thread", THREAD)


def cases(layers, which=DEFAULT, **options):
    return [
        Case(prepare_drawn(layer), which, before=(number % 17, number // 2 % 17), **options)
        for number, layer in enumerate(layers)
    ]


@pytest.mark.parametrize("isa", PATHS)
def test_drawn_layers_under_address_sanitizer(address_sanitized, isa):
    if isa not in isas(address_sanitized):
        pytest.skip(f"this processor and build have {', '.join(isas(address_sanitized))}")
    run_right([address_sanitized], cases(LAYERS), isa)


@pytest.mark.parametrize("isa", PATHS)
def test_every_schedule_under_address_sanitizer(address_sanitized, isa):
    if isa not in isas(address_sanitized):
        pytest.skip(f"this processor and build have {', '.join(isas(address_sanitized))}")
    run_right([address_sanitized], whole_cases(), isa)
    schedules = run_right([address_sanitized], cases(LAYERS[5::30], EVERY, vary=True), isa)
    assert paths(schedules) == PATHS[isa]


def test_address_sanitizer_sees_one_element_too_many(address_sanitized):
    """The control of the tests above; what intrinsics touch is for the fences in test_isa.py."""
    layer = next(layer for layer in LAYERS if layer.kernel == (3, 3) and layer.pattern == "dense")
    for lacking in ((1, 0), (0, 1)):
        case = Case(prepare_drawn(layer), lacking=lacking)
        # The last one has the fewest intrinsics.
        with pytest.raises(StoppedError, match="heap-buffer-overflow"):
            list(run_cases([address_sanitized], [case], isas(address_sanitized)[-1]))


def test_drawn_layers_under_thread_sanitizer(thread_sanitized):
    """Plans executed by two callers at once, each on three threads."""
    run_right([thread_sanitized], cases(LAYERS[::9], threads=3, callers=2))
    run_right([thread_sanitized], whole_cases()[::5])
    run_right([thread_sanitized], cases(LAYERS[3::90], EVERY, threads=4, callers=2))


# Bad input: an error from planning, nothing read or written out of bounds.


def tampered_case(name):
    """A layer with two blocks of input channels, its words or offsets changed after packing."""
    layer = next(
        layer
        for layer in LAYERS
        if layer.group_in_channels == 257
        and layer.pattern == "half"
        and layer.group_out_channels > 1
        and max(layer.kernel) < 16
        and layer.batch != 0
    )
    prepared = prepare_drawn(layer)
    words, offsets = tampered(prepared.call.words, prepared.call.offsets, name)
    return Case(prepared._replace(call=prepared.call._replace(words=words, offsets=offsets)))


def test_tampered_weights_are_refused(address_sanitized):
    tampered_cases = [tampered_case(name) for name in TAMPERED]
    for which in (DEFAULT, EVERY):
        asked = [case._replace(which=which) for case in tampered_cases]
        for message, case, (result,) in zip(
            TAMPERED.values(), asked, run_cases([address_sanitized], asked)
        ):
            assert result.schedule == "none"
            assert message in result.error
            assert_untouched(case, result)
