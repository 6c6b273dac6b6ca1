"""Attention, its statistics and its gradients in float64, from the formulas and apart from the library's kernels."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.kernels import KERNELS
from headwise.kernels.call import Call, Result
from headwise.kernels.gradients import run_kernel
from headwise.masks import Everything, Grid, Mask
from headwise.rule import Rule
from headwise.scores import ALiBi, Bias, RelativeBias, Score, SinkLogits, SoftCap
from headwise.stats import (
    COLUMN_MASS,
    CONCENTRATION,
    DISTANCE,
    DISTANCE_VARIANCE,
    ENTROPY,
    LARGEST,
    SQUARES,
    KeyWeights,
    LargestOther,
    RangeMass,
    Statistic,
)

LIMITS = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}  # as tests/core/test_kernels.py has them
GRADIENT_LIMITS = {torch.float32: 5e-6, torch.bfloat16: 1.5e-2, torch.float16: 3e-3}


def run(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, score: Iterable[Score] = (), *,
    scale: float | None = None, statistics: Iterable[Statistic] = (), dropout: float = 0.0, seed: int = 0,
) -> Result:  # fmt: skip
    """What the compiled kernel makes of a call that it must not refuse."""
    grid = Grid(*q.shape[:3], k.shape[2])
    rule = Rule(mask or Everything(), q.shape[-1] ** -0.5 if scale is None else scale, grid, tuple(score))
    call = Call(q, k, v, rule, dropout, seed, tuple(statistics))
    assert KERNELS["cpu"].refuse(call) is None
    return run_kernel(KERNELS["cpu"], call)


def error(got: Tensor, expected: Tensor) -> float:
    """Relative, Frobenius."""
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))


@dataclass
class Truth:
    """The attention matrix in float64: weights p and scores s (−∞ where masked), [b, h, n, m]; lse [b, h, n]."""

    p: Tensor
    s: Tensor
    lse: Tensor

    def out(self, v: Tensor) -> Tensor:
        """[b, h, n, d_v]"""
        return self.p @ v.double().repeat_interleave(self.p.shape[1] // v.shape[1], 1)

    def of(self, statistic: Statistic) -> Tensor:
        """[b, h, n], or [b, h, m] for what a key receives."""
        p, n, m = self.p, *self.p.shape[2:]
        position = torch.arange(n)[:, None] + m - n
        far = (position - torch.arange(m)).abs().double()
        if statistic == LARGEST:
            return self.s.amax(-1)
        if statistic == ENTROPY:
            return -torch.special.xlogy(p, p).sum(-1)
        if statistic == SQUARES:
            return p.square().sum(-1)
        if statistic == CONCENTRATION:
            among = self.s.softmax(-1).nan_to_num(0.0)  # of the keys alone, whatever a sink takes
            return among.square().sum(-1)
        if statistic == DISTANCE:
            return (p * far).sum(-1)
        if statistic == DISTANCE_VARIANCE:
            whole = p.sum(-1, keepdim=True)
            even = p / whole.where(whole > 0, torch.ones_like(whole))
            return (even * (far - (even * far).sum(-1, keepdim=True)).square()).sum(-1)
        if statistic == COLUMN_MASS:
            return p.sum(-2)
        if isinstance(statistic, RangeMass):
            key = torch.arange(m) - (position if statistic.relative else 0)
            return p.masked_fill((key < statistic.start) | (key >= statistic.stop), 0.0).sum(-1)
        assert isinstance(statistic, KeyWeights)
        if isinstance(statistic, LargestOther):
            others = (statistic.weights > 0)[:, None, None] & (position != torch.arange(m))
            return p.masked_fill(~others, 0.0).amax(-1)
        return (p * statistic.weights.double()[:, None, None, :]).sum(-1)


def truth(
    q: Tensor, k: Tensor, mask: Mask | None = None, score: Iterable[Score] = (), scale: float | None = None
) -> Truth:
    """Differentiable in q, k and what the scores hold."""
    b, h, n, d = q.shape
    m = k.shape[2]
    keys = k.double().repeat_interleave(h // k.shape[1], 1)
    s = torch.einsum("bhnd,bhmd->bhnm", q.double(), keys) * (d**-0.5 if scale is None else scale)
    score = tuple(score)
    for part in score:
        if isinstance(part, SoftCap):
            s = part.cap * (s / part.cap).tanh()
    offset = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    for part in score:
        if isinstance(part, ALiBi):
            s = s - part.slopes.double()[:, None, None] * offset.abs()
        elif isinstance(part, RelativeBias):
            s = s + part.values.double()[:, (offset - part.first).clamp(0, part.values.shape[1] - 1)]
        elif isinstance(part, Bias):
            s = s + part.values.double()
    allowed = (mask or Everything()).to_dense(n, m, batch=b, heads=h).expand(b, h, n, m)
    s = s.masked_fill(~allowed, -torch.inf)
    # Rows that see nothing: no term at all, not even the sink's.
    dark = (s == -torch.inf).all(-1)
    terms = [s, *(x.logits.double()[:, None, None].expand(b, h, n, 1) for x in score if isinstance(x, SinkLogits))]
    safe = torch.cat(terms, -1).masked_fill(dark[..., None], 0.0)
    p = safe.softmax(-1)[..., :m].masked_fill(dark[..., None], 0.0)
    return Truth(p, s, safe.logsumexp(-1).masked_fill(dark, -torch.inf))
