"""Number of heads against the size of a head."""

import math

import torch
from torch import Tensor

from headwise.wording import Bilingual
from headwise_textbook.curves import Curve
from headwise_textbook.guide.topic import Topic, exercise


@exercise(
    "The rank that the score matrix q kᵀ of n tokens can have at most, for heads of size `d_k`.",
    "头维度为 `d_k` 时，n 个词元的分数矩阵 q kᵀ 的秩最大是多少？",
    lambda draw: (draw.size(1, 20), draw.size(1, 20)),
)
def largest_rank(n: int, d_k: int) -> int:
    """Our solution."""
    return min(n, d_k)


@exercise(
    "Of the numbers of heads `choices`, the one whose head size d_model / h is nearest to `wanted` (the smaller h if two are), among those that divide d_model.",
    "在候选头数 `choices` 中选出能整除 d_model、且头维度 d_model / h 最接近 `wanted` 的一个（相同时取较小的 h）。",
    lambda draw: (
        8 * draw.size(1, 16),
        [1] + [draw.size(1, 16) for _ in range(draw.size(1, 5))],
        draw.size(1, 64),
    ),
)
def choose_heads(d_model: int, choices: list[int], wanted: int) -> int:
    """Our solution."""
    return min((h for h in choices if d_model % h == 0), key=lambda h: (abs(d_model // h - wanted), h))


@exercise(
    "The best approximation of `scores` `[n, n]` that heads of size `d_k` can reach: its nearest matrix of rank at most d_k (in the Frobenius norm).",
    "`d_k` 维的头对 `scores` `[n, n]` 的最佳逼近：求（Frobenius 范数下）秩不超过 d_k 的最近矩阵。",
    lambda draw: (draw.normal(n := draw.size(1, 6), n), draw.size(1, 6)),
    tolerance=2e-3,
)
def nearest_scores(scores: Tensor, d_k: int) -> Tensor:
    """Our solution."""
    u, s, v = torch.linalg.svd(scores)
    return (u[:, :d_k] * s[:d_k]) @ v[:d_k]


def errors(n: int = 64) -> dict[int, float]:
    """How far the best scores of rank d_k are from those of a permutation of n tokens."""
    generator = torch.Generator().manual_seed(0)
    wanted = torch.eye(n)[torch.randperm(n, generator=generator)] * 8.0
    found = {}
    for d_k in (1, 2, 4, 8, 16, 32, 64):
        found[d_k] = float((nearest_scores.ours(wanted, d_k) - wanted).norm() / wanted.norm())
    return found


def picture() -> Curve:
    """How well scores of rank d_k approximate a permutation."""
    return Curve.of(
        Bilingual("Scores of a permutation of 64 tokens", "64 个词元的一个置换的分数矩阵"),
        Bilingual("head size d_k", "头维度 d_k"), Bilingual("relative error", "相对误差"),
        {Bilingual("best scores of rank d_k", "秩为 d_k 的最佳分数"): errors()},
        {"√(1 − d_k / 64)": {d: math.sqrt(1 - d / 64) for d in errors()}},
        log="x",
    )  # fmt: skip


TOPIC = Topic(
    place=11,
    title=Bilingual("Number of heads or size of heads", "头数与头维度的权衡"),
    formula=r"d_k = d_{\text{model}} / h, \qquad \operatorname{rank}(Q K^{\top}) \le d_k",
    plain="d_k = d / h,  rank(Q Kᵀ) ≤ d_k",
    intro=Bilingual(
        """
        At a fixed width, more heads are narrower heads. Narrow heads are limited: the scores of n tokens have rank at most
        d_k, so a head of size 2 cannot give 64 queries 64 unrelated rows of scores. Many heads have other costs too: each
        stores and exponentiates its own n × n scores.
        """,
        """
        d_model 固定时，头越多，每个头的维度就越小。小的头能力有限：n 个词元的分数矩阵的秩最多是 d_k，所以 2 维的头无法给 64 个查询
        64 行互不相关的分数。头多还有别的代价：每个头都有自己的 n × n 分数要存储、要求指数。
        """,
    ),
    code="headwise plan trade-off 512 --seq 1024{lang}",
    reading=Bilingual(
        """
        Parameters and FLOPs do not depend on h; the exponentials and the stored scores grow with it. A blockwise kernel
        stores only a log-sum-exp per row and head. Which h learns best is an empirical question: in our own comparison,
        trained under the same conditions, multi-head and single-head attention of equal width differ by less than their
        seeds do ([comparison](../../comparison.md)).
        """,
        """
        参数与浮点运算量不随 h 变化；指数运算与需要存储的分数则随之增长。分块计算的内核每行每头只存一个 log-sum-exp。
        哪个 h 学得最好要靠实验：在我们自己的同条件训练比较中，d_model 相同的多头与单头注意力之差，小于随机种子造成的差别
        （见[比较](../../comparison.md)）。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "The scores that a permutation of 64 tokens needs have full rank: narrow heads can only approximate them.",
        "64 个词元的置换需要满秩的分数矩阵：维度小的头只能近似。",
    ),
    claims=(
        "low-rank-bottleneck",
        "more-heads-learn-more",
        "d-k-bounds-rank",
        "d-k-bounds-information",
        "degrees-of-freedom",
        "multi-head-is-better",
        "easier-to-train",
    ),
    exercises=(largest_rank, choose_heads, nearest_scores),
)
