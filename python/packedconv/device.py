"""What this build can run on here, and whether it is the device that a file names."""

import functools
import glob
import math
import os
import platform
import re
import typing


class DeviceError(RuntimeError):
    """The device that was asked for is not the one found."""


class Device(typing.NamedTuple):
    """A device at hand.

    name: as in config/devices/ where it is known ("cpu", "a100-sxm4-40gb").
    kind: "cpu" or "cuda".
    title: model name that the hardware reports.
    cores: physical cores that this process may use; multiprocessors of a GPU.
    """

    name: str
    kind: str
    title: str
    cores: int


def devices() -> typing.List[Device]:
    """Devices that this build can run on here, the CPU first.

    GPUs are listed where the build has CUDA kernels for them and the driver shows them.
    """
    found = []
    for detect in _DETECTORS:
        found.extend(detect())
    return found


def match(device_file: typing.Mapping[str, typing.Any], device: Device) -> bool:
    """Whether a device at hand is the one that a file of config/devices/ describes.

    The kinds must agree, and a file with `match` names one model exactly, so that
    variants (40 GB and 80 GB, SXM and PCIe) stay apart. The multiprocessors in its `gpu`
    block must agree too: a Jetson TX1 has the title of a Jetson Nano, and two of them.
    """
    if device_file.get("kind") != device.kind:
        return False
    title = device_file.get("match")
    if title is None:
        return device_file.get("name") == device.name
    multiprocessors = (device_file.get("gpu") or {}).get("multiprocessors", device.cores)
    return title == device.title and multiprocessors == device.cores


def require(device_file: typing.Mapping[str, typing.Any]) -> Device:
    """The device at hand that a file of config/devices/ describes.

    Raises DeviceError, which names what was asked for and what was found, when there
    is none: what is measured on one device is never labelled as another.
    """
    found = devices()
    for device in found:
        if match(device_file, device):
            return device
    step = "set `device` to the machine at hand, for example device=cpu"
    if device_file.get("kind") == "cuda":
        step = _missing_gpu(found)
    raise DeviceError(
        "device: expected {}, found {}; {}".format(
            _asked_for(device_file),
            ", ".join(f"{device.name} ({_described(device)})" for device in found),
            step,
        )
    )


@functools.lru_cache(maxsize=None)
def device_limits(index: int) -> typing.Tuple[int, int, int, int]:
    """What a kernel's launch has to fit on GPU `index` (as torch and CUDA count them).

    (compute capability as major * 10 + minor, multiprocessors, bytes of shared memory that
    a block may ask for, bytes of shared memory of a multiprocessor).
    Raises RuntimeError when this build cannot run on that GPU: no CUDA kernels, no such
    GPU, or one older than every architecture that the kernels were compiled for.
    """
    gpu = _gpu(index)
    return (
        _capability(gpu),
        gpu["multiprocessors"],
        gpu["shared_per_block"],
        gpu["shared_per_multiprocessor"],
    )


def usable_cores(root: str = "/") -> int:
    """Physical cores that this process may use, at least 1.

    Limited by the CPU affinity of the process and by the CPU quota of its control
    groups (rounded down: a thread more than the quota is throttled). `root` is where
    sys and proc lie.
    """
    allowed = os.sched_getaffinity(0)
    cores = _physical_cores(allowed, root)
    quota = _cpu_quota(root)
    if quota is not None:
        cores = min(cores, math.floor(quota))
    return max(1, cores)


