"""Clocks, temperature, power and throttling of a GPU, and whether its clocks moved."""

import glob
import os
import subprocess
import typing

from packedconv.bench.machine import read_file

# States under the same load whose clocks differ by more than this share have moved.
CLOCK_TOLERANCE = 0.02
QUERY_SECONDS = 10.0

State = typing.Dict[str, typing.Any]

_FIELDS = {
    "clocks.sm": "sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_w",
}
# Newer drivers call it an event, older ones know throttling only.
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# Bits of the reasons (nvml.h) that slow a GPU under load. Being idle, clocks set by an
# application and synchronised boost are not among them.
_THROTTLING = {
    0x0000000000000004: "power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "temperature (driver)",
    0x0000000000000040: "temperature (hardware)",
    0x0000000000000080: "power brake",
}


def read_state(gpu: str, root: str = "/") -> State:
    """State of a GPU now; a value is None where nothing tells it.

    gpu: as nvidia-smi's --id takes it (index, UUID or PCI bus id). sm_clock_mhz,
    memory_clock_mhz, temperature_c, power_w: numbers. throttle_reasons: names of what slows
    the GPU, [] where nothing does. source: "nvidia-smi"; "sysfs" on a Jetson, which has no
    nvidia-smi; None where neither answers. `root` is where sys lies.
    """
    return _from_nvidia_smi(gpu) or _from_sysfs(root) or _state(None)


def driver_version() -> typing.Optional[str]:
    """Version of the NVIDIA driver, or None where nvidia-smi does not tell it."""
    lines = (_query(["--query-gpu=driver_version"]) or "").splitlines()
    return lines[0].strip() if lines else None


def clocks_moved(states: typing.Sequence[State]) -> typing.Optional[bool]:
    """Whether the clock of the multiprocessors differs among states by more than
    CLOCK_TOLERANCE of the highest; None where fewer than two states know it, and of those
    that were not read under load (under_load) none does."""
    clocks = _known(states, "sm_clock_mhz")
    if len(clocks) < 2:
        return None
    return max(clocks) - min(clocks) > CLOCK_TOLERANCE * max(clocks)


def throttled(states: typing.Sequence[State]) -> typing.List[str]:
    """What slowed the GPU in any of the states."""
    return sorted({reason for reasons in _known(states, "throttle_reasons") for reason in reasons})


def describe_clocks(states: typing.Sequence[State]) -> str:
    """Range of the clock among states and what slowed the GPU, in words."""
    clocks = _known(states, "sm_clock_mhz")
    text = f"{min(clocks):g} to {max(clocks):g} MHz" if clocks else "clocks unknown"
    reasons = throttled(states)
    return text + (", slowed by {}".format(", ".join(reasons)) if reasons else "")


def _state(source: typing.Optional[str]) -> State:
    state = dict.fromkeys(_FIELDS.values())  # type: State
    return dict(state, throttle_reasons=None, source=source)


def _from_nvidia_smi(gpu: str) -> typing.Optional[State]:
    for reasons in _REASONS:
        fields = [*_FIELDS, reasons]
        text = _query([f"--id={gpu}", "--query-gpu={}".format(",".join(fields))])
        values = [value.strip() for value in (text or "").strip().split(",")]
        if len(values) == len(fields):
            state = _state("nvidia-smi")
            for name, value in zip(_FIELDS.values(), values):
                state[name] = _number(value)
            state["throttle_reasons"] = _reasons(values[-1])
            return state
    return None


def _query(arguments: typing.List[str]) -> typing.Optional[str]:
    try:
        output = subprocess.run(
            ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=QUERY_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.decode("utf-8", "replace")


def _from_sysfs(root: str) -> typing.Optional[State]:
    """State of a Jetson's GPU: clock in Hz, temperature in m°C, power in mW."""
    clocks = _values(root, "sys/class/devfreq/*gpu*/cur_freq") or _values(
        root, "sys/devices/*gpu*/devfreq/*/cur_freq"
    )
    if not clocks:
        return None
    state = _state("sysfs")
    state["sm_clock_mhz"] = clocks[0] / 1e6
    for path in sorted(glob.glob(os.path.join(root, "sys/class/thermal/thermal_zone*/type"))):
        if "gpu" in (read_file(path) or "").lower():
            found = _number(read_file(os.path.join(os.path.dirname(path), "temp")))
            state["temperature_c"] = None if found is None else found / 1e3
    # The monitor's first rail is the whole board's.
    power = _values(root, "sys/bus/i2c/drivers/ina3221x/*/iio:device*/in_power0_input")
    state["power_w"] = power[0] / 1e3 if power else None
    return state


def _values(root: str, pattern: str) -> typing.List[float]:
    found = (_number(read_file(path)) for path in sorted(glob.glob(os.path.join(root, pattern))))
    return [value for value in found if value is not None]


def _known(states: typing.Sequence[State], name: str) -> typing.List[typing.Any]:
    return [
        state[name] for state in states if state[name] is not None and state.get("under_load", True)
    ]


def _reasons(text: str) -> typing.Optional[typing.List[str]]:
    try:
        bits = int(text, 16)
    except ValueError:
        return None
    return [name for bit, name in sorted(_THROTTLING.items()) if bits & bit]


def _number(text: typing.Optional[str]) -> typing.Optional[float]:
    try:
        return float(text or "")
    except ValueError:
        return None
