"""Builds csrc/tests/cpu_layers, runs layers in it and checks what it wrote.

Builds lie in build/ and are made again when a source changes.
"""

import functools
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import typing

import numpy as np
import odd_layers
import pytest
import torch
from drawn_layers import (
    DrawnLayer,
    draw_bias,
    draw_input,
    draw_weight,
    laid_out,
    reference_and_bound,
)
from emulation import (
    BUILD,
    CSRC,
    Call,
    StoppedError,
    build_lock,
    digest,
    make_call,
    memory_of,
    run_command,
    run_sanitized,
    skip_without,
)
from odd_layers import OddLayer

from packedconv.packed import pack

CROSS_COMPILER = "aarch64-linux-gnu-g++"
# What a Jetson Nano has.
CORTEX_A57 = ("qemu-aarch64", "-cpu", "cortex-a57", "-L", "/usr/aarch64-linux-gnu")
NEHALEM = ("qemu-x86_64", "-cpu", "Nehalem")
HASWELL = ("qemu-x86_64", "-cpu", "Haswell")
PACKAGES = {"qemu-aarch64": "qemu-user", "qemu-x86_64": "qemu-user"}
PACKAGES[CROSS_COMPILER] = "g++-aarch64-linux-gnu"

# The instruction sets that there are kernels for, each with its paths: only long vectors have the
# aligned one.
PATHS = {isa: {"naive", "loose"} for isa in ("x86_64_v4", "x86_64_v3", "x86_64_v2", "aarch64")}
for isa in ("x86_64_v4", "x86_64_v3"):
    PATHS[isa].add("aligned")

# Which schedules a layer runs with: an index of cpu_schedules, or one of these.
DEFAULT, EVERY = -1, -2

# Where all arrays of a case lie: in blocks of the heap, or with their end or their beginning
# at a page that must not be touched.
HEAP, BEFORE_FENCE, BEHIND_FENCE = range(3)


def skip_without_tools(*names: str) -> None:
    for name in names:
        if shutil.which(name) is None:
            pytest.skip(f"no {name}: apt-get install {PACKAGES[name]}")


def build_program(name: str, *settings: str) -> pathlib.Path:
    """Build csrc/tests in build/`name` with CMake settings (-D...); skip without its tools.

    Raises RuntimeError with what CMake or the compiler said.
    """
    toolchain = CSRC / "tests" / "aarch64.cmake"
    arm = name.endswith("aarch64")
    if arm:
        skip_without_tools(CROSS_COMPILER)
        version = subprocess.run([CROSS_COMPILER, "--version"], check=True, capture_output=True)
        settings = (*settings, f"-DCMAKE_TOOLCHAIN_FILE={toolchain}")
    folder = BUILD / name
    program, stamp = folder / "cpu_layers", folder / "cpu_layers.sha256"
    tests = [CSRC / "tests" / file for file in ("CMakeLists.txt", "cpu_layers.cpp")]
    with build_lock(folder):
        used = [*CSRC.glob("*.h"), *CSRC.glob("cpu/*"), *tests, toolchain]
        wanted = digest(CSRC, used, *settings, version.stdout.decode() if arm else "")
        if program.exists() and stamp.exists() and stamp.read_text() == wanted:
            return program
        stamp.unlink(missing_ok=True)
        # The environment's own cmake and ninja come first, whether or not it is activated.
        path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path}
        if arm:
            environment.pop("CXX", None)
        configure = ["cmake", "-S", str(CSRC / "tests"), "-B", str(folder), "-G", "Ninja"]
        for command in ([*configure, *settings], ["cmake", "--build", str(folder), "-j2"]):
            run_command(command, env=environment)
        stamp.write_text(wanted)
    return program


def build_sanitized(name: str, flags: typing.Sequence[str], *settings: str) -> pathlib.Path:
    """`build_program` with compiler flags, or a skipped test where they do not work."""
    skip_without(flags)
    return build_program(
        name,
        f"-DCMAKE_CXX_FLAGS={' '.join(flags)}",
        # No -O3 behind the flags.
        "-DCMAKE_BUILD_TYPE=Sanitized",
        *settings,
    )


