"""Identities that the library is based on: statistics of the weights computed without them. All in float64."""

import math

import torch
from torch import Tensor

from headwise import AttentionMap, attend
from headwise.wording import Bilingual
from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.evidence import Check, at_least, at_most, difference, equal, same
from headwise_textbook.claims.samples import layer, multi_head, normal
from headwise_textbook.curves import Curve

ERROR = "error", "误差"


@claim(
    "A row's entropy needs no matrix: H_i = LSE_i − scale · q_i·(P K)_i, attention with the keys as values.",
    "一行的熵不需要矩阵：H_i = LSE_i − scale · q_i·(P K)_i，即以键作值的注意力。",
    formula="H_i = LSE_i − scale · q_i·(P K)_i",
    also=("follows from p = exp(s − LSE)", "由 p = exp(s − LSE) 推出"),
    control=("the log-sum-exp alone is not the entropy", "只有 log-sum-exp 并不是熵"),
    note="若分数带有加性偏置，还需一项 Σ p·bias。",
)  # fmt: skip
def entropy_without_weights() -> list[Check]:
    """Additive biases require another term, Σ p·bias."""
    q, k, _ = _qkv()
    pk, amap = attend(q, k, k, return_map=True)
    entropy = amap.lse - amap.rule.scale * (q * pk).sum(-1)
    truth = torch.special.entr(_weights(q, k)).sum(-1)
    return [
        same(ERROR, entropy, truth),
        at_least(("error of the log-sum-exp alone",
                  "只用 log-sum-exp 的误差"), difference(amap.lse, truth), 0.01).control(
            difference(entropy, truth)),
    ]  # fmt: skip


@claim(
    "Σ_j p_ij² = exp(LSE(2s) − 2·LSE(s)): how many keys share a row follows from two log-sum-exps.",
    "Σ_j p_ij² = exp(LSE(2s) − 2·LSE(s))：一行分给多少个键，由两个 log-sum-exp 可知。",
    formula="Σ_j p_ij² = exp(LSE(2s) − 2·LSE(s))",
    also=("follows from p = exp(s − LSE)", "由 p = exp(s − LSE) 推出"),
    control=("with LSE(s) once instead of twice it is another number", "LSE(s) 只减一次就不是这个数"),
    note="第二个和就是尺度加倍的注意力。",
)  # fmt: skip
def effective_keys_from_lse() -> list[Check]:
    """The second sum is attention at twice the scale."""
    q, k, v = _qkv()
    scale = q.shape[-1] ** -0.5
    once, twice = (attend(q, k, v, scale=c * scale, return_map=True)[1].lse for c in (1, 2))
    found, truth = torch.exp(twice - 2 * once), _weights(q, k).square().sum(-1)
    return [
        same(ERROR, found, truth),
        at_least(("error of exp(LSE(2s) − LSE(s))", "exp(LSE(2s) − LSE(s)) 的误差"),
                 difference(torch.exp(twice - once), truth), 0.01).control(difference(found, truth)),
    ]  # fmt: skip


@claim(
    "What a key receives, Σ_i p_ij, is the gradient of its value for dO = 1, and Σ_i exp(s_ij − LSE_i).",
    "一个键得到的总权重 Σ_i p_ij，等于 dO = 1 时其值的梯度，也等于 Σ_i exp(s_ij − LSE_i)。",
    formula=("Σ_i p_ij = dV_j for dO = 1", "dO = 1 时 Σ_i p_ij = dV_j"),
    also="dV = Pᵀ dO",
    control=("the sums of the rows are 1 and not this", "行和恒为 1，并不是它"),
    note="P 的列和，用三种方法计算。",
)  # fmt: skip
def received_mass_gradient() -> list[Check]:
    """The column sums of P, computed in three ways."""
    q, k, v = _qkv()
    v.requires_grad_()
    out, amap = attend(q, k, v, return_map=True)
    out.sum().backward()
    assert v.grad is not None
    mass = _weights(q, k).sum(-2)
    return [
        same(("error of the gradient", "梯度的误差"), v.grad[..., 0], mass),
        same(("of the map's own sum", "注意力图自身求和的误差"), amap.received(), mass),
        at_least(("error of sums over rows", "行和的误差"), difference(torch.ones_like(mass), mass), 0.01).control(
            difference(v.grad[..., 0], mass)),
    ]  # fmt: skip


