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


@claim
def entropy_without_weights() -> list[Check]:
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


@claim
def effective_keys_from_lse() -> list[Check]:
    q, k, v = _qkv()
    scale = q.shape[-1] ** -0.5
    once, twice = (attend(q, k, v, scale=c * scale, return_map=True)[1].lse for c in (1, 2))
    found, truth = torch.exp(twice - 2 * once), _weights(q, k).square().sum(-1)
    return [
        same(ERROR, found, truth),
        at_least(("error of exp(LSE(2s) − LSE(s))", "exp(LSE(2s) − LSE(s)) 的误差"),
                 difference(torch.exp(twice - once), truth), 0.01).control(difference(found, truth)),
    ]  # fmt: skip


@claim
def received_mass_gradient() -> list[Check]:
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


@claim
def lse_bounds_maximum() -> list[Check]:
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


@claim
def importance_from_gradient() -> list[Check]:
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


@claim
def key_blocks_merge_exactly() -> list[Check]:
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


@claim
def weights_are_an_operator() -> list[Check]:
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


@claim
def torch_tells_lse() -> list[Check]:
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


@claim
def key_bias_does_nothing() -> list[Check]:
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


@claim
def entropy_has_a_floor() -> list[Check | Curve]:
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
