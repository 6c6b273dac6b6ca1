"""Exercises, part three: our solutions of what heads know and take, and what is done with them."""

import torch
from torch import Tensor, nn

from headwise_textbook.exercises.exercise import Draw, exercise, normal


# information
@exercise(
    lambda draw: (
        draw.normal(n := draw.size(3, 8), draw.size(1, 4)) + torch.arange(n)[:, None] * 0.1,
        draw.normal(n, draw.size(1, 4)) + torch.arange(n)[:, None] * 0.2,
    ),
    tolerance=1e-3,
)
def cka(x: Tensor, y: Tensor) -> Tensor:
    x, y = (one.double() - one.double().mean(0) for one in (x, y))
    return (y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())


@exercise(lambda draw: ((p := draw.uniform(draw.size(1, 4), draw.size(1, 4)) + 0.01) / p.sum(),))
def mutual_information(p: Tensor) -> Tensor:
    return torch.xlogy(p, p / (p.sum(1, keepdim=True) * p.sum(0, keepdim=True))).sum()


@exercise(lambda draw: (draw.size(1, 12),))
def circle_keys(n: int) -> Tensor:
    angles = 2 * torch.pi * torch.arange(n) / n
    return torch.stack((angles.cos(), angles.sin()), -1)


# kv_sharing
@exercise(normal("g*r n d", "g n d", "g n d", g=(1, 3), r=(1, 3), d=(1, 5)), tolerance=1e-3)
def grouped_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    repeat = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


@exercise(lambda draw: (draw.size(1, 80), draw.size(1, 64), draw.size(1, 256), draw.size(1, 8192), draw.size(1, 4)))
def cache_size(layers: int, kv_heads: int, head_dim: int, tokens: int, size: int) -> int:
    return layers * 2 * kv_heads * head_dim * tokens * size


@exercise(lambda draw: (draw.normal((g := draw.size(1, 3)) * draw.size(1, 3), draw.size(1, 5), draw.size(1, 3)), g))
def mean_groups(wk: Tensor, g: int) -> Tensor:
    return wk.unflatten(0, (g, -1)).mean(1)


# pruning
def _projections(draw: Draw) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    h, d_k, d = draw.size(2, 4), draw.size(1, 3), draw.size(1, 6)
    return *(draw.normal(d, h * d_k) for _ in range(3)), draw.normal(h * d_k, d), h, draw.size(0, h - 1)  # type: ignore[return-value]


