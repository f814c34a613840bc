"""The CPU kernels on every instruction set, on older processors and on 64-bit ARM.

The drawn layers run in csrc/tests/cpu_layers: natively, and emulated by qemu-user, which
refuses the instructions that its model of a processor lacks. The package itself runs emulated
too, with the same Python, numpy and PyTorch.
"""

import os
import signal
import subprocess
import sys

import pytest
from cpu_program import (
    BEFORE_FENCE,
    BEHIND_FENCE,
    CORTEX_A57,
    EVERY,
    HASWELL,
    HEAP,
    NEHALEM,
    PATHS,
    Case,
    build_program,
    isas,
    paths,
    prepare_drawn,
    run_cases,
    run_right,
    skip_without_tools,
    whole_cases,
)
from drawn_layers import LAYERS
from emulation import COMPILER, ROOT, StoppedError

pytestmark = pytest.mark.usefixtures("one_thread")

# The drawn layers are covers of all pairs of options, one after the other; two hold each
# pair twice.
TWO_COVERS = LAYERS[: 2 * len(LAYERS) // 10]


@pytest.fixture(scope="module")
def native():
    return build_program("cpu-native")


@pytest.fixture(scope="module")
def aarch64():
    skip_without_tools(CORTEX_A57[0])
    return build_program("cpu-aarch64")


def drawn_cases(layers, fences=True, **options):
    """Cases on one to three threads, whose images begin at any multiple of 4 bytes.

    fences: end every array where a page begins that must not be touched, or the opposite.
    """
    cases = []
    for number, layer in enumerate(layers):
        place, before = BEFORE_FENCE, (number % 17, number // 3 % 17)
        if number % 4 == 0:
            place, before = BEHIND_FENCE, (0, 0)
        cases.append(
            Case(
                prepare_drawn(layer),
                threads=1 + number % 3,
                place=place if fences else HEAP,
                before=before,
                **options,
            )
        )
    return cases


def every_schedule(layers):
    """The same layers with every schedule, and with single fields of these changed."""
    return drawn_cases(layers, which=EVERY, vary=True)


@pytest.mark.parametrize("isa", PATHS)
def test_native(native, isa):
    if isa not in isas(native):
        pytest.skip(f"this processor and build have {', '.join(isas(native))}, not {isa}")
    run_right([native], drawn_cases(LAYERS), isa)
    run_right([native], whole_cases(place=BEFORE_FENCE), isa)
    # From a multiple of the page's size on, as writing past the caches needs.
    run_right([native], whole_cases(place=BEHIND_FENCE, vary=True), isa)
    schedules = run_right([native], every_schedule(LAYERS[::24]), isa)
    assert paths(schedules) == PATHS[isa]


@pytest.mark.parametrize(
    ("emulator", "available"),
    [(NEHALEM, ["x86_64_v2"]), (HASWELL, ["x86_64_v3", "x86_64_v2"])],
    ids=["Nehalem", "Haswell"],
)
def test_older_processors(native, emulator, available):
    skip_without_tools(emulator[0])
    if "x86_64_v2" not in isas(native):
        pytest.skip("the program is not one for x86-64")
    # Those that this machine has and the older one lacks are not chosen, so none is illegal.
    assert isas(native, emulator) == available
    # qemu 7.2 reads all of a vector that is loaded under a mask, the processor does not.
    haswell = emulator == HASWELL
    cases = drawn_cases(TWO_COVERS if haswell else LAYERS, fences=not haswell)
    run_right([*emulator, native], cases)


def test_aarch64(aarch64):
    assert isas(aarch64, CORTEX_A57) == ["aarch64"]
    run_right([*CORTEX_A57, aarch64], drawn_cases(LAYERS))
    run_right([*CORTEX_A57, aarch64], whole_cases(place=BEHIND_FENCE))
    schedules = run_right([*CORTEX_A57, aarch64], every_schedule(LAYERS[::48]))
    assert paths(schedules) == PATHS["aarch64"]


@pytest.mark.parametrize("lacking", [(1, 0), (0, 1)], ids=["input", "output"])
def test_fences_stop_access_to_one_element_too_many(native, lacking):
    """The control of the tests above."""
    layer = next(layer for layer in LAYERS if layer.kernel == (3, 3) and layer.pattern == "dense")
    case = Case(prepare_drawn(layer), place=BEFORE_FENCE, lacking=lacking)
    for isa in isas(native):
        with pytest.raises(StoppedError, match=f"exit status -{signal.SIGSEGV:d}"):
            list(run_cases([native], [case], isa))


def test_unavailable_isa_names_the_available_ones(native):
    skip_without_tools(NEHALEM[0])
    if "x86_64_v2" not in isas(native):
        pytest.skip("the program is not one for x86-64")
    case = Case(prepare_drawn(LAYERS[0]))
    expected = (
        "PACKEDCONV_ISA: expected one of x86_64_v2, which this processor and build have; got "
    )
    for isa in ("x86_64_v4", "x86_64_v3", "aarch64", "x86_64"):
        ((result,),) = run_cases([*NEHALEM, native], [case], isa)
        assert (result.schedule, result.error) == ("none", expected + isa)


def test_emulator_refuses_what_its_processor_lacks(tmp_path):
    """The control of the tests above: AVX code does not pass for that of a Nehalem."""
    skip_without_tools(NEHALEM[0])
    source, program = tmp_path / "avx.cpp", tmp_path / "avx"
    source.write_text('int main() { asm volatile("vxorps %ymm0, %ymm0, %ymm0"); }\n')
    if subprocess.run([*COMPILER.split(), str(source), "-o", str(program)], check=False).returncode:
        pytest.skip("the compiler is not one for x86-64")
    done = subprocess.run([*HASWELL, str(program)], check=False, stderr=subprocess.DEVNULL)
    assert done.returncode == 0
    done = subprocess.run([*NEHALEM, str(program)], check=False, stderr=subprocess.DEVNULL)
    assert done.returncode != 0


PACKAGE = """
import torch, packedconv
generator = torch.Generator().manual_seed(7)
draw = lambda *shape: torch.rand(shape, generator=generator) * 2 - 1
for stride, size, groups in ((1, 37, 1), (2, 20, 2), (1, 7, 1)):
    weight = draw(6, 8 // groups, 3, 3)
    weight[draw(*weight.shape) < 0.6] = 0
    packed = packedconv.pack(weight)
    image, bias = draw(2, 8, size, size), draw(6)
    options = {"stride": stride, "padding": 1, "groups": groups}
    result = packedconv.conv2d(image, packed, bias, activation="relu", **options)
    expected = torch.nn.functional.conv2d(image, packed.unpack(), bias, **options).relu()
    assert torch.allclose(result, expected, rtol=0, atol=1e-4), (stride, size, groups)
try:
    import os
    os.environ["PACKEDCONV_ISA"] = "x86_64_v4"
    packedconv.conv2d(draw(1, 8, 9, 9), packed)
except ValueError as error:
    print(error)
"""


def test_package_on_a_nehalem():
    """The extension module as it is installed, with PyTorch, where there is no AVX."""
    skip_without_tools(NEHALEM[0])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "PACKEDCONV_ISA": ""}
    done = subprocess.run(
        [*NEHALEM, sys.executable, "-c", PACKAGE],
        env={**environment, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "PACKEDCONV_ISA: expected one of x86_64_v2, which" in done.stdout
