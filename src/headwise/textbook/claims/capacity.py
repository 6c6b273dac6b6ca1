"""What one head can express, and what only several heads can."""

import math

import torch
from torch import Tensor, nn

from headwise.attention import attend
from headwise.map import AttentionMap
from headwise.reports.curves import Curve
from headwise.textbook.claims.claim import claim
from headwise.textbook.claims.evidence import Check, Verdict, at_least, at_most, difference, equal, same
from headwise.textbook.claims.model import Trained, trained
from headwise.textbook.claims.samples import adam, multi_head, normal

KEYS = 4096


@claim(
    "The scores Q Kᵀ of a head have rank d_k at most.",
    formula="rank(Q Kᵀ) ≤ d_k",
    source="§5.3, h against d_k; Bhojanapalli et al. 2020, 2002.07028",
)
def d_k_bounds_rank() -> list[Check]:
    """Their softmax has full rank nevertheless."""
    found = []
    for d in (1, 2, 5):
        scores = normal(61, d, seed=1) @ normal(61, d, seed=2).mT
        found.append(equal(f"rank of 61×61 scores, d_k = {d}", _rank(scores), d))
    weights = torch.softmax(normal(61, 61), -1)
    return [*found, equal("rank of their softmax", _rank(weights), 61).control()]


@claim(
    "What a head can say about where it looks is limited to some d_k bits.",
    formula="claimed: I(query; key looked at) ≤ d_k bits",
    source="§5.3, limited information of a head",
    expected=Verdict.FAILS,
)
def d_k_bounds_information() -> list[Check | Curve]:
    """d_k bounds the rank of the scores, not the information: with d_k = 2 and keys on a circle, each of 4096 queries
    selects its own key.
    """
    amap = _circle(KEYS)
    weights, keys = amap.topk(1)
    own = int((keys[0, 0, :, 0] == torch.arange(KEYS)).sum())
    measured = {n: _bits(_circle(n)) for n in (4, 16, 64, 256, 1024, KEYS)}
    claimed = {
        "as claimed: d_k": dict.fromkeys(measured, 2.0),
        "log2 n, the maximum": {n: math.log2(n) for n in measured},
    }
    title = "Information in the pattern of a head with d_k = 2"
    return [
        at_most("bits per row at d_k = 2", measured[KEYS], 2.0),
        equal("queries of 4096 with a key of their own", own, KEYS).control(),
        at_least("smallest weight on that key", float(weights.min()), 0.99).control(),
        equal("rank of the scores, 512 of them", _rank(_circle(512).q[0, 0] @ _circle(512).k[0, 0].mT), 2).control(),
        Curve.of(title, "keys n", "bits", {"measured": measured}, claimed, log="x"),
    ]


@claim(
    "What a head can tell is limited: its output has d_v numbers for a token.",
    formula="rank(head_i W_i^O) ≤ d_v",
    source="§5.3, limited information of a head",
    expected=Verdict.CONDITIONS,
)
def head_output_is_limited() -> list[Check | Curve]:
    """Limited in directions: each trained head adds to d_v of d_model dimensions, and a few of them carry most of the
    energy. Not limited in bits: a head with d_v = 1 that attends to its own token distinguishes 4096 of them.
    """
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
    lines = {
        "mean of all heads": {r: float(shares[:, r - 1].mean()) for r in size},
        "the head with the fewest directions": {r: float(shares[:, r - 1].max()) for r in size},
        "the head with the most directions": {r: float(shares[:, r - 1].min()) for r in size},
    }
    return [
        at_most(f"largest rank of the output of a trained head, of {whole} dimensions", max(ranks), d_v),
        at_most("tokens of 4096 distinguished with d_v = 1", _distinguished(KEYS), 2).beyond(),
        at_least("rank of the layer's output relative to that of a head", _rank_of_sum(model) / d_v, 2.0).control(),
        Curve.of(f"Output of trained heads, {d_v} directions each", "directions", "share of energy", lines, log="x"),
    ]


@claim(
    "One head reaches every positive matrix P of rows that sum to 1 if and only if d_k ≥ n.",
    formula="softmax(Q Kᵀ) = P for every P > 0 ⟺ d_k ≥ n",
    source="§5.3, h against d_k; Bhojanapalli et al. 2020, 2002.07028, theorem 1",
    expected=Verdict.CONDITIONS,
)
def one_head_every_pattern() -> list[Check | Curve]:
    """d_k ≥ n is sufficient and n − 2 is not, but n − 1 is sufficient too, because the softmax does not depend on a
    constant in each row: the rank of ln P with centred rows decides.
    """
    n = 17
    p = torch.softmax(2.0 * normal(n, n), -1)
    errors = {d: _pattern_error(p, d) for d in range(1, n + 1)}
    lines = {"closest scores of that rank": errors}
    centred = p.log() - p.log().mean(-1, keepdim=True)
    # Scores that give P differ from ln P by a constant a row, so centred they are `centred`: no lower rank will do.
    return [
        at_most("n = 17, d_k = 17: error of P", errors[n], 1e-10),
        at_least("d_k = 15: error with the closest scores of that rank", errors[n - 2], 1e-3),
        at_least("lowest rank of scores that give P", _rank(centred), n - 1),
        at_least("d_k = 16: error of P", errors[n - 1], 1e-3).beyond(),
        Curve.of("Error of a matrix P made with scores of rank d_k, n = 17", "d_k", "largest error", lines, log="y"),
    ]


