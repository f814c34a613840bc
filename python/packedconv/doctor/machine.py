"""The machine: memory, CPUs, load, clocks, and whether somebody measures on it."""

import glob
import os
import re
import time
import typing

from packedconv.bench.lock import FOLDER, lock_holder
from packedconv.device import cpu_title, usable_cores
from packedconv.doctor.findings import MISSING, OK, WARNING, Finding

# Share of the CPUs in use by others, above which measurements suffer.
BUSY_SHARE = 0.2
LOOK_SECONDS = 0.5  # how long to watch them; load averages would count what has just ended
BURST_SECONDS = 2.0
_BURST_STEPS = 20000  # about a millisecond
# Shares by which the median burst and the slowest twentieth may lie above the fastest.
_MEDIAN_SPREAD, _TAIL_SPREAD = 0.05, 0.2
# Bytes: the largest step of `all` on a CPU takes 1.0e9, and that of what goes beyond it 2.6e9.
_LEAST_MEMORY, _GOOD_MEMORY = 1.2e9, 3e9


def memory(root: str = "/") -> Finding:
    """Memory that can be had, by the kernel and by the control groups of the process."""
    text = _read(root, "proc/meminfo")
    total, free = (_kilobytes(text, key) for key in ("MemTotal", "MemAvailable"))
    if total is None or free is None:
        return Finding(WARNING, "memory", "unknown (no /proc/meminfo)", "free -m, to see it")
    limit = _memory_limit(root)
    found = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    if limit is not None and limit < free:
        free = limit
        found += f", of which this control group may take {limit / 1e9:.1f} GB more"
    if free >= _GOOD_MEMORY:
        return Finding(OK, "memory", found)
    state = WARNING if free >= _LEAST_MEMORY else MISSING
    return Finding(
        state,
        "memory",
        f"{found}; expected {_GOOD_MEMORY / 1e9:g} GB free",
        "ps aux --sort -rss | head, to see what takes it; in a container, a higher --memory",
    )


def cpus(root: str = "/") -> Finding:
    """The CPUs that this process may use, and what keeps it from the others."""
    allowed, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    cores = usable_cores(root)
    found = f"{cpu_title(root)}, {cores} usable cores on {allowed} of {there} logical CPUs"
    if allowed < there:
        found += " (taskset or a cpuset holds the others back)"
    if cores < _cores_without_quota(allowed, root):
        return Finding(
            WARNING,
            "CPUs",
            found + ", by the CPU quota of a control group, which stops threads in the middle",
            "a limit by CPUs instead of by time: docker run --cpuset-cpus 0-1 (not --cpus)",
        )
    return Finding(OK, "CPUs", found)