@exercise(_projections)
def prune_head(
    wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, num_heads: int, i: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_k = wo.shape[0] // num_heads
    kept = [row for row in range(wo.shape[0]) if row // d_k != i]
    return wq[:, kept], wk[:, kept], wv[:, kept], wo[kept]


@exercise(normal("h n d", "n d", h=(1, 4)), tolerance=1e-3)
def gate_importance(heads: Tensor, grad: Tensor) -> Tensor:
    return (heads * grad).sum((-2, -1)).abs()


@exercise(
    lambda draw: (
        draw.normal(layers := draw.size(1, 4), h := draw.size(1, 4)).abs()
        + torch.arange(layers * h).view(layers, h) * 1e-3,
        draw.size(0, layers * (h - 1)),
    )
)
def heads_to_remove(importance: Tensor, count: int) -> list[tuple[int, int]]:
    layers, h = importance.shape
    left = [h] * layers
    chosen: list[tuple[int, int]] = []
    for at in importance.flatten().argsort().tolist():
        layer, head = divmod(at, h)
        if len(chosen) < count and left[layer] > 1:
            chosen.append((layer, head))
            left[layer] -= 1
    return chosen


# residual
@exercise(normal("n d", d=(2, 8)))
def layer_norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@exercise(lambda draw: (draw.normal(n := draw.size(), d := draw.size(2, 8)), draw.normal(n, d)))
def post_norm(x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.layer_norm(x + y, x.shape[-1:])


@exercise(
    lambda draw: (draw.normal(draw.size(), d := draw.size(2, 6)), draw.normal(draw.size(1, 4), d, d) / d),
    tolerance=1e-3,
)
def residual_stack(x: Tensor, ws: Tensor) -> Tensor:
    for w in ws:
        x = x + nn.functional.layer_norm(x, x.shape[-1:]) @ w
    return x


# trade_off
@exercise(lambda draw: (draw.size(1, 20), draw.size(1, 20)))
def largest_rank(n: int, d_k: int) -> int:
    return min(n, d_k)


@exercise(
    lambda draw: (
        8 * draw.size(1, 16),
        [1] + [draw.size(1, 16) for _ in range(draw.size(1, 5))],
        draw.size(1, 64),
    )
)
def choose_heads(d_model: int, choices: list[int], wanted: int) -> int:
    return min((h for h in choices if d_model % h == 0), key=lambda h: (abs(d_model // h - wanted), h))


@exercise(lambda draw: (draw.normal(n := draw.size(1, 6), n), draw.size(1, 6)), tolerance=2e-3)
def nearest_scores(scores: Tensor, d_k: int) -> Tensor:
    u, s, v = torch.linalg.svd(scores)
    return (u[:, :d_k] * s[:d_k]) @ v[:d_k]


# writing
@exercise(
    lambda draw: (draw.normal(v := draw.size(1, 7)) + torch.arange(v) * 1e-2, draw.size(1, v), draw.size(1, 20) / 10)
)
def top_k(logits: Tensor, k: int, temperature: float) -> Tensor:
    kept = torch.full_like(logits, -torch.inf)
    at = logits.topk(k).indices
    kept[at] = logits[at]
    return (kept / temperature).softmax(0)


@exercise(lambda draw: (draw.normal(n := draw.size(2, 7), v := draw.size(1, 5)), draw.whole(v, n)))
def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:])


@exercise(lambda draw: (0.01 + 0.99 * draw.uniform(draw.size()),), tolerance=1e-3)
def perplexity(probabilities: Tensor) -> Tensor:
    return (-probabilities.log().mean()).exp()


# losses
@exercise(normal("n m"), tolerance=1e-3)
def entropy_gradient(scores: Tensor) -> Tensor:
    return torch.func.grad(lambda s: torch.special.entr(s.softmax(-1)).sum())(scores)


@exercise(lambda draw: (draw.weights(draw.size(1, 3), draw.size(), draw.size()), draw.size(0, 9) / 5))
def floor_loss(weights: Tensor, floor: float) -> Tensor:
    return (floor - torch.special.entr(weights).sum(-1).mean(-1)).clamp(min=0).mean()


@exercise(lambda draw: (draw.weights(n := draw.size(), m := draw.size()), draw.booleans(n, m) | torch.eye(n, m).bool()))
def lesson_loss(weights: Tensor, wanted: Tensor) -> Tensor:
    return (-(weights.log() * wanted).sum(-1) / wanted.sum(-1)).nanmean()


# hardware
@exercise(
    lambda draw: (
        draw.normal(n := draw.size(), d := draw.size()),
        draw.normal(n, d),
        5 * draw.normal(n),
        5 * draw.normal(n),
    ),
    tolerance=1e-3,
)
def merge_halves(a: Tensor, b: Tensor, la: Tensor, lb: Tensor) -> Tensor:
    share = (la - torch.logaddexp(la, lb)).exp()[:, None]
    return share * a + (1 - share) * b


@exercise(
    lambda draw: (
        draw.normal(draw.size(), d := draw.size(1, 4)),
        draw.normal(m := draw.size(1, 9), d),
        draw.normal(m, draw.size(1, 4)),
        draw.size(1, 4),
    ),
    tolerance=1e-3,
)
def in_blocks(q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
    total, most = torch.zeros(len(q), v.shape[1]), torch.full((len(q), 1), -torch.inf)
    sums = torch.zeros(len(q), 1)
    for start in range(0, len(k), size):
        scores = q @ k[start : start + size].T
        new = torch.maximum(most, scores.amax(1, keepdim=True))
        p, scale = (scores - new).exp(), (most - new).exp()
        total, sums, most = total * scale + p @ v[start : start + size], sums * scale + p.sum(1, keepdim=True), new
    return total / sums


@exercise(normal("h d", "h n d", "h n d", "h d", "h d", h=(1, 3), d=(1, 4)), tolerance=1e-3)
def decode_step(q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k, v = torch.cat((k, new_k[:, None]), 1), torch.cat((v, new_v[:, None]), 1)
    p = (k @ q[..., None] / q.shape[-1] ** 0.5).softmax(1)
    return (p * v).sum(1), k, v


# demonstration
@exercise(
    lambda draw: (
        [
            "".join("天子 大宋鳳閣"[i] for i in draw.whole(7, draw.size(1, 6)).tolist()) + "宋"
            for _ in range(draw.size(1, 3))
        ],
    )
)
def encode(texts: list[str]) -> list[list[int]]:
    rows = [[c for c in text if c.strip()] for text in texts]
    ids = {c: i for i, c in enumerate(dict.fromkeys(c for row in rows for c in row))}
    width = max(map(len, rows))
    return [[ids[c] for c in row] + [len(ids)] * (width - len(row)) for row in rows]


@exercise(
    lambda draw: (draw.weights(b := draw.size(1, 3), draw.size(1, 3), n := draw.size(2, 6), n), 1 + draw.whole(n, b))
)
def padding_share(weights: Tensor, lengths: Tensor) -> Tensor:
    real = torch.arange(weights.shape[-1]) < lengths[:, None]
    lost = (weights * ~real[:, None, None]).sum(-1)
    return (lost * real[:, None]).sum((0, 2)) / real.sum()


@exercise(lambda draw: (draw.weights(n := draw.size(), m := draw.size()), draw.booleans(n, m), draw.size(1, 9) / 10))
def dropped(weights: Tensor, kept: Tensor, p: float) -> tuple[Tensor, Tensor]:
    found = torch.where(kept, weights / (1 - p), 0.0)
    return found, found.sum(-1)
