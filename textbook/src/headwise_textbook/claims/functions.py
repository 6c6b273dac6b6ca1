"""Attention as a kernel, as a set of free numbers, and as an approximation of functions."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.wording import Bilingual
from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.evidence import Check, Verdict, at_least, at_most, difference, equal
from headwise_textbook.claims.samples import adam, normal, standard
from headwise_textbook.curves import Curve
from headwise_textbook.texts import place


@claim(
    "A head can be seen as a kernel: it maps the inputs to a feature space and takes their similarity there.",
    "一个头可以视为一个核函数：把输入映射到特征空间，再计算相似度。",
    formula="κ(x, y) = exp(x W_Q W_Kᵀ yᵀ / √d_k)",
    at=[
        place("treatment", "5.3.1",
              "A single head can be seen as a kernel function, several heads as a combination of kernels, "
              "as in multiple kernel learning.",
              "单头可视为一个核函数，多头是多个核函数的组合，即“多核学习”。", paragraph=3),
    ],
    also="Tsai et al. 2019, 1908.11775",
    control=("with W_Q = W_K it is symmetric and positive semidefinite", "W_Q = W_K 时，它对称且半正定"),
    note="核方法中的核函数须对称且半正定。W_Q ≠ W_K 时 exp(QKᵀ) 两者都不是：谁关注谁有方向。多核学习的结论因此不能直接"
         "套用；"
    "文中“核”若只指相似度，则无可判断。",
    expected=Verdict.FAILS,
)  # fmt: skip
def head_is_a_kernel() -> list[Check]:
    """A kernel of kernel methods is symmetric and positive semidefinite. With W_Q ≠ W_K, exp(QKᵀ) is neither: who
    attends to whom has a direction. So results of multiple kernel learning do not carry over. If “kernel” means any
    measure of similarity, there is nothing to judge.
    """
    x, w_q, w_k = normal(11, 12, seed=5), normal(12, 4, seed=1) / 2, normal(12, 4, seed=2) / 2
    kappa, alike = (torch.exp(x @ w_q @ (x @ one).mT / 2.0) for one in (w_k, w_q))
    skew, least = difference(kappa.mT, kappa), _least_eigenvalue(kappa)
    return [
        at_most(("difference between κ(x, y) and κ(y, x)", "κ(x, y) 与 κ(y, x) 之差"), skew, 1e-12),
        at_least(("least eigenvalue of the symmetric part, relative to the largest",
                  "对称部分的最小特征值与最大之比"), least, -1e-12),
        at_most(("the difference with W_Q = W_K",
                 "W_Q = W_K 时的差"), difference(alike.mT, alike), 1e-12).control(skew),
        at_least(("the least eigenvalue with W_Q = W_K", "W_Q = W_K 时的最小特征值"), _least_eigenvalue(alike), -1e-12)
        .control(least),
    ]  # fmt: skip


@claim(
    "The weights of a head have n degrees of freedom, as each row is a probability distribution.",
    "一个头的权重矩阵有 n 个自由度，因为每行是一个概率分布。",
    formula=("claimed: n;  counted: n·(n − 1)", "所述：n；计得：n·(n − 1)"),
    at=[place("treatment", "5.3.10", "The matrix of weights has n degrees of freedom, each row being a distribution.",
              "权重矩阵有 n 个自由度（每行是一个概率分布）。", paragraph=4)],
    control=("a matrix with one free number in each row does have n", "每行只有一个自由数的矩阵，确实是 n 个"),
    note="一个分布有 n − 1 个自由度，n 行共 n·(n − 1)。分数的秩为 d_k 时更少，但仍不是 n：2·n·d_k − d_k² − d_k，即 n "
         "= 7、d_k = 2 时 22 个。"
    "以 softmax 的雅可比矩阵的秩计数。",
    expected=Verdict.FAILS,
)  # fmt: skip
def degrees_of_freedom() -> list[Check | Curve]:
    """A distribution has n − 1, n rows have n·(n − 1). Scores of rank d_k have fewer, 2·n·d_k − d_k² − d_k, but not n.
    Counted as the rank of the Jacobian of the softmax.
    """
    n, half = 7, Bilingual("n, as claimed", "n，如所述")
    sizes = 2, 3, 5, 7, 9
    free = {m: _freedom(_of_any_rank, normal(m, m)) for m in sizes}
    low = {m: _freedom(_of_rank_two, normal(2, m, 2)) for m in sizes}
    one = _freedom(_one_number_a_row, normal(n))
    lines = {Bilingual("free scores", "自由的分数"): free, Bilingual("scores of rank 2", "秩为 2 的分数"): low}
    return [
        equal(("degrees of freedom of P, n = 7", "P 的自由度，n = 7"), free[n], n),
        equal(("with d_k = 2", "d_k = 2 时"), low[n], n),
        equal(("of a P with one free number in each row", "每行一个自由数的 P"), one, n).control(free[n]),
        Curve.of(Bilingual("Degrees of freedom of a head's weights", "一个头的权重的自由度"), Bilingual("tokens n",
                                                                                              "词元数 n"),
                 Bilingual("rank of the Jacobian", "雅可比矩阵的秩"), lines, {half: {m: m for m in sizes}}),
    ]  # fmt: skip


@claim(
    "With enough basis functions, multi-head attention approximates any continuous function.",
    "只要基函数足够丰富，多头注意力就能逼近任意连续函数。",
    formula=("n = 1: head_i = x W_i^V, so f(x) = x Σ_i W_i^V W_i^O",
             "n = 1：head_i = x W_i^V，故 f(x) = x Σ_i W_i^V W_i^O"),
    at=[
        place("treatment", "5.3.16",
              "If the set of basis functions is rich enough, their linear combinations approximate any "
              "continuous function; multi-head attention learns its basis.",
              "若基函数集合足够丰富，其线性组合可逼近任意连续函数；多头注意力自适应地构造基函数。", paragraph=3),
    ],
    control=("a network with one hidden layer, trained in the same way, does approximate it",
             "同样训练的单隐层网络能逼近它"),
    note="这句话本身是关于足够丰富的函数族的定理；文中把它用于多头注意力，却没有说明后者是否足够丰富，其实并不是。n "
         "= 1 时 softmax 恒为 1，不论多少个头，输出都是 x "
         "的线性函数；"
    "没有位置信息时，它对词元的排列等变，只作用于第一个词元的函数也做不到。Transformer 的逼近定理需要前馈网络与位"
    "置（Yun et al. 2020）。",
    also="Yun et al. 2020, 1912.10077",
    expected=Verdict.FAILS,
)  # fmt: skip
def approximates_everything() -> list[Check]:
    """The sentence itself is a theorem about families that are rich enough; multi-head attention, to which the text
    applies it without saying whether it is one, is not. For n = 1 the softmax is 1, and with any number of heads the
    output is linear in x. Without positions it is equivariant to the order of tokens,
    so that a function of the first token only is out of reach. Theorems for Transformers need the feed-forward layer
    and positions (Yun et al. 2020).
    """
    square = {h: _missed(standard(8, h), 1, lambda x: x.square() - 1) for h in (1, 8)}
    first = _missed(standard(8, 4), 2, lambda x: x * torch.tensor([1.0, 0.0])[:, None])
    network = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    able = _missed(network, 1, lambda x: x.square() - 1)
    return [
        at_most(("share of y = x² − 1 missed, n = 1, better of 1 and 8 heads",
                 "n = 1 时 y = x² − 1 未学到的比例，1 个与 8 个头中较好的"),
                min(square.values()), 0.1),
        at_most(("share of y = (x_1, 0) missed, n = 2", "n = 2 时 y = (x_1, 0) 未学到的比例"), first, 0.1),
        at_most(("share of y = x² − 1 missed by a network with 64 hidden units",
                 "64 个隐单元的网络未学到的 y = x² − 1 的比例"),
                able, 0.1).control(min(square.values())),
    ]  # fmt: skip


def _least_eigenvalue(matrix: Tensor) -> float:
    """The least eigenvalue of the symmetric part, relative to the largest."""
    values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2)
    return float(values[0] / values[-1])


def _freedom(weights: Callable[[Tensor], Tensor], at: Tensor) -> int:
    """The rank of the Jacobian of the weights with respect to all free numbers."""
    jacobian: Any = torch.autograd.functional.jacobian(lambda t: weights(t).flatten(), at)
    return int(torch.linalg.matrix_rank(jacobian.flatten(1), rtol=1e-10))


def _of_any_rank(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1)


def _of_rank_two(numbers: Tensor) -> Tensor:
    q, k = numbers
    return torch.softmax(q @ k.mT / math.sqrt(2), -1)


def _one_number_a_row(numbers: Tensor) -> Tensor:
    """Each row has a free weight on its own token and shares the rest equally."""
    n, own = len(numbers), torch.sigmoid(numbers)
    return torch.diag(own) + (1 - own)[:, None] / (n - 1) * (1 - torch.eye(n, dtype=numbers.dtype))


def _missed(module: torch.nn.Module, n: int, target: Callable[[Tensor], Tensor]) -> float:
    """The share of a target [b, n, 8] that a module misses after training on random inputs, measured on others."""
    draw = torch.Generator().manual_seed(0)

    def loss() -> Tensor:
        x = torch.randn(128, n, 8, generator=draw)
        y = target(x)
        return (module(x) - y).square().sum() / y.square().sum()

    list(adam(module.parameters(), loss, 300, 1e-2, last=0.05))
    with torch.no_grad():
        return loss().item()
