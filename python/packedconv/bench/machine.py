"""Facts of the machine that ride with every measurement. No host name, no user name."""

import json
import os
import platform
import re
import subprocess
import time
import typing

from packedconv.device import cpu_title, usable_cores

# Instruction sets that change how fast a convolution runs.
_NOTABLE_FLAGS = re.compile(
    r"^(sse4_2|avx|avx2|fma|f16c|avx512\w*|avx_vnni|amx_\w+|neon|asimd\w*|fphp|sve\w*|bf16|i8mm"
    r"|hypervisor)$"
)

# Variables that choose the instruction set of the dense side's libraries, and of either side.
_DENSE_VARIABLES = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA")
GOVERNED = ("PACKEDCONV_ISA",) + _DENSE_VARIABLES

Facts = typing.Dict[str, typing.Any]


def require_environment(asked: typing.Mapping[str, str]) -> None:
    """Raise ValueError unless this process has the variables that a layer asks for.

    And none besides that would slow down the dense side alone.
    """
    for name, value in sorted(asked.items()):
        if os.environ.get(name) != value:
            raise ValueError(
                f"environment: expected {name}={value}, got {os.environ.get(name)!r}; set it "
                "before the process starts, since libraries read it once"
            )
    for name in _DENSE_VARIABLES:
        if name in os.environ and name not in asked:
            raise ValueError(
                f"environment: expected {name} unset, which this layer does not ask for, got "
                f"{os.environ[name]!r}; unset it"
            )


def machine_facts() -> Facts:
    """Hardware, system and software, as values that JSON can hold; None where unknown.

    Imports torch and the extension.
    """
    import numpy as np
    import torch

    from packedconv import _core

    return {
        "cpu": cpu_title(),
        "architecture": platform.machine(),
        "logical_cpus": os.cpu_count(),
        "allowed_cpus": len(os.sched_getaffinity(0)),
        "usable_cores": usable_cores(),
        "caches": _caches(),
        "cpu_flags": _cpu_flags(),
        "memory_bytes": _memory_bytes(),
        "transparent_hugepages": read_file("/sys/kernel/mm/transparent_hugepage/enabled"),
        "governor": read_file("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "system": _system(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "torch_config": torch.__config__.show().strip().splitlines(),
        "torch_threads": torch.get_num_threads(),
        "float32_matmul_precision": _call(torch, "get_float32_matmul_precision"),
        # Set by measurements on a GPU: whether TF32 was allowed.
        "tf32": None,
        "gpus": _core.gpus(),
        "extension": dict(_core.build_info()),
        "isa": _core.isa(),
        "openmp_libraries": _openmp_libraries(),
        "commit": _commit(),
    }


def comparable_facts() -> Facts:
    """What must be the same for all measurements of a run, since they are compared."""
    import torch

    from packedconv import _core

    return {
        "cpu": cpu_title(),
        "isa": _core.isa(),
        "torch": torch.__version__,
        "openmp_libraries": _openmp_libraries(),
        "environment": {name: os.environ.get(name) for name in GOVERNED},
    }


def moment() -> Facts:
    """What changes while measuring: load averages, clock frequencies in MHz, UTC time.

    "monotonic": seconds on the machine's steady clock, by which two measurements can be
    told apart.
    """
    return {
        "monotonic": time.monotonic(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_average": list(os.getloadavg()),
        "frequencies_mhz": _frequencies(),
    }


def _caches() -> typing.List[Facts]:
    folder = "/sys/devices/system/cpu/cpu0/cache"
    if not os.path.isdir(folder):
        return []
    caches = []
    for name in sorted(os.listdir(folder)):
        values = {
            key: read_file(os.path.join(folder, name, key))
            for key in ("level", "type", "size", "shared_cpu_list")
        }
        if values["level"] is not None:
            caches.append(values)
    return caches


def largest_cache_bytes() -> int:
    """Size of the last-level cache that the first CPU sees, 0 when it is not known."""
    sizes = [0]
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
    for cache in _caches():
        found = re.match(r"^(\d+)([KMG]?)$", cache["size"] or "")
        if found:
            sizes.append(int(found.group(1)) * units[found.group(2)])
    return max(sizes)


def available_memory_bytes() -> typing.Optional[int]:
    """Memory that can be had without swapping, or None when it is not known."""
    return _meminfo("MemAvailable")


def _cpu_flags() -> typing.List[str]:
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", read_file("/proc/cpuinfo") or "", re.M)
    flags = found.group(1).split() if found else []
    return [flag for flag in flags if _NOTABLE_FLAGS.match(flag)]


def _frequencies() -> typing.List[float]:
    current = []
    for cpu in sorted(os.sched_getaffinity(0)):
        khz = read_file(f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq")
        if khz is not None:
            current.append(int(khz) / 1000.0)
    if current:
        return current
    text = read_file("/proc/cpuinfo") or ""
    return [float(mhz) for mhz in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)]


def _memory_bytes() -> typing.Optional[int]:
    return _meminfo("MemTotal")


def _meminfo(key: str) -> typing.Optional[int]:
    found = re.search(rf"^{key}:\s*(\d+) kB", read_file("/proc/meminfo") or "", re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def _system() -> typing.Optional[str]:
    found = re.search(r'^PRETTY_NAME="?([^"\n]*)', read_file("/etc/os-release") or "", re.MULTILINE)
    return found.group(1) if found else platform.system()


def _openmp_libraries() -> typing.List[str]:
    """OpenMP runtimes in this process; with more than one, each has threads of its own."""
    paths = set(
        re.findall(r"/\S*lib(?:gomp|iomp|omp)[^/\s]*$", read_file("/proc/self/maps") or "", re.M)
    )
    return sorted(os.path.basename(path) for path in paths)


def _commit() -> typing.Optional[Facts]:
    """Commit of the checkout that this package lies in; None outside a checkout."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    if not os.path.isfile(os.path.join(root, "csrc", "CMakeLists.txt")):
        return None
    # A copy that scripts/measure_remote made says which checkout it is of.
    stated = read_file(os.path.join(root, "build", "commit.json"))
    if stated is not None:
        return json.loads(stated)
    commit = _git(root, "rev-parse", "HEAD")
    if not commit:
        return None
    return {"id": commit, "modified": _git(root, "status", "--porcelain") != ""}


def _git(root: str, *arguments: str) -> typing.Optional[str]:
    try:
        output = subprocess.run(
            # Reading only: no lock on the index that another git command might want.
            ["git", "--no-optional-locks", "-C", root, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return output.decode("utf-8", "replace").strip()


def _call(module: typing.Any, name: str) -> typing.Any:
    """Result of a function that older versions lack."""
    function = getattr(module, name, None)
    return function() if function is not None else None


def read_file(path: str) -> typing.Optional[str]:
    """Text of a file of the system, stripped; None where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return None
