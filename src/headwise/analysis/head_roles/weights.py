"""Exact weights of chosen pairs without the n×m matrix: one key a query, the keys around the diagonal, and the keys
that match a query's token.

For matches, the keys are sorted by the token that they represent, and within a token by position. The keys that match a
query are then one range (for each range of its mask), so the weight on all of them is exp(LSE over the range − LSE of
the row): one call of `attend` in which each query is allowed its matches only, and blocks without a match are never
computed. `DuplicateMass` and `InductionMass` compute the same from tiles; they are used where the order of the keys
enters a score.
"""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise.analysis.head_roles.sight import Sight, ranges
from headwise.attention import attend
from headwise.fields import Array
from headwise.map import AttentionMap
from headwise.masks import Grid, Mask, Span, State
from headwise.rule import compute
from headwise.scores import SoftCap
from headwise.stats import DuplicateMass, InductionMass

TALL = 32  # queries in a block that is multiplied by the keys around it


def key_weights(amap: AttentionMap, sight: Sight, key: Tensor) -> Tensor:
    """p[i, key] for one key of each batch entry, [b or 1] as indices: [b, h, n], 0 where it is
    masked."""
    b, h, n, _ = amap.shape
    h_kv, d = amap.k.shape[1], amap.k.shape[3]
    at = key.to(amap.k.device).expand(b)
    vector = compute(amap.k)[torch.arange(b, device=at.device), :, at]  # [b, h_kv, d]
    products = compute(amap.q).reshape(b, h_kv, -1, d) @ vector[..., None]
    keys = key[:, None, None].expand(-1, n, 1)
    return _weights(amap, logits(amap, products.view(b, h, n, 1), keys.to(at.device)), sight.sees(keys))[..., 0]