@claim(
    "LSE − ln m ≤ max_j s_ij ≤ LSE; the exact maximum cannot be had from it.",
    "LSE − ln m ≤ max_j s_ij ≤ LSE；但由 LSE 得不到最大值本身。",
    formula="LSE − ln m ≤ max_j s_ij ≤ LSE",
    also="Milakov & Gimelshein 2018, 1805.02867",
    control=("with half as many keys in the bound, equal scores violate it", "界中的键数减半，相等的分数就会违反它"),
    note="两个界都能取到：一行分数全相等，另一行只有一个大值，两者的 LSE 相同。",
)  # fmt: skip
def lse_bounds_maximum() -> list[Check]:
    """Both bounds are attained, by equal scores and by a single large one, with the same LSE."""
    q, k, v = _qkv()
    lse = attend(q, k, v, return_map=True)[1].lse
    largest = (q @ k.mT * q.shape[-1] ** -0.5).amax(-1)
    m = k.shape[2]
    flat, peak = torch.zeros(m, dtype=torch.float64), torch.full((m,), -1e3, dtype=torch.float64)
    peak[0] = math.log(m)
    above = float((lse - math.log(m) - largest).max())
    return [
        at_least(("smallest LSE − max", "LSE − max 的最小值"), float((lse - largest).min()), 0.0),
        at_most(("largest LSE − ln m − max", "LSE − ln m − max 的最大值"), above, 0.0),
        equal(("two rows of LSE", "两行的 LSE"), float(peak.logsumexp(0)), float(flat.logsumexp(0)), 1e-12),
        equal(("whose maxima differ by", "它们的最大值之差"), float(peak.max() - flat.max()), math.log(m), 1e-12),
        at_least(("LSE − ln(m/2) − max of equal scores", "分数全相等时的 LSE − ln(m/2) − max"),
                 float(flat.logsumexp(0)) - math.log(m / 2) - float(flat.max()), 0.1).control(above),
    ]  # fmt: skip


@claim(
    "The importance |∂L/∂ξ_h| of a head with a gate ξ_h on it is |Σ_i rowsum(dO ∘ O)|, which the backward pass has.",
    "给头乘上门控 ξ_h，其重要性 |∂L/∂ξ_h| 等于 |Σ_i rowsum(dO ∘ O)|，反向传播中本来就有。",
    formula="|∂L/∂ξ_h| = |Σ_i rowsum(dO ∘ O)|",
    also="Michel et al. 2019, 1905.10650",
    control=("the size of the head's output is not its importance", "头输出的大小并不是它的重要性"),
    note="对各头门控的导数，与 dO ∘ O 之和比较。",
)  # fmt: skip
def importance_from_gradient() -> list[Check]:
    """The derivative with respect to a gate on each head, compared with the sum over dO ∘ O."""
    module, x, target = multi_head(), normal(2, 7, 12, seed=5), normal(2, 7, 12, seed=6)
    gates = torch.ones(3, dtype=torch.float64, requires_grad=True)
    heads = module.attention(*module.project(x, x))[0]  # [b, h, n, d_v]
    out = heads.detach().requires_grad_()
    losses = [(module.output(module.merge(h, x)) - target).square().sum() for h in (heads * gates[:, None, None], out)]
    (by_gate,), (by_head,) = torch.autograd.grad(losses[0], [gates]), torch.autograd.grad(losses[1], [out])
    found, norms = (by_head * out).sum((0, 2, 3)).abs(), out.square().sum((0, 2, 3)).sqrt()
    scaled = norms * by_gate.abs().max() / norms.max()
    return [
        same(ERROR, found, by_gate.abs()),
        at_least(("error of ‖O‖, scaled", "‖O‖（经缩放）的误差"), difference(scaled, by_gate.abs()), 0.01).control(
            difference(found, by_gate.abs())),
    ]  # fmt: skip


@claim(
    "Attention over parts of the keys merges exactly by the log-sum-exps of the parts.",
    "对部分键的注意力，可以用各部分的 log-sum-exp 精确合并。",
    formula="out = Σ_blocks e^{LSE_block − LSE} out_block",
    also="Milakov & Gimelshein 2018, 1805.02867; ring attention, 2310.01889",
    control=("the mean of the parts is not the whole", "各部分取平均不等于整体"),
    note="因此键可以分到多个块、多个核、多台机器上。",
)  # fmt: skip
def key_blocks_merge_exactly() -> list[Check]:
    """Keys can therefore be split over blocks, cores and machines."""
    q, k, v = _qkv()
    parts = [attend(q, k[:, :, a:z], v[:, :, a:z], return_map=True) for a, z in ((0, 3), (3, 4), (4, 13))]
    lse = torch.stack([amap.lse for _, amap in parts]).logsumexp(0)
    merged = torch.stack([out * torch.exp(amap.lse - lse)[..., None] for out, amap in parts]).sum(0)
    whole, mean = attend(q, k, v), torch.stack([out for out, _ in parts]).mean(0)
    return [
        same(ERROR, merged, whole),
        at_least(("error of the mean of the parts", "各部分取平均的误差"), difference(mean, whole), 0.01).control(
            difference(merged, whole)),
    ]  # fmt: skip


