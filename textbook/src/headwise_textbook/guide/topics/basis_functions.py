"""Heads as basis functions."""

import torch
from torch import Tensor

from headwise.wording import Bilingual
from headwise_textbook.curves import Curve
from headwise_textbook.guide.topic import Topic, exercise


@exercise(
    "The best linear combination of basis functions: `phi` `[n, h]` are their values at n points, `y` `[n]` the target. Return the largest error of the least-squares fit.",
    "基函数的最佳线性组合：`phi` `[n, h]` 是基函数在 n 个点上的值，`y` `[n]` 是目标。返回最小二乘拟合的最大误差。",
    lambda draw: (draw.normal(n := draw.size(3, 8), draw.size(1, 2)), draw.normal(n)),
    tolerance=5e-3,
)
def fit_error(phi: Tensor, y: Tensor) -> Tensor:
    """Our solution."""
    phi, y = phi.double(), y.double()
    return (phi @ torch.linalg.lstsq(phi, y[:, None]).solution[:, 0] - y).abs().max()


@exercise(
    "A head on two tokens with the values 0 and 1 and the score difference a·x + b gives the weight of the second: σ(a·x + b). Return the values of h such heads `[n, h]` for points `x` `[n]`, slopes `a` `[h]` and offsets `b` `[h]`.",
    "两个词元的值为 0 和 1、分数之差为 a·x + b 的头，输出就是第二个词元的权重 σ(a·x + b)。对点 `x` `[n]`、斜率 `a` `[h]`、偏移 `b` `[h]`，返回 h 个这样的头的值 `[n, h]`。",
    lambda draw: (draw.normal(draw.size()), draw.normal(h := draw.size(1, 4)), draw.normal(h)),
)
def sigmoid_heads(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Our solution."""
    return (x[:, None] * a + b).sigmoid()


@exercise(
    "A sequence of a single token x: what does multi-head attention with `wv` `[h, d, k]` and `wo` `[h, k, d]` compute? Return its output for `x` `[d]`.",
    "序列只有一个词元 x 时，多头注意力算出来的是什么？给定 `wv` `[h, d, k]` 与 `wo` `[h, k, d]`，返回 `x` `[d]` 的输出。",
    lambda draw: (
        draw.normal(d := draw.size()),
        draw.normal(h := draw.size(1, 3), d, k := draw.size(1, 3)),
        draw.normal(h, k, d),
    ),
    tolerance=1e-3,
)
def single_token(x: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
    """Our solution."""
    return torch.einsum("d,hdk,hke->e", x, wv, wo)


def errors() -> dict[int, float]:
    """The error of the best combination of h heads with random slopes and offsets, for sin(3x)."""
    x = torch.linspace(-2, 2, 201, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    a = 3 * torch.randn(64, generator=generator, dtype=torch.float64)
    b = 4 * torch.randn(64, generator=generator, dtype=torch.float64)
    found = {}
    for h in (1, 2, 4, 8, 16):
        phi = torch.cat((sigmoid_heads.ours(x, a[:h], b[:h]), torch.ones(201, 1, dtype=torch.float64)), 1)
        found[h] = float(fit_error.ours(phi, (3 * x).sin()))
    return found


def picture() -> Curve:
    """The error over the number of heads."""
    return Curve.of(
        Bilingual("sin(3x) as a sum of h heads", "用 h 个头之和逼近 sin(3x)"),
        Bilingual("heads h", "头数 h"), Bilingual("largest error", "最大误差"),
        {Bilingual("random heads, best W_O", "随机的头，最佳的 W_O"): errors()}, log="xy",
    )  # fmt: skip


TOPIC = Topic(
    place=21,
    title=Bilingual("Heads as basis functions", "基函数视角"),
    formula=r"f(X) = \text{Concat}(\phi_1(X), \dots, \phi_h(X))\, W_O, \qquad \phi_i(X) = \text{Attention}(X W_i^Q, X W_i^K, X W_i^V)",
    plain="f(X) = Concat(φ_1(X) … φ_h(X)) W_O,  φ_i(X) = Attention(X W_i^Q, X W_i^K, X W_i^V)",
    intro=Bilingual(
        """
        The output is linear in W_O: with fixed heads, attention is a combination of h functions φ_i, like a series. Unlike sines,
        the φ_i are learned. Below the input is a number x beside two tokens with the values 0 and 1; a head's output is then a
        sigmoid of x, and the best W_O is a least-squares problem.
        """,
        """
        输出对 W_O 是线性的：固定各头之后，注意力就是 h 个函数 φ_i 的组合，像一个级数；与正弦基不同，φ_i 是学来的。下面的输入是
        一个数 x，旁边有两个值为 0 与 1 的词元；这时一个头的输出是 x 的 sigmoid，求最佳的 W_O 就是最小二乘问题。
        """,
    ),
    code="""
import torch, headwise as hw
x = torch.linspace(-2, 2, 201).double()
target = (3 * x).sin()
slopes, offsets = 3 * torch.randn(16).double(), 4 * torch.randn(16).double()
for h in (1, 2, 4, 8, 16):
    q = torch.stack((x, torch.ones_like(x)), -1).expand(h, -1, -1)[None]              # [1, h, 201, 2]
    k = torch.stack((torch.zeros(h, 2), torch.stack((slopes[:h], offsets[:h]), -1)), 1).double()[None]   # [1, h, 2, 2]
    v = torch.tensor([[0.0], [1.0]]).double().expand(1, h, 2, 1)
    phi = torch.cat((hw.attend(q, k, v, scale=1.0)[0, :, :, 0].T, torch.ones(201, 1).double()), 1)
    w_o = torch.linalg.lstsq(phi, target[:, None]).solution
    print(f"{h:2} heads: largest error {(phi @ w_o - target[:, None]).abs().max().item():.1g}")
""",
    reading=Bilingual(
        """
        More heads approximate better, even with random ones. This is not a theorem about every input: for a single token
        the softmax has one entry, its weight is 1, and the whole layer is linear in x, whatever the number of heads. The
        theorems on universal approximation by Transformers use the feed-forward network and positions as well.
        """,
        """
        头越多，逼近越好，即使头是随机的。但这并非对所有输入都成立的定理：只有一个词元时，softmax 只有一项，权重恒为 1，
        无论多少个头，整个层对 x 都是线性的。Transformer 的万能逼近定理还用到前馈网络与位置信息。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "The largest error of the best combination of h random heads for sin(3x).",
        "h 个随机的头的最佳组合逼近 sin(3x) 的最大误差。",
    ),
    claims=("basis-functions", "approximates-everything"),
    exercises=(fit_error, sigmoid_heads, single_token),
)
