"""Identities that the library is based on: statistics of the weights computed without them. All in float64."""

import math

import torch
from torch import Tensor

from headwise.attention import attend
from headwise.map import AttentionMap
from headwise.reports.curves import Curve
from headwise.textbook.claims.claim import claim
from headwise.textbook.claims.evidence import Check, at_least, at_most, difference, equal, same
from headwise.textbook.claims.samples import layer, multi_head, normal


@claim(
    "A row's entropy needs no matrix: H_i = LSE_i − scale · q_i·(P K)_i, attention with the keys as values.",
    formula="H_i = LSE_i − scale · q_i·(P K)_i",
    source="follows from p = exp(s − LSE)",
)
def entropy_without_weights() -> list[Check]:
    """Additive biases require another term, Σ p·bias."""
    q, k, _ = _qkv()
    pk, amap = attend(q, k, k, return_map=True)
    entropy = amap.lse - amap.rule.scale * (q * pk).sum(-1)
    return [same("error", entropy, torch.special.entr(_weights(q, k)).sum(-1))]


@claim(
    "Σ_j p_ij² = exp(LSE(2s) − 2·LSE(s)): how many keys share a row follows from two log-sum-exps.",
    formula="Σ_j p_ij² = exp(LSE(2s) − 2·LSE(s))",
    source="follows from p = exp(s − LSE)",
)
def effective_keys_from_lse() -> list[Check]:
    """The second sum is attention at twice the scale."""
    q, k, v = _qkv()
    scale = q.shape[-1] ** -0.5
    once, twice = (attend(q, k, v, scale=c * scale, return_map=True)[1].lse for c in (1, 2))
    return [same("error", torch.exp(twice - 2 * once), _weights(q, k).square().sum(-1))]


@claim(
    "What a key receives, Σ_i p_ij, is the gradient of its value for dO = 1, and Σ_i exp(s_ij − LSE_i).",
    formula="Σ_i p_ij = dV_j for dO = 1",
    source="dV = Pᵀ dO",
)
def received_mass_gradient() -> list[Check]:
    """The column sums of P, computed in three ways."""
    q, k, v = _qkv()
    v.requires_grad_()
    out, amap = attend(q, k, v, return_map=True)
    out.sum().backward()
    assert v.grad is not None
    mass = _weights(q, k).sum(-2)
    return [
        same("error of the gradient", v.grad[..., 0], mass),
        same("of the map's own sum", amap.received(), mass),
    ]


@claim(
    "LSE − ln m ≤ max_j s_ij ≤ LSE; the exact maximum cannot be had from it.",
    formula="LSE − ln m ≤ max_j s_ij ≤ LSE",
    source="Milakov & Gimelshein 2018, 1805.02867",
)
def lse_bounds_maximum() -> list[Check]:
    """Both bounds are attained, by equal scores and by a single large one, with the same LSE."""
    q, k, v = _qkv()
    lse = attend(q, k, v, return_map=True)[1].lse
    largest = (q @ k.mT * q.shape[-1] ** -0.5).amax(-1)
    m = k.shape[2]
    flat, peak = torch.zeros(m, dtype=torch.float64), torch.full((m,), -1e3, dtype=torch.float64)
    peak[0] = math.log(m)
    return [
        at_least("smallest LSE − max", float((lse - largest).min()), 0.0),
        at_most("largest LSE − ln m − max", float((lse - math.log(m) - largest).max()), 0.0),
        equal("two rows of LSE", float(peak.logsumexp(0)), float(flat.logsumexp(0)), 1e-12),
        equal("whose maxima differ by", float(peak.max() - flat.max()), math.log(m), 1e-12),
    ]


@claim(
    "The importance |∂L/∂ξ_h| of a head with a gate ξ_h on it is |Σ_i rowsum(dO ∘ O)|, which the backward pass has.",
    formula="|∂L/∂ξ_h| = |Σ_i rowsum(dO ∘ O)|",
    source="Michel et al. 2019, 1905.10650",
)
def importance_from_gradient() -> list[Check]:
    """The derivative with respect to a gate on each head, compared with the sum over dO ∘ O."""
    module, x, target = multi_head(), normal(2, 7, 12, seed=5), normal(2, 7, 12, seed=6)
    gates = torch.ones(3, dtype=torch.float64, requires_grad=True)
    heads = module.attention(*module.project(x, x))[0]  # [b, h, n, d_v]
    out = heads.detach().requires_grad_()
    losses = [(module.output(module.merge(h, x)) - target).square().sum() for h in (heads * gates[:, None, None], out)]
    (by_gate,), (by_head,) = torch.autograd.grad(losses[0], [gates]), torch.autograd.grad(losses[1], [out])
    return [same("error", (by_head * out).sum((0, 2, 3)).abs(), by_gate.abs())]


