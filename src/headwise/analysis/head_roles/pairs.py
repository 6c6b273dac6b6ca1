"""Exact weights of chosen pairs, a few keys for each query: O(n) products instead of the n×m matrix."""

from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise.analysis.head_roles.sight import Sight
from headwise.map import AttentionMap
from headwise.rule import compute

TALL = 32  # queries that are multiplied by the keys around them at once


def key_weights(amap: AttentionMap, sight: Sight, key: Tensor) -> Tensor:
    """p[i, key] for one key of each batch entry, [b or 1] as indices: [b, h, n], 0 where it is not seen."""
    b, h, n, _ = amap.shape
    h_kv, d = amap.k.shape[1], amap.k.shape[3]
    at = key.to(amap.k.device).expand(b)
    vector = compute(amap.k)[torch.arange(b, device=at.device), :, at]  # [b, h_kv, d]
    products = compute(amap.q).reshape(b, h_kv, -1, d) @ vector[..., None]
    keys = key[:, None, None].expand(-1, n, 1)
    return _weights(amap, logits(amap, products.view(b, h, n, 1), keys.to(at.device)), sight.sees(keys))[..., 0]


def band(amap: AttentionMap, sight: Sight, reach: int) -> tuple[Tensor, Tensor, Tensor]:
    """The weights around the diagonal: p[i, i + o], the scores before the softmax, and which of these keys query i may
    see; each [b, h, n, 2·reach + 1] for the offsets o = −reach … reach (the last one may be [b or 1, h or 1, …])."""
    n, m = amap.shape[2:]
    keys = (torch.arange(n) + m - n)[:, None] + torch.arange(-reach, reach + 1)
    seen = sight.sees(keys[None])
    scores = logits(amap, _band_products(amap, reach), keys[None].clamp(0, max(0, m - 1)).to(amap.q.device))
    return _weights(amap, scores, seen), scores, seen


def offset_mass(amap: AttentionMap, queries: range, offset: int) -> Tensor:
    """Exact weights p[i, i + offset] for queries at consecutive positions i on the key axis, [b, h, len(queries)]: O(n)
    products."""
    b, h, n, m = amap.shape
    h_kv, d = amap.k.shape[1], amap.k.shape[3]
    keys = torch.arange(n) + m - n + offset
    at = keys.clamp(0, m - 1).to(amap.k.device)
    q = compute(amap.q).view(b, h_kv, -1, n, d)
    products = torch.einsum("bkgnd,bknd->bkgn", q, compute(amap.k)[:, :, at]).reshape(b, h, n, 1)
    seen = Sight(amap.rule).sees(keys[None, :, None])
    weights = _weights(amap, logits(amap, products, at[None, :, None]), seen)[..., 0]
    return weights[..., queries.start - (m - n) : queries.stop - (m - n)]


def logits(amap: AttentionMap, products: Tensor, keys: Tensor) -> Tensor:
    """Scores before the softmax and before the mask, of the products q_i·k_j [b, h, n, w] with the keys
    [b or 1, n, w]: the order of terms is that of `rule.score_tile`."""
    terms = amap.rule.terms(amap.lse)
    scores = products * amap.rule.scale
    if terms.soft_cap:
        scores = torch.tanh(scores / terms.soft_cap) * terms.soft_cap
    n, m = amap.shape[2:]
    if terms.relative is not None:
        query = torch.arange(n, device=keys.device)[:, None]
        scores = scores + terms.relative[:, keys - query + n - 1].transpose(0, 1)
    for bias in terms.biases:
        if bias.shape[3] > 1:
            wide = max(len(bias), len(keys))
            rows = bias.expand(wide, -1, n, m)
            bias = rows.gather(-1, keys[:, None].expand(wide, rows.shape[1], -1, -1))
        scores = scores + bias
    return scores


def _weights(amap: AttentionMap, scores: Tensor, seen: Tensor) -> Tensor:
    minus = amap.lse.masked_fill(amap.lse == -torch.inf, torch.inf)[..., None]
    return torch.where(seen.to(scores.device), torch.exp(scores - minus), 0.0)


def _band_products(amap: AttentionMap, reach: int) -> Tensor:
    """q_i·k_j for |i − j| ≤ reach, [b, h, n, 2·reach + 1]: a block of queries by the block of keys around it."""
    b, h, n, m = amap.shape
    blocks, wide = -(-n // TALL), 2 * reach + 1
    # Keys from m − n − reach on, for as long as the last block reads; less than nothing is cut off.
    before, length = reach - (m - n), blocks * TALL + 2 * reach
    key = pad(compute(amap.k), (0, 0, before, length - before - m))
    around = key.unfold(2, TALL + 2 * reach, TALL)  # [b, h_kv, blocks, d, TALL + 2·reach], a view
    query = compute(amap.q) if n == blocks * TALL else pad(compute(amap.q), (0, 0, 0, blocks * TALL - n))
    products = key.new_empty(b, h, blocks, TALL, TALL + 2 * reach)
    for batch, head in product(range(b), range(h)):  # all at once would copy every key that two blocks read
        mine = query[batch, head].unflatten(0, (blocks, TALL))
        torch.bmm(mine, around[batch, head * len(key[0]) // h], out=products[batch, head])
    # Row r begins r keys further on: reading the memory in rows one longer does that shift.
    step = products.stride()
    near = products.as_strided((b, h, blocks, TALL, wide), (*step[:3], step[3] + 1, 1))
    return near.reshape(b, h, blocks * TALL, wide)[:, :, :n]
