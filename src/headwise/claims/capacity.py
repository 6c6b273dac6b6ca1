"""What a head can express, and what several can that one cannot."""

import math

import torch
from torch import Tensor, nn

from headwise.attention import attend
from headwise.claims.claim import claim
from headwise.claims.definitions import multi_head
from headwise.claims.evidence import Check, Verdict, at_least, at_most, difference, equal, same
from headwise.claims.samples import normal
from headwise.map import AttentionMap

KEYS = 4096


@claim(
    "d-k-bounds-rank",
    "The scores Q Kᵀ of a head have rank d_k at most.",
    source="§5.3, h against d_k; Bhojanapalli et al. 2020, 2002.07028",
    expected=Verdict.HOLDS,
)
def d_k_bounds_rank() -> list[Check]:
    """The softmax of them has full rank nevertheless."""
    found = []
    for d in (1, 2, 5):
        scores = normal(61, d, seed=1) @ normal(61, d, seed=2).mT
        found.append(equal(f"rank of 61×61 scores, d_k = {d}", _rank(scores), d))
    weights = torch.softmax(normal(61, 61), -1)
    return [*found, equal("rank that it can see", _rank(weights), 61).control()]


@claim(
    "d-k-bounds-information",
    "What a head can say about where it looks is limited to some d_k bits.",
    source="§5.3, limited information of a head",
    expected=Verdict.FAILS,
)
def d_k_bounds_information() -> list[Check]:
    """d_k bounds the rank of the scores, not information: with d_k = 2 and keys on a circle each of 4096 queries picks
    a key of its own.
    """
    amap = _circle(KEYS)
    weights, keys = amap.topk(1)
    own = int((keys[0, 0, :, 0] == torch.arange(KEYS)).sum())
    # Every key is chosen by one query alike, so the bits told are log2 n less what stays open in a row.
    bits = math.log2(KEYS) - float(amap.measure("entropy")["entropy"]) / math.log(2)
    return [
        at_most("bits told by a row of d_k = 2", bits, 2.0),
        equal("queries of 4096 with a key of their own", own, KEYS).control(),
        at_least("least weight on that key", float(weights.min()), 0.99).control(),
        equal("rank of the scores, 512 of them", _rank(_circle(512).q[0, 0] @ _circle(512).k[0, 0].mT), 2).control(),
    ]


@claim(
    "one-head-every-pattern",
    "One head reaches every positive matrix P of rows that sum to 1 if and only if d_k ≥ n.",
    source="§5.3, h against d_k; Bhojanapalli et al. 2020, 2002.07028, theorem 1",
    expected=Verdict.CONDITIONS,
)
def one_head_every_pattern() -> list[Check]:
    """d_k ≥ n is enough and n − 2 is not; but n − 1 is enough too, as the softmax forgets a constant in each row: what
    counts is the rank of ln P with its rows centred.
    """
    n = 17
    p = torch.softmax(2.0 * normal(n, n), -1)
    errors = {d: _pattern_error(p, d) for d in (n, n - 1, n - 2)}
    centred = p.log() - p.log().mean(-1, keepdim=True)
    # Scores that give P differ from ln P by a constant a row, so centred they are `centred`: no lower rank will do.
    return [
        at_most("n = 17, d_k = 17: error of P", errors[n], 1e-10),
        at_least("d_k = 15: error with the closest scores of that rank", errors[n - 2], 1e-3),
        at_least("least rank of scores that give P", _rank(centred), n - 1),
        at_least("d_k = 16: error of P", errors[n - 1], 1e-3).beyond(),
    ]


@claim(
    "low-rank-bottleneck",
    "A head with d_k < n cannot learn to look where it should.",
    source="§5.3, why not more heads; Bhojanapalli et al. 2020, 2002.07028 (low-rank bottleneck)",
    expected=Verdict.CONDITIONS,
)
def low_rank_bottleneck() -> list[Check]:
    """A head is trained to copy one of 12 tokens for each, given their places. With d_k = 1 all scores of a row rise
    or fall along one line, so only two keys can be the largest. But a few numbers are enough for sharp patterns,
    which need not be any matrix P.
    """
    missed = {d: _copying_missed(d) for d in (1, 4, 12)}
    return [
        at_least("d_k = 1: share of the target missed", missed[1], 0.5),
        at_least("d_k = 4, still below n = 12", missed[4], 0.5).beyond(),
        at_most("d_k = 12", missed[12], 0.05).control(),
    ]


