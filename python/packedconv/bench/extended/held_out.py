"""Timing a layer that `advise` has not seen: as a layer of the crossover, at one sparsity."""

from packedconv.bench.extended.crossover import measure

__all__ = ["measure"]