@claim(
    "Attention over parts of the keys merges exactly by the log-sum-exps of the parts.",
    formula="out = Σ_blocks e^{LSE_block − LSE} out_block",
    source="Milakov & Gimelshein 2018, 1805.02867; ring attention, 2310.01889",
)
def key_blocks_merge_exactly() -> list[Check]:
    """Keys can therefore be split over blocks, cores and machines."""
    q, k, v = _qkv()
    parts = [attend(q, k[:, :, a:z], v[:, :, a:z], return_map=True) for a, z in ((0, 3), (3, 4), (4, 13))]
    lse = torch.stack([amap.lse for _, amap in parts]).logsumexp(0)
    merged = torch.stack([out * torch.exp(amap.lse - lse)[..., None] for out, amap in parts]).sum(0)
    return [same("error", merged, attend(q, k, v))]


@claim(
    "P X is attention with the values X, and Pᵀ Y its transpose: products, rollout and singular values need no n×n.",
    formula="P X = attend(Q, K, X);  Pᵀ Y;  rollout Π(½P + ½1)",
    source="Abnar & Zuidema 2020, 2005.00928 (rollout)",
)
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
        same("error of P X", (amap @ x)[0, 0], p @ x),
        same("of Pᵀ X", (amap.T @ x)[0, 0], p.mT @ x),
        same("of four layers of rollout", rolled, torch.linalg.matrix_power(mean, 4) @ x),
        same("of singular values", singular, torch.linalg.svdvals(p), 1e-9),
    ]


@claim(
    "PyTorch's fused CPU attention returns the log-sum-exp of each row beside the output.",
    formula="LSE_i = ln Σ_j e^{s_ij}",
    source="torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
)
def torch_tells_lse() -> list[Check]:
    """A private operator; its result is checked here and in the tests."""
    q, k, _ = _qkv()
    v = normal(*k.shape, seed=8)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return [
        same("error of LSE", lse, scores.logsumexp(-1)),
        same("of the output", out, _weights(q, k) @ v),
    ]


@claim(
    "A bias on the keys never changes the output: it adds the same to every score of a row.",
    formula="softmax(s_i + q_i·b_K) = softmax(s_i)",
    source="follows from the softmax",
)
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
        at_most("change by a key bias", moved["k_proj"], 1e-12),
        at_least("by a query bias", moved["q_proj"], 0.01).control(),
    ]


@claim(
    "Rows of T scores with norm σ at most keep an entropy of ln(1 + (T−1)β) + σ√(T(T−1)) β / (1 + (T−1)β), "
    "β = exp(−σ√(T/(T−1))).",
    formula="H ≥ ln(1 + (T−1)β) + σ√(T(T−1)) β / (1 + (T−1)β)",
    source="Zhai et al. 2023, 2303.06296",
)
def entropy_has_a_floor() -> list[Check | Curve]:
    """The bound is tight: it is attained by one large score and equal others. Growing weights let entropy collapse."""
    margins, reached = [], []
    for t, sigma in (5, 1.0), (64, 4.0), (64, 12.0):
        rows = normal(500, t, seed=t)
        rows = sigma * rows / rows.norm(dim=-1, keepdim=True)
        peak = torch.full((t,), -1.0, dtype=torch.float64)
        peak[0] = t - 1
        margins.append(float(_row_entropy(rows).min()) - _floor(t, sigma))
        reached.append(abs(float(_row_entropy(sigma * peak / peak.norm())) - _floor(t, sigma)))
    return [
        at_least("smallest entropy minus the bound, 1500 random rows", min(margins), 0.0),
        at_most("distance of the extreme row from it", max(reached), 1e-12),
        _floor_curve(64, (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)),
    ]


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
        "mean of 500 random rows": {sigma: float(x.mean()) for sigma, x in entropies.items()},
        "least of them": {sigma: float(x.min()) for sigma, x in entropies.items()},
    }
    floor = {"the bound": {sigma: _floor(t, sigma) for sigma in norms}}
    return Curve.of(f"Entropy of rows of {t} scores", "norm σ of the scores", "nats", lines, floor, log="x")


def _row_entropy(scores: Tensor) -> Tensor:
    return torch.special.entr(torch.softmax(scores, -1)).sum(-1)


def _floor(t: int, sigma: float) -> float:
    beta = math.exp(-sigma * math.sqrt(t / (t - 1)))
    return math.log(1 + (t - 1) * beta) + sigma * math.sqrt(t * (t - 1)) * beta / (1 + (t - 1) * beta)
