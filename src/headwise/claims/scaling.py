"""Why scores are divided by √d_k, measured with and without."""

import math

import torch

from headwise.claims.claim import claim
from headwise.claims.evidence import Check, Verdict, at_most, equal
from headwise.claims.model import trained
from headwise.claims.samples import normal

SIZES = 16, 64, 1024


@claim(
    "scaling-keeps-variance",
    "q·k has variance d_k, and q·k / √d_k has variance 1.",
    source="ch. 11; §5.3; Vaswani et al. 2017, footnote 4",
    expected=Verdict.CONDITIONS,
)
def scaling_keeps_variance() -> list[Check]:
    """Of independent entries of variance 1, as at the start of training. Trained queries and keys are not: in our
    model the scaled scores of heads spread far from 1.
    """
    found = []
    for d in SIZES:
        dots = (normal(20_000, d, seed=1) * normal(20_000, d, seed=2)).sum(-1)
        found += [
            equal(f"variance of q·k at d_k = {d}", float(dots.var()), d, 0.05),
            equal("scaled", float((dots / math.sqrt(d)).var()), 1, 0.05),
        ]
    variances = torch.cat([_score_variance(amap.q, amap.k) for amap in trained().maps])
    return [
        *found,
        equal("trained model, variance of scaled scores, smallest head", float(variances.min()), 1, 0.05).beyond(),
        equal("largest head", float(variances.max()), 1, 0.05).beyond(),
    ]


@claim(
    "scaling-keeps-gradients",
    "Without the factor the softmax saturates as d_k grows and its gradient vanishes; with it both stay.",
    source="ch. 11; §5.3; Vaswani et al. 2017, §3.2.1",
    expected=Verdict.HOLDS,
)
def scaling_keeps_gradients() -> list[Check]:
    """Mean norm of ∂p/∂s = diag(p) − p pᵀ over random rows of 64 keys."""
    slopes = {}
    for d in SIZES:
        dots = normal(200, d, seed=1) @ normal(64, d, seed=2).mT  # [queries, keys]
        for scale in (1.0, d**-0.5):
            p = torch.softmax(scale * dots, -1)
            jacobian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
            slopes[d, scale == 1.0] = float(jacobian.flatten(1).norm(dim=-1).mean())
    return [
        at_most("gradient at d_k = 1024 over 16, without the factor", slopes[1024, True] / slopes[16, True], 0.5),
        equal("with it", slopes[1024, False] / slopes[16, False], 1, 0.1),
    ]


def _score_variance(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Variance of the scaled scores of each head, all pairs that a causal mask allows: [h]."""
    scores = (q.double() @ k.double().mT)[0] / math.sqrt(q.shape[-1])  # [h, n, n]
    seen = torch.ones(scores.shape[1:]).tril().bool()
    return scores[:, seen].var(-1)
