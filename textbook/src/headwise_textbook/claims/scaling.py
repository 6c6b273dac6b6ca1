"""Why scores are divided by √d_k: measurements with and without the factor."""

import math

import torch

from headwise.wording import Bilingual
from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.evidence import Check, at_most, equal
from headwise_textbook.claims.model import trained
from headwise_textbook.claims.samples import normal
from headwise_textbook.curves import Curve

SIZES = 1, 4, 16, 64, 256, 1024
WITHOUT = Bilingual("without the factor", "不缩放")


@claim
def scaling_keeps_variance() -> list[Check | Curve]:
    found, plain, scaled = [], {}, {}
    for d in SIZES:
        dots = (normal(20_000, d, seed=1) * normal(20_000, d, seed=2)).sum(-1)
        plain[d], scaled[d] = float(dots.var()), float((dots / math.sqrt(d)).var())
    for d in (16, 64, 1024):
        found += [
            equal((f"variance of q·k at d_k = {d}", f"d_k = {d} 时 q·k 的方差"), plain[d], d, 0.05),
            equal(("scaled", "缩放后"), scaled[d], 1, 0.05),
        ]
    variances = torch.cat([_score_variance(amap.q, amap.k) for amap in trained().maps])
    least, most = float(variances.min()), float(variances.max())
    return [
        *found,
        equal(("trained model, variance of scaled scores, smallest head",
               "训练好的模型，缩放后分数的方差，最小的头"), least, 1, 0.05)
        .beyond(),
        equal(("largest head", "最大的头"), most, 1, 0.05).beyond(),
        equal(("divided by d_k = 64", "除以 d_k = 64"), plain[64] / 64**2, 1 / 64, 0.05).control(scaled[64]),
        Curve.of(Bilingual("Variance of the logits", "分数的方差"), "d_k", Bilingual("variance", "方差"), {
            "q·k": plain, "q·k / √d_k": scaled}, {"d_k": {d: d for d in SIZES}}, log="xy"),
    ]  # fmt: skip


@claim
def scaling_keeps_gradients() -> list[Check | Curve]:
    plain, scaled = {}, {}
    for d in SIZES:
        dots = normal(200, d, seed=1) @ normal(64, d, seed=2).mT  # [queries, keys]
        plain[d], scaled[d] = _slope(dots), _slope(dots / math.sqrt(d))
    lines = {WITHOUT: plain, Bilingual("with 1/√d_k", "除以 √d_k"): scaled}
    axis = Bilingual("mean ‖∂p/∂s‖", "‖∂p/∂s‖ 的平均")
    return [
        at_most(
            ("gradient at d_k = 1024 relative to 16, without the factor", "不缩放时，d_k = 1024 的梯度与 16 时之比"),
            plain[1024] / plain[16], 0.5,
        ),
        equal(("with it", "缩放时"), scaled[1024] / scaled[16], 1, 0.1),
        equal(("gradient without the factor relative to that with it, d_k = 1", "d_k = 1 时，不缩放与缩放的梯度之比"),
              plain[1] / scaled[1], 1, 0.01).control(plain[1024] / scaled[1024]),
        Curve.of(Bilingual("Gradient of the softmax, 64 keys", "softmax 的梯度，64 个键"), "d_k", axis, lines, log="x"),
    ]  # fmt: skip


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
