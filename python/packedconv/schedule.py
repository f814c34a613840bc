"""Schedules of CPU plans, what they belong to, and their form in a packed file."""

import json
import re
import typing

from packedconv.arguments import Pair, is_integer

Quad = typing.Tuple[int, int, int, int]
# As CpuSchedule in csrc/cpu/plan.h: names to values.
Schedule = typing.Dict[str, typing.Any]

PATHS = ("naive", "loose", "aligned")
# Largest value of each whole number.
_INTEGERS = {
    "rows": (1 << 31) - 1,
    "vectors": (1 << 31) - 1,
    "block_channels": (1 << 63) - 1,
    "strip": (1 << 63) - 1,
}
_FLAGS = ("prefetch", "stream")
FIELDS = ("path",) + tuple(_INTEGERS) + _FLAGS


class PlanKey(typing.NamedTuple):
    """What a CPU plan is made for, and so what a schedule belongs to.

    Shapes are (N, C, H, W) of the whole input and output; padding is what lies above and to the
    left of the image. isa: the instruction set, as PACKEDCONV_ISA names it.
    """

    input_shape: Quad
    output_shape: Quad
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    threads: int
    isa: str


def checked_schedule(schedule: object) -> Schedule:
    """A copy of `schedule` in its one form. Whether a layer has it, the plan says.

    Raises TypeError for what is no dict, ValueError naming the field that is missing, unknown
    or no value of its kind.
    """
    if not isinstance(schedule, dict):
        raise TypeError(f"schedule: expected a dict, got {type(schedule).__name__}")
    for name in FIELDS:
        if name not in schedule:
            raise ValueError(
                f"schedule: expected the field {name}, got {_shortened(sorted(schedule, key=str))}"
            )
    for name in schedule:
        if name not in FIELDS:
            raise ValueError(
                f"schedule: expected the fields {', '.join(FIELDS)}, got {_shortened(name)}"
            )
    values = {}  # type: Schedule
    for name in FIELDS:
        value = schedule[name]
        if name in _INTEGERS:
            if not is_integer(value) or not 1 <= value <= _INTEGERS[name]:
                bits = _INTEGERS[name].bit_length()
                raise ValueError(
                    f"schedule: expected {name} of at least 1 and below 2^{bits}, got "
                    f"{_shortened(value)}"
                )
            values[name] = int(value)
        elif name in _FLAGS:
            if not isinstance(value, bool):
                raise ValueError(
                    f"schedule: expected {name} to be true or false, got {_shortened(value)}"
                )
            values[name] = value
        else:
            if not isinstance(value, str) or value not in PATHS:
                raise ValueError(
                    f"schedule: expected path to be one of {', '.join(PATHS)}, got "
                    f"{_shortened(value)}"
                )
            values[name] = value
    return values


def checked_schedules(
    schedules: typing.Mapping[PlanKey, Schedule], weight_shape: Quad
) -> typing.Dict[PlanKey, Schedule]:
    """A copy of the schedules of a weight. Raises ValueError for one of no call with it."""
    return {
        _checked_key(key, weight_shape): checked_schedule(schedule)
        for key, schedule in schedules.items()
    }


def _checked_key(key: typing.Sequence, weight_shape: Quad) -> PlanKey:
    values = PlanKey(*key)
    result = PlanKey(
        _integers("input_shape", values.input_shape, (0, 1, 1, 1)),
        _integers("output_shape", values.output_shape, (0, 1, 1, 1)),
        _integers("stride", values.stride, (1, 1)),
        _integers("padding", values.padding, (0, 0)),
        _integers("dilation", values.dilation, (1, 1)),
        _integer("groups", values.groups, 1),
        _integer("threads", values.threads, 1, (1 << 31) - 1),
        values.isa,
    )
    if not isinstance(result.isa, str) or not re.match(r"[0-9A-Za-z._-]+\Z", result.isa):
        raise ValueError(
            "schedules: expected isa to be a name of letters, digits, -, _ and ., got "
            f"{_shortened(result.isa)}"
        )
    channels = weight_shape[1] * result.groups
    images = result.input_shape[0]
    if weight_shape[0] % result.groups or result.input_shape[1] != channels:
        raise ValueError(
            f"schedules: expected an input of {channels} channels and groups that divide "
            f"{weight_shape[0]}, got input_shape {result.input_shape} and {result.groups} groups"
        )
    if result.output_shape[:2] != (images, weight_shape[0]):
        raise ValueError(
            f"schedules: expected an output of {images} images and {weight_shape[0]} channels, "
            f"got output_shape {result.output_shape}"
        )
    for axis in range(2):
        fault = _axis_fault(
            result.input_shape[2 + axis],
            result.output_shape[2 + axis],
            weight_shape[2 + axis],
            result.stride[axis],
            result.padding[axis],
            result.dilation[axis],
        )
        if fault is not None:
            raise ValueError(
                f"schedules: expected {fault}, got input_shape {result.input_shape}, output_shape "
                f"{result.output_shape}, stride {result.stride}, padding {result.padding}, "
                f"dilation {result.dilation} of a kernel {weight_shape[2:]}"
            )
    return result


