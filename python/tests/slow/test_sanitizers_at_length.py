"""The kernels under sanitizers with many more drawn layers than a plain run of the tests takes.

Layers of covers that no other test draws: each cover has every pair of options.
"""

import pytest
from cpu_program import DEFAULT, EVERY, PATHS, Case, isas, prepare_drawn, run_right
from cpu_program import build_sanitized as build_cpu
from drawn_layers import COVERS, draw_layers
from emulation import A100, ADDRESS, H200, TEGRA_X1, run_cases
from emulation import Case as EmulatedCase
from emulation import build_sanitized as build_emulated

pytestmark = pytest.mark.usefixtures("one_thread")

# As in test_cpu_sanitizers.py.
THREAD = ("-O1", "-g1", "-fsanitize=thread", "-DPACKEDCONV_STD_THREADS")
MORE_LAYERS = draw_layers(range(COVERS, 4 * COVERS))
# So many in one process of the program.
PART = 200


def parts(layers):
    return [layers[first : first + PART] for first in range(0, len(layers), PART)]


def cases(layers, which=DEFAULT, **options):
    return [
        Case(prepare_drawn(layer), which, before=(number % 17, number // 2 % 17), **options)
        for number, layer in enumerate(layers)
    ]


def test_the_layers_are_new_and_many():
    assert len(MORE_LAYERS) > 1500
    usual = set(draw_layers(range(COVERS)))
    assert len(usual.intersection(MORE_LAYERS)) < len(MORE_LAYERS) / 20


@pytest.mark.parametrize("isa", PATHS)
def test_cpu_under_address_sanitizer(isa):
    program = build_cpu("cpu-address", (*ADDRESS, "-DPACKEDCONV_STD_THREADS"))
    if isa not in isas(program):
        pytest.skip(f"this processor and build have {', '.join(isas(program))}")
    for layers in parts(MORE_LAYERS):
        run_right([program], cases(layers), isa)


@pytest.mark.parametrize("isa", PATHS)
def test_every_schedule_of_the_cpu_under_address_sanitizer(isa):
    program = build_cpu("cpu-address", (*ADDRESS, "-DPACKEDCONV_STD_THREADS"))
    if isa not in isas(program):
        pytest.skip(f"this processor and build have {', '.join(isas(program))}")
    schedules = set()
    for layers in parts(MORE_LAYERS[::10]):
        schedules.update(run_right([program], cases(layers, EVERY, vary=True), isa))
    assert {schedule.split()[0] for schedule in schedules} == PATHS[isa]


def test_cpu_under_thread_sanitizer():
    """Plans executed by two callers at once, each on three or four threads."""
    program = build_cpu("cpu-thread", THREAD)
    for layers in parts(MORE_LAYERS[::2]):
        run_right([program], cases(layers, threads=3, callers=2))
    run_right([program], cases(MORE_LAYERS[1::40], EVERY, threads=4, callers=2))


@pytest.mark.parametrize(
    ("implementation", "limits", "step"),
    [("auto", A100, 2), ("auto", H200, 3), ("auto", TEGRA_X1, 3), ("general", A100, 5)],
    ids=["auto-a100", "auto-h200", "auto-tegra-x1", "general"],
)
def test_cuda_kernels_under_address_sanitizer(implementation, limits, step):
    """The CUDA kernels' source, which this implementation chooses for a device."""
    program = build_emulated("emulated-address", ADDRESS, "emulated_conv2d")
    kernels = set()
    for layers in parts(MORE_LAYERS[::step]):
        prepared = [prepare_drawn(layer) for layer in layers]
        asked = [
            EmulatedCase(one.call, implementation, (), limits, (number % 4, number % 3))
            for number, one in enumerate(prepared)
        ]
        for one, result in zip(prepared, run_cases(program, asked, timeout=3600)):
            assert result.kernel != "error", f"{result.sentence}: {one.layer}"
            kernels.add(result.kernel)
            assert not result.output.isnan().any(), f"NaN: {one.layer}"
            excess = (result.output.double() - one.expected).abs() - one.bound
            assert bool((excess <= 0).all()), f"over the bound by {excess.max()}: {one.layer}"
    assert ("general" if implementation == "general" else "column") in kernels
