"""Attention and its statistics as the formulas say, in float64 and apart from the library's own kernels."""

import torch
from samples import dense_truth
from torch import Tensor

from headwise.masks import Grid, Mask
from headwise.rule import Rule
from headwise.scores import ALiBi, Bias, RelativeBias, Score, SinkLogits, SoftCap


def error(got: Tensor, expected: Tensor) -> float:
    """Relative, Frobenius."""
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))


def rule(q: Tensor, k: Tensor, mask: Mask, score: tuple[Score, ...] = (), scale: float | None = None) -> Rule:
    b, h, n, d = q.shape
    return Rule(mask, d**-0.5 if scale is None else scale, Grid(b, h, n, k.shape[2]), score)


def weights(
    q: Tensor, k: Tensor, mask: Mask, score: tuple[Score, ...] = (), scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Weights [b, h, n, m] and log-sum-exp [b, h, n]; differentiable in q, k and what the scores hold."""
    n, m = q.shape[2], k.shape[2]
    _, allowed, s = dense_truth(q, k, mask, scale)
    offset = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    for part in (part for part in score if isinstance(part, SoftCap)):
        s = part.cap * torch.tanh(s / part.cap)
    for part in score:
        if isinstance(part, ALiBi):
            s = s - part.slopes.double()[:, None, None] * offset.abs()
        elif isinstance(part, RelativeBias):
            s = s + part.values.double()[:, (offset - part.first).clamp(0, part.values.shape[1] - 1)]
        elif isinstance(part, Bias):
            s = s + part.values.double()
    s = s.masked_fill(~allowed, -torch.inf)
    sinks = [part.logits.double() for part in score if isinstance(part, SinkLogits)]
    terms = torch.cat((s, *(x[:, None, None].expand(*s.shape[:3], 1) for x in sinks)), -1)
    dark = ~allowed.any(-1, keepdim=True)
    p = terms.masked_fill(dark, 0.0).softmax(-1)[..., :m].masked_fill(dark, 0.0)
    return p, terms.logsumexp(-1).masked_fill(dark[..., 0], -torch.inf)


def output(p: Tensor, v: Tensor) -> Tensor:
    """[b, h, n, d_v]"""
    return p @ v.double().repeat_interleave(p.shape[1] // v.shape[1], 1)


def distance(p: Tensor) -> Tensor:
    """|position of the query − key|, [n, m]"""
    n, m = p.shape[2:]
    return ((torch.arange(n)[:, None] + m - n) - torch.arange(m)).abs().double()
