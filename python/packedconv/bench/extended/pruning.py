"""Gradual magnitude pruning (Zhu and Gupta, 2017, arXiv:1710.01878)."""

from collections.abc import Mapping

import torch

from packedconv.layer import nonzero_count


def scheduled_sparsity(begin: float, end: float, progress: float) -> float:
    """Equation 1 of Zhu and Gupta: from `begin` to `end` as `progress` goes from 0 to 1, and
    `end` from then on."""
    left = 1 - min(max(progress, 0.0), 1.0)
    return end + (begin - end) * left**3


class Pruner:
    """Keeps the weights of largest magnitude of each layer, the others zero.

    layers: by name; each is pruned by itself, to exactly round((1 - S) · n) nonzeros. A weight
    that was pruned never comes back.
    """

    def __init__(self, layers: Mapping[str, torch.nn.Module]) -> None:
        self._weights = {name: layer.weight for name, layer in layers.items()}
        self._masks = {
            name: torch.ones_like(weight, dtype=torch.bool)
            for name, weight in self._weights.items()
        }

    @torch.no_grad()
    def prune(self, sparsity: float) -> None:
        """Prune what is too much for a sparsity."""
        for name, weight in self._weights.items():
            # Below any magnitude: a pruned weight ranks behind one that is zero by chance.
            ranks = weight.abs().masked_fill(~self._masks[name], -1.0).flatten()
            kept = ranks.topk(nonzero_count(weight.numel(), sparsity)).indices
            mask = torch.zeros_like(ranks, dtype=torch.bool)
            mask[kept] = True
            self._masks[name] &= mask.view_as(weight)
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Put zeros where weights are pruned; after every step of an optimizer."""
        for name, weight in self._weights.items():
            weight.mul_(self._masks[name])
