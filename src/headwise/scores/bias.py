"""Arbitrary biases."""

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.fields import Array
from headwise.masks import Grid, Span
from headwise.scores.base import Score, check_device, check_floats
from headwise.scores.terms import Terms


class Bias(Score):
    """A bias added to the scores, [b or 1, h or 1, n or 1, m or 1]; may require gradients.

    −∞ hides a key as a mask does, but the key still counts as allowed in measures.
    """

    repeats = True
    placed = False  # a part of the matrix has a slice of it
    holds = {"values": Array("bhnm")}

    def __init__(self, values: Tensor) -> None:
        self.values = check_floats("Bias(values)", values, 4)

    def check(self, grid: Grid, device: torch.device) -> None:
        if any(size not in (1, full) for size, full in zip(self.values.shape, grid, strict=True)):
            raise ShapeError(
                f"score=Bias(values): shape {tuple(self.values.shape)}, expected "
                f"({', '.join(f'{size} or 1' for size in grid)})"
            )
        check_device("Bias(values)", self.values, device)

    def with_gap(self, gap: Span, grid: Grid) -> Score:
        """Its values may have the dropped keys or not."""
        keys, whole = self.values.shape[3], grid.m + gap.size
        if keys not in (1, grid.m, whole):
            raise ShapeError(
                f"score=Bias(values): {keys} keys, expected {whole}, {grid.m} without the {gap.size} that the cache "
                f"has dropped, or 1"
            )
        if keys != whole:
            return self
        return Bias(torch.cat((self.values[..., : gap.start], self.values[..., gap.stop :]), -1))

    def terms(self, grid: Grid, like: Tensor) -> Terms:
        return Terms(grid.n, biases=(self.values,))

    def __repr__(self) -> str:
        return f"Bias(<{'×'.join(map(str, self.values.shape))}>)"
