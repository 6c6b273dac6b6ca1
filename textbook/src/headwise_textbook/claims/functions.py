"""Attention as a kernel, as a set of free numbers, and as an approximation of functions."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.wording import Bilingual
from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.evidence import Check, at_least, at_most, difference, equal
from headwise_textbook.claims.samples import adam, normal, standard
from headwise_textbook.curves import Curve


@claim
def head_is_a_kernel() -> list[Check]:
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


@claim
def degrees_of_freedom() -> list[Check | Curve]:
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


@claim
def approximates_everything() -> list[Check]:
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