def band(amap: AttentionMap, sight: Sight, reach: int) -> tuple[Tensor, Tensor, Tensor]:
    """The weights around the diagonal p[i, i + o], the scores before the softmax, and which of these keys are allowed;
    each [b, h, n, 2·reach + 1] for the offsets o = −reach … reach of tokens (the last may be
    [b or 1, h or 1, …])."""
    n, m = amap.shape[2:]
    grid, steps = amap.rule.grid, torch.arange(-reach, reach + 1)
    keys = grid.keys_at((torch.arange(n) + grid.first_token)[:, None] + steps)
    seen, products = sight.sees(keys[None]), _band_products(amap, reach)
    if grid.gap.size:  # of the keys along their axis, to those of the tokens, which are not farther along it
        at = keys - (torch.arange(n) + grid.shift)[:, None] + reach
        products = products.gather(-1, at.clamp(0, 2 * reach).to(products.device).expand_as(products))
    scores = logits(amap, products, keys[None].clamp(0, max(0, m - 1)).to(amap.q.device))
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
    """Scores before the softmax and the mask from the products q_i·k_j [b, h, n, w] with the keys [b or 1, n, w]; the
    order of terms is that of `rule.score_tile`."""
    terms = amap.rule.terms(amap.lse)
    scores = products * amap.rule.scale
    if terms.soft_cap:
        scores = torch.tanh(scores / terms.soft_cap) * terms.soft_cap
    n, m = amap.shape[2:]
    if terms.relative is not None:
        query = torch.arange(n, device=keys.device)[:, None]
        scores = scores + terms.relative[:, terms.entries(query, keys)].transpose(0, 1)
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
    # Keys from reach before the first query up to the end of the last block; negative padding cuts off.
    before, length = reach - amap.rule.grid.shift, blocks * TALL + 2 * reach
    key = pad(compute(amap.k), (0, 0, before, length - before - m))
    around = key.unfold(2, TALL + 2 * reach, TALL)  # [b, h_kv, blocks, d, TALL + 2·reach], a view
    query = compute(amap.q) if n == blocks * TALL else pad(compute(amap.q), (0, 0, 0, blocks * TALL - n))
    products = key.new_empty(b, h, blocks, TALL, TALL + 2 * reach)
    for batch, head in product(range(b), range(h)):  # in one product, the keys that two blocks share would be copied
        mine = query[batch, head].unflatten(0, (blocks, TALL))
        torch.bmm(mine, around[batch, head * len(key[0]) // h], out=products[batch, head])
    # Row r begins r keys later: a row stride that is one longer makes that shift.
    step = products.stride()
    near = products.as_strided((b, h, blocks, TALL, wide), (*step[:3], step[3] + 1, 1))
    return near.reshape(b, h, blocks * TALL, wide)[:, :, :n]


class Ranges(Mask):
    """The keys of given spans, int32 [b, n, K, 2] on the CPU."""

    holds = {"given": Array("bn*2")}

    def __init__(self, given: Tensor) -> None:
        self.given = given

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        at = self.given[:, rows.cpu()]
        key = cols.cpu()[:, None]
        inside = (key >= at[:, :, None, :, 0]) & (key < at[:, :, None, :, 1])
        return inside.any(-1)[:, None].to(rows.device)

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        at = self.given[:, rows.start : rows.stop]
        meets = (at[..., 0] < cols.stop) & (at[..., 1] > cols.start) & (at[..., 0] < at[..., 1])
        return State.MIXED if bool(meets.any()) else State.EMPTY

    def spans(self, grid: Grid) -> Tensor:
        return self.given


def match_counts(ids: Tensor, sight: Sight, shift: int) -> Tensor:
    """The keys j ≤ i in sight of query i with token[j − shift] = token[i], j − shift < i, counted: [b or 1, h or 1, n].

    Args:
        ids: integer tokens [b or 1, m], or of all tokens if a cache has dropped some.
        shift: 0 for repeats of the token, 1 for the tokens that followed them.
    """
    if sight.spans is not None:
        _, found = _sorted(ids, sight, shift)
        return (found[..., 1] - found[..., 0]).sum(-1)[:, None]
    of_query, of_key, position = _tokens(ids, sight.grid, shift)
    before = torch.arange(sight.grid.m) < position[:, None] + shift  # where matching keys can be

    def count(allowed: Tensor, rows: slice) -> Tensor:
        same = (of_query[:, rows, None] == of_key[:, None]) & before[rows]
        return (allowed & same[:, None]).sum(-1)

    return sight.by_rows(count)


def match_masses(amap: AttentionMap, ids: Tensor, sight: Sight, shifts: Sequence[int] = (0, 1)) -> list[Tensor]:
    """Σ p_ij over the matching keys, [b, h, n] for each shift."""
    terms = amap.rule.terms(amap.lse[..., :0])
    if sight.spans is None or terms.relative is not None or terms.biases:
        measures = [(DuplicateMass, InductionMass)[shift](ids) for shift in shifts]
        rows = amap.measure(*measures, rows=True).rows
        return [rows[measure.name] for measure in measures]
    b, m = amap.shape[0], amap.shape[3]
    score = (SoftCap(terms.soft_cap),) if terms.soft_cap else ()
    order = _query_order(ids, sight.grid)
    back, q, total = order.argsort(1), _taken(amap.q, order, 2), _taken(amap.lse, order, 2)
    masses = []
    for shift in shifts:
        cols, found = _sorted(ids, sight, shift)
        found = _taken(found.expand(b, -1, -1, -1), order, 1)
        k, mask = _taken(amap.k, cols, 2), Ranges(ranges(found[..., 0], found[..., 1], m))
        _, only = attend(q, k, k[..., :0], mask=mask, scale=amap.rule.scale, score=score, return_map=True)
        mass = torch.exp(only.lse - total).masked_fill(only.lse == -torch.inf, 0.0)
        masses.append(_taken(mass, back, 2))
    return masses


def _taken(x: Tensor, order: Tensor, axis: int) -> Tensor:
    """x [b, …] with `axis` in the order [b or 1, size]."""
    order = order.to(x.device)
    if len(order) == 1:
        return x.index_select(axis, order[0])
    return torch.stack([one.index_select(axis - 1, at) for one, at in zip(x, order, strict=True)])


def _tokens(ids: Tensor, grid: Grid, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens numbered 0, 1, 2 …: of the queries [b or 1, n] (−2 before the first key), those that the keys represent
    [b or 1, m] (−1 for none), and the positions of the queries on the key axis [n]."""
    token = torch.unique(ids.cpu(), return_inverse=True)[1]
    of_key = grid.of_keys(pad(token, (shift, 0), value=-1)[:, : token.shape[1]])
    position, at = torch.arange(grid.n) + grid.shift, torch.arange(grid.n) + grid.first_token
    return torch.where(at >= 0, token[:, at.clamp_min(0)], -2), of_key, position


def _query_order(ids: Tensor, grid: Grid) -> Tensor:
    """The queries sorted by token, [b or 1, n]."""
    return _tokens(ids, grid, 0)[0].argsort(dim=1, stable=True)


def _sorted(ids: Tensor, sight: Sight, shift: int) -> tuple[Tensor, Tensor]:
    """The order of keys by the token they represent [b or 1, m], and of each query the ranges of matching keys in that
    order, [b or 1, n, K, 2]."""
    assert sight.spans is not None
    of_query, of_key, position = _tokens(ids, sight.grid, shift)
    stride = sight.grid.m + 1
    code, cols = (of_key * stride + torch.arange(sight.grid.m)).sort(1)
    b = max(len(of_query), len(sight.spans))
    code, of_query = code.expand(b, -1).contiguous(), of_query.expand(b, -1)
    # A matching key is before the query, or at most `shift` − 1 after it.
    before = (position + shift).clamp_min(0)[None, :, None, None]
    ends = torch.minimum(sight.spans, before).expand(b, -1, -1, -1) + of_query[..., None, None] * stride
    return cols, torch.searchsorted(code, ends.reshape(b, -1)).view(ends.shape)
