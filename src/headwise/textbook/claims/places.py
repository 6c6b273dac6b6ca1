"""Attention and convolution: heads that attend to fixed offsets."""

import math

import torch
from torch import Tensor, nn

from headwise.attention import attend
from headwise.nn.base import AttentionLayer
from headwise.nn.convolution import from_conv1d, from_conv2d
from headwise.reports.curves import Curve
from headwise.seeds import seeded
from headwise.textbook.claims.claim import claim
from headwise.textbook.claims.evidence import Check, at_least, at_most, difference, same
from headwise.textbook.claims.samples import normal


@claim(
    "Attention with a head for each place of the kernel, and positions as keys, is a convolution.",
    formula="Σ_Δ A_Δ X W_Δ = conv(X), A_Δ[i, j] = 1 if j = i + Δ",
    source="§5.3, relation to convolution; Cordonnier et al. 2020, 1911.03584, theorem 1",
)
def attention_is_convolution() -> list[Check]:
    """Up to rounding, with dilation, groups and zero padding. Unlike in a convolution, the offsets can change."""
    with seeded(0):
        one = nn.Conv1d(4, 6, 3, padding=2, dilation=2, groups=2).double()
        two = nn.Conv2d(3, 5, (3, 5), padding=(1, 2)).double()
    x, image = normal(2, 4, 13), normal(2, 3, 7, 11)
    blunt = from_conv1d(one, sharpness=0.5)
    return [
        same("error, 1-d, dilation 2", _lined(from_conv1d(one), x), one(x), 1e-10),
        same("error, 2-d, 3×5", from_conv2d(two)(image.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), two(image), 1e-10),
        at_least("error with blunt heads", difference(_lined(blunt, x), one(x)), 0.1).control(),
    ]


@claim(
    "With the scores −α‖δ − Δ‖² the error falls as e^{−α}: a convolution is reached for α → ∞ only.",
    formula="error ∝ e^{−α} for the scores −α‖δ − Δ‖²",
    source="Cordonnier et al. 2020, 1911.03584, theorem 1",
)
def convolution_is_a_limit() -> list[Check | Curve]:
    """A 3×3 kernel, away from the border: four neighbours at distance 1 get e^{−α} each."""
    with seeded(0):
        conv = nn.Conv2d(3, 2, 3, padding=1, bias=False).double()
    image = normal(1, 3, 9, 9)
    truth = conv(image)[..., 1:-1, 1:-1]
    errors = {
        alpha: difference(_quadratic(conv, image, alpha)[..., 1:-1, 1:-1], truth)
        for alpha in (0.5, 1, 2, 5, 10, 15, 20, 25, 30, 40)
    }
    found = []
    for alpha in (5, 10, 20):
        error = errors[alpha]
        found.append(at_most(f"error · e^α at α = {alpha}", error * math.exp(alpha), 10))
        found.append(at_least(f"error · e^α at α = {alpha}", error * math.exp(alpha), 0.5).control())
    lines, bound = {"nine heads": errors}, {"4·e^{−α}": {alpha: 4 * math.exp(-alpha) for alpha in errors}}
    return [
        *found,
        at_most("error at α = 40", errors[40], 1e-12),
        Curve.of("Attention as a 3×3 convolution", "sharpness α", "largest error", lines, bound, log="y"),
    ]


def _lined(module: AttentionLayer, x: Tensor) -> Tensor:
    """Apply the layer to an input with channels first."""
    return module(x.mT).mT


def _quadratic(conv: nn.Conv2d, image: Tensor, alpha: float) -> Tensor:
    """A 3×3 convolution [1, c, n, n] as nine heads with scores −α‖p_k − p_q − Δ‖² of the positions p."""
    side = image.shape[-1]
    axis = torch.arange(side, dtype=torch.float64)
    p = torch.cartesian_prod(axis, axis)  # [n², 2]
    shifts = torch.cartesian_prod(axis[:3], axis[:3]) - 1  # [9, 2]
    # −α(‖p_k‖² − 2 p_k·(p_q + Δ)) is the score up to a constant per row.
    k = torch.cat((p.square().sum(-1, keepdim=True), p), -1)
    aims = p + shifts[:, None]  # [9, n², 2]
    q = -alpha * torch.cat((torch.ones_like(aims[..., :1]), -2.0 * aims), -1)
    v = image.flatten(2).mT[:, None]  # [1, 1, n², c]
    heads = attend(q[None], k[None, None], v, scale=1.0)  # [1, 9, n², c]
    out = torch.einsum("bhnc,och->bon", heads, conv.weight.detach().flatten(2))
    return out.unflatten(-1, (side, side))