def cpu_title(root: str = "/") -> str:
    """Model name of the CPU as the kernel reports it."""
    text = _read(os.path.join(root, "proc/cpuinfo")) or ""
    for key in ("model name", "Hardware", "Model", "cpu model", "cpu"):
        found = re.search(r"^%s\s*:\s*(.+)$" % key, text, re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def _cpu() -> typing.List[Device]:
    return [Device(name="cpu", kind="cpu", title=cpu_title(), cores=usable_cores())]


def _cuda() -> typing.List[Device]:
    core = _extension()
    if core is None:
        return []
    oldest = min(core.build_info()["cuda_architectures"], default=0)
    return [
        Device(slug(gpu["name"]), "cuda", gpu["name"], gpu["multiprocessors"])
        for gpu in core.gpus()
        if _capability(gpu) >= oldest
    ]


# One function per kind of device, each returning the devices of that kind.
_DETECTORS = [_cpu, _cuda]


def _extension():
    """The compiled extension, or None where it is not built or does not load."""
    try:
        from packedconv import _core
    except ImportError:
        return None
    return _core


def _gpu(index: int) -> typing.Dict[str, typing.Any]:
    """Facts of a GPU that this build runs on. Raises RuntimeError for another."""
    core = _extension()
    info = {"cuda": None} if core is None else core.build_info()
    if info["cuda"] is None:
        raise RuntimeError(f"cuda:{index}: {_NO_CUDA_BUILD}")
    # Not by position: a GPU that does not tell its properties is left out.
    found = {gpu["index"]: gpu for gpu in core.gpus()}
    if not found:
        raise RuntimeError(f"cuda:{index}: {_no_gpu(core)}")
    gpu = found.get(index)
    if gpu is None:
        raise RuntimeError(
            "cuda:{}: expected one of the GPUs that the driver shows ({})".format(
                index, ", ".join("cuda:{} {}".format(i, found[i]["name"]) for i in sorted(found))
            )
        )
    if _capability(gpu) < min(info["cuda_architectures"], default=0):
        raise RuntimeError(f"cuda:{index}: {_too_old(gpu, info)}")
    return gpu


_NO_CUDA_BUILD = (
    "this build has no CUDA kernels; build with nvcc on PATH (or CUDACXX=/path/to/nvcc) and "
    "the CMake option -DPACKEDCONV_CUDA=ON, or stay on the CPU"
)
_NO_GPU = (
    "no CUDA device, since the driver shows no NVIDIA GPU; see what nvidia-smi says and whether "
    "CUDA_VISIBLE_DEVICES hides it, or stay on the CPU"
)


def _no_gpu(core: typing.Any) -> str:
    """Why a build with CUDA kernels finds no GPU at all, and the next step."""
    driver, built = core.cuda_driver_version(), core.build_info()["cuda"]
    if driver and not _runs_on(built, driver):
        return (
            f"the driver supports CUDA {driver} and this build needs {built}: update the driver, "
            "or build with an older CUDA, or stay on the CPU"
        )
    return _NO_GPU


def _runs_on(built: str, driver: str) -> bool:
    """Whether a program built with one version of CUDA runs on a driver for another."""
    needed, there = (tuple(int(part) for part in version.split(".")) for version in (built, driver))
    # From CUDA 11 on, drivers run what any minor version of their major one built.
    return there >= needed or 11 <= there[0] == needed[0]


def _capability(gpu: typing.Mapping[str, typing.Any]) -> int:
    major, minor = gpu["compute_capability"]
    return 10 * major + minor


def _too_old(gpu: typing.Mapping[str, typing.Any], info: typing.Mapping[str, typing.Any]) -> str:
    compiled = info["cuda_architectures"]
    return (
        "{} (compute capability {}.{}) is older than every architecture of this build ({}); "
        "rebuild with the CMake option -DCMAKE_CUDA_ARCHITECTURES={} and a CUDA that still "
        "compiles for it (this one was {})".format(
            gpu["name"],
            gpu["compute_capability"][0],
            gpu["compute_capability"][1],
            ", ".join("{}.{}".format(*divmod(architecture, 10)) for architecture in compiled),
            _capability(gpu),
            info["cuda"],
        )
    )


def _missing_gpu(found: typing.Sequence[Device]) -> str:
    """Why the GPU that was asked for is not among the devices found, and the next step."""
    core = _extension()
    if core is None:
        return (
            "packedconv._core is not built or does not load; see what `python -c 'import "
            "packedconv._core'` says, or measure on the CPU: device=cpu"
        )
    info = core.build_info()
    if info["cuda"] is None:
        return _NO_CUDA_BUILD + ": device=cpu"
    others = [device for device in found if device.kind == "cuda"]
    if others:
        return "set `device` to the machine at hand: " + " or ".join(
            sorted({f"device={device.name}" for device in others})
        )
    old = core.gpus()
    if old:
        return _too_old(old[0], info)
    return _no_gpu(core) + ": device=cpu"


def _asked_for(device_file: typing.Mapping[str, typing.Any]) -> str:
    title = device_file.get("match", "any {}".format(device_file.get("kind")))
    multiprocessors = (device_file.get("gpu") or {}).get("multiprocessors")
    if multiprocessors is not None:
        title += f", {multiprocessors} multiprocessors"
    return "{} ({})".format(device_file.get("name"), title)


def _described(device: Device) -> str:
    if device.kind == "cuda":
        return f"{device.title}, {device.cores} multiprocessors"
    return device.title


def slug(title: str) -> str:
    """A GPU's name in config/devices/: "NVIDIA A100-SXM4-40GB" is a100-sxm4-40gb."""
    words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return re.sub(r"^nvidia-", "", words)


def _physical_cores(cpus: typing.Iterable[int], root: str) -> int:
    cores = set()
    for cpu in cpus:
        folder = os.path.join(root, "sys/devices/system/cpu/cpu%d/topology" % cpu)
        siblings = _read(os.path.join(folder, "thread_siblings_list"))
        # Without topology every logical CPU counts as a core.
        cores.add(siblings.strip() if siblings else str(cpu))
    return len(cores)


def _cpu_quota(root: str) -> typing.Optional[float]:
    """The smallest CPU quota of the process's control groups in cores, or None."""
    quotas = []
    for line in (_read(os.path.join(root, "proc/self/cgroup")) or "").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers == "":
            base = os.path.join(root, "sys/fs/cgroup")
        elif "cpu" in controllers.split(","):
            bases = glob.glob(os.path.join(root, "sys/fs/cgroup", "*cpu*"))
            base = next(
                (base for base in sorted(bases) if "cpu" in os.path.basename(base).split(",")),
                os.path.join(root, "sys/fs/cgroup/cpu"),
            )
        else:
            continue
        # A limit of any ancestor holds. In a container the path may not be visible,
        # and then its root shows the container's own limit.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            quotas.append(_group_quota(os.path.join(base, *parts[:depth])))
    known = [quota for quota in quotas if quota is not None]
    return min(known) if known else None


def _group_quota(folder: str) -> typing.Optional[float]:
    text = _read(os.path.join(folder, "cpu.max"))
    if text is not None:
        quota, period = (text.split() + ["100000"])[:2]
        return None if quota == "max" else int(quota) / int(period)
    quota, period = (
        _read(os.path.join(folder, name)) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    )
    if quota is None or period is None or int(quota) <= 0 or int(period) <= 0:
        return None
    return int(quota) / int(period)


def _read(path: str) -> typing.Optional[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return None