def _cores_without_quota(allowed: int, root: str) -> int:
    siblings = {
        _read(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        for cpu in os.sched_getaffinity(0)
    }
    return min(allowed, len(siblings))


def load(root: str = "/", seconds: float = LOOK_SECONDS) -> Finding:
    """The share of the CPUs that others use while this process sleeps, and who most."""
    before, took_before = _cpu_times(root), _process_times(root)
    time.sleep(seconds)
    after, took_after = _cpu_times(root), _process_times(root)
    if before is None or after is None or after[1] <= before[1]:
        return Finding(WARNING, "load", "unknown (no /proc/stat)", "top, to see it")
    share = (after[0] - before[0]) / (after[1] - before[1])
    average = (_read(root, "proc/loadavg") or "unknown").split()[0]
    found = f"{share:.0%} of the CPUs in use, load average {average}"
    if share <= BUSY_SHARE:
        return Finding(OK, "load", found)
    took = {pid: took_after[pid] - took_before.get(pid, 0) for pid in took_after}
    took.pop(os.getpid(), None)
    busiest = max(took, key=lambda pid: took[pid]) if took else None
    if busiest is not None and took[busiest] > 0:
        name = (_read(root, f"proc/{busiest}/comm") or "").strip() or "ended"
        found += f"; busiest is process {busiest} ({name})"
    return Finding(WARNING, "load", found, "top, to see by what; measure when it has ended")


def clocks(
    measuring: typing.Sequence[int] = (), root: str = "/", seconds: float = BURST_SECONDS
) -> typing.List[Finding]:
    """Whether a CPU computes at one speed: what governs its clock, and how bursts spread.

    measuring: processes that measure now, which bursts would disturb: then there are none.
    """
    return [_governor(root), _stability(measuring, seconds)]


def _governor(root: str) -> Finding:
    folder = "sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
    governors = sorted({(_read("", path) or "").strip() for path in _glob(root, folder)} - {""})
    notes = []
    turbo = _turbo(root)
    if turbo is not None:
        notes.append("turbo {}".format("on" if turbo else "off"))
    if is_virtual(root):
        notes.append("a virtual machine: its host governs the clock and shares the CPU")
    if not governors:
        notes.insert(0, "no cpufreq here to read a governor from")
        return Finding(OK, "clock", "; ".join(notes))
    notes.insert(0, "governor " + " and ".join(governors))
    if governors == ["performance"]:
        return Finding(OK, "clock", "; ".join(notes))
    return Finding(
        WARNING,
        "clock",
        "; ".join(notes) + "; it may move while measuring",
        "sudo cpupower frequency-set -g performance",
    )


def _turbo(root: str) -> typing.Optional[bool]:
    """Whether the clock may go above its nominal rate; None where nothing tells it."""
    off = _read(root, "sys/devices/system/cpu/intel_pstate/no_turbo")
    if off is not None:
        return off.strip() == "0"
    boost = _read(root, "sys/devices/system/cpu/cpufreq/boost")
    return None if boost is None else boost.strip() == "1"


def is_virtual(root: str = "/") -> bool:
    """Whether the processor says that a hypervisor runs it."""
    flags = re.search(r"^flags\s*:(.*)$", _read(root, "proc/cpuinfo") or "", re.MULTILINE)
    if flags:
        return "hypervisor" in flags.group(1).split()
    return os.path.exists(os.path.join(root, "sys/hypervisor/type"))


def _stability(measuring: typing.Sequence[int], seconds: float) -> Finding:
    if measuring:
        return Finding(OK, "clock stability", "not tried, since it would disturb a measurement")
    return judge_bursts(_bursts(seconds))


def judge_bursts(times: typing.Sequence[float]) -> Finding:
    """How far equal bursts of work spread; `times` in seconds."""
    ordered = sorted(times)
    fastest = ordered[0]
    median = ordered[len(ordered) // 2] / fastest - 1
    tail = ordered[len(ordered) * 19 // 20] / fastest - 1
    found = (
        f"{len(ordered)} equal bursts of {1e3 * fastest:.1f} ms: the median {median:.0%} above the"
        f" fastest, the slowest twentieth {tail:.0%} and more"
    )
    if median <= _MEDIAN_SPREAD and tail <= _TAIL_SPREAD:
        return Finding(OK, "clock stability", found)
    return Finding(
        WARNING,
        "clock stability",
        found + f"; expected {_MEDIAN_SPREAD:.0%} and {_TAIL_SPREAD:.0%} at most",
        "an idle machine, on mains, not throttled by heat; what repeats it says so in its spread",
    )


def _bursts(seconds: float) -> typing.List[float]:
    times = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        total = 0
        for step in range(_BURST_STEPS):
            total += step * step
        times.append(time.perf_counter() - start)
    return times


def measuring(devices: typing.Iterable[str], folder: str = FOLDER) -> typing.Dict[str, int]:
    """Processes that hold the lock of a measurement, by device; of these devices."""
    holders = {
        device: lock_holder(os.path.join(folder, f"packedconv-{device}.lock")) for device in devices
    }
    return {device: pid for device, pid in holders.items() if pid is not None}


def measurement(holders: typing.Mapping[str, int]) -> Finding:
    """Whether somebody measures now; holders: as `measuring`."""
    if not holders:
        return Finding(OK, "measurement lock", "free: nobody measures on this machine")
    listed = ", ".join(f"process {pid} ({device})" for device, pid in sorted(holders.items()))
    pid = next(iter(holders.values()))
    return Finding(
        WARNING,
        "measurement lock",
        f"held by {listed}; a measurement of the same device waits, any other disturbs it",
        f"ps -fp {pid}, to see whose it is; wait until it has ended",
    )


def _cpu_times(root: str) -> typing.Optional[typing.Tuple[float, float]]:
    """Busy and all clock ticks of the CPUs since the start."""
    fields = (_read(root, "proc/stat") or "").split("\n", 1)[0].split()
    if len(fields) < 5 or fields[0] != "cpu":
        return None
    # The last two are guests, which are counted among the users already.
    ticks = [float(field) for field in fields[1:9]]
    idle = sum(ticks[3:5])
    return sum(ticks) - idle, sum(ticks)


def _process_times(root: str) -> typing.Dict[int, float]:
    """Clock ticks that each process has used."""
    found = {}
    for path in _glob(root, "proc/[0-9]*/stat"):
        # The name, in brackets, may hold blanks.
        fields = (_read("", path) or "").rpartition(")")[2].split()
        if len(fields) > 12:
            found[int(os.path.basename(os.path.dirname(path)))] = int(fields[11]) + int(fields[12])
    return found


def _memory_limit(root: str) -> typing.Optional[float]:
    """Bytes that the control groups of the process let it take on top; None without a limit."""
    rooms = []
    for line in (_read(root, "proc/self/cgroup") or "").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers == "":
            base, names = "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # A limit of any ancestor holds; in a container only its root may be visible.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = os.path.join(base, *parts[:depth])
            limit, used = (_read(root, os.path.join(folder, name)) for name in names)
            if limit and used and limit.strip().isdigit() and used.strip().isdigit():
                # Pages of files that nobody needs any more are given back.
                stat = _read(root, os.path.join(folder, "memory.stat")) or ""
                cached = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
                kept = float(used) - (float(cached.group(1)) if cached else 0.0)
                rooms.append(max(0.0, float(limit) - kept))
    return min(rooms) if rooms else None


def _kilobytes(text: typing.Optional[str], key: str) -> typing.Optional[float]:
    found = re.search(rf"^{key}:\s*(\d+) kB", text or "", re.MULTILINE)
    return 1024.0 * int(found.group(1)) if found else None


def _glob(root: str, pattern: str) -> typing.List[str]:
    return sorted(glob.glob(os.path.join(root, pattern)))


def _read(root: str, path: str) -> typing.Optional[str]:
    try:
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return None
