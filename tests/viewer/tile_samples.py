"""What tiles and pyramids are held to: dense weights in float64, pooled square by square."""

import warnings
from collections.abc import Sequence

import numpy as np
import torch

import headwise as hw
from headwise.map import AttentionMap
from headwise.masks import Mask
from headwise.scores import Score


def map_of(
    n: int, m: int, mask: Mask, *, d: int = 5, heads: int = 2, score: Sequence[Score] = (), seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> AttentionMap:  # fmt: skip
    """A map [1, heads, n, m] of random queries and keys with large logits."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (2 * torch.randn(1, heads, size, d, generator=generator) for size in (n, m))
    _, amap = hw.attend(q.to(dtype), k.to(dtype), k.to(dtype), mask=mask, score=tuple(score), return_map=True)
    return amap


def dense(amap: AttentionMap, head: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights in float64 and which pairs are allowed, [n, m], from q and k alone (for maps without scores)."""
    _, heads, n, m = amap.shape
    q, k = amap.q[0, head].double(), amap.k[0, head].double()
    allowed = amap.mask.to_dense(n, m, heads=heads)
    allowed = allowed.expand(1, heads, n, m)[0, head]
    scores = (q @ k.T * amap.rule.scale).masked_fill(~allowed, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)  # a row that sees nothing
    return weights.numpy(), allowed.numpy()


def pooled(weights: np.ndarray, allowed: np.ndarray, cell: int, reduce: str) -> np.ndarray:
    """Mean or largest of the allowed weights of each square, NaN where none is."""
    n, m = weights.shape
    high, wide = -(-n // cell), -(-m // cell)
    filled = np.full((high * cell, wide * cell), np.nan)
    filled[:n, :m] = np.where(allowed, weights, np.nan)
    squares = filled.reshape(high, cell, wide, cell)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of squares without a number
        return np.nanmean(squares, (1, 3)) if reduce == "mean" else np.nanmax(squares, (1, 3))


def close(found: np.ndarray, truth: np.ndarray, *, of_half: float = 0.0) -> None:
    """Alike to float32, NaN in the same places; `of_half` is how much half floats add, as a share of the weight."""
    assert found.shape == truth.shape
    assert np.array_equal(np.isnan(found), np.isnan(truth))
    known = ~np.isnan(truth)
    if known.any():
        room = (2e-5 + of_half) * np.abs(truth[known]) + 1e-7 + 1e-4 * of_half * np.ptp(truth[known])
        assert (np.abs(found[known] - truth[known]) <= room).all()
