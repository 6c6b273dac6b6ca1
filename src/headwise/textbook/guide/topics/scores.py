"""Scores: products of queries and keys, scaled, and the softmax over the keys."""

import math

import torch
from torch import Tensor

from headwise.attention import attend
from headwise.reports.curves import Matrices, Matrix
from headwise.textbook.guide.grading.draw import Draw
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual


def _qk(draw: Draw) -> tuple[Tensor, Tensor]:
    h, n, m, d = draw.size(1, 3), draw.size(), draw.size(), draw.size()
    return draw.normal(h, n, d), draw.normal(h, m, d)


@exercise(
    "The attention weights softmax(q kᵀ / √d) of `q` `[h, n, d]` and `k` `[h, m, d]`.",
    "计算 `q` `[h, n, d]` 与 `k` `[h, m, d]` 的注意力权重 softmax(q kᵀ / √d)。",
    _qk,
)
def weights_of(q: Tensor, k: Tensor) -> Tensor:
    """Our solution."""
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)


@exercise(
    "The softmax of a row of scores `[m]` which may be as large as 1000 or −1000, without overflow.",
    "对一行分数 `[m]` 做 softmax；分数可能达到 1000 或 −1000，不能溢出。",
    lambda draw: (500 * draw.normal(draw.size()),),
)
def safe_softmax(scores: Tensor) -> Tensor:
    """Our solution."""
    shifted = (scores - scores.max()).exp()
    return shifted / shifted.sum()


@exercise(
    "The entropy in nats of each row of `weights` `[n, m]`; a weight of 0 contributes 0. Return `[n]`.",
    "计算 `weights` `[n, m]` 每一行的熵（奈特）；权重为 0 的项贡献 0。返回 `[n]`。",
    lambda draw: ((w := torch.relu(draw.weights(draw.size(), m := draw.size()) - 0.2 / m)) / w.sum(-1, keepdim=True),),
)
def row_entropy(weights: Tensor) -> Tensor:
    """Our solution."""
    return -torch.xlogy(weights, weights).sum(-1)


def picture() -> Matrices:
    """Weights of random queries and keys, with and without the factor."""
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 1, 10, 256, generator=generator)
    maps = [attend(q, k, k, scale=scale, return_map=True)[1][0, 0, :, :] for scale in (1 / 16, 1.0)]
    titles = Bilingual("softmax(q·k / √d_k)", "softmax(q·k / √d_k)"), Bilingual("softmax(q·k)", "softmax(q·k)")
    return Matrices(
        tuple(Matrix(title, one, numbers=True, top=1.0) for title, one in zip(titles, maps, strict=True)),
        rows=Bilingual("queries", "查询"),
        columns=Bilingual("keys; d_k = 256, random q and k", "键；d_k = 256，q 与 k 随机"),
    )


TOPIC = Topic(
    place=4,
    title=Bilingual("Scores, scaling and softmax", "分数、缩放与 softmax"),
    formula=r"A = \operatorname{softmax}\!\left(\frac{Q K^{\top}}{\sqrt{d_k}}\right), \qquad \text{head} = A V",
    plain="A = softmax(Q Kᵀ / √d_k),  head = A V",
    intro=Bilingual(
        """
        Each head compares every query with every key by a dot product. A sum of d_k products of independent numbers with
        variance 1 has variance d_k, so that scores of wide heads are large, the softmax puts all weight on one key, and
        its gradient vanishes. Dividing by √d_k keeps the variance at 1 whatever the width. The softmax then makes each
        row positive with sum 1: row i says how much of each value the output of token i contains.
        """,
        """
        每个头用点积比较每个查询与每个键。d_k 个相互独立、方差为 1 的数两两相乘再求和，方差是 d_k；头的维度越大，分数就越
        大，softmax 会把全部权重放在一个键上，梯度随之消失。除以 √d_k 之后，无论维度多大，方差都是 1。随后 softmax
        使每一行为正且和为 1：第 i 行就是第 i 个词元的输出中各个值所占的比例。
        """,
    ),
    code="""
import torch, headwise as hw
for d_k in (4, 64, 1024):
    q, k = torch.randn(2, 1, 1, 512, d_k)
    for name, scale in (("q·k", 1.0), ("q·k/√d_k", d_k ** -0.5)):
        amap = hw.attend(q, k, k, scale=scale, return_map=True)[1]
        found = amap.measure("entropy", "top1_mass")
        print(f"d_k = {d_k:4}  {name:9} variance {(scale * q @ k.mT).var().item():7.1f}"
              f"  entropy {found['entropy'].mean().item():4.1f}  largest weight {found['top1_mass'].mean().item():.2f}")
""",
    reading=Bilingual(
        """
        With the factor, all widths behave alike: the entropy is near log 512 = 6.2 nats less one half. Without it, at
        d_k = 1024 a single key has almost all the weight before anything has been learned. `amap.measure` reads both
        statistics from the same pass; the 512 × 512 weights are never stored.
        """,
        """
        有了缩放因子，各种维度的表现一致：熵约为 log 512 ≈ 6.2 奈特再减 0.5。没有它，d_k = 1024 时还没开始学习，
        单个键就已占据几乎全部权重。`amap.measure` 在同一遍计算中得到两个统计量，512 × 512 的权重矩阵从不存储。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "The same ten random queries and keys of width 256, with the factor and without it.",
        "同样十个 256 维的随机查询与键：有缩放因子（左）与没有缩放因子（右）。",
    ),
    claims=("attention-formula", "scaling-keeps-variance", "scaling-keeps-gradients", "key-bias-does-nothing"),
    exercises=(weights_of, safe_softmax, row_entropy),
)
