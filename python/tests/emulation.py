"""Builds the CUDA kernels' source for the CPU (csrc/emulation) and runs layers on it.

Builds lie in build/ and are made again when a source changes.
"""

import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import pathlib
import struct
import subprocess
import sys
import sysconfig
import tempfile
import types
import typing

import numpy as np
import pybind11
import pytest
import torch

from packedconv import arguments
from packedconv.packed import PackedWeight

ROOT = pathlib.Path(__file__).parents[2]
CSRC = ROOT / "csrc"
BUILD = ROOT / "build"
COMPILER = os.environ.get("CXX", "c++")

# (compute capability, multiprocessors, shared memory in bytes per block, per multiprocessor)
Limits = typing.Tuple[int, int, int, int]
A100: Limits = (80, 108, 166912, 167936)
H200: Limits = (90, 132, 232448, 233472)
TEGRA_X1: Limits = (53, 1, 49152, 65536)

WARNINGS = ("-Wall", "-Wextra", "-Wno-unknown-pragmas")
# Line tables are enough for a sanitizer to name a line, and quicker to compile.
ADDRESS = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREAD = ("-O1", "-g1", "-fsanitize=thread", "-DPACKEDCONV_EMULATION_THREADS", "-pthread")
IMPLEMENTATIONS = ("auto", "column", "paper", "general")


# Building.


@contextlib.contextmanager
def build_lock(folder: pathlib.Path) -> typing.Iterator[None]:
    """Keep the test processes from building one thing twice at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def digest(csrc: pathlib.Path, paths: typing.Iterable[pathlib.Path], *settings: str) -> str:
    """SHA-256 over source files, the compiler's version and how it is called."""
    total = hashlib.sha256(repr((settings, sys.version)).encode())
    total.update(subprocess.run([COMPILER, "--version"], check=True, capture_output=True).stdout)
    for path in sorted(path for path in paths if path.is_file()):
        total.update(str(path.relative_to(csrc)).encode() + b"\0")
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def run_command(command: typing.Sequence[str], **options: typing.Any) -> None:
    done = subprocess.run(command, text=True, capture_output=True, check=False, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")


class Build(typing.NamedTuple):
    folder: pathlib.Path  # of objects and program
    csrc: pathlib.Path


def build_program(
    folder: pathlib.Path,
    flags: typing.Sequence[str],
    test: str,
    csrc: pathlib.Path = CSRC,
    like: typing.Optional[Build] = None,
) -> pathlib.Path:
    """Compile csrc/tests/`test`.cpp with kernels and emulation, two files at a time.

    like: a build with the same flags and headers, whose objects of equal .cpp files are taken.
    Raises RuntimeError with what the compiler said.
    """
    sources = [csrc / "tests" / f"{test}.cpp", csrc / "emulation" / "cuda.cpp"]
    if test == "emulated_conv2d":
        sources.append(csrc / "cuda" / "conv2d.cu")
        host = (csrc / "cuda").glob("*.cpp")
        sources += sorted(path for path in host if not path.name.startswith("no_"))
        sources.append(csrc / "weight_check.cpp")
    program, stamp = folder / test, folder / f"{test}.sha256"
    with build_lock(folder):
        used = [*csrc.glob("*.h"), *csrc.glob("cuda/*"), *csrc.glob("emulation/*"), sources[0]]
        used.append(csrc / "weight_check.cpp")
        wanted = digest(csrc, used, *flags)
        if program.exists() and stamp.exists() and stamp.read_text() == wanted:
            return program
        stamp.unlink(missing_ok=True)
        base = [COMPILER, "-std=c++14", "-DPACKEDCONV_EMULATION", *WARNINGS, *flags]

        def compile_source(source: pathlib.Path) -> str:
            if like is not None and source.suffix == ".cpp":
                twin = like.csrc / source.relative_to(csrc)
                if twin.read_bytes() == source.read_bytes():
                    return str(like.folder / f"{source.name}.o")
            target = str(folder / f"{source.name}.o")
            run_command([*base, "-x", "c++", "-c", str(source), "-o", target])
            return target

        # The longest first.
        sources.sort(key=lambda path: path.suffix != ".cu")
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(compile_source, sources))
        run_command([*base, *objects, "-o", str(program)])
        stamp.write_text(wanted)
    return program


