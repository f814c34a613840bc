"""Measured ceilings of the device: FP32 FMA peak and memory bandwidth."""

import time
import typing

from packedconv.bench.machine import available_memory_bytes, largest_cache_bytes

TRIALS = 5
PEAK_SECONDS = 0.2
COPY_REPEATS = 3
_LEAST_COPY_BYTES = 256 * 2**20


# Lengths of single bursts in turn: a short one may fit between two disturbances, a long
# one outlasts the start of the threads.
_BURST_SECONDS = (0.002, 0.02)


def peak_flops(threads: int, seconds: float) -> float:
    """FP32 FMA peak, FLOP/s: the best of bursts from registers over about `seconds`.

    Longer on a machine so busy that no burst began before it was over.
    """
    from packedconv import _core

    end = time.perf_counter() + seconds
    best = 0.0
    while best == 0.0 or time.perf_counter() < end:
        best = max([best] + [_core.fma_peak(threads, burst) for burst in _BURST_SECONDS])
    return best


def measure_ceilings(
    device: str, run: str, threads: int, trials: int = TRIALS
) -> typing.List[typing.Dict[str, typing.Any]]:
    """Rows of ceilings.csv: peak_flops (FLOP/s) and bandwidth (bytes/s), per trial.

    On all `threads`, and on one thread for comparison.
    """
    # torch first: whichever OpenMP library comes first serves both.
    import torch  # noqa: F401

    from packedconv import _core

    copied = copy_bytes()
    rows = []
    for trial in range(trials):
        for count in sorted({threads, 1}, reverse=True):
            values = {
                "peak_flops": peak_flops(count, PEAK_SECONDS),
                "bandwidth": _core.copy_bandwidth(count, copied, COPY_REPEATS),
            }
            for quantity, value in values.items():
                rows.append(
                    {
                        "device": device,
                        "run": run,
                        "quantity": quantity,
                        "threads": count,
                        "trial": trial,
                        "value": value,
                    }
                )
    return rows


def copy_bytes() -> int:
    """Size of the copied array: four last-level caches at least, an eighth of memory at most."""
    wanted = max(_LEAST_COPY_BYTES, 4 * largest_cache_bytes())
    available = available_memory_bytes()
    if available is not None:
        wanted = min(wanted, available // 8)
    return max(64, wanted // 64 * 64)
