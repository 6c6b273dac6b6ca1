"""What one head can express, what only several can, and what they can be trained to do."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise import AttentionMap, attend
from headwise.wording import tr
from headwise_textbook.claims.claim import Check, Plot, at_least, at_most, claim, difference, differs, equal, same
from headwise_textbook.claims.model import Trained, adam, layer, multi_head, normal, rank, standard, trained
from headwise_textbook.trace import seeded

# What one head can express, and what only several heads can.
KEYS = 4096
MEASURED = tr("measured")


@claim
def d_k_bounds_rank() -> list[Check]:
    ranks = {d: rank(normal(61, d, seed=1) @ normal(61, d, seed=2).mT) for d in (1, 2, 5)}
    weights = torch.softmax(normal(61, 61), -1)
    return [
        *(equal(tr("rank of 61×61 scores, d_k = {d}", d=d), found, d) for d, found in ranks.items()),
        equal(tr("rank of a softmax of 61×61 numbers"), rank(weights), 61).control(ranks[5]),
    ]


@claim
def d_k_bounds_information() -> list[Check | Plot]:
    amap = _circle(KEYS)
    out = (amap @ amap.k[0, 0])[0, 0]  # the values are the points of the circle, d_v = d_k = 2
    known = (out - amap.k[0, 0]).norm(dim=-1) < math.sin(math.pi / KEYS)  # half the distance of two keys
    bits = math.log2(max(1, int(known.sum())))
    signs = math.log2(len(set(map(tuple, (out >= 0).tolist()))))
    # As all keys are chosen equally often, the information in a row is log2 n minus its entropy.
    entropies = {n: float(_circle(n).measure("entropy")["entropy"]) for n in (4, 16, 64, 256, 1024, KEYS)}
    measured = {n: math.log2(n) - entropy / math.log(2) for n, entropy in entropies.items()}
    claimed = {
        tr("as claimed: d_k"): dict.fromkeys(measured, 2.0),
        tr("log2 n, the maximum"): {n: math.log2(n) for n in measured},
    }
    return [
        at_most(tr("bits in the output of a head with d_k = 2"), bits, 2.0),
        at_most(tr("bits in its pattern, per row"), measured[KEYS], 2.0),
        at_most(tr("bits in the signs of the output"), signs, 2.0).control(),
        Plot({MEASURED: measured}, claimed),
    ]  # fmt: skip


@claim
def head_output_is_limited() -> list[Check | Plot]:
    model = trained()
    ranks, energy = [], []
    for i, heads in enumerate(model.heads):
        w = model.attention(i).per_head_weights()["o"].detach().double()  # [h, d_v, d_model]
        added = torch.einsum("nhd,hde->hne", heads.double(), w)
        singular = torch.linalg.svdvals(added)  # [h, min(n, d_model)]
        ranks += [int((s > 1e-9 * s[0]).sum()) for s in singular]
        share = singular.square().cumsum(-1)
        energy.append(share / share[:, -1:])
    d_v, whole = model.heads[0].shape[-1], model.decoder.config.d_model
    shares = torch.cat(energy)  # [layers · h, …]
    size = (1, 2, 4, 8, 16, d_v)
    return [
        at_most(tr("largest rank of the output of a trained head, of {whole} dimensions", whole=whole),
                max(ranks), d_v),
        at_most(tr("tokens of 4096 distinguished with d_v = 1"), _distinguished(KEYS), 2).beyond(),
        at_least(tr("rank of the layer's output relative to that of a head"),
                 _rank_of_sum(model) / d_v, 2.0).control(max(ranks) / d_v),
        Plot({
            tr("mean of all heads"): {r: float(shares[:, r - 1].mean()) for r in size},
            tr("the head with the fewest directions"): {r: float(shares[:, r - 1].max()) for r in size},
            tr("the head with the most directions"): {r: float(shares[:, r - 1].min()) for r in size},
        }),
    ]  # fmt: skip


@claim
def one_head_every_pattern() -> list[Check | Plot]:
    n = 17
    p = torch.softmax(2.0 * normal(n, n), -1)
    low = torch.softmax(normal(n, 2, seed=1) @ normal(n, 2, seed=2).mT, -1)
    errors = {d: _pattern_error(p, d) for d in range(1, n + 1)}
    centred = p.log() - p.log().mean(-1, keepdim=True)
    # Scores that give P differ from ln P by a constant a row, so centred they are `centred`: no lower rank will do.
    return [
        at_most(tr("n = 17, d_k = 17: error of P"), errors[n], 1e-10),
        at_least(tr("d_k = 15: error with the closest scores of that rank"), errors[n - 2], 1e-3),
        at_least(tr("lowest rank of scores that give P"), rank(centred), n - 1),
        at_least(tr("d_k = 16: error of P"), errors[n - 1], 1e-3).beyond(),
        at_most(tr("d_k = 2: error of a P whose logarithms have rank 2"),
                _pattern_error(low, 2), 1e-10).control(errors[2]),
        Plot({tr("closest scores of that rank"): errors}),
    ]  # fmt: skip


@claim
def many_heads_beat_one() -> list[Check]:
    n, d = 9, 4
    x = torch.cat((normal(12, n, d), normal(12, 1, d, seed=1).expand(-1, n, -1)))  # half of them constant
    shifts = torch.eye(n, dtype=torch.float64).roll(1, 1), torch.eye(n, dtype=torch.float64).roll(-1, 1)
    target = shifts[1] @ x - shifts[0] @ x
    two = _attended(shifts[1], x) - _attended(shifts[0], x)  # W^V W^O = 1 and −1
    one, other = (torch.softmax(normal(n, n, seed=s), -1) for s in (7, 8))  # two heads with W^V W^O = 1, one with 2
    merged = difference(2 * _attended((one + other) / 2, x), _attended(one, x) + _attended(other, x))
    left = {h: _one_large_head_missed(h) for h in (1, 4)}
    what = {h: tr("{h} × d_k = {d_k} trained on one head of d_k = 4, share missed", h=h, d_k=4 // h) for h in left}
    return [
        same(tr("two heads, error on x_{i−1} − x_{i+1}"), two, target, 1e-10),
        at_least(tr("best single head, share missed"), _one_head_misses(x, target), 0.2),
        at_least(tr("heads with one W^V W^O, share that one head misses"), merged, 1e-6)
        .beyond(),
        at_most(what[4], left[4], 0.01).beyond(),
        at_most(what[1], left[1], 0.01).control(left[4]),
    ]  # fmt: skip


@claim
def one_head_is_asymmetric() -> list[Check]:
    n = 9
    p = torch.softmax(2.0 * normal(n, n), -1)  # the strength of i → j says nothing of that of j → i
    symmetric, found = torch.softmax((p.log() + p.log().mT) / 2, -1), _pattern_error(p, n)
    # As functions of X: the log-weights of one head with d_k = d_model = 4, and those of the mean pattern of two.
    module, x = standard(4, 2, head_dim=4).double(), normal(1, 17, 4, seed=5)
    patterns = module(x, return_map=True)[1].to_dense()[0].detach()
    one, two = (rank(logs - logs.mean(-1, keepdim=True)) for logs in (patterns[0].log(), patterns.mean(0).log()))
    return [
        at_least(tr("rank of the log-weights of two heads of d_k = d_model = 4, mean pattern, 17 tokens"), two, 5),
        at_least(tr("error of one head of size n on an asymmetric matrix P"), found, 0.01).beyond(),
        at_most(tr("the rank of one head"), one, 4).control(),
        at_least(tr("error of one head with W_Q = W_K up to constants in a row"), difference(symmetric, p), 0.01)
        .control(found),
    ]  # fmt: skip


@claim
def independent_heads_add() -> list[Check]:
    module, x = layer("block_diagonal", 12, 3), normal(20_000, 1, 12, seed=5)
    apart, alike = (_bits_shared(module, one) for one in (x, x + 2.0 * normal(20_000, 1, 1, seed=6)))
    return [
        at_most(tr("bits of two heads minus their joint bits, independent"), apart, 0.01),
        at_least(tr("the same, correlated: redundant bits"), alike, 0.5),
        at_least(tr("the same of one head and its copy with a little noise"), _bits_shared(module, x, copied=True), 5)
        .control(),
    ]  # fmt: skip


def _bits_shared(module: Any, x: Tensor, copied: bool = False) -> float:
    """Bits that the outputs of two heads of a layer have in common for single tokens, for which they are normal."""
    heads = module(x, return_concat=True)[1].detach().flatten(0, 1).unflatten(-1, (3, 4))
    one, other = heads[:, 0], heads[:, 0] + 0.01 * heads[:, 1] if copied else heads[:, 1]
    entropies = [float(torch.logdet(torch.cov(part.mT))) / 2 for part in (one, other, torch.cat((one, other), 1))]
    return (entropies[0] + entropies[1] - entropies[2]) / math.log(2)


@claim
def basis_functions() -> list[Check | Plot]:
    module, x = multi_head(), normal(5, 11, 12, seed=5)
    y, concat = module(x, return_concat=True)
    phi, out = concat.detach().flatten(0, 1), y.detach().flatten(0, 1)
    fit = torch.linalg.lstsq(phi, out).solution
    of_x = torch.linalg.lstsq(x.flatten(0, 1), out).solution  # the layer is not linear in X
    left = {}
    for heads in (1, 2, 3):  # the share that the best linear map of them does not reproduce
        of = phi[:, : 4 * heads]
        left[heads] = float((of @ torch.linalg.lstsq(of, out).solution - out).norm() / out.norm())
    error = difference(phi @ fit, out)
    return [
        at_most(tr("error of the fit"), error, 1e-10),
        same(tr("W_O found, error"), fit, module.o_proj.weight.mT, 1e-8),
        differs(tr("missed by a fit on X itself"), x.flatten(0, 1) @ of_x, out),
        at_least(tr("missed by a fit on two of the heads"), left[2], 0.01).control(left[3]),
        Plot({tr("linear in the heads"): left}),
    ]  # fmt: skip


def _distinguished(n: int) -> int:
    """How many of n tokens on a circle, each attending to itself, get distinguishable outputs of one number."""
    q, k = _circle(n).q, _circle(n).k
    values = torch.linspace(-1.0, 1.0, n, dtype=torch.float64)[None, None, :, None]
    out = attend(q, k, values, scale=_sharpness(n))[0, 0, :, 0]
    return int((out - values[0, 0, :, 0]).abs().lt(0.5 * float(values[0, 0, 1, 0] - values[0, 0, 0, 0])).sum())


def _rank_of_sum(model: Trained) -> int:
    """Rank of the output of the first layer, the sum over its heads."""
    return rank(model.heads[0].double().flatten(1) @ model.attention(0).o_proj.weight.detach().double().mT)


def _circle(n: int) -> AttentionMap:
    """n keys and n queries of two numbers at the same angles, so sharp that neighbours get no weight."""
    angle = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    points = torch.stack((angle.cos(), angle.sin()), -1)[None, None]
    return attend(points, points, points, scale=_sharpness(n), return_map=True)[1]


def _sharpness(n: int) -> float:
    """The scale at which neighbours on a circle of n keys get e^{−20} of the largest weight."""
    return 20.0 / (1 - math.cos(2 * math.pi / n))


def _pattern_error(p: Tensor, d: int) -> float:
    """The largest error of P from the rank-d scores closest to ln P; the rows of ln P are centred unless d ≥ n."""
    n = len(p)
    logs = p.log() if d >= n else p.log() - p.log().mean(-1, keepdim=True)
    u, s, vh = torch.linalg.svd(logs)
    q, k = u[:, :d] * s[:d], vh[:d].mT
    weights = attend(q[None, None], k[None, None], k[None, None], scale=1.0, return_map=True)[1].to_dense()[0, 0]
    return difference(weights, p)


def _attended(p: Tensor, x: Tensor) -> Tensor:
    """Attention with the weights p [n, n], up to 1e-14 where p is 0, and the values x [b, n, d]."""
    n = len(p)
    q = (p + 1e-14).log().expand(len(x), 1, n, n)
    return attend(q, torch.eye(n, dtype=p.dtype).expand_as(q), x[:, None], scale=1.0)[:, 0]


def _one_head_misses(x: Tensor, target: Tensor) -> float:
    """Share of the target's energy that the best single head misses, with free weights for every input (more than any
    W^Q and W^K allow) and one W for all inputs."""
    logits = nn.Parameter(0.01 * normal(len(x), x.shape[1], x.shape[1], seed=3))
    w = nn.Parameter(0.1 * normal(x.shape[2], x.shape[2], seed=4))
    return min(adam([logits, w], lambda: _share(torch.softmax(logits, -1) @ x @ w, target), 300, 0.1))


def _one_large_head_missed(h: int) -> float:
    """The share of one sharp head of size 4 that a layer of h heads misses after training, d_model = 4."""
    x = nn.functional.normalize(normal(24, 12, 4, seed=11), dim=-1)
    target = attend(*([x[:, None]] * 3), scale=12.0)[:, 0]  # each token attends to those that resemble it
    student = layer("multi_head", 4, h, seed=3)
    return min(adam(student.parameters(), lambda: _share(student(x), target), 400, 0.05))


# Attention as a kernel, as a set of free numbers, and as an approximation of functions.
@claim
def head_is_a_kernel() -> list[Check]:
    x, w_q, w_k = normal(11, 12, seed=5), normal(12, 4, seed=1) / 2, normal(12, 4, seed=2) / 2
    kappa, alike = (torch.exp(x @ w_q @ (x @ one).mT / 2.0) for one in (w_k, w_q))
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=x.dtype)
    signed = torch.exp(x @ w_q * signs @ (x @ w_q).mT / 2.0)
    least, rows = _least_eigenvalue(alike), alike / alike.sum(-1, keepdim=True)
    return [
        at_most(tr("difference between κ(x, y) and κ(y, x) with W_Q = W_K"), difference(alike.mT, alike), 1e-12),
        at_least(tr("least eigenvalue relative to the largest, W_Q = W_K"), least, -1e-12),
        at_most(tr("the difference with W_Q ≠ W_K"), difference(kappa.mT, kappa), 1e-12).beyond(),
        at_least(tr("the least eigenvalue of the symmetric part, W_Q ≠ W_K"), _least_eigenvalue(kappa), -1e-12)
        .beyond(),
        at_most(tr("difference between p_ij and p_ji after the softmax, W_Q = W_K"), difference(rows.mT, rows), 1e-12)
        .beyond(),
        at_most(tr("the least eigenvalue with signs in the product"), _least_eigenvalue(signed), -1e-6)
        .control(least),
    ]  # fmt: skip


@claim
def degrees_of_freedom() -> list[Check | Plot]:
    n, half = 7, tr("n, as claimed")

    def one_number_a_row(numbers: Tensor) -> Tensor:
        """Each row has a free weight on its own token and shares the rest equally."""
        own = torch.sigmoid(numbers)
        return torch.diag(own) + (1 - own)[:, None] / (n - 1) * (1 - torch.eye(n, dtype=numbers.dtype))

    sizes = 2, 3, 5, 7, 9
    free = {m: _freedom(lambda scores: torch.softmax(scores, -1), normal(m, m)) for m in sizes}
    low = {m: _freedom(lambda qk: torch.softmax(qk[0] @ qk[1].mT / math.sqrt(2), -1), normal(2, m, 2)) for m in sizes}
    one = _freedom(one_number_a_row, normal(n))
    return [
        equal(tr("degrees of freedom of P, n = 7"), free[n], n),
        equal(tr("with d_k = 2"), low[n], n),
        equal(tr("of a P with one free number in each row"), one, n).control(),
        Plot({tr("free scores"): free, tr("scores of rank 2"): low}, {half: {m: m for m in sizes}}),
    ]  # fmt: skip


@claim
def approximates_everything() -> list[Check]:
    square = {h: _missed(standard(8, h), 1, lambda x: x.square() - 1) for h in (1, 8)}
    first = _missed(standard(8, 4), 2, lambda x: x * torch.tensor([1.0, 0.0])[:, None])
    rich, poor = (_missed_by_random_features(count) for count in (400, 2))
    return [
        at_most(tr("share of y = x² − 1 missed by combinations of 400 random functions of x"), rich, 0.1),
        at_most(tr("share of y = x² − 1 missed by heads, n = 1, better of 1 and 8"), min(square.values()), 0.1)
        .beyond(),
        at_most(tr("share of y = (x_1, 0) missed by heads, n = 2"), first, 0.1).beyond(),
        at_least(tr("share of y = x² − 1 missed by combinations of 2 random functions"), poor, 0.5).control(),
    ]  # fmt: skip


def _missed_by_random_features(count: int) -> float:
    """The share of y = x² − 1 that the best linear combinations of random functions of x miss, on other inputs."""
    w, b = normal(8, count, seed=1), normal(count, seed=2)
    seen, x = normal(4000, 8, seed=3), normal(1000, 8, seed=4)
    fit = torch.linalg.lstsq((seen @ w + b).relu(), seen.square() - 1).solution
    return float(_share((x @ w + b).relu() @ fit, x.square() - 1))


def _least_eigenvalue(matrix: Tensor) -> float:
    """The least eigenvalue of the symmetric part, relative to the largest."""
    values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2)
    return float(values[0] / values[-1])


def _freedom(weights: Callable[[Tensor], Tensor], at: Tensor) -> int:
    """The rank of the Jacobian of the weights with respect to all free numbers."""
    jacobian: Any = torch.autograd.functional.jacobian(lambda t: weights(t).flatten(), at)
    return rank(jacobian.flatten(1))


def _missed(module: torch.nn.Module, n: int, target: Callable[[Tensor], Tensor]) -> float:
    """The share of a target [b, n, 8] that a module misses after training on random inputs, measured on others."""
    draw = torch.Generator().manual_seed(0)

    def loss() -> Tensor:
        x = torch.randn(128, n, 8, generator=draw)
        return _share(module(x), target(x))

    list(adam(module.parameters(), loss, 300, 1e-2, last=0.05))
    with torch.no_grad():
        return loss().item()


# What heads can be trained to do: with too few heads, with heads that are too small, and with enough heads.
STEPS = 300
MISSED = tr("share of the target missed")


@claim
def low_rank_bottleneck() -> list[Check | Plot]:
    missed = {d: _copying_missed(d) for d in (1, 2, 3, 4, 12)}
    return [
        at_least(tr("d_k = 1: share of the target missed"), missed[1], 0.5),
        at_least(tr("d_k = 4, still below n = 12"), missed[4], 0.5).beyond(),
        at_most("d_k = 12", missed[12], 0.05).control(),
        Plot({tr("after 400 steps"): missed}),
    ]  # fmt: skip


@claim
def more_heads_learn_more() -> list[Check | Plot]:
    missed = {h: _trained_missed(h) for h in (1, 2, 4, 8, 16, 32)}
    steps = (*range(0, STEPS, 25), STEPS)
    ends = {h: way[-1] for h, way in missed.items()}
    return [
        at_least(tr("h = 1, d_k = 32: share missed"), ends[1], 0.4),
        at_most("h = 2, d_k = 16", ends[2], 0.03),
        at_most("h = 4, d_k = 8", ends[4], 0.03),
        at_most("h = 32, d_k = 1", ends[32], 0.03).beyond(),
        at_most(tr("one head on y_i = x_π(i)"), _trained_missed(1, patterns=1)[-1], 0.03).control(),
        Plot({tr("after {steps} steps", steps=STEPS): ends}),
        Plot({f"h = {h}, d_k = {32 // h}": {t: missed[h][t] for t in steps} for h in (1, 2, 4, 32)}),
    ]  # fmt: skip


def _trained_missed(h: int, patterns: int = 2) -> list[float]:
    """The share of y_i = x_π(i) − x_σ(i), or of its first term, that a layer of h heads misses: at each step on new
    sequences, and finally on 256 others.

    Tokens are [x | position]: 8 random numbers, and a random vector of 24 numbers for each of 16 positions.
    """
    n, content, d_model = 16, 8, 32
    draw = torch.Generator().manual_seed(0)
    first, second = (torch.randperm(n, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    places = normal(n, d_model - content, seed=5).float()
    with seeded(0):
        module = standard(d_model, h)

    def missed(sequences: int = 16) -> Tensor:
        x = torch.randn(sequences, n, content, generator=draw)
        y = module(torch.cat((x, places.expand(sequences, -1, -1)), -1))[..., :content]
        return _share(y, x[:, first] - (x[:, second] if patterns == 2 else 0.0))

    losses = list(adam(module.parameters(), missed, STEPS, 1e-2, last=0.02))
    with torch.no_grad():
        return [*losses, missed(256).item()]


def _share(found: Tensor, target: Tensor) -> Tensor:
    """The share of the target's energy that is missed."""
    return (found - target).square().sum() / target.square().sum()


def _copying_missed(d: int) -> float:
    """The share of y_i = x_π(i) that a trained head of size d misses; positions are one-hot vectors."""
    n = 12
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    x = normal(16, 1, n, 5)
    weights = [nn.Parameter(normal(n, d, seed=s)) for s in (1, 2)]  # a one-hot position times W is a row of W

    def missed() -> Tensor:
        q, k = (w.expand(len(x), 1, n, d) for w in weights)
        return _share(attend(q, k, x), x[:, :, order])

    return [*adam(weights, missed, 400, 0.1)][-1]
