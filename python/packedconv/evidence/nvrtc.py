"""Compile every CUDA kernel with NVRTC, for GPUs that the installed nvcc no longer knows.

NVRTC 11.8 (packages nvidia-cuda-nvrtc-cu11 and nvidia-cuda-runtime-cu11) compiles the kernels'
unchanged source to machine code, down to the sm_53 of a Jetson Nano, without a GPU or a driver.
"""

import argparse
import concurrent.futures
import ctypes
import importlib.metadata
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
SOURCE = ROOT / "csrc" / "tests" / "all_kernels.cu"
PACKAGES = {"nvidia-cuda-nvrtc-cu11": "libnvrtc.so.*", "nvidia-cuda-runtime-cu11": "cuda_fp16.h"}

# NVRTC has no C++ standard library. This is all that the kernels use of it.
HEADERS = {
    "cstdint": """#pragma once
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
namespace std {
using size_t = decltype(sizeof(0));
using ::int8_t; using ::uint8_t; using ::int16_t; using ::uint16_t; using ::int32_t;
using ::uint32_t; using ::int64_t; using ::uint64_t; using ::uintptr_t;
}
""",
}
# Host code that stands beside kernels mentions these and is never compiled.
HEADERS["string"] = "#pragma once\nnamespace std { class string {}; }\n"
HEADERS["vector"] = "#pragma once\nnamespace std { template <typename T> class vector {}; }\n"
HEADERS["string.h"] = "#pragma once\n"  # memcpy is built in
HEADERS.update(dict.fromkeys(("cstddef", "stdint.h", "stddef.h"), HEADERS["cstdint"]))


class NotInstalledError(RuntimeError):
    """A package with the compiler or its headers is missing."""


class CompilationError(RuntimeError):
    """The compiler refused the source; holds its log."""


def packaged(package: str, pattern: str) -> pathlib.Path:
    """The file of an installed package that matches `pattern`."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.match(pattern):
            return pathlib.Path(file.locate())
    raise NotInstalledError(f"{package} is not installed; pip install {package}==11.8.89")


def version() -> str:
    """Name and version of the installed compiler."""
    return "NVRTC " + importlib.metadata.version(next(iter(PACKAGES)))


def compile_kernels(
    architecture: int, source: pathlib.Path = SOURCE, standard: str = "c++14"
) -> bytes:
    """Machine code (an ELF file) of all kernels for sm_<architecture>.

    Raises NotInstalledError, and CompilationError with the compiler's log.
    """
    library, header = (packaged(*item) for item in PACKAGES.items())
    nvrtc = ctypes.CDLL(str(library))
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    program = ctypes.c_void_p()

    def call(name: str, *arguments: object) -> None:
        status = getattr(nvrtc, name)(*arguments)
        if status:
            raise CompilationError(f"{name}: {nvrtc.nvrtcGetErrorString(status).decode()}\n{log()}")

    def read(size_of: str, get: str) -> bytes:
        size = ctypes.c_size_t()
        call(size_of, program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        call(get, program, content)
        return content.raw

    def log() -> str:
        if not program:
            return ""
        return read("nvrtcGetProgramLogSize", "nvrtcGetProgramLog").rstrip(b"\0").decode()

    def strings(values: list[str]) -> ctypes.Array:
        return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))

    call(
        "nvrtcCreateProgram",
        *(ctypes.byref(program), source.read_bytes(), source.name.encode(), len(HEADERS)),
        *(strings(list(HEADERS.values())), strings(list(HEADERS))),
    )
    options = [
        f"--gpu-architecture=sm_{architecture}",
        f"--std={standard}",
        f"--include-path={source.parent}",
        f"--include-path={header.parent}",
        # What nvcc takes for host code has no other home here.
        "--device-as-default-execution-space",
    ]
    # In a thread of its own: the compiler leaves it in the locale "C", where files are ASCII.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(call, "nvrtcCompileProgram", program, len(options), strings(options)).result()
    code = read("nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code


def kernels_in(code: bytes) -> list[str]:
    """Mangled names of the kernels in machine code: each has a section of its own."""
    return sorted(
        {name.decode() for name in re.findall(rb"\0\.text\.(_Z\w*_kernel\w*)(?=\0)", code)}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", type=int, default=53)
    parser.add_argument("--source", type=pathlib.Path, default=SOURCE)
    parser.add_argument("--out", type=pathlib.Path, help="file for the machine code")
    options = parser.parse_args()
    try:
        code = compile_kernels(options.architecture, options.source)
    except (NotInstalledError, CompilationError) as error:
        sys.exit(f"error: {error}")
    if options.out:
        options.out.write_bytes(code)
    print(f"sm_{options.architecture}: {len(kernels_in(code))} kernels, {len(code)} bytes")


if __name__ == "__main__":
    main()
