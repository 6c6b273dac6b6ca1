"""Heads as layers × heads where layers differ in heads, as they do after pruning: what is missing is filled up."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Places:
    """The heads of each layer; arrays get as many as the layer that has most, and at least `least`."""

    counts: tuple[int, ...]
    least: int = 0

    @property
    def most(self) -> int:
        """Heads of the layer that has most."""
        return max(self.least, *self.counts)

    @property
    def uneven(self) -> list[int]:
        """The counts if layers differ, else []."""
        return list(self.counts) if len(set(self.counts)) > 1 else []

    @property
    def indices(self) -> list[int]:
        """layer · most + head of every head that there is."""
        return [layer * self.most + head for layer, count in enumerate(self.counts) for head in range(count)]

    def stacked(self, layers: Sequence[np.ndarray], fill: float = np.nan) -> np.ndarray:
        """One array [heads, …] a layer as [layers, most, …]."""
        whole = np.full((len(layers), self.most, *layers[0].shape[1:]), fill, layers[0].dtype)
        for into, layer in zip(whole, layers, strict=True):
            into[: len(layer)] = layer
        return whole

    def square(self, matrix: np.ndarray) -> np.ndarray:
        """A matrix of all heads with all heads, as one of all places with all places."""
        whole = np.full((len(self.counts) * self.most,) * 2, np.nan)
        whole[np.ix_(self.indices, self.indices)] = matrix
        return whole
