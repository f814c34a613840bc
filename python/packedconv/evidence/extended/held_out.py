"""What `packedconv.advise` says of layers that its calibration has not seen, and measurement."""

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from packedconv.calibration import Calibration
from packedconv.evidence.cpu_experiments import Experiments
from packedconv.evidence.extended.crossover import COLUMNS as MEASURED
from packedconv.evidence.extended.crossover import crossover_table, planned_workload
from packedconv.layer import Layer

# Within this factor of break-even either choice is as good.
BAND = 1.10
# What is asked of `advise`: right on this share of the layers outside the band, which are to be at
# least so many, and on each side of break-even so many.
WANTED_SHARE = 0.90
WANTED_LAYERS = 60
WANTED_PER_SIDE = 25

COLUMNS = [
    *(name for name in MEASURED if not name.startswith("break_even")),
    *("predicted", "predicted_low", "predicted_high", "confidence", "outside_range"),
    *("advised", "faster", "outside_band", "right", "threshold_right"),
]


class Score(NamedTuple):
    """How often the advice was right.

    layers: of all; sparse_faster: of them, by measurement; outside: the band around break-even;
    right: of those, `advise`; threshold: the best single one on the sparsity, chosen with hindsight
    on the same layers, sparse at or above it; threshold_right: of those outside, it.
    """

    layers: int
    sparse_faster: int
    outside: int
    right: int
    threshold: float
    threshold_right: int

    @property
    def share(self) -> float:
        """Of the layers outside the band, on which `advise` was right; NaN without any."""
        return self.right / self.outside if self.outside else math.nan

    @property
    def balanced(self) -> bool:
        """Whether enough layers lie on each side of break-even."""
        most = max(self.sparse_faster, self.layers - self.sparse_faster)
        return self.layers >= WANTED_LAYERS and self.layers - most >= WANTED_PER_SIDE

    @property
    def reached(self) -> bool:
        """Whether `advise` did what is asked of it."""
        enough = self.share >= WANTED_SHARE
        return self.balanced and enough and self.right > self.threshold_right


def held_out_table(experiments: Experiments, calibration: Calibration) -> pd.DataFrame:
    """One row per layer with `COLUMNS`: measured as in the crossover's table, and predicted.

    calibration: fitted to the crossover alone. predicted, predicted_low, predicted_high,
    confidence: of `packedconv.advise`; outside_range: in what the layer lies outside of what was
    calibrated. right: whether the advised side is the faster one, threshold_right whether that of
    the best threshold is.
    """
    table = crossover_table(experiments)
    rows: list[dict[str, Any]] = []
    for row in table.itertuples():
        facts = experiments.facts[row.layer]
        layer = Layer(**facts["experiment"]["layer"])
        found = calibration.predict(planned_workload(facts, layer, row.sparsity))
        rows.append(
            {
                "predicted": found.speedup,
                "predicted_low": found.low,
                "predicted_high": found.high,
                "confidence": found.confidence,
                "outside_range": "; ".join(found.outside),
                "advised": found.choice,
            }
        )
    table = table.join(pd.DataFrame(rows, index=table.index))
    table["faster"] = np.where(table["speedup"] > 1, "sparse", "dense")
    table["outside_band"] = (table["speedup"] > BAND) | (table["speedup"] < 1 / BAND)
    table["right"] = table["advised"] == table["faster"]
    threshold = best_threshold(table[table["outside_band"]])
    chosen = np.where(table["sparsity"] >= threshold, "sparse", "dense")
    table["threshold_right"] = chosen == table["faster"]
    return table[COLUMNS]


def best_threshold(table: pd.DataFrame) -> float:
    """The sparsity from which on "sparse" is right most often, midway between two of the table.

    -inf or inf where one answer for all is; the lowest of several equally good ones.
    """
    found = np.sort(table["sparsity"].unique())
    candidates = [-math.inf, *((found[1:] + found[:-1]) / 2), math.inf]
    faster = table["faster"] == "sparse"
    right = [int(((table["sparsity"] >= value) == faster).sum()) for value in candidates]
    return float(candidates[int(np.argmax(right))])


def score(table: pd.DataFrame) -> Score:
    """The counts of a table of `held_out_table`."""
    outside = table[table["outside_band"]]
    return Score(
        len(table),
        int((table["faster"] == "sparse").sum()),
        len(outside),
        int(outside["right"].sum()),
        best_threshold(outside),
        int(outside["threshold_right"].sum()),
    )


def require_disjoint(held_out: Experiments, crossover: Experiments) -> None:
    """Raises ValueError for a layer of the crossover among those held out."""
    seen = {_shape(facts): name for name, facts in crossover.facts.items()}
    for name, facts in held_out.facts.items():
        if _shape(facts) in seen:
            raise ValueError(
                f"held_out: expected layers that the crossover has not, got {name}, which has the "
                f"shape of {seen[_shape(facts)]}; delete what is left over in the folder of "
                "results, or draw with another seed"
            )


def _shape(facts: dict[str, Any]) -> tuple:
    return tuple(Layer(**facts["experiment"]["layer"]))[1:]
