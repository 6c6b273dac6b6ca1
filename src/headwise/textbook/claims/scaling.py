"""Why scores are divided by √d_k: measurements with and without the factor."""

import math

import torch

from headwise.reports.curves import Curve
from headwise.textbook.claims.claim import claim
from headwise.textbook.claims.evidence import Check, Verdict, at_most, equal
from headwise.textbook.claims.model import trained
from headwise.textbook.claims.samples import normal

SIZES = 1, 4, 16, 64, 256, 1024


@claim(
    "q·k has variance d_k, and q·k / √d_k has variance 1.",
    formula="Var(q·k) = d_k,  Var(q·k / √d_k) = 1",
    source="ch. 11; §5.3; Vaswani et al. 2017, footnote 4",
    expected=Verdict.CONDITIONS,
)
def scaling_keeps_variance() -> list[Check | Curve]:
    """For independent entries of variance 1, as at the start of training. Trained queries and keys are not independent:
    in our model the variance of the scaled scores of heads is far from 1.
    """
    found, plain, scaled = [], {}, {}
    for d in SIZES:
        dots = (normal(20_000, d, seed=1) * normal(20_000, d, seed=2)).sum(-1)
        plain[d], scaled[d] = float(dots.var()), float((dots / math.sqrt(d)).var())
    for d in (16, 64, 1024):
        found += [equal(f"variance of q·k at d_k = {d}", plain[d], d, 0.05), equal("scaled", scaled[d], 1, 0.05)]
    variances = torch.cat([_score_variance(amap.q, amap.k) for amap in trained().maps])
    return [
        *found,
        equal("trained model, variance of scaled scores, smallest head", float(variances.min()), 1, 0.05).beyond(),
        equal("largest head", float(variances.max()), 1, 0.05).beyond(),
        Curve.of("Variance of the logits", "d_k", "variance", {
            "q·k": plain, "q·k / √d_k": scaled}, {"d_k": {d: d for d in SIZES}}, log="xy"),
    ]  # fmt: skip


@claim(
    "Without the factor the softmax saturates as d_k grows and its gradient vanishes; with it both stay.",
    formula="∂p/∂s = diag(p) − p pᵀ,  p = softmax(c · q·k), c = 1 or 1/√d_k",
    source="ch. 11; §5.3; Vaswani et al. 2017, §3.2.1",
)
def scaling_keeps_gradients() -> list[Check | Curve]:
    """Mean norm of ∂p/∂s = diag(p) − p pᵀ over random rows of 64 keys."""
    plain, scaled = {}, {}
    for d in SIZES:
        dots = normal(200, d, seed=1) @ normal(64, d, seed=2).mT  # [queries, keys]
        plain[d], scaled[d] = _slope(dots), _slope(dots / math.sqrt(d))
    lines = {"without the factor": plain, "with 1/√d_k": scaled}
    return [
        at_most("gradient at d_k = 1024 relative to 16, without the factor", plain[1024] / plain[16], 0.5),
        equal("with it", scaled[1024] / scaled[16], 1, 0.1),
        Curve.of("Gradient of the softmax, 64 keys", "d_k", "mean ‖∂p/∂s‖", lines, log="x"),
    ]


def _slope(scores: torch.Tensor) -> float:
    """Mean Frobenius norm of ∂p/∂s over the rows of the scores."""
    p = torch.softmax(scores, -1)
    jacobian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return float(jacobian.flatten(1).norm(dim=-1).mean())


def _score_variance(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Variance of the scaled scores of each head over all pairs that a causal mask allows, [h]."""
    scores = (q.double() @ k.double().mT)[0] / math.sqrt(q.shape[-1])  # [h, n, n]
    seen = torch.ones(scores.shape[1:]).tril().bool()
    return scores[:, seen].var(-1)
