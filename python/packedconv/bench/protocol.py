"""The paper's protocol (section 6): rounds of executions, contenders interleaved."""

import gc
import random
import resource
import sys
import time
import typing

from packedconv.bench.contenders import Contender

# A warm-up lasts at least this long. After a switch of contender the first executions of a
# small layer take up to three times as long as the later ones. Where PyTorch and the
# extension have an OpenMP library each, the idle threads of the other one also spin for
# some milliseconds before they sleep. A pause instead would let the threads fall asleep,
# and make the first execution slower still.
WARMUP_SECONDS = 0.02
PEAK_BURST_SECONDS = 0.1

_Block = typing.Tuple[str, Contender]
# Seconds of each execution of a block, and minor page faults of all of them.
TimeBlock = typing.Callable[[typing.Any, int, int], typing.Tuple[typing.List[float], int]]


class Sample(typing.NamedTuple):
    """One timed execution; rounds and executions count from 0."""

    key: str
    implementation: str
    layout: str
    round: int
    execution: int
    seconds: float


class StopRounds(Exception):  # noqa: N818
    """Raised while a block is timed: no more can be, and what was timed is to be kept."""


class Measurement(typing.NamedTuple):
    """What the rounds of one layer gave.

    peak_bursts: FP32 FMA peak at the start of each round, FLOP/s.
    page_faults: minor page faults per timed execution, by (key, implementation).
    stopped: why the rounds ended early, None where they did not.
    """

    samples: typing.List[Sample]
    peak_bursts: typing.List[float]
    page_faults: typing.Dict[typing.Tuple[str, str], float]
    stopped: typing.Optional[str] = None


def run_rounds(
    contenders: typing.Mapping[str, typing.Sequence[Contender]],
    rounds: int,
    executions: int,
    warmup_executions: int,
    seed: int,
    peak_burst: typing.Callable[[], float],
    title: str,
    time_block: typing.Optional[TimeBlock] = None,
) -> Measurement:
    """Time every contender of every key (a sparsity) in every round.

    In each round the keys, and within a key its contenders, come in an order drawn by the
    seed, so that no contender always follows the same one. A switch of contender is
    followed by `warmup_executions` and at least WARMUP_SECONDS of executions that are not
    timed: the first ones find another contender's data in the caches.
    `time_block` stands in for timing by the clock, given (contender, executions,
    warmup_executions). It and `peak_burst` may raise StopRounds.
    """
    time_block = time_block or time_executions
    samples = []  # type: typing.List[Sample]
    bursts = []  # type: typing.List[float]
    faults = {}  # type: typing.Dict[typing.Tuple[str, str], int]
    timed = {}  # type: typing.Dict[typing.Tuple[str, str], int]
    stopped = None  # type: typing.Optional[str]
    draw = random.Random(seed).random
    blocks = sum(len(group) for group in contenders.values())
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with _progress(rounds * blocks, title) as progress:
            for number in range(rounds):
                bursts.append(peak_burst())
                for key, contender in _round_order(contenders, draw):
                    seconds, count = time_block(contender, executions, warmup_executions)
                    block = (key, contender.implementation)
                    faults[block] = faults.get(block, 0) + count
                    timed[block] = timed.get(block, 0) + len(seconds)
                    samples.extend(
                        Sample(
                            key, contender.implementation, contender.layout, number, index, value
                        )
                        for index, value in enumerate(seconds)
                    )
                    progress.update(1)
    except StopRounds as stop:
        stopped = str(stop)
    finally:
        if collecting:
            gc.enable()
    per_execution = {block: count / max(1, timed[block]) for block, count in faults.items()}
    return Measurement(samples, bursts, per_execution, stopped)


def faults_by_implementation(
    measured: Measurement,
) -> typing.Dict[str, typing.Dict[str, float]]:
    """Page faults per execution as facts state them: by implementation, then by key."""
    faults = {}  # type: typing.Dict[str, typing.Dict[str, float]]
    for (key, implementation), count in measured.page_faults.items():
        faults.setdefault(implementation, {})[key] = count
    return faults


def minor_faults() -> int:
    """Minor page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _round_order(
    contenders: typing.Mapping[str, typing.Sequence[Contender]],
    draw: typing.Callable[[], float],
) -> typing.List[_Block]:
    return [
        (key, contender)
        for key in _shuffled(sorted(contenders), draw)
        for contender in _shuffled(contenders[key], draw)
    ]


def _shuffled(
    items: typing.Sequence[typing.Any], draw: typing.Callable[[], float]
) -> typing.List[typing.Any]:
    # Not random.shuffle, whose order may differ between Python versions.
    ranks = [draw() for _ in items]
    return [items[index] for index in sorted(range(len(items)), key=ranks.__getitem__)]


def time_executions(
    contender: Contender, executions: int, warmup_executions: int
) -> typing.Tuple[typing.List[float], int]:
    """Seconds of each execution, and minor page faults of all of them."""
    execute, clock = contender.execute, time.perf_counter
    if contender.prepare is not None:
        contender.prepare()
    warm = clock() + WARMUP_SECONDS
    for _ in range(max(1, warmup_executions)):
        execute()
    while clock() < warm:
        execute()
    seconds = [0.0] * executions
    faults = minor_faults()
    for index in range(executions):
        begin = clock()
        execute()
        seconds[index] = clock() - begin
    return seconds, minor_faults() - faults


class _NoProgress:
    """Stands in for a progress bar where there is no terminal, or no tqdm."""

    def __enter__(self) -> "_NoProgress":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, _: int) -> None:
        pass


def _progress(total: int, title: str) -> typing.Any:
    # The terminal itself, even where messages are logged as well.
    terminal = sys.__stderr__
    if terminal is None or not terminal.isatty():
        return _NoProgress()
    try:
        from tqdm import tqdm
    except ImportError:
        return _NoProgress()
    # The monitor is a thread, which could run during an execution.
    tqdm.monitor_interval = 0
    return tqdm(file=terminal, total=total, desc=title, unit="block", leave=False)
