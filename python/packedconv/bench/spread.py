"""How far the rounds of a measurement lie apart, and measuring again where that is too far."""

import typing

import numpy as np


def spread(values: typing.Sequence[float]) -> float:
    """Interquartile range of values over their median."""
    low, median, high = np.percentile(values, (25, 50, 75))
    return float((high - low) / median)


def wide_points(samples: typing.Iterable[typing.Any], widest: float) -> typing.Set[str]:
    """Sparsity keys where the round medians of any contender spread by more than `widest`."""
    rounds = {}  # type: typing.Dict[typing.Tuple[str, str], typing.Dict[int, typing.List[float]]]
    for sample in samples:
        found = rounds.setdefault((sample.key, sample.implementation), {})
        found.setdefault(sample.round, []).append(sample.seconds)
    return {
        key
        for (key, _), values in rounds.items()
        if spread([float(np.median(seconds)) for seconds in values.values()]) > widest
    }


def repeated(
    groups: typing.Mapping[str, typing.Any],
    time_rounds: typing.Callable[[typing.Mapping[str, typing.Any], int], typing.Any],
    widest: float,
    repeats: int,
) -> typing.Tuple[typing.List[typing.Any], typing.Any]:
    """Samples of every attempt, and a measurement with the bursts and page faults of all.

    time_rounds(groups, attempt): a `protocol.Measurement` of contenders by sparsity key. A key
    of which a contender spreads by more than `widest` is measured again with all its contenders,
    `repeats` times at most. Its last attempt counts, whatever it spreads by: to choose among
    attempts would favour those that look good.
    """
    attempts, bursts = [], []  # type: typing.List[typing.Any], typing.List[float]
    faults = {}  # type: typing.Dict[typing.Tuple[str, str], float]
    for attempt in range(1 + repeats):
        measured = time_rounds(groups, attempt)
        attempts.append(measured.samples)
        bursts += measured.peak_bursts
        faults.update(measured.page_faults)
        wide = wide_points(measured.samples, widest)
        groups = {key: group for key, group in groups.items() if key in wide}
        if not groups:
            break
    return attempts, measured._replace(peak_bursts=bursts, page_faults=faults)
