"""What one head can express, what only several can, and what they can be trained to do."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise import AttentionMap, attend
from headwise.wording import Bilingual
from headwise_textbook.claims.claim import Check, at_least, at_most, claim, difference, differs, equal, same
from headwise_textbook.claims.model import Trained, adam, layer, multi_head, normal, rank, standard, trained
from headwise_textbook.curves import Curve
from headwise_textbook.trace import seeded

# What one head can express, and what only several heads can.
KEYS = 4096
MEASURED = Bilingual("measured", "实测")


@claim
def d_k_bounds_rank() -> list[Check]:
    ranks = {d: rank(normal(61, d, seed=1) @ normal(61, d, seed=2).mT) for d in (1, 2, 5)}
    weights = torch.softmax(normal(61, 61), -1)
    return [
        *(
            equal((f"rank of 61×61 scores, d_k = {d}", f"61×61 分数的秩，d_k = {d}"), found, d)
            for d, found in ranks.items()
        ),
        equal(("rank of a softmax of 61×61 numbers", "61×61 个数的 softmax 的秩"), rank(weights), 61).control(ranks[5]),
    ]


@claim
def d_k_bounds_information() -> list[Check | Curve]:
    amap = _circle(KEYS)
    out = (amap @ amap.k[0, 0])[0, 0]  # the values are the points of the circle, d_v = d_k = 2
    known = (out - amap.k[0, 0]).norm(dim=-1) < math.sin(math.pi / KEYS)  # half the distance of two keys
    bits = math.log2(max(1, int(known.sum())))
    signs = math.log2(len(set(map(tuple, (out >= 0).tolist()))))
    # As all keys are chosen equally often, the information in a row is log2 n minus its entropy.
    entropies = {n: float(_circle(n).measure("entropy")["entropy"]) for n in (4, 16, 64, 256, 1024, KEYS)}
    measured = {n: math.log2(n) - entropy / math.log(2) for n, entropy in entropies.items()}
    claimed = {
        Bilingual("as claimed: d_k", "如所述：d_k"): dict.fromkeys(measured, 2.0),
        Bilingual("log2 n, the maximum", "log2 n，最大值"): {n: math.log2(n) for n in measured},
    }
    title = Bilingual("Information in the pattern of a head with d_k = 2", "d_k = 2 的头，其注意力图中的信息")
    return [
        at_most(("bits in the output of a head with d_k = 2", "d_k = 2 的头，其输出中的位数"), bits, 2.0),
        at_most(("bits in its pattern, per row", "其注意力图中每行的位数"), measured[KEYS], 2.0),
        at_most(("bits in the signs of the output", "输出的符号中的位数"), signs, 2.0).control(bits),
        Curve.of(title, Bilingual("keys n", "键数 n"), Bilingual("bits", "位"), {MEASURED: measured}, claimed, log="x"),
    ]  # fmt: skip


@claim
def head_output_is_limited() -> list[Check | Curve]:
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
        Bilingual("mean of all heads", "所有头的平均"): {r: float(shares[:, r - 1].mean()) for r in size},
        Bilingual("the head with the fewest directions", "方向最少的头"): {
            r: float(shares[:, r - 1].max()) for r in size
        },
        Bilingual("the head with the most directions", "方向最多的头"): {
            r: float(shares[:, r - 1].min()) for r in size
        },
    }
    title = Bilingual(f"Output of trained heads, {d_v} directions each", f"训练好的头的输出，各 {d_v} 个方向")
    return [
        at_most((f"largest rank of the output of a trained head, of {whole} dimensions",
                 f"训练好的头的输出的最大秩，共 {whole} 维"),
                max(ranks), d_v),
        at_most(("tokens of 4096 distinguished with d_v = 1",
                 "d_v = 1 时 4096 个词元中能区分的个数"), _distinguished(KEYS), 2).beyond(),
        at_least(("rank of the layer's output relative to that of a head", "整层输出的秩与一个头之比"),
                 _rank_of_sum(model) / d_v, 2.0).control(max(ranks) / d_v),
        Curve.of(title, Bilingual("directions", "方向数"), Bilingual("share of energy", "能量比例"), lines, log="x"),
    ]  # fmt: skip


@claim
def one_head_every_pattern() -> list[Check | Curve]:
    n = 17
    p = torch.softmax(2.0 * normal(n, n), -1)
    low = torch.softmax(normal(n, 2, seed=1) @ normal(n, 2, seed=2).mT, -1)
    errors = {d: _pattern_error(p, d) for d in range(1, n + 1)}
    lines = {Bilingual("closest scores of that rank", "该秩下最接近的分数"): errors}
    centred = p.log() - p.log().mean(-1, keepdim=True)
    title = Bilingual(
        "Error of a matrix P made with scores of rank d_k, n = 17", "用秩为 d_k 的分数实现 P 的误差，n = 17"
    )
    # Scores that give P differ from ln P by a constant a row, so centred they are `centred`: no lower rank will do.
    return [
        at_most(("n = 17, d_k = 17: error of P", "n = 17，d_k = 17：P 的误差"), errors[n], 1e-10),
        at_least(("d_k = 15: error with the closest scores of that rank",
                  "d_k = 15：该秩下最接近的分数的误差"), errors[n - 2], 1e-3),
        at_least(("lowest rank of scores that give P", "能给出 P 的分数的最低秩"), rank(centred), n - 1),
        at_least(("d_k = 16: error of P", "d_k = 16：P 的误差"), errors[n - 1], 1e-3).beyond(),
        at_most(("d_k = 2: error of a P whose logarithms have rank 2", "d_k = 2：对数的秩为 2 的 P 的误差"),
                _pattern_error(low, 2), 1e-10).control(errors[2]),
        Curve.of(title, "d_k", Bilingual("largest error", "最大误差"), lines, log="y"),
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
    what = {h: (f"{h} × d_k = {4 // h} trained on one head of d_k = 4, share missed",
                f"{h} 个 d_k = {4 // h} 的头去学一个 d_k = 4 的头，未学到的比例") for h in left}  # fmt: skip
    return [
        same(("two heads, error on x_{i−1} − x_{i+1}", "两个头对 x_{i−1} − x_{i+1} 的误差"), two, target, 1e-10),
        at_least(("best single head, share missed", "最优单头未实现的比例"), _one_head_misses(x, target), 0.2),
        at_least(("heads with one W^V W^O, share that one head misses",
                  "W^V W^O 相同的头，一个头未实现的比例"), merged, 1e-6)
        .beyond(),
        at_most(what[4], left[4], 0.01).beyond(),
        at_most(what[1], left[1], 0.01).control(left[4]),
    ]  # fmt: skip


@claim
def basis_functions() -> list[Check | Curve]:
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
        at_most(("error of the fit", "拟合的误差"), error, 1e-10),
        same(("W_O found, error", "求得的 W_O 的误差"), fit, module.o_proj.weight.mT, 1e-8),
        differs(("missed by a fit on X itself", "对 X 本身拟合未得到的"), x.flatten(0, 1) @ of_x, out, error),
        at_least(("missed by a fit on two of the heads", "对两个头拟合未得到的"), left[2], 0.01).control(left[3]),
        Curve.of(Bilingual("Output of three heads fitted by least squares", "对三个头的输出做最小二乘"),
                 Bilingual("heads available to the fit", "可用的头数"), Bilingual("share missed", "未得到的比例"), {
            Bilingual("linear in the heads", "对头线性"): left}, log="y"),
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

    def one_number_a_row(numbers: Tensor) -> Tensor:
        """Each row has a free weight on its own token and shares the rest equally."""
        own = torch.sigmoid(numbers)
        return torch.diag(own) + (1 - own)[:, None] / (n - 1) * (1 - torch.eye(n, dtype=numbers.dtype))

    sizes = 2, 3, 5, 7, 9
    free = {m: _freedom(lambda scores: torch.softmax(scores, -1), normal(m, m)) for m in sizes}
    low = {m: _freedom(lambda qk: torch.softmax(qk[0] @ qk[1].mT / math.sqrt(2), -1), normal(2, m, 2)) for m in sizes}
    one = _freedom(one_number_a_row, normal(n))
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
MISSED = Bilingual("share of the target missed", "目标中未学到的比例")


@claim
def low_rank_bottleneck() -> list[Check | Curve]:
    missed = {d: _copying_missed(d) for d in (1, 2, 3, 4, 12)}
    return [
        at_least(("d_k = 1: share of the target missed", "d_k = 1：目标中未学到的比例"), missed[1], 0.5),
        at_least(("d_k = 4, still below n = 12", "d_k = 4，仍小于 n = 12"), missed[4], 0.5).beyond(),
        at_most("d_k = 12", missed[12], 0.05).control(missed[1]),
        Curve.of(Bilingual("A head trained to copy one of 12 tokens", "训练一个头复制 12 个词元之一"), "d_k", MISSED, {
            Bilingual("after 400 steps", "400 步之后"): missed}, log="y"),
    ]  # fmt: skip


@claim
def more_heads_learn_more() -> list[Check | Curve]:
    missed = {h: _trained_missed(h) for h in (1, 2, 4, 8, 16, 32)}
    steps = (*range(0, STEPS, 25), STEPS)
    ends = {h: way[-1] for h, way in missed.items()}
    ways = {f"h = {h}, d_k = {32 // h}": {t: missed[h][t] for t in steps} for h in (1, 2, 4, 32)}
    title = Bilingual("Trained on y_i = x_π(i) − x_σ(i), d_model = 32", "以 y_i = x_π(i) − x_σ(i) 训练，d_model = 32")
    return [
        at_least(("h = 1, d_k = 32: share missed", "h = 1，d_k = 32：未学到的比例"), ends[1], 0.4),
        at_most("h = 2, d_k = 16", ends[2], 0.03),
        at_most("h = 4, d_k = 8", ends[4], 0.03),
        at_most("h = 32, d_k = 1", ends[32], 0.03).beyond(),
        at_most(("one head on y_i = x_π(i)",
                 "一个头，目标 y_i = x_π(i)"), _trained_missed(1, patterns=1)[-1], 0.03).control(ends[1]),
        Curve.of(title, Bilingual("heads h", "头数 h"), MISSED, {
            Bilingual(f"after {STEPS} steps", f"{STEPS} 步之后"): ends}, log="xy"),
        Curve.of(Bilingual("The same in training", "训练过程"), Bilingual("step", "步"), MISSED, ways, log="y"),
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
