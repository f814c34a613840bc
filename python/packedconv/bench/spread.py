"""How far the rounds of a measurement lie apart."""

import typing

import numpy as np


def spread(values: typing.Sequence[float]) -> float:
    """Interquartile range of values over their median."""
    low, median, high = np.percentile(values, (25, 50, 75))
    return float((high - low) / median)
