"""The fastest schedule of a layer on the CPU at hand, found by timing."""

import math
import numbers
import time
import typing

import torch

from packedconv import _core, plan
from packedconv.packed import PackedWeight
from packedconv.schedule import PlanKey

# Seconds that a sample lasts at least, so that the clock's own time is lost in it.
_SAMPLE_SECONDS = 2e-4
# What is slower than the fastest by this factor is dropped: after a first look, and later.
_SLOW_AT_FIRST = 1.5
_SLOW = 1.1
# Rounds before which nothing is decided.
_ROUNDS = 3
_MOST_ROUNDS = 200
# The default stays unless another takes less than this part of its time.
_CLEARLY_FASTER = 0.97
_FASTEST = "fastest of those that autotune timed; "
_DEFAULT = "no other that autotune timed was 3 % faster; "

Run = typing.Callable[[], None]


def autotune(packed: PackedWeight, key: PlanKey, seconds: float) -> plan.CpuPlan:
    """Keep the fastest schedule for a call as the weight's, and return its plan.

    seconds: for the whole; passed where the default's plan and its first executions take longer.
    Where no two schedules could be compared in that time, nothing is kept.
    Raises TypeError unless `seconds` is a number, ValueError unless it is positive, MemoryError.
    Whatever ends it early leaves the weight as it was.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
        raise TypeError(f"seconds: expected a number, got {seconds!r}")
    if not seconds > 0:
        raise ValueError(f"seconds: expected a positive number, got {seconds!r}")
    end = _clock() + float(seconds)
    schedules = _core.cpu_schedules(**plan.core_arguments(packed, key))
    device = torch.device("cpu")
    image = plan.empty("input", key.input_shape, device)
    # A generator of its own: the caller's random numbers stay what they were.
    image.uniform_(generator=torch.Generator().manual_seed(0))
    out = plan.empty("out", key.output_shape, device)
    cores = {}  # type: typing.Dict[int, typing.Any]

    def prepare(index: int) -> Run:
        core = cores[index] = plan.compiled(packed, key, schedules[index])
        places = (image.data_ptr(), image.stride(), 0, False, out.data_ptr(), out.stride())
        return lambda: core.execute(*places, key.threads)

    best, compared = fastest(len(schedules), prepare, cores.pop, end)
    if not compared:
        return plan.find(packed, key)
    return plan.keep(packed, key, cores[best], _FASTEST if best else _DEFAULT)


def fastest(
    count: int,
    prepare: typing.Callable[[int], Run],
    drop: typing.Callable[[int], object],
    end: float,
) -> typing.Tuple[int, bool]:
    """Which of `count` candidates runs fastest; 0, the default, unless another clearly does.

    And whether time was enough to compare it with another.

    prepare: makes a candidate ready to run. drop: told of those that are out of the race, never
    of 0. end: when to stop, by `_clock`.
    """
    runs, first = {}, {}  # type: typing.Dict[int, Run], typing.Dict[int, float]

    def drop_slow(times: typing.Mapping[int, float], factor: float) -> None:
        limit = factor * min(times.values())
        for index in [index for index in runs if index and times[index] > limit]:
            del runs[index], first[index]
            drop(index)

    begin, looked = _clock(), 0
    for index in range(count):
        # Half of the time is for comparing the best.
        if index and _clock() >= begin + (end - begin) / 2:
            break
        runs[index] = prepare(index)
        runs[index]()  # takes memory, warms caches
        first[index] = min(_timed(runs[index], 1) for _ in range(2))
        looked += 1
        drop_slow(first, _SLOW_AT_FIRST)

    samples = {index: [] for index in runs}  # type: typing.Dict[int, typing.List[float]]
    repeats = max(1, math.ceil(_SAMPLE_SECONDS / max(min(first.values()), 1e-9)))
    for done in range(1, _MOST_ROUNDS + 1):
        round_seconds = repeats * sum(first.values())
        if len(runs) == 1 or _clock() + round_seconds > end:
            break
        # To and fro, so that none always comes after the same other one.
        for index in sorted(runs, reverse=done % 2 == 0):
            samples[index].append(_timed(runs[index], repeats))
        if done >= _ROUNDS:
            drop_slow({index: _median(samples[index]) for index in runs}, _SLOW)

    if len(runs) == 1:  # the default alone is left: the others are slower, if there were any
        return 0, looked > 1
    if len(samples[0]) < _ROUNDS:
        return 0, False
    medians = {index: _median(samples[index]) for index in runs}
    best = min(medians, key=lambda index: medians[index])
    return best if medians[best] < _CLEARLY_FASTER * medians[0] else 0, True


def _clock() -> float:
    return time.perf_counter()


def _timed(run: Run, repeats: int) -> float:
    """Seconds of one execution, the mean of so many."""
    begin = _clock()
    for _ in range(repeats):
        run()
    return (_clock() - begin) / repeats


def _median(values: typing.Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[-1 - middle]) / 2