@functools.lru_cache(maxsize=None)
def isas(program: pathlib.Path, emulator: typing.Tuple[str, ...] = ()) -> typing.List[str]:
    """The instruction sets that the program has and the processor runs, fastest first."""
    command = [*emulator, str(program), "--isas"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


class Prepared(typing.NamedTuple):
    """A layer as it is called, and what must come out."""

    layer: typing.Any  # named when the check fails
    call: Call  # its output is -77 all over, around a sliced one too
    expected: torch.Tensor  # (N, OC, H_out, W_out), float64
    bound: torch.Tensor  # the largest error allowed


@functools.lru_cache(maxsize=None)
def prepare_drawn(layer: DrawnLayer) -> Prepared:
    image, packed, bias = draw_input(layer), pack(draw_weight(layer)), draw_bias(layer)
    expected, bound = reference_and_bound(image, packed, bias, layer.activation, layer.options)
    out = laid_out(torch.zeros(expected.shape), layer.out_layout or "contiguous")
    torch.empty(0).set_(out.untyped_storage()).fill_(-77.0)
    call = make_call(image, packed, bias, activation=layer.activation, out=out, **layer.options)
    return Prepared(layer, call, expected.view(out.shape), bound.view(out.shape))


# Layers with tiles that lie in the output as a whole, unlike most of those drawn.
WHOLE_LAYERS = [
    OddLayer("tiles of whole rows", 2, 20, 6, (24, 64)),
    OddLayer("tiles side by side", 1, 40, 5, (28, 192), density=0.1, relu=True),
    OddLayer("1 x 1", 1, 33, 7, (32, 48), kernel=(1, 1), padding=(0, 0)),
    OddLayer("strides", 1, 12, 5, (49, 128), stride=(2, 2), density=0.3),
    OddLayer("groups and dilation", 1, 16, 6, (24, 96), padding=(2, 2), dilation=(2, 2), groups=2),
    OddLayer("5 x 5", 2, 9, 4, (14, 80), kernel=(5, 5), padding=(2, 2), bias=False),
]


@functools.lru_cache(maxsize=None)
def prepare_whole(layer: OddLayer, channel_gap: int, row_gap: int) -> Prepared:
    """The gaps are elements between the channels and the rows of the output."""
    expected, bound = odd_layers.reference(layer)
    height, width = expected.shape[2:]
    step = width + row_gap
    memory = torch.full((*expected.shape[:2], height * step + channel_gap), -77.0)
    out = memory[..., : height * step].unflatten(-1, (height, step))[..., :width]
    call = make_call(
        *odd_layers.tensors(layer),
        activation="relu" if layer.relu else None,
        out=out,
        **odd_layers.options(layer),
    )
    return Prepared((layer, channel_gap, row_gap), call, expected, bound)


class Case(typing.NamedTuple):
    prepared: Prepared
    which: int = DEFAULT  # index of cpu_schedules, DEFAULT or EVERY
    plan_threads: int = 2
    threads: int = 2
    callers: int = 1  # threads that execute the plan at the same time
    vary: bool = False  # also with single fields of the schedules changed
    place: int = HEAP
    # Elements between the beginning of the memory and the tensor's.
    before: typing.Tuple[int, int] = (0, 0)
    # Elements that the memory of input and output lacks at its end.
    lacking: typing.Tuple[int, int] = (0, 0)


class Result(typing.NamedTuple):
    schedule: str  # "none" when planning threw
    error: str
    memory: np.ndarray  # of the output


def write_case(file: typing.BinaryIO, case: Case) -> None:
    """As csrc/tests/cpu_layers.cpp reads it."""
    call = case.prepared.call
    numbers = [case.which, case.plan_threads, case.threads, case.callers, case.vary]
    numbers += [call.input.shape[0], call.input.shape[1], call.output.shape[1], call.groups]
    numbers += [*call.input.shape[2:], *call.output.shape[2:], *call.kernel]
    numbers += [*call.stride, *call.dilation, *call.padding]
    numbers += [*call.input.stride(), *call.output.stride(), *case.before, call.relu, case.place]
    memory = [
        whole[: len(whole) - lacking]
        for whole, lacking in zip(
            map(memory_of, (call.input, call.output), case.before), case.lacking
        )
    ]
    arrays = [
        memory[0],
        np.zeros(0, np.float32) if call.bias is None else call.bias.numpy(),
        memory[1],
        np.asarray(call.words),
        np.asarray(call.offsets).ravel(),
    ]
    numbers += [*(len(array) for array in arrays), len(call.offsets)]
    file.write(struct.pack(f"={len(numbers)}q", *numbers))
    for array in arrays:
        file.write(array.tobytes())


def read_results(file: typing.BinaryIO) -> typing.List[Result]:
    """Of one case."""

    def read(count: int) -> bytes:
        data = file.read(count)
        assert len(data) == count, "the program stopped before its end"
        return data

    def number() -> int:
        return struct.unpack("=q", read(8))[0]

    results = []
    for _ in range(number()):
        schedule, error = (read(number()).decode() for _ in range(2))
        results.append(Result(schedule, error, np.frombuffer(read(4 * number()), np.float32)))
    return results


def run_cases(
    command: typing.Sequence[typing.Union[str, pathlib.Path]],
    cases: typing.Sequence[Case],
    isa: str = "",
    timeout: float = 600,
) -> typing.Iterator[typing.List[Result]]:
    """The results of each case, all computed in one process.

    command: the program, behind an emulator where it needs one. isa: PACKEDCONV_ISA.
    Raises StoppedError with what the program printed when it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = [os.path.join(folder, name) for name in ("cases", "results")]
        with open(names[0], "wb") as file:
            for case in cases:
                write_case(file, case)
        done = run_sanitized(
            ["env", f"PACKEDCONV_ISA={isa}", *map(str, command), *names], timeout=timeout
        )
        if done.returncode:
            raise StoppedError(f"exit status {done.returncode}:\n{done.stderr[:6000]}")
        with open(names[1], "rb") as file:
            for _ in cases:
                yield read_results(file)
            assert not file.read(1), "the program wrote more results than cases"


def assert_right(case: Case, result: Result) -> None:
    """Within the bound, and nothing else written."""
    prepared = case.prepared
    where = f"{result.schedule}, {case._replace(prepared=None)}, {prepared.layer}"
    assert not result.error, f"{result.error}: {where}"
    output = prepared.call.output
    memory = torch.from_numpy(result.memory.copy())
    if output.numel():
        written = memory.as_strided(output.shape, output.stride(), case.before[1])
        assert not written.isnan().any(), f"NaN: {where}"
        excess = (written.double() - prepared.expected).abs() - prepared.bound
        assert bool((excess <= 0).all()), f"over the bound by {excess.max().item()}: {where}"
        written.copy_(output)
    assert_untouched(case, result._replace(memory=memory.numpy()))


def assert_untouched(case: Case, result: Result) -> None:
    before = memory_of(case.prepared.call.output, case.before[1])
    assert np.array_equal(result.memory, before, equal_nan=True), f"wrote where not asked: {case}"


def run_right(
    command: typing.Sequence[typing.Union[str, pathlib.Path]],
    cases: typing.Sequence[Case],
    isa: str = "",
) -> typing.List[str]:
    """Run cases and check every result; the schedules that they ran with."""
    schedules = []
    for case, results in zip(cases, run_cases(command, cases, isa)):
        assert results, f"no schedule for {case.prepared.layer}"
        for result in results:
            assert_right(case, result)
            schedules.append(result.schedule)
    return schedules


def whole_cases(**options: typing.Any) -> typing.List[Case]:
    """Every schedule on `WHOLE_LAYERS`, with outputs on cache lines and beside them."""
    return [
        Case(prepare_whole(layer, *gaps), EVERY, threads=3, before=(0, before), **options)
        for layer in WHOLE_LAYERS
        for *gaps, before in ((0, 0, 0), (0, 0, 1), (1, 0, 0), (16, 0, 0), (4, 4, 4), (0, 8, 0))
    ]


def paths(schedules: typing.Iterable[str]) -> typing.Set[str]:
    return {schedule.split()[0] for schedule in schedules}
