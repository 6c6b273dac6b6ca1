"""Attention and convolution: heads that attend to fixed offsets."""

import math

import torch
from torch import Tensor, nn

from headwise import attend
from headwise.nn import AttentionLayer, from_conv1d, from_conv2d
from headwise.wording import Bilingual
from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.evidence import Check, at_least, at_most, difference, same
from headwise_textbook.claims.samples import normal
from headwise_textbook.curves import Curve
from headwise_textbook.seeds import seeded


@claim
def attention_is_convolution() -> list[Check]:
    with seeded(0):
        one = nn.Conv1d(4, 6, 3, padding=2, dilation=2, groups=2).double()
        two = nn.Conv2d(3, 5, (3, 5), padding=(1, 2)).double()
    x, image = normal(2, 4, 13), normal(2, 3, 7, 11)
    sharp, blunt = (_lined(module, x) for module in (from_conv1d(one), from_conv1d(one, sharpness=0.5)))
    plane = from_conv2d(two)(image.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return [
        same(("error, 1-d, dilation 2", "误差，一维，空洞 2"), sharp, one(x), 1e-10),
        same(("error, 2-d, 3×5", "误差，二维，3×5"), plane, two(image), 1e-10),
        at_least(("error with blunt heads", "头不够尖锐时的误差"), difference(blunt, one(x)), 0.1).control(
            difference(sharp, one(x))),
    ]  # fmt: skip


@claim
def convolution_is_a_limit() -> list[Check | Curve]:
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
        what = f"error · e^α at α = {alpha}", f"α = {alpha} 时的误差 · e^α"
        found.append(at_most(what, error * math.exp(alpha), 10))
        found.append(at_least(what, error * math.exp(alpha), 0.5).control(errors[40] * math.exp(alpha)))
    lines = {Bilingual("nine heads", "九个头"): errors}
    bound = {"4·e^{−α}": {alpha: 4 * math.exp(-alpha) for alpha in errors}}
    return [
        *found,
        at_most(("error at α = 40", "α = 40 时的误差"), errors[40], 1e-12),
        Curve.of(Bilingual("Attention as a 3×3 convolution", "用注意力实现 3×3 卷积"), Bilingual("sharpness α",
                                                                                         "锐度 α"),
                 Bilingual("largest error", "最大误差"), lines, bound, log="y"),
    ]  # fmt: skip


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
