"""Answers to all exercises, written from their tasks alone, as learners write them: loops, lists, NumPy, in place."""

import itertools
import math

import numpy as np
import torch
from torch import nn


def favourite_key(weights):
    return [int(np.argmax(head.numpy().mean(0))) for head in weights]


def mean_head(weights):
    mean = sum(weights) / len(weights)
    return mean, [float((head - mean).abs().max()) for head in weights]


def two_patterns(n):
    a, b = torch.eye(n), torch.zeros(n, n)
    for i in range(n):
        b[i, max(0, i - 1)] = 1
    return [a, b]


def split_heads(x, num_heads):
    b, n, d = x.shape
    return x.view(b, n, num_heads, d // num_heads).permute(0, 2, 1, 3)


def head_of_channel(channel, d_model, num_heads):
    return [channel in range(i * d_model // num_heads, (i + 1) * d_model // num_heads) for i in range(num_heads)].index(
        True
    )


def swap_two_heads(x, num_heads, a, b):
    d_k = x.shape[-1] // num_heads
    first, second = slice(a * d_k, (a + 1) * d_k), slice(b * d_k, (b + 1) * d_k)
    x[..., first], x[..., second] = x[..., second].clone(), x[..., first].clone()
    return x


def shapes_of(b, n, d, h):
    q = torch.zeros(b, n, h, d // h).transpose(1, 2)
    scores = q @ q.transpose(2, 3)
    return q.shape, scores.shape, (scores @ q).shape, torch.zeros(b, n, d).shape


def multi_head(x, wq, wk, wv, wo, num_heads):
    d_k = x.shape[-1] // num_heads
    parts = []
    for i in range(num_heads):
        columns = slice(i * d_k, (i + 1) * d_k)
        q, k, v = x @ wq[:, columns], x @ wk[:, columns], x @ wv[:, columns]
        parts.append(torch.softmax(q @ k.transpose(1, 2) / math.sqrt(d_k), dim=-1) @ v)
    return torch.cat(parts, dim=-1) @ wo


def scores_without_transpose(q, k):
    return torch.einsum("bnhd,bngd->bnhg", q, k) / math.sqrt(q.shape[-1])


def weights_of(q, k):
    scores = np.einsum("hnd,hmd->hnm", q.numpy(), k.numpy()) / math.sqrt(q.shape[-1])
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def safe_softmax(scores):
    return torch.softmax(scores, dim=0)


def row_entropy(weights):
    return torch.distributions.Categorical(probs=weights).entropy()


def causal_mask(n, m):
    return [[j <= i + m - n for j in range(m)] for i in range(n)]


def masked_softmax(scores, mask):
    return torch.nan_to_num(torch.softmax(scores.masked_fill(mask == 0, float("-inf")), dim=-1))


def padding_mask(lengths, m):
    mask = torch.zeros(len(lengths), 1, 1, m)
    for i, length in enumerate(lengths):
        mask[i, 0, 0, :length] = 1
    return mask.bool()


def merge_heads(heads):
    b, h, n, d_k = heads.shape
    return heads.permute(0, 2, 1, 3).contiguous().view(b, n, h * d_k)


def merge_ragged(heads):
    return torch.cat(heads, dim=1), [0, *itertools.accumulate(head.shape[1] for head in heads[:-1])]


def repair_merge(wrong, num_heads):
    b, n, d = wrong.shape
    heads = wrong.reshape(b, num_heads, n, d // num_heads)
    return torch.cat([heads[:, i] for i in range(num_heads)], dim=-1)


def contributions(heads, wo):
    d_k = heads.shape[-1]
    return [head @ wo[i * d_k : (i + 1) * d_k] for i, head in enumerate(heads)]


def without_head(heads, wo, i):
    d_k = heads.shape[-1]
    wo = torch.cat((wo[: i * d_k], wo[(i + 1) * d_k :]))
    return torch.cat([head for j, head in enumerate(heads) if j != i], dim=-1) @ wo


def value_output(wv, wo):
    return torch.matmul(wv.double(), wo.double())


def layer_norm(x):
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)


def post_norm(x, y):
    return nn.LayerNorm(x.shape[-1], elementwise_affine=False)(x + y)


def residual_stack(x, ws):
    for w in ws:
        x += layer_norm(x) @ w
    return x


def parameters(d_model, num_heads, num_kv_heads, head_dim, bias):
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    layers = [(d_model, size) for size in sizes] + [(num_heads * head_dim, d_model)]
    return sum(a * b + (b if bias else 0) for a, b in layers)


def attention_share(layers, d, d_ff, vocab):
    return 4 * d**2 * layers / (layers * (4 * d**2 + 2 * d * d_ff) + vocab * d)


def most_kv_heads(d_model, num_heads, limit):
    for g in range(num_heads, 0, -1):
        if num_heads % g == 0 and 2 * d_model**2 + 2 * d_model * (g * d_model // num_heads) <= limit:
            return g
    return 0


def possible_heads(d_model, least):
    return tuple(h for h in range(1, d_model + 1) if not d_model % h and d_model / h >= least)


def head_size(d_model, num_heads, head_dim):
    d_k = head_dim or d_model / num_heads
    return [d_k, d_k * num_heads == d_model]


def model_attention(layers, d_model, num_heads, num_kv_heads, head_dim):
    return layers * (2 * d_model * num_heads * head_dim + 2 * d_model * num_kv_heads * head_dim)


def largest_rank(n, d_k):
    return torch.linalg.matrix_rank(torch.randn(n, d_k) @ torch.randn(d_k, n))


def choose_heads(d_model, choices, wanted):
    best = None
    for h in sorted(choices):
        if d_model % h == 0 and (best is None or abs(d_model / h - wanted) < abs(d_model / best - wanted)):
            best = h
    return best


def nearest_scores(scores, d_k):
    u, s, vh = torch.linalg.svd(scores)
    s[d_k:] = 0
    return u @ torch.diag(s) @ vh


def previous_score(weights):
    n = weights.shape[-1]
    return [sum(float(head[i, i - 1]) for i in range(1, n)) / (n - 1) for head in weights]


def uniform_previous(n):
    return float(previous_score(torch.tril(torch.ones(n, n))[None] / torch.arange(1, n + 1)[:, None])[0])


def induction_keys(ids):
    n = len(ids)
    return [[0 < j < i and bool(ids[j - 1] == ids[i]) for j in range(n)] for i in range(n)]


def prune_head(wq, wk, wv, wo, num_heads, i):
    keep = torch.ones(num_heads, wo.shape[0] // num_heads, dtype=torch.bool)
    keep[i] = False
    keep = keep.flatten()
    return [wq[:, keep], wk[:, keep], wv[:, keep], wo[keep, :]]


def gate_importance(heads, grad):
    gates = torch.ones(len(heads), requires_grad=True)
    ((gates[:, None, None] * heads).sum(0) * grad).sum().backward()
    return gates.grad.abs()


def heads_to_remove(importance, count):
    left, chosen = [importance.shape[1]] * len(importance), []
    every = sorted((float(x), i, j) for i, row in enumerate(importance) for j, x in enumerate(row))
    for _, layer, head in every:
        if len(chosen) == count:
            break
        if left[layer] > 1:
            left[layer] -= 1
            chosen.append([layer, head])
    return chosen


def layer_flops(n, d):
    return 2 * (3 * n * d * d + n * n * d + n * n * d + n * d * d)


def crossover(d):
    return next(n for n in itertools.count(max(1, 2 * d - 3)) if 4 * n * n * d >= 8 * n * d * d)


def score_memory(b, h, n, size):
    return [b * h * n**2 * size, b * h * n * 4]


def queries(x, w):
    return torch.einsum("bnd,hkd->bhnk", x, w)


def output(heads, wo):
    return sum(heads[:, i] @ wo[i] for i in range(len(wo)))


def one_matrix(w):
    return torch.cat([head.T for head in w], dim=1)


def block_diag(blocks):
    h, a, b = blocks.shape
    whole = torch.zeros(h * a, h * b)
    for i in range(h):
        whole[i * a : (i + 1) * a, i * b : (i + 1) * b] = blocks[i]
    return whole


def grouped_linear(x, blocks):
    parts = x.chunk(len(blocks), dim=-1)
    return torch.cat([part @ w for part, w in zip(parts, blocks, strict=True)], dim=-1)


def channels_read(w, num_heads):
    d, size = w.shape[0], w.shape[1] // num_heads
    return np.array([[w[c, i * size : (i + 1) * size].any().item() for c in range(d)] for i in range(num_heads)])


def largest_angle(a, b):
    singular = torch.linalg.svdvals(torch.linalg.qr(a)[0].T @ torch.linalg.qr(b)[0])
    return torch.arccos(singular[-1])


def cosines(heads):
    return [[torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) for b in heads] for a in heads]


def fits_one_head(scores, d_k):
    return torch.linalg.matrix_rank(scores) <= d_k


def top_k_gate(logits, k):
    weights = torch.softmax(logits, dim=-1)
    for row in weights:
        row[row < row.sort(descending=True).values[k - 1]] = 0
    return weights


def top_p_heads(weights, p):
    kept = torch.zeros(weights.shape)
    for i, row in enumerate(weights):
        total = 0.0
        for head in row.argsort(descending=True):
            kept[i, head] = 1
            total += row[head]
            if total >= p:
                break
    return kept == 1


def mixed_heads(heads, weights, wo):
    return sum(weights[:, i, None] * (heads[i] @ wo[i]) for i in range(len(heads)))


def heads_attend(q, k, v):
    h, n, d = q.shape
    out = torch.zeros(h, n, d)
    for t in range(n):
        out[:, t] = torch.softmax(q[:, t] @ k[:, t].T / d**0.5, dim=-1) @ v[:, t]
    return out


def mix_groups(heads, w):
    g = len(w)
    groups = [heads[i : i + g] for i in range(0, len(heads), g)]
    return torch.cat([torch.tensordot(w, group, dims=1) for group in groups])


def folded(group, first):
    return torch.mm(group, first)


def grouped_query(q, k, v):
    h, g = len(q), len(k)
    return torch.stack([
        torch.nn.functional.scaled_dot_product_attention(q[i], k[i // (h // g)], v[i // (h // g)]) for i in range(h)
    ])  # fmt: skip


def cache_size(layers, kv_heads, head_dim, tokens, size):
    return float(2 * layers * kv_heads * head_dim * tokens * size)


def mean_groups(wk, g):
    return [part.mean(0) for part in wk.chunk(g)]


def fit_error(phi, y):
    solution, *_ = np.linalg.lstsq(phi.numpy(), y.numpy(), rcond=None)
    return np.abs(phi.numpy() @ solution - y.numpy()).max()


def sigmoid_heads(x, a, b):
    return torch.stack([1 / (1 + torch.exp(-(slope * x + offset))) for slope, offset in zip(a, b, strict=True)], dim=1)


def single_token(x, wv, wo):
    return sum(x @ wv[i] @ wo[i] for i in range(len(wv)))


def cka(x, y):
    x, y = x - x.mean(0), y - y.mean(0)
    return torch.norm(y.T @ x) ** 2 / (torch.norm(x.T @ x) * torch.norm(y.T @ y))


def mutual_information(p):
    a, b = p.sum(1), p.sum(0)
    return sum(float(p[i, j] * torch.log(p[i, j] / (a[i] * b[j]))) for i in range(len(a)) for j in range(len(b)))


def circle_keys(n):
    return [[math.cos(2 * math.pi * i / n), math.sin(2 * math.pi * i / n)] for i in range(n)]


def shift_head(n, offset):
    return [[1 if j == i + offset else 0 for j in range(n)] for i in range(n)]


def convolution_matrix(kernel, n):
    r = len(kernel) // 2
    c = torch.zeros(n, n)
    for i in range(n):
        for j in range(len(kernel)):
            if 0 <= i + j - r < n:
                c[i, i + j - r] = kernel[j]
    return c


def convolve(x, w):
    r = len(w) // 2
    return nn.functional.conv1d(x.T[None], w.permute(2, 1, 0), padding=r)[0].T


def merge_halves(a, b, la, lb):
    share = torch.softmax(torch.stack((la, lb)), dim=0)
    return share[0][:, None] * a + share[1][:, None] * b


def in_blocks(q, k, v, size):
    return torch.softmax(q @ k.T, dim=-1) @ v


def decode_step(q, k, v, new_k, new_v):
    k, v = torch.cat((k, new_k.unsqueeze(1)), dim=1), torch.cat((v, new_v.unsqueeze(1)), dim=1)
    return torch.nn.functional.scaled_dot_product_attention(q.unsqueeze(1), k, v).squeeze(1), k, v


def encode(texts):
    ids = {}
    rows = [[ids.setdefault(c, len(ids)) for c in text.replace(" ", "")] for text in texts]
    return torch.tensor([row + [len(ids)] * (max(map(len, rows)) - len(row)) for row in rows])


def padding_share(weights, lengths):
    shares = [weights[i, :, : lengths[i], lengths[i] :].sum(-1) for i in range(len(weights))]
    return torch.cat(shares, dim=-1).mean(-1)


def dropped(weights, kept, p):
    weights = weights * kept.float() / (1 - p)
    return weights, weights.sum(1)


def top_k(logits, k, temperature):
    values, at = torch.topk(logits / temperature, k)
    return torch.zeros(len(logits)).scatter(0, at, torch.softmax(values, dim=0))


def next_token_loss(logits, ids):
    probabilities = torch.log_softmax(logits, dim=-1)
    return -sum(probabilities[i, ids[i + 1]] for i in range(len(ids) - 1)) / (len(ids) - 1)


def perplexity(probabilities):
    return float(torch.prod(probabilities.double()) ** (-1 / len(probabilities)))


def entropy_gradient(scores):
    p = torch.softmax(scores, dim=-1)
    entropy = -(p * torch.log(p)).sum(-1)
    return [[-p[i, j] * (torch.log(p[i, j]) + entropy[i]) for j in range(p.shape[1])] for i in range(len(p))]


def floor_loss(weights, floor):
    costs = []
    for head in weights:
        rows = [-sum(float(p) * math.log(p) for p in row) for row in head]
        costs.append(max(0, floor - sum(rows) / len(rows)))
    return sum(costs) / len(costs)


def lesson_loss(weights, wanted):
    losses = [-torch.log(row[keys]).mean() for row, keys in zip(weights, wanted, strict=True) if keys.any()]
    return sum(losses) / len(losses)