@functools.lru_cache(maxsize=None)
def missing_sanitizer(flag: str) -> str:
    """Why programs with a sanitizer cannot be built or run here; empty when they can."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "empty.cpp")
        source.write_text("int main() { return 0; }\n")
        for command in (
            [COMPILER, flag, str(source), "-o", f"{folder}/empty"],
            [f"{folder}/empty"],
        ):
            done = subprocess.run(command, text=True, capture_output=True, check=False)
            if done.returncode:
                return f"{COMPILER} has no working {flag}: {done.stderr.strip()[-300:]}"
    return ""


def skip_without(flags: typing.Sequence[str]) -> None:
    """Skip the test where the compiler lacks a sanitizer of `flags`."""
    for flag in flags:
        if flag.startswith("-fsanitize="):
            missing = missing_sanitizer(flag)
            if missing:
                pytest.skip(missing)


def build_sanitized(name: str, flags: typing.Sequence[str], test: str) -> pathlib.Path:
    """`build_program` in build/`name`, or a skipped test."""
    skip_without(flags)
    return build_program(BUILD / name, flags, test)


def run_sanitized(command: typing.Sequence[str], **options: typing.Any):
    """A finished process, whose sanitizer stops it at its first finding with exit status 99."""
    stop = "exitcode=99:halt_on_error=1"
    environment = {
        **os.environ,
        "ASAN_OPTIONS": stop,
        "TSAN_OPTIONS": stop,
        "UBSAN_OPTIONS": "exitcode=99:halt_on_error=1:print_stacktrace=1",
    }
    return subprocess.run(
        command, env=environment, text=True, capture_output=True, check=False, **options
    )


@functools.lru_cache(maxsize=None)
def emulated_core() -> types.ModuleType:
    """The extension module, built with -DPACKEDCONV_CUDA=EMULATED in build/emulated.

    Its `cuda_conv2d` runs on host memory. Raises RuntimeError with what the compiler said.
    """
    folder = BUILD / "emulated"
    module = folder / ("_core" + sysconfig.get_config_var("EXT_SUFFIX"))
    # The environment's own cmake and ninja come first, whether or not it is activated.
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    with build_lock(folder):
        wanted, stamp = digest(CSRC, CSRC.rglob("*")), folder / "module.sha256"
        if not (module.exists() and stamp.exists() and stamp.read_text() == wanted):
            stamp.unlink(missing_ok=True)
            configure = [
                *("cmake", "-S", str(CSRC), "-B", str(folder), "-G", "Ninja"),
                *("-DPACKEDCONV_CUDA=EMULATED", "-DCMAKE_BUILD_TYPE=Release"),
                f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
                f"-DPython_EXECUTABLE={sys.executable}",
            ]
            for command in (configure, ["cmake", "--build", str(folder)]):
                run_command(command, env={**os.environ, "PATH": path})
            stamp.write_text(wanted)
    spec = importlib.util.spec_from_file_location("packedconv_emulated._core", module)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


# Layers in this process.


class Call(typing.NamedTuple):
    """One convolution, with its arguments in the form that the kernels take."""

    input: torch.Tensor  # (N, IC, H, W)
    words: np.ndarray
    offsets: np.ndarray
    bias: typing.Optional[torch.Tensor]
    output: torch.Tensor  # (N, OC, H_out, W_out), written
    kernel: typing.Tuple[int, int]
    stride: typing.Tuple[int, int]
    padding: typing.Tuple[int, int]  # top, left
    dilation: typing.Tuple[int, int]
    groups: int
    relu: bool


def make_call(
    input: torch.Tensor,
    packed: PackedWeight,
    bias: typing.Optional[torch.Tensor] = None,
    stride: typing.Any = 1,
    padding: typing.Any = 0,
    dilation: typing.Any = 1,
    groups: int = 1,
    activation: typing.Optional[str] = None,
    out: typing.Optional[torch.Tensor] = None,
) -> Call:
    """The arguments of `packedconv.conv2d` as a call; an output not given is NaN all over."""
    kernel = packed.shape[2:]
    stride = arguments.pair("stride", stride, 1)
    dilation = arguments.pair("dilation", dilation, 1)
    before, after = arguments.padding_pairs(padding, kernel, stride, dilation)
    batched = input if input.dim() == 4 else input.unsqueeze(0)
    size = arguments.output_shape(tuple(batched.shape[2:]), kernel, stride, before, after, dilation)
    if out is None:
        out = torch.full((batched.shape[0], packed.shape[0], *size), float("nan"))
    return Call(
        input=batched,
        words=packed.words,
        offsets=packed.offsets,
        bias=None if bias is None else bias.contiguous(),
        output=out if out.dim() == 4 else out.unsqueeze(0),
        kernel=kernel,
        stride=(stride[0] if size[0] > 1 else 1, stride[1] if size[1] > 1 else 1),
        padding=before,
        dilation=dilation,
        groups=groups,
        relu=activation == "relu",
    )


def make_plan(
    call: Call,
    limits: Limits = A100,
    implementation: str = "auto",
    config: typing.Optional[typing.Tuple[int, ...]] = None,
):
    """The emulated module's plan for a call, a CudaPlan."""
    return emulated_core().cuda_plan(
        input_shape=tuple(call.input.shape),
        output_shape=tuple(call.output.shape),
        words=call.words,
        offsets=call.offsets,
        kernel=call.kernel,
        stride=call.stride,
        padding=call.padding,
        dilation=call.dilation,
        groups=call.groups,
        limits=limits,
        implementation=implementation,
        config=config,
    )


