"""Exercises, part one: our solutions of what multi-head attention computes, and what it costs."""

import math

import torch
from torch import Tensor

from headwise_textbook.exercises.exercise import Draw, exercise, normal


# shapes
@exercise(lambda draw: (draw.size(), draw.size(), (h := draw.size(1, 8)) * draw.size(1, 8), h))
def shapes_of(b: int, n: int, d: int, h: int) -> list[list[int]]:
    return [[b, h, n, d // h], [b, h, n, n], [b, h, n, d // h], [b, n, d]]


@exercise(
    lambda draw: (
        draw.normal(draw.size(1, 3), draw.size(), d := (h := draw.size(1, 3)) * draw.size(1, 3)),
        *(draw.normal(d, d) / d**0.5 for _ in range(4)),
        h,
    ),
    tolerance=1e-3,
)
def multi_head(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, num_heads: int) -> Tensor:
    q, k, v = ((x @ w).unflatten(-1, (num_heads, -1)).transpose(1, 2) for w in (wq, wk, wv))
    p = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (p @ v).transpose(1, 2).flatten(2) @ wo


@exercise(normal("b n h d", "b n h d", b=(1, 3), h=(1, 4)))
def scores_without_transpose(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / q.shape[-1] ** 0.5


# splitting
@exercise(lambda draw: (draw.normal(draw.size(), draw.size(), (h := draw.size(1, 4)) * draw.size(1, 4)), h))
def split_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


@exercise(lambda draw: ((c := draw.size(1, 8) * (h := draw.size(1, 8))) and draw.size(0, c - 1), c, h))
def head_of_channel(channel: int, d_model: int, num_heads: int) -> int:
    return channel // (d_model // num_heads)


@exercise(
    lambda draw: (
        draw.normal(draw.size(), draw.size(), (h := draw.size(2, 4)) * draw.size(1, 3)),
        h,
        draw.size(0, h - 1),
        draw.size(0, h - 1),
    )
)
def swap_two_heads(x: Tensor, num_heads: int, a: int, b: int) -> Tensor:
    order = list(range(num_heads))
    order[a], order[b] = order[b], order[a]
    return x.unflatten(-1, (num_heads, -1))[..., order, :].flatten(-2)


# merging
@exercise(lambda draw: (draw.normal(draw.size(1, 3), draw.size(1, 4), draw.size(), draw.size(1, 4)),))
def merge_heads(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


@exercise(lambda draw: ([draw.normal(n, draw.size(1, 4)) for n in [draw.size()] for _ in range(draw.size(1, 4))],))
def merge_ragged(heads: list[Tensor]) -> tuple[Tensor, list[int]]:
    starts = [sum(head.shape[1] for head in heads[:i]) for i in range(len(heads))]
    return torch.cat(heads, 1), starts


@exercise(lambda draw: (draw.normal(draw.size(1, 3), draw.size(), (h := draw.size(1, 4)) * draw.size(1, 4)), h))
def repair_merge(wrong: Tensor, num_heads: int) -> Tensor:
    b, n, d = wrong.shape
    return wrong.reshape(b, num_heads, n, d // num_heads).transpose(1, 2).flatten(2)


# scores
def _qk(draw: Draw) -> tuple[Tensor, Tensor]:
    h, n, m, d = draw.size(1, 3), draw.size(), draw.size(), draw.size()
    return draw.normal(h, n, d), draw.normal(h, m, d)


@exercise(_qk)
def weights_of(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)


@exercise(lambda draw: (500 * draw.normal(draw.size()),))
def safe_softmax(scores: Tensor) -> Tensor:
    shifted = (scores - scores.max()).exp()
    return shifted / shifted.sum()


@exercise(
    lambda draw: ((w := torch.relu(draw.weights(draw.size(), m := draw.size()) - 0.2 / m)) / w.sum(-1, keepdim=True),)
)
def row_entropy(weights: Tensor) -> Tensor:
    return -torch.xlogy(weights, weights).sum(-1)


# masks
@exercise(lambda draw: (n := draw.size(), n + draw.size(0, 4)))
def causal_mask(n: int, m: int) -> Tensor:
    return torch.ones(n, m, dtype=torch.bool).tril(m - n)


@exercise(lambda draw: (draw.normal(n := draw.size(), m := draw.size()), draw.booleans(n, m)))
def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.where(mask.any(-1, keepdim=True), weights, 0.0)


@exercise(lambda draw: (1 + draw.whole(m := draw.size(1, 7), draw.size()), m))
def padding_mask(lengths: Tensor, m: int) -> Tensor:
    return (torch.arange(m) < lengths[:, None])[:, None, None]


# output_projection
@exercise(normal("h n k", "h*k d", h=(1, 4), k=(1, 4)))
def contributions(heads: Tensor, wo: Tensor) -> Tensor:
    return heads @ wo.unflatten(0, (heads.shape[0], -1))


@exercise(
    lambda draw: (
        draw.normal(h := draw.size(2, 4), draw.size(), d_k := draw.size(1, 4)),
        draw.normal(h * d_k, draw.size()),
        draw.size(0, h - 1),
    )
)
def without_head(heads: Tensor, wo: Tensor, i: int) -> Tensor:
    h, _, d_k = heads.shape
    rows = [row for head in range(h) if head != i for row in range(head * d_k, (head + 1) * d_k)]
    return torch.cat([heads[j] for j in range(h) if j != i], -1) @ wo[rows]


@exercise(lambda draw: (draw.normal(d := draw.size(1, 6), k := draw.size(1, 4)), draw.normal(k, d)))
def value_output(wv: Tensor, wo: Tensor) -> Tensor:
    return wv @ wo


# parameters
@exercise(lambda draw: (draw.size(1, 64), draw.size(1, 8), draw.size(1, 8), draw.size(1, 16), draw.size(0, 1) == 1))
def parameters(d_model: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool) -> int:
    q, kv = num_heads * head_dim, num_kv_heads * head_dim
    return d_model * (2 * q + 2 * kv) + bias * (q + 2 * kv + d_model)


@exercise(lambda draw: (draw.size(1, 12), draw.size(1, 64), draw.size(1, 256), draw.size(0, 1000)))
def attention_share(layers: int, d: int, d_ff: int, vocab: int) -> float:
    attention = layers * 4 * d * d
    return attention / (attention + layers * 2 * d * d_ff + vocab * d)


@exercise(lambda draw: ((h := draw.size(1, 12)) * (k := draw.size(1, 8)), h, draw.size(0, 4 * (h * k) ** 2)))
def most_kv_heads(d_model: int, num_heads: int, limit: int) -> int:
    fits = [
        g for g in range(1, num_heads + 1)
        if num_heads % g == 0 and 2 * d_model**2 + 2 * d_model * g * (d_model // num_heads) <= limit
    ]  # fmt: skip
    return max(fits, default=0)


# cost
@exercise(lambda draw: (draw.size(1, 4096), draw.size(1, 1024)))
def layer_flops(n: int, d: int) -> int:
    return 8 * n * d * d + 4 * n * n * d


@exercise(lambda draw: (draw.size(1, 4096),))
def crossover(d: int) -> int:
    return 2 * d


@exercise(lambda draw: (draw.size(1, 8), draw.size(1, 32), draw.size(1, 8192), draw.size(1, 4)))
def score_memory(b: int, h: int, n: int, size: int) -> tuple[int, int]:
    return b * h * n * n * size, b * h * n * 4


# configurations
@exercise(lambda draw: (draw.size(1, 96), draw.size(1, 8)))
def possible_heads(d_model: int, least: int) -> list[int]:
    return [h for h in range(1, d_model + 1) if d_model % h == 0 and d_model // h >= least]


@exercise(
    lambda draw: (
        (h := draw.size(1, 8)) * (k := draw.size(1, 8)),
        h,
        None if draw.size(0, 1) else draw.size(max(1, k - 1), k + 1),
    )
)
def head_size(d_model: int, num_heads: int, head_dim: int | None) -> tuple[int, bool]:
    d_k = d_model // num_heads if head_dim is None else head_dim
    return d_k, num_heads * d_k == d_model


@exercise(lambda draw: (draw.size(1, 48), draw.size(1, 512), draw.size(1, 64), draw.size(1, 8), draw.size(1, 128)))
def model_attention(layers: int, d_model: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    return layers * 2 * d_model * head_dim * (num_heads + num_kv_heads)