@claim(
    "Several heads represent strictly more than one.",
    formula="y_i = x_{i−1} − x_{i+1}",
    source="§5.3; ch. 11, single head against multi-head; Amsel et al. 2024, 2407.16153",
    expected=Verdict.CONDITIONS,
)
def many_heads_beat_one() -> list[Check]:
    """y_i = x_{i−1} − x_{i+1} requires two heads: one head gives an average times one matrix, which is 0 for equal
    tokens only if the matrix is 0. Heads with a common W^V W^O are equivalent to one head, because a mean of patterns
    is a pattern.
    """
    n, d = 9, 4
    x = torch.cat((normal(12, n, d), normal(12, 1, d, seed=1).expand(-1, n, -1)))  # half of them constant
    shifts = torch.eye(n, dtype=torch.float64).roll(1, 1), torch.eye(n, dtype=torch.float64).roll(-1, 1)
    target = shifts[1] @ x - shifts[0] @ x
    two = _attended(shifts[1], x) - _attended(shifts[0], x)  # W^V W^O = 1 and −1
    return [
        same("two heads, error on x_{i−1} − x_{i+1}", two, target, 1e-10),
        at_least("best single head, share missed", _one_head_misses(x, target), 0.2),
        at_least("heads with one W^V W^O, share that one head misses", _merged(x), 1e-6).beyond(),
    ]


@claim(
    "The layer is f(X) = Concat(φ_1(X) … φ_h(X)) W_O: linear in what the heads say, which are its basis functions.",
    formula="f(X) = Concat(φ_1(X) … φ_h(X)) W_O",
    source="5.3.16",
)
def basis_functions() -> list[Check | Curve]:
    """Least squares from the concatenated heads to the output has no residual and recovers W_O; the basis itself
    depends on X.
    """
    module, x = multi_head(), normal(5, 11, 12, seed=5)
    y, concat = module(x, return_concat=True)
    phi, out = concat.detach().flatten(0, 1), y.detach().flatten(0, 1)
    fit = torch.linalg.lstsq(phi, out).solution
    of_x = torch.linalg.lstsq(x.flatten(0, 1), out).solution  # the layer is not linear in X
    left = {heads: _missed_by_fit(phi[:, : 4 * heads], out) for heads in (1, 2, 3)}
    return [
        same("error of the fit", phi @ fit, out, 1e-10),
        same("W_O found, error", fit, module.o_proj.weight.mT, 1e-8),
        at_least("missed by a fit on X itself", difference(x.flatten(0, 1) @ of_x, out), 0.01).control(),
        at_least("missed by a fit on two of the heads", left[2], 0.01).control(),
        Curve.of("Output of three heads fitted by least squares", "heads available to the fit", "share missed", {
            "linear in the heads": left}, log="y"),
    ]  # fmt: skip


def _distinguished(n: int) -> int:
    """How many of n tokens on a circle, each attending to itself, get distinguishable outputs of one number."""
    q, k = _circle(n).q, _circle(n).k
    values = torch.linspace(-1.0, 1.0, n, dtype=torch.float64)[None, None, :, None]
    out = attend(q, k, values, scale=_sharpness(n))[0, 0, :, 0]
    return int((out - values[0, 0, :, 0]).abs().lt(0.5 * float(values[0, 0, 1, 0] - values[0, 0, 0, 0])).sum())


def _rank_of_sum(model: Trained) -> int:
    """Rank of the output of the first layer, the sum over its heads."""
    return _rank(model.heads[0].double().flatten(1) @ model.attention(0).o_proj.weight.detach().double().mT)


def _rank(matrix: Tensor) -> int:
    return int(torch.linalg.matrix_rank(matrix, rtol=1e-10))


def _missed_by_fit(of: Tensor, out: Tensor) -> float:
    """Share of `out` that the best linear map of `of` does not reproduce."""
    return float((of @ torch.linalg.lstsq(of, out).solution - out).norm() / out.norm())


def _bits(amap: AttentionMap) -> float:
    """Information in bits between query and attended key: log2 n minus the entropy of a row, as all keys are chosen
    equally often."""
    return math.log2(amap.shape[-1]) - float(amap.measure("entropy")["entropy"]) / math.log(2)


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

    def missed() -> Tensor:
        return (torch.softmax(logits, -1) @ x @ w - target).square().sum() / target.square().sum()

    return min(adam([logits, w], missed, 300, 0.1))


def _merged(x: Tensor) -> float:
    """Error of one head with W^V W^O = 2 and the mean pattern, compared with two heads with W^V W^O = 1."""
    n = x.shape[1]
    one, other = (torch.softmax(normal(n, n, seed=s), -1) for s in (7, 8))
    return difference(2 * _attended((one + other) / 2, x), _attended(one, x) + _attended(other, x))
