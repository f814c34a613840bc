"""Hardware counters of the calling thread, where the machine gives them (perf_event_open(2))."""

import ctypes
import errno
import os
import platform
import struct
import typing

# Numbers of the system call.
_SYSTEM_CALLS = {"x86_64": 298, "aarch64": 241}
_HARDWARE, _CACHE = 0, 3
# A cache's number, of read accesses, those that miss.
_L1D_READ_MISSES = 0 | 0 << 8 | 1 << 16
_LAST_LEVEL_READ_MISSES = 2 | 0 << 8 | 1 << 16
# Type and configuration by name, as in linux/perf_event.h.
EVENTS = {
    "cycles": (_HARDWARE, 0),
    "instructions": (_HARDWARE, 1),
    "stalled_cycles_frontend": (_HARDWARE, 7),
    "stalled_cycles_backend": (_HARDWARE, 8),
    "l1d_read_misses": (_CACHE, _L1D_READ_MISSES),
    "last_level_read_misses": (_CACHE, _LAST_LEVEL_READ_MISSES),
}
_ATTRIBUTE_BYTES = 64  # the first published size, which every Linux takes
_TIME_ENABLED_AND_RUNNING = 1 | 2
# Not in the kernel nor in the hypervisor, which only the privileged may count.
_USER_ONLY = 1 << 5 | 1 << 6

Open = typing.Callable[[int, int], int]


def count(
    execute: typing.Callable[[], typing.Any],
    executions: int,
    events: typing.Mapping[str, typing.Tuple[int, int]] = EVENTS,
) -> typing.Dict[str, typing.Any]:
    """Events in user code of the calling thread, per execution, of so many after an untimed one.

    Each event is counted by itself, in executions of its own, so that no two share a register.
    Returns {"values": by event, "left_out": the reason by event}.
    """
    values, left_out = {}, {}
    execute()
    for name, (kind, config) in events.items():
        try:
            values[name] = _counted(kind, config, execute, executions) / executions
        except OSError as error:
            left_out[name] = str(error)
    return {"values": values, "left_out": left_out}


def _counted(
    kind: int, config: int, execute: typing.Callable[[], typing.Any], executions: int
) -> float:
    descriptor = _open(kind, config)
    try:
        before = _read(descriptor)
        for _ in range(executions):
            execute()
        value, enabled, running = (b - a for a, b in zip(before, _read(descriptor)))
    finally:
        os.close(descriptor)
    if running <= 0:
        raise OSError("the counter was never running")
    return value * enabled / running


def _open(kind: int, config: int) -> int:
    """A descriptor that counts from now on. Raises OSError that says why there is none."""
    number = _SYSTEM_CALLS.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        raise OSError(f"no perf_event_open on {platform.system()} {platform.machine()}")
    attribute = struct.pack(
        "IIQQQQQIIQ",
        *(kind, _ATTRIBUTE_BYTES, config, 0, 0, _TIME_ENABLED_AND_RUNNING, _USER_ONLY, 0, 0, 0),
    )
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = library.syscall(
        ctypes.c_long(number), attribute, *(ctypes.c_int(value) for value in (0, -1, -1)), 0
    )
    if descriptor < 0:
        raise OSError(_reason(ctypes.get_errno()))
    return int(descriptor)


def _read(descriptor: int) -> typing.Tuple[int, int, int]:
    """Events, and the nanoseconds that the counter was wanted and running."""
    return struct.unpack("QQQ", os.read(descriptor, 24))


def _reason(number: int) -> str:
    text = f"perf_event_open: {os.strerror(number)}"
    if number == errno.ENOENT:
        return f"{text}; the system shows no such counter, as virtual machines often do"
    if number in (errno.EACCES, errno.EPERM):
        return f"{text}; see /proc/sys/kernel/perf_event_paranoid"
    return text