def _axis_fault(
    size: int, output: int, kernel: int, stride: int, before: int, dilation: int
) -> typing.Optional[str]:
    """What an axis of a call should be instead; None where it can be."""
    if output == 1 and stride != 1:
        return "stride 1 along an axis of one output"
    extent = dilation * (kernel - 1) + 1
    # padding="same" has one more behind than before where the extent is even.
    if stride == 1 and output == size and before == (extent - 1) // 2:
        return None
    room = size + 2 * before - extent
    if room < 0:
        return "an image that the kernel fits into"
    # The stride of one output was not kept.
    if output not in (1, room // stride + 1):
        return "the output size that follows"
    return None


def _integers(name: str, values: object, least: typing.Tuple[int, ...]) -> typing.Any:
    if not isinstance(values, (tuple, list)) or len(values) != len(least):
        raise ValueError(
            f"schedules: expected {name} of {len(least)} integers, got {_shortened(values)}"
        )
    return tuple(_integer(name, value, minimum) for value, minimum in zip(values, least))


def _integer(name: str, value: typing.Any, minimum: int, maximum: int = (1 << 63) - 1) -> int:
    if not is_integer(value) or not minimum <= value <= maximum:
        bits = maximum.bit_length()
        raise ValueError(
            f"schedules: expected {name} of at least {minimum} and below 2^{bits}, got "
            f"{_shortened(value)}"
        )
    return int(value)


def _shortened(value: object) -> str:
    """What a file holds, for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def to_bytes(schedules: typing.Mapping[PlanKey, Schedule]) -> bytes:
    """The schedules as a packed file holds them (csrc/FORMAT.md)."""
    entries = []
    for key, schedule in schedules.items():
        entry = dict(key._asdict(), schedule=schedule)
        entries.append(json.dumps(entry, sort_keys=True, separators=(",", ":")))
    return ("[" + ",".join(sorted(entries)) + "]").encode("ascii")


def from_bytes(content: bytes, weight_shape: Quad) -> typing.Dict[PlanKey, Schedule]:
    """The inverse of `to_bytes`. Raises ValueError for all that `to_bytes` does not write."""
    try:
        return _parsed(content, weight_shape)
    except RecursionError:
        raise ValueError("schedules: expected flat JSON, got deeply nested JSON") from None


def _parsed(content: bytes, weight_shape: Quad) -> typing.Dict[PlanKey, Schedule]:
    try:
        entries = json.loads(content.decode("ascii"))
    except ValueError as error:
        raise ValueError(f"schedules: expected JSON in ASCII, got {error}") from None
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            f"schedules: expected an array of at least one schedule, got {_shortened(entries)}"
        )
    names = set(PlanKey._fields) | {"schedule"}
    schedules = {}  # type: typing.Dict[PlanKey, Schedule]
    for entry in entries:
        if not isinstance(entry, dict) or set(entry) != names:
            got = sorted(entry) if isinstance(entry, dict) else entry
            raise ValueError(
                f"schedules: expected the fields {sorted(names)}, got {_shortened(got)}"
            )
        if not isinstance(entry["schedule"], dict):
            raise ValueError(f"schedule: expected an object, got {_shortened(entry['schedule'])}")
        key = PlanKey(*(entry[name] for name in PlanKey._fields))
        schedules[_checked_key(key, weight_shape)] = checked_schedule(entry["schedule"])
    # Leaves one form for each set of schedules: no twins, no other order, no other spelling.
    if to_bytes(schedules) != content:
        raise ValueError(
            "schedules: expected sorted entries, each once, without spaces, got another spelling "
            f"of them ({len(content)} bytes); save the weight again with the program that wrote it"
        )
    return schedules
