"""What parts are compared with: a softmax in float64, written apart from the library, on inputs of odd sizes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SIZES = (2, 6, 17, 29)  # batch, heads, queries, keys: sizes that differ, so that a swapped axis shows
KV_HEADS, HEAD_DIM, VALUE_DIM = 3, 5, 3
Formula = Callable[[Tensor, Tensor, Tensor], Any]


def vectors(sizes: tuple[int, int, int, int], value_dim: int = VALUE_DIM) -> list[Tensor]:
    """Queries, keys and values that require gradients."""
    b, h, n, m = sizes
    generator = torch.Generator().manual_seed(3)
    shapes = (b, h, n, HEAD_DIM), (b, KV_HEADS, m, HEAD_DIM), (b, KV_HEADS, m, value_dim)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def truth(q: Tensor, k: Tensor, v: Tensor, formula: Formula, dense: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, weights and log-sum-exp in float64, with their graph, by the formula and the cells of the mask."""
    group, (n, m) = q.shape[1] // k.shape[1], dense.shape[2:]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    found = formula(q.double() @ keys.mT / q.shape[-1] ** 0.5, torch.arange(n)[:, None] + m - n, torch.arange(m))
    scores, sinks = found if isinstance(found, tuple) else (found, None)
    scores = scores.masked_fill(~dense, -torch.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(*scores.shape[:3], 1).masked_fill(~dense.any(-1, True), -torch.inf)
        scores = torch.cat((scores, sink), -1)
    lse = scores.logsumexp(-1)
    seen = dense.any(-1, keepdim=True)
    base = lse.where(seen[..., 0], torch.zeros_like(lse))[..., None]
    weights = torch.where(seen, (scores - base).exp(), 0.0)[..., :m]
    return weights @ values, weights, lse
