"""Attention and convolution: heads that attend to fixed offsets."""

import math

import torch
from torch import Tensor, nn

from headwise.attention import attend
from headwise.base.run import seeded
from headwise.nn.base import AttentionLayer
from headwise.nn.convolution import from_conv1d, from_conv2d
from headwise.reports.curves import Curve
from headwise.textbook.claims.claim import claim
from headwise.textbook.claims.evidence import Check, at_least, at_most, difference, same
from headwise.textbook.claims.samples import normal
from headwise.textbook.texts import place
from headwise.wording import Bilingual


@claim(
    "Attention with a head for each place of the kernel, and positions as keys, is a convolution.",
    "卷积核的每个位置用一个头、以位置作键，注意力就是卷积。",
    formula=("Σ_Δ A_Δ X W_Δ = conv(X), A_Δ[i, j] = 1 if j = i + Δ",
             "Σ_Δ A_Δ X W_Δ = conv(X)，j = i + Δ 时 A_Δ[i, j] = 1"),
    at=[
        place("treatment", "5.3.18", "The two are deeply connected: a head is like a filter that detects one pattern.",
              "两者有深刻联系：一个头好比一个检测某种模式的滤波器。", paragraph=1),
        place("treatment", "5.3.18",
              "A convolution is a product with a matrix C(W), multi-head attention one of W_O with the "
              "stacked heads.", "卷积是乘以矩阵 C(W)；多头注意力是 W_O 乘以堆叠的各头。", paragraph=2),
    ],
    also="Cordonnier et al. 2020, 1911.03584, theorem 1",
    control=("heads that are not sharp are no convolution", "不够尖锐的头不是卷积"),
    note="只差舍入；空洞、分组与零填充也都一样。与卷积不同，偏移量可以改变。文中只说相似，等式出自所引定理。",
)  # fmt: skip
def attention_is_convolution() -> list[Check]:
    """Up to rounding, with dilation, groups and zero padding. Unlike in a convolution, the offsets can change. The text
    states the likeness only; the equality is the cited theorem.
    """
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


@claim(
    "With the scores −α‖δ − Δ‖² the error falls as e^{−α}: a convolution is reached for α → ∞ only.",
    "分数取 −α‖δ − Δ‖² 时，误差按 e^{−α} 下降：只有 α → ∞ 才是卷积。",
    formula=("error ∝ e^{−α} for the scores −α‖δ − Δ‖²", "分数为 −α‖δ − Δ‖² 时，误差 ∝ e^{−α}"),
    also="Cordonnier et al. 2020, 1911.03584, theorem 1",
    control=("times e^α, the error at a finite α is not that of the limit",
             "有限 α 处的误差乘 e^α，不等于极限处的误差"),
    note="3×3 卷积核，不计边界：距离为 1 的四个邻居各得 e^{−α}。",
)  # fmt: skip
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
