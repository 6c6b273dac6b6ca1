"""Learned attention sinks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.fields import Array
from headwise.masks import Grid, Span
from headwise.scores.base import Score, check_device, check_floats
from headwise.scores.terms import Terms


class SinkLogits(Score):
    """A learned logit per head in the softmax denominator, without a value (gpt-oss, 2508.10925; Miller 2023 with 0).

    p_ij = exp S_ij / (exp sink + Σ_j' exp S_ij'): rows sum to less than 1. The log-sum-exp includes the sink, except
    for fully masked queries, where it is −∞.

    Args:
        logits: [h] numbers or a floating tensor, which may require gradients.
    """

    placed = False
    holds = {"logits": Array("h")}

    def __init__(self, logits: Sequence[float] | Tensor) -> None:
        self.logits = check_floats("SinkLogits(logits)", logits, 1)

    def check(self, grid: Grid, device: torch.device) -> None:
        if len(self.logits) != grid.h:
            raise ShapeError(f"score=SinkLogits(logits): {len(self.logits)} logits for {grid.h} heads")
        check_device("SinkLogits(logits)", self.logits, device)

    def terms(self, grid: Grid, like: Tensor) -> Terms:
        return Terms(grid.n, sinks=self.logits.to(like))

    def part(self, rows: Span, cols: Span, grid: Grid) -> None:
        return None  # it belongs to whole rows

    def __repr__(self) -> str:
        return f"SinkLogits(<{len(self.logits)}>)"
