"""Sums over stretches of rows: sufficient for means, for merging inputs, and for the confidence of the means.

Confidence is from a block bootstrap (Künsch 1989): stretches of consecutive rows of one sequence are resampled with
replacement, since neighbouring rows are correlated. It concerns the rows of these inputs only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

STRETCHES = 64  # about as many an input
MOST = 256  # of several merged inputs
DRAWS = 1000


@dataclass(frozen=True)
class Tally:
    """Sums over the eligible rows of each stretch, float64 [layers, stretches, heads, …].

    Attributes:
        total: of the score; count: eligible rows; uniform: of the score of a uniform head.
    """

    total: np.ndarray
    count: np.ndarray
    uniform: np.ndarray

    def mean(self) -> tuple[np.ndarray, np.ndarray]:
        """Score and uniform baseline [layers, heads, …]; NaN where no row is eligible."""
        return _mean(self.total.sum(1), self.uniform.sum(1), self.count.sum(1))

    def drawn(self) -> tuple[np.ndarray, np.ndarray]:
        """`mean` of each draw of the bootstrap, [draws, layers, heads, …]."""
        weights = _draws(self.total.shape[1])
        total, uniform, count = (
            np.tensordot(weights, x, axes=(1, 1)) for x in (self.total, self.uniform, self.count)
        )  # fmt: skip
        return _mean(total, uniform, count)

    def at(self, index: np.ndarray) -> "Tally":
        """For a tally with one more axis, the entry `index` [layers, heads] of that axis."""
        where = index[:, None, :, None]
        return Tally(*(np.take_along_axis(x, where, -1)[..., 0] for x in (self.total, self.count, self.uniform)))

    def merge(self, other: "Tally") -> "Tally":
        """The tally of both inputs."""
        parts = zip((self.total, self.count, self.uniform), (other.total, other.count, other.uniform), strict=True)
        return Tally(*(pooled(np.concatenate(pair, 1)) for pair in parts))


def stack(layers: list[Tally]) -> Tally:
    """One tally of several layers, each [1, stretches, heads, …]."""
    return Tally(*(np.concatenate([getattr(x, name) for x in layers]) for name in ("total", "count", "uniform")))


def tally(score: Tensor, eligible: Tensor, uniform: Tensor, tokens: Tensor | None = None) -> Tally:
    """Sums of one layer. score: [b, h, n, …]; eligible and uniform broadcast to it; rows that are not eligible
    are left out. tokens: [b or 1, t], the rows that are no padding; None if all are."""
    uniform = uniform.expand(torch.broadcast_shapes(uniform.shape, eligible.shape)).masked_fill(~eligible, 0.0)
    rows = [score.masked_fill(~eligible.to(score.device), 0.0), eligible, uniform]
    if tokens is not None:
        at = tokens.view(len(tokens), 1, -1, *(1,) * (score.ndim - 3))
        rows = [torch.take_along_dim(x.expand(*x.shape[:2], *score.shape[2:]), at.to(x.device), 2) for x in rows]
        score = rows[0]
    total, count, even = (by_stretch(x, score.shape) for x in rows)
    return Tally(total, *(np.broadcast_to(x, total.shape) for x in (count, even)))


def by_stretch(rows: Tensor, shape: Sequence[int]) -> np.ndarray:
    """Sums of [b or 1, h or 1, n, …] over stretches of rows, broadcast to `shape`: [1, b · stretches, h or 1, …]."""
    b, _, n = shape[:3]
    length = min(n, max(1, -(-n * b // STRETCHES)))
    many = -(-n // length)
    rows = rows if rows.dtype.is_floating_point else rows.float()
    if many * length > n:
        rows = pad(rows, (*(0, 0) * (rows.ndim - 3), 0, many * length - n))
    sums = rows.unflatten(2, (many, length)).sum(3, dtype=torch.float64)
    sums = sums.expand(b, *sums.shape[1:]).transpose(1, 2)
    return sums.reshape(1, b * many, *sums.shape[2:]).cpu().numpy()


def pooled(sums: np.ndarray) -> np.ndarray:
    """Sums of at most MOST stretches: neighbouring ones are added."""
    while sums.shape[1] > MOST:
        if sums.shape[1] % 2:
            sums = np.concatenate((sums, np.zeros_like(sums[:, :1])), 1)
        sums = sums[:, ::2] + sums[:, 1::2]
    return sums


def _mean(total: np.ndarray, uniform: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / count, uniform / count


@lru_cache(maxsize=8)
def _draws(stretches: int) -> np.ndarray:
    """How often each draw contains each stretch, [draws, stretches]; seeded, so that results repeat."""
    share = np.full(stretches, 1.0 / max(1, stretches))
    return np.random.default_rng(0).multinomial(stretches, share, size=DRAWS).astype(np.float64)