@claim(
    "many-heads-beat-one",
    "Several heads represent strictly more than one.",
    source="§5.3; ch. 11, single head against multi-head; Amsel et al. 2024, 2407.16153",
    expected=Verdict.CONDITIONS,
)
def many_heads_beat_one() -> list[Check]:
    """y_i = x_{i−1} − x_{i+1} takes two heads: one head gives an average times one matrix, and the average of equal
    tokens leaves nothing to subtract. Heads with a common W^V W^O are one, as a mean of patterns is a pattern.
    """
    n, d = 9, 4
    x = torch.cat((normal(12, n, d), normal(12, 1, d, seed=1).expand(-1, n, -1)))  # half of them constant
    shifts = torch.eye(n, dtype=torch.float64).roll(1, 1), torch.eye(n, dtype=torch.float64).roll(-1, 1)
    target = shifts[1] @ x - shifts[0] @ x
    two = _attended(shifts[1], x) - _attended(shifts[0], x)  # W^V W^O = 1 and −1
    return [
        same("two heads, error on x_{i−1} − x_{i+1}", two, target, 1e-10),
        at_least("best single head, share of it missed", _one_head_misses(x, target), 0.2),
        at_least("heads with one W^V W^O, share that one head misses", _merged(x), 1e-6).beyond(),
    ]


@claim(
    "basis-functions",
    "The layer is f(X) = Concat(φ_1(X) … φ_h(X)) W_O: linear in what the heads say, which are its basis functions.",
    source="5.3.16",
    expected=Verdict.HOLDS,
)
def basis_functions() -> list[Check]:
    """Least squares from the concatenated heads to the output leaves nothing and finds W_O again; the basis itself
    moves with X.
    """
    module, x = multi_head(), normal(5, 11, 12, seed=5)
    y, concat = module(x, return_concat=True)
    phi, out = concat.detach().flatten(0, 1), y.detach().flatten(0, 1)
    fit = torch.linalg.lstsq(phi, out).solution
    of_x = torch.linalg.lstsq(x.flatten(0, 1), out).solution  # the layer is not linear in X
    return [
        same("what the fit misses", phi @ fit, out, 1e-10),
        same("W_O found, error", fit, module.o_proj.weight.mT, 1e-8),
        at_least("missed by a fit on X itself", difference(x.flatten(0, 1) @ of_x, out), 0.01).control(),
    ]


def _rank(matrix: Tensor) -> int:
    return int(torch.linalg.matrix_rank(matrix, rtol=1e-10))


def _circle(n: int) -> AttentionMap:
    """n keys and n queries of two numbers, at the same angles; sharp enough that neighbours get nothing."""
    angle = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    points = torch.stack((angle.cos(), angle.sin()), -1)[None, None]
    sharp = 20.0 / (1 - math.cos(2 * math.pi / n))
    return attend(points, points, points, scale=sharp, return_map=True)[1]


def _pattern_error(p: Tensor, d: int) -> float:
    """The largest error of P made of scores of rank d: the closest ones to ln P, its rows centred if d is too small
    for the rest."""
    n = len(p)
    logs = p.log() if d >= n else p.log() - p.log().mean(-1, keepdim=True)
    u, s, vh = torch.linalg.svd(logs)
    q, k = u[:, :d] * s[:d], vh[:d].mT
    weights = attend(q[None, None], k[None, None], k[None, None], scale=1.0, return_map=True)[1].to_dense()[0, 0]
    return difference(weights, p)


def _attended(p: Tensor, x: Tensor) -> Tensor:
    """Attention with the weights p [n, n], or as good as: 1e-14 where p is 0, values x [b, n, d]."""
    n = len(p)
    q = (p + 1e-14).log().expand(len(x), 1, n, n)
    return attend(q, torch.eye(n, dtype=p.dtype).expand_as(q), x[:, None], scale=1.0)[:, 0]


def _one_head_misses(x: Tensor, target: Tensor) -> float:
    """Share of the target's energy that no single head found, with weights of its own for every input (more than any
    W^Q and W^K could give) and one W for all."""
    logits = nn.Parameter(0.01 * normal(len(x), x.shape[1], x.shape[1], seed=3))
    w = nn.Parameter(0.1 * normal(x.shape[2], x.shape[2], seed=4))
    optimizer = torch.optim.Adam([logits, w], lr=0.1)
    best = math.inf
    for _ in range(300):
        missed = (torch.softmax(logits, -1) @ x @ w - target).square().sum() / target.square().sum()
        best = min(best, missed.item())
        optimizer.zero_grad()
        missed.backward()
        optimizer.step()
    return best


def _copying_missed(d: int) -> float:
    """What a trained head of size d misses of y_i = x_π(i), its places given as one-hot vectors: share of energy."""
    n = 12
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    x = normal(16, 1, n, 5)
    w_q, w_k = (nn.Parameter(normal(n, d, seed=s)) for s in (1, 2))  # a place times W is a row of W
    optimizer = torch.optim.Adam([w_q, w_k], lr=0.1)
    for _ in range(400):
        q, k = (w.expand(len(x), 1, n, d) for w in (w_q, w_k))
        missed = (attend(q, k, x) - x[:, :, order]).square().sum() / x.square().sum()
        optimizer.zero_grad()
        missed.backward()
        optimizer.step()
    return missed.item()


def _merged(x: Tensor) -> float:
    """Two heads with the same W^V W^O = 1, summed, against one head with W^V W^O = 2 and their mean pattern."""
    n = x.shape[1]
    one, other = (torch.softmax(normal(n, n, seed=s), -1) for s in (7, 8))
    return difference(2 * _attended((one + other) / 2, x), _attended(one, x) + _attended(other, x))
