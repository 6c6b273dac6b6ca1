"""Padding to layers × heads for layers with different numbers of heads, as after pruning."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Places:
    """The number of heads of each layer. Arrays are padded to the largest one, and at least to `least`."""

    counts: tuple[int, ...]
    least: int = 0

    @property
    def most(self) -> int:
        """The number of heads of padded arrays."""
        return max(self.least, *self.counts)

    @property
    def indices(self) -> list[int]:
        """layer · most + head of every head."""
        return [layer * self.most + head for layer, count in enumerate(self.counts) for head in range(count)]

    def stacked(self, layers: Sequence[np.ndarray], fill: float = np.nan) -> np.ndarray:
        """Arrays [heads, …], one per layer, as [layers, most, …]."""
        whole = np.full((len(layers), self.most, *layers[0].shape[1:]), fill, layers[0].dtype)
        for into, layer in zip(whole, layers, strict=True):
            into[: len(layer)] = layer
        return whole

    def square(self, matrix: np.ndarray) -> np.ndarray:
        """A matrix [heads, heads] as [layers · most, layers · most], NaN for missing heads."""
        whole = np.full((len(self.counts) * self.most,) * 2, np.nan)
        whole[np.ix_(self.indices, self.indices)] = matrix
        return whole