@claim(
    "P X is attention with the values X, and Pᵀ Y its transpose: products, rollout and singular values need no n×n.",
    "P X 就是以 X 为值的注意力，Pᵀ Y 是它的转置：乘积、rollout 与奇异值都不需要 n×n 矩阵。",
    formula="P X = attend(Q, K, X);  Pᵀ Y;  rollout Π(½P + ½1)",
    also="Abnar & Zuidema 2020, 2005.00928 (rollout)",
    control=("P is not symmetric: Pᵀ X is not P X", "P 不对称：Pᵀ X 不是 P X"),
    note="只用乘积计算：P X、Pᵀ X、四层 rollout、全部奇异值。",
)  # fmt: skip
def weights_are_an_operator() -> list[Check]:
    """Computed from products alone: P X, Pᵀ X, four layers of rollout, all singular values."""
    q, k = normal(1, 1, 13, 5, seed=1), normal(1, 1, 13, 5, seed=2)
    amap: AttentionMap = attend(q, k, k, return_map=True)[1]
    p, x = _weights(q, k)[0, 0], normal(13, 3, seed=4)
    rolled = x
    for _ in range(4):
        rolled = 0.5 * (amap @ rolled)[0, 0] + 0.5 * rolled
    mean = 0.5 * (p + torch.eye(13, dtype=torch.float64))
    block = normal(13, 13, seed=9)
    for _ in range(60):
        block = torch.linalg.qr(amap.T @ (amap @ block))[0][0, 0]  # subspace iteration
    singular = torch.linalg.svdvals((amap @ block)[0, 0])
    return [
        same(("error of P X", "P X 的误差"), (amap @ x)[0, 0], p @ x),
        same(("of Pᵀ X", "Pᵀ X 的误差"), (amap.T @ x)[0, 0], p.mT @ x),
        same(("of four layers of rollout", "四层 rollout 的误差"), rolled, torch.linalg.matrix_power(mean, 4) @ x),
        same(("of singular values", "奇异值的误差"), singular, torch.linalg.svdvals(p), 1e-9),
        at_least(("difference between Pᵀ X and P X", "Pᵀ X 与 P X 之差"), difference((amap.T @ x)[0, 0], p @ x), 0.01)
        .control(difference((amap @ x)[0, 0], p @ x)),
    ]  # fmt: skip


@claim(
    "PyTorch's fused CPU attention returns the log-sum-exp of each row beside the output.",
    "PyTorch 在 CPU 上的融合注意力，除输出外还返回每行的 log-sum-exp。",
    formula="LSE_i = ln Σ_j e^{s_ij}",
    also="torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    control=("the log-sum-exp of unscaled scores is another one", "未缩放分数的 log-sum-exp 是另一个数"),
    note="这是私有算子；其结果在此处和测试中核对。",
)  # fmt: skip
def torch_tells_lse() -> list[Check]:
    """A private operator; its result is checked here and in the tests."""
    q, k, _ = _qkv()
    v = normal(*k.shape, seed=8)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return [
        same(("error of LSE", "LSE 的误差"), lse, scores.logsumexp(-1)),
        same(("of the output", "输出的误差"), out, _weights(q, k) @ v),
        at_least(("error of LSE without the factor",
                  "不缩放时 LSE 的误差"), difference(lse, (q @ k.mT).logsumexp(-1)), 0.01)
        .control(difference(lse, scores.logsumexp(-1))),
    ]  # fmt: skip


