"""What this build can run on here, and whether it is the device that a file names."""

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

    name: as in config/devices/ where it is known ("cpu").
    kind: "cpu" or "cuda".
    title: model name that the hardware reports.
    cores: physical cores that this process may use; multiprocessors of a GPU.
    """

    name: str
    kind: str
    title: str
    cores: int


def devices() -> typing.List[Device]:
    """Devices that this build can run on here, the CPU first."""
    found = []
    for detect in _DETECTORS:
        found.extend(detect())
    return found


def match(device_file: typing.Mapping[str, typing.Any], device: Device) -> bool:
    """Whether a device at hand is the one that a file of config/devices/ describes.

    The kinds must agree, and a file with `match` names one model exactly, so that
    variants (40 GB and 80 GB, SXM and PCIe) stay apart.
    """
    if device_file.get("kind") != device.kind:
        return False
    title = device_file.get("match")
    if title is None:
        return device_file.get("name") == device.name
    return title == device.title


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
        step = "this version has no CUDA kernels and measures on the CPU: device=cpu"
    raise DeviceError(
        "device: expected {} ({}), found {}; {}".format(
            device_file.get("name"),
            device_file.get("match", "any {}".format(device_file.get("kind"))),
            ", ".join(f"{device.name} ({device.title})" for device in found),
            step,
        )
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


# One function per kind of device, each returning the devices of that kind.
_DETECTORS = [_cpu]


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
