"""Timing of queued work by pairs of events, and inputs that no cache still holds."""

import itertools
import math
import time
import typing

from packedconv.bench import protocol

# A pair of events spans at least this long, so that neither the launch of its first
# execution nor the clock of the events (about a microsecond) counts.
PAIR_SECONDS = 0.002
MOST_EXECUTIONS = 1000
# Where queueing takes this share of a pair, the time is that of the host's calls.
CALL_BOUND_SHARE = 0.9
# Between two uses of an input, others pass of this many times the size of the L2 cache.
ROTATION_FACTOR = 4

Execute = typing.Callable[[], None]


class Pace(typing.NamedTuple):
    """executions: of a pair of events. seconds: of one execution, about. queue_seconds: what
    the host takes to queue one, of the same pair, before which nothing was queued.

    Only such a pair tells: a full queue makes the host wait for the device.
    """

    executions: int
    seconds: float
    queue_seconds: float = 0.0

    @property
    def call_bound(self) -> bool:
        """Whether an execution takes about as long as its call, so that the call is timed."""
        return self.queue_seconds >= CALL_BOUND_SHARE * self.seconds


def time_pairs(
    accelerator: typing.Any, execute: Execute, pairs: int, executions: int
) -> typing.List[float]:
    """Seconds of an execution for each of `pairs` pairs of events: the time between the two
    over the `executions` queued between them, so the mean within the pair.

    Where calling takes longer than computing, it is the time of the call (Pace.call_bound).
    Waits once, at the end, and raises there what went wrong in any of them.
    """
    events = []
    for _ in range(pairs):
        begin = accelerator.record()
        for _ in range(executions):
            execute()
        events.append((begin, accelerator.record()))
    accelerator.synchronize()
    return [accelerator.elapsed(begin, end) / executions for begin, end in events]


def calibrate(accelerator: typing.Any, execute: Execute) -> Pace:
    """How many executions make a pair last PAIR_SECONDS, by trial, after one untimed."""
    execute()
    accelerator.synchronize()
    executions = 1
    while True:
        begin = time.perf_counter()
        first = accelerator.record()
        for _ in range(executions):
            execute()
        last = accelerator.record()
        queue_seconds = (time.perf_counter() - begin) / executions
        accelerator.synchronize()
        seconds = accelerator.elapsed(first, last) / executions
        if seconds * executions >= PAIR_SECONDS or executions >= MOST_EXECUTIONS:
            return Pace(executions, seconds, queue_seconds)
        # A first trial is slow: at least double, and try again.
        wanted = math.ceil(PAIR_SECONDS / max(seconds, PAIR_SECONDS / MOST_EXECUTIONS))
        executions = min(MOST_EXECUTIONS, max(2 * executions, wanted))


def warm_up(execute: Execute, pace: Pace, executions: int) -> None:
    """Queue at least `executions`, at least one, and WARMUP_SECONDS of them."""
    lasting = math.ceil(protocol.WARMUP_SECONDS / max(pace.seconds, 1e-6))
    for _ in range(max(1, executions, lasting)):
        execute()


def rotation_count(input_bytes: int, l2_bytes: int) -> int:
    """Number of copies of an input to go round, so that none is found in the L2 cache.

    One where the input alone exceeds the cache ROTATION_FACTOR times.
    """
    return max(1, math.ceil(ROTATION_FACTOR * l2_bytes / float(input_bytes)))


def rotate(copies: typing.Sequence[typing.Any]) -> typing.Callable[[], typing.Any]:
    """A function that returns the copies in turn, one a call."""
    return itertools.cycle(copies).__next__
