"""Rounds of layers beside the paper's: the attempt that counts, medians, and how far they spread.

Everywhere in these tables a round's value is the median over its executions, as in the decision
to measure a point again.
"""

import numpy as np
import pandas as pd

from packedconv.bench.spread import spread
from packedconv.evidence.statistics import resampled_median

POINT = ["layer", "sparsity", "implementation"]

Point = tuple[str, float, str]


def last_attempts(samples: pd.DataFrame) -> pd.DataFrame:
    """Of every layer and sparsity the attempt that counts."""
    last = samples.groupby(["layer", "sparsity"])["attempt"].transform("max")
    return samples[samples["attempt"] == last]


def round_medians(samples: pd.DataFrame) -> pd.DataFrame:
    """Median seconds of every round, by `POINT` and round."""
    return samples.groupby([*POINT, "round"], as_index=False)["seconds"].median()


def resampled(samples: pd.DataFrame) -> dict[Point, np.ndarray]:
    """`statistics.resampled_median` over the round medians, seconds, by `POINT`."""
    return {
        (str(key[0]), float(key[1]), str(key[2])): resampled_median(values.to_numpy())
        for key, values in round_medians(samples).groupby(POINT)["seconds"]
    }


def widest_spreads(samples: pd.DataFrame) -> dict[tuple[str, float], float]:
    """The widest spread of round medians of any contender, by layer and sparsity."""
    widest: dict[tuple[str, float], float] = {}
    for (name, sparsity, _), values in round_medians(samples).groupby(POINT)["seconds"]:
        point = (str(name), float(sparsity))
        widest[point] = max(widest.get(point, 0.0), spread(values.to_numpy()))
    return widest