@claim(
    "A bias on the keys never changes the output: it adds the same to every score of a row.",
    "键上的偏置从不改变输出：它给一行的所有分数加上同一个数。",
    formula="softmax(s_i + q_i·b_K) = softmax(s_i)",
    also=("follows from the softmax", "由 softmax 推出"),
    control=("a bias on the queries does change the output", "查询上的偏置会改变输出"),
    note="查询上的偏置会改变输出。因此 4·d 个偏置中有 d 个毫无作用。",
)  # fmt: skip
def key_bias_does_nothing() -> list[Check]:
    """A bias on the queries does change it. One d of the 4·d biases has therefore no effect."""
    module, x = layer("multi_head", 12, 3, bias=True), normal(2, 7, 12, seed=5)
    before = module(x)
    moved = {}
    for name in ("k_proj", "q_proj"):
        with torch.no_grad():
            getattr(module, name).bias += 3.0 * normal(12, seed=6)
        moved[name] = difference(module(x), before)
    return [
        at_most(("change by a key bias", "键偏置引起的改变"), moved["k_proj"], 1e-12),
        at_least(("by a query bias", "查询偏置引起的改变"), moved["q_proj"], 0.01).control(moved["k_proj"]),
    ]


@claim(
    "Rows of T scores with norm σ at most keep an entropy of ln(1 + (T−1)β) + σ√(T(T−1)) β / (1 + (T−1)β), "
    "β = exp(−σ√(T/(T−1))).",
    "T 个分数的范数不超过 σ 时，一行的熵不低于 ln(1 + (T−1)β) + σ√(T(T−1)) β / (1 + (T−1)β)，其中 β = "
    "exp(−σ√(T/(T−1)))。",
    formula="H ≥ ln(1 + (T−1)β) + σ√(T(T−1)) β / (1 + (T−1)β)",
    also="Zhai et al. 2023, 2303.06296",
    control=("the bound for half the norm is violated by the extreme row", "按一半范数算出的界，会被极端的一行违反"),
    note="界是紧的：一个大分数、其余相等时取到。权重增长会让熵塌缩。",
)  # fmt: skip
def entropy_has_a_floor() -> list[Check | Curve]:
    """The bound is tight: it is attained by one large score and equal others. Growing weights let entropy collapse."""
    margins, reached = [], []
    for t, sigma in (5, 1.0), (64, 4.0), (64, 12.0):
        rows = normal(500, t, seed=t)
        rows = sigma * rows / rows.norm(dim=-1, keepdim=True)
        peak = torch.full((t,), -1.0, dtype=torch.float64)
        peak[0] = t - 1
        margins.append(float(_row_entropy(rows).min()) - _floor(t, sigma))
        extreme = float(_row_entropy(sigma * peak / peak.norm()))
        reached.append(abs(extreme - _floor(t, sigma)))
        below = extreme - _floor(t, sigma / 2)
    return [
        at_least(("smallest entropy minus the bound, 1500 random rows",
                  "最小的熵减去界，1500 个随机行"), min(margins), 0.0),
        at_most(("distance of the extreme row from it", "极端的一行与界的距离"), max(reached), 1e-12),
        at_most(("entropy of the extreme row minus the bound for σ/2",
                 "极端一行的熵减去 σ/2 的界"), below, -0.01).control(
            min(margins)),
        _floor_curve(64, (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)),
    ]  # fmt: skip


def _qkv() -> tuple[Tensor, Tensor, Tensor]:
    return 3.0 * normal(2, 3, 11, 5, seed=1), normal(2, 3, 13, 5, seed=2), normal(2, 3, 13, 7, seed=3)


def _weights(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)


def _floor_curve(t: int, norms: tuple[float, ...]) -> Curve:
    """Entropy of rows over the norm of their scores."""
    rows = normal(500, t, seed=t)
    rows = rows / rows.norm(dim=-1, keepdim=True)
    entropies = {sigma: _row_entropy(sigma * rows) for sigma in norms}
    lines = {
        Bilingual("mean of 500 random rows", "500 个随机行的平均"): {
            at: float(x.mean()) for at, x in entropies.items()
        },
        Bilingual("least of them", "其中最小的"): {at: float(x.min()) for at, x in entropies.items()},
    }
    floor = {Bilingual("the bound", "界"): {sigma: _floor(t, sigma) for sigma in norms}}
    title = Bilingual(f"Entropy of rows of {t} scores", f"{t} 个分数的行的熵")
    return Curve.of(
        title, Bilingual("norm σ of the scores", "分数的范数 σ"), Bilingual("nats", "奈特"), lines, floor, log="x"
    )


def _row_entropy(scores: Tensor) -> Tensor:
    return torch.special.entr(torch.softmax(scores, -1)).sum(-1)


def _floor(t: int, sigma: float) -> float:
    beta = math.exp(-sigma * math.sqrt(t / (t - 1)))
    return math.log(1 + (t - 1) * beta) + sigma * math.sqrt(t * (t - 1)) * beta / (1 + (t - 1) * beta)