def run_plan(plan: typing.Any, call: Call) -> None:
    """Launch a plan on the emulated device; writes the output of the call."""
    # As a device holds it: from a multiple of 16 bytes on.
    memory = torch.empty(len(plan.table) + 4, dtype=torch.int32)
    table = memory[-(memory.data_ptr() // 4) % 4 :][: len(plan.table)]
    table.copy_(torch.from_numpy(plan.table.view(np.int32)))
    emulated_core().cuda_conv2d(
        plan=plan,
        device=0,
        stream=0,
        input=call.input.data_ptr(),
        input_strides=call.input.stride(),
        table=table.data_ptr(),
        bias=0 if call.bias is None else call.bias.data_ptr(),
        relu=call.relu,
        output=call.output.data_ptr(),
        output_strides=call.output.stride(),
    )


# Layers in a program of its own, for sanitizers.


class Case(typing.NamedTuple):
    """A call, and what plans and launches it."""

    call: Call
    implementation: str = "auto"
    config: typing.Tuple[int, ...] = ()
    limits: Limits = A100
    # Elements between the beginning of the memory (a multiple of 16 bytes) and the tensor's.
    before: typing.Tuple[int, int] = (0, 0)


class Result(typing.NamedTuple):
    kernel: str  # "error" when planning or launching threw
    sentence: str  # why this kernel, or the message of the error
    output: torch.Tensor


def memory_of(tensor: torch.Tensor, before: int) -> np.ndarray:
    """The elements from the tensor's first to its last one, with `before` NaNs in front."""
    reach = 0
    if tensor.numel():
        reach = 1 + sum(step * (n - 1) for step, n in zip(tensor.stride(), tensor.shape))
    inside = torch.as_strided(tensor, (reach,), (1,)).numpy() if reach else []
    return np.concatenate([np.full(before, np.nan), inside]).astype(np.float32)


def write_case(file: typing.BinaryIO, case: Case) -> None:
    """As csrc/tests/emulated_conv2d.cpp reads it."""
    call = case.call
    shape = [
        *(call.input.shape[0], call.input.shape[1], call.output.shape[1], call.groups),
        *(*call.input.shape[2:], *call.output.shape[2:], *call.kernel),
        *(*call.stride, *call.dilation, *call.padding),
    ]
    bias = np.zeros(0, np.float32) if call.bias is None else call.bias.numpy()
    words, offsets = np.asarray(call.words), np.asarray(call.offsets)
    arrays = [
        memory_of(call.input, case.before[0]),
        bias,
        memory_of(call.output, case.before[1]),
        words,
        offsets.ravel(),
    ]
    numbers = [IMPLEMENTATIONS.index(case.implementation), len(case.config), *case.config]
    numbers += [*case.limits, *shape, *call.input.stride(), *call.output.stride()]
    numbers += [*case.before, call.relu, *(len(array) for array in arrays), len(offsets)]
    file.write(struct.pack(f"={len(numbers)}q", *numbers))
    for array in arrays:
        file.write(array.tobytes())


def read_result(file: typing.BinaryIO, case: Case) -> Result:
    def read(what: str, count: int) -> bytes:
        data = file.read(count)
        assert len(data) == count, f"the program stopped before its {what}"
        return data

    texts = []
    for what in ("kernel", "sentence"):
        (length,) = struct.unpack("=q", read(what, 8))
        texts.append(read(what, length).decode())
    (count,) = struct.unpack("=q", read("output", 8))
    memory = torch.frombuffer(bytearray(read("output", 4 * count) + b"\0" * 4), dtype=torch.float32)
    output = case.call.output
    view = memory.as_strided(output.shape, output.stride(), case.before[1])
    return Result(texts[0], texts[1], view if output.numel() else output.clone())


class StoppedError(AssertionError):
    """A sanitizer or a crash ended the program."""


def run_cases(
    program: pathlib.Path, cases: typing.Sequence[Case], timeout: float = 600
) -> typing.List[Result]:
    """Run cases in one process. Raises StoppedError with what it printed when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        names = [os.path.join(folder, name) for name in ("cases", "results")]
        with open(names[0], "wb") as file:
            for case in cases:
                write_case(file, case)
        done = run_sanitized([str(program), *names], timeout=timeout)
        if done.returncode:
            raise StoppedError(f"exit status {done.returncode}:\n{done.stderr[:6000]}")
        with open(names[1], "rb") as file:
            return [read_result(file, case) for case in cases]
