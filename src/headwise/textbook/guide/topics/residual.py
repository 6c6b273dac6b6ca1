"""The residual connection and the normalisation around attention."""

import torch
from torch import Tensor, nn

from headwise.base.run import seeded
from headwise.nn.block import TransformerBlock
from headwise.nn.registry import STANDARD, build
from headwise.reports.curves import Curve
from headwise.textbook.guide.grading.draw import Draw
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual

DEPTHS = (1, 2, 4, 8, 16, 24)


def _tokens(draw: Draw) -> tuple[Tensor]:
    return (draw.normal(draw.size(), draw.size(2, 8)),)


@exercise(
    "Layer normalisation of `x` `[n, d]` without scale and shift: each token minus its mean, divided by √(variance + 1e-5); the variance is the mean of the squared deviations (divided by d, not d − 1).",
    "对 `x` `[n, d]` 做层归一化（不含缩放与平移）：每个词元减去自己的均值，再除以 √(方差 + 1e-5)；方差是偏差平方的平均（除以 d，而不是 d − 1）。",
    _tokens,
)
def layer_norm(x: Tensor) -> Tensor:
    """Our solution."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@exercise(
    "One step of a post-norm block: LayerNorm(x + y) for `x` and the output `y` of attention, both `[n, d]`; normalise as in layer-norm.",
    "后归一化块的一步：LayerNorm(x + y)，其中 `x` 与注意力输出 `y` 都是 `[n, d]`；归一化方法同 layer-norm。",
    lambda draw: (draw.normal(n := draw.size(), d := draw.size(2, 8)), draw.normal(n, d)),
)
def post_norm(x: Tensor, y: Tensor) -> Tensor:
    """Our solution."""
    return nn.functional.layer_norm(x + y, x.shape[-1:])


@exercise(
    "A stack of pre-norm linear layers: x ← x + LayerNorm(x) W for each `[d, d]` matrix of `ws` `[layers, d, d]`, in order, with LayerNorm as in layer-norm; `x` `[n, d]`.",
    "一叠前归一化的线性层：对 `x` `[n, d]`，依次用 `ws` `[layers, d, d]` 中的每个矩阵 W 执行 x ← x + LayerNorm(x) W；归一化方法同 layer-norm。",
    lambda draw: (draw.normal(draw.size(), d := draw.size(2, 6)), draw.normal(draw.size(1, 4), d, d) / d),
    tolerance=1e-3,
)
def residual_stack(x: Tensor, ws: Tensor) -> Tensor:
    """Our solution."""
    for w in ws:
        x = x + nn.functional.layer_norm(x, x.shape[-1:]) @ w
    return x


def gradients(residual: bool) -> dict[int, float]:
    """The norm of the gradient that reaches the input through layers of attention, relative to one layer."""
    found = {}
    for depth in DEPTHS:
        with seeded(0):
            x = torch.randn(1, 16, 32, requires_grad=True)
            y = x
            for _ in range(depth):
                attention = build(STANDARD, 32, 4, {})
                y = TransformerBlock(attention, d_ff=64)(y) if residual else attention(y)
            (y * torch.randn_like(y)).sum().backward()
        assert x.grad is not None
        found[depth] = float(x.grad.norm())
    return {depth: one / found[1] for depth, one in found.items()}


def picture() -> Curve:
    """How the gradient at the input depends on the depth."""
    return Curve.of(
        Bilingual("Gradient at the input, relative to one layer", "输入处的梯度（相对于一层）"),
        Bilingual("layers", "层数"), Bilingual("norm", "范数"),
        {
            Bilingual("x + Attention(Norm(x))", "x + Attention(Norm(x))"): gradients(True),
            Bilingual("Attention(x)", "Attention(x)"): gradients(False),
        },
        log="xy",
    )  # fmt: skip


TOPIC = Topic(
    place=8,
    title=Bilingual("Residual connection and normalisation", "残差连接与归一化"),
    formula=r"X^{(2)} = \text{LayerNorm}\!\left(X^{(1)} + \text{MultiHead}(X^{(1)})\right)",
    plain="X2 = LayerNorm(X1 + MultiHead(X1))",
    intro=Bilingual(
        """
        Attention never stands alone in a model. Its output is added to its input, and the sum (or the input) is normalised.
        The addition gives every layer a path on which the gradient passes unchanged; without it, the gradient at the first
        layer shrinks with every layer above. Equation (5.3.9) writes the projections W_Q, W_K, W_V and W_O a second time,
        outside of MultiHead, which already contains them: read literally, it would project twice.
        """,
        """
        模型中的注意力从不单独出现：它的输出加到输入上，和（或输入）再做归一化。相加为每一层提供了一条梯度原样通过的路径；没有它，
        第一层得到的梯度会随层数不断缩小。公式 (5.3.9) 在 MultiHead 之外又写了一遍 W_Q、W_K、W_V 与 W_O，而 MultiHead
        本身已经包含它们：照字面计算会投影两次。
        """,
    ),
    code="""
import torch, headwise as hw
for residual in (True, False):
    for depth in (1, 8, 24):
        torch.manual_seed(0)
        x = y = torch.randn(1, 16, 32, requires_grad=True)
        for _ in range(depth):
            attention = hw.MultiHeadAttention(32, 4)
            y = hw.TransformerBlock(attention, d_ff=64)(y) if residual else attention(y)
        (y * torch.randn_like(y)).sum().backward()
        print(f"{'with' if residual else 'without':8} residual, {depth:2} layers: gradient {x.grad.norm().item():.2g}")
""",
    reading=Bilingual(
        """
        Attention alone is an average of tokens, layer after layer: after 24 layers the gradient has vanished, and so have the
        differences between tokens. `hw.TransformerBlock` wraps any attention design with residual connections, norms and a
        feed-forward network, in the order "pre" (norm first) or "post" (as in equation 5.3.9).
        """,
        """
        单独的注意力每一层都在对词元求平均：24 层之后梯度已经消失，词元之间的差别也一并消失。`hw.TransformerBlock`
        可以为任何注意力设计加上残差连接、归一化和前馈网络，次序可选 "pre"（先归一化）或 "post"（同公式 5.3.9）。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "The gradient that reaches the input through up to 24 layers, with residual connections and without.",
        "经过最多 24 层后到达输入的梯度：有残差连接与没有残差连接。",
    ),
    claims=("residual-norm", "output-replaces", "projects-twice", "normalised-tokens"),
    exercises=(layer_norm, post_norm, residual_stack),
)
