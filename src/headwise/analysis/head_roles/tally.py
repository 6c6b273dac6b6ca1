"""What heads attend to, counted without the n×m matrix: keys in sight, exact weights of pairs, sums over rows.

If the mask is a few ranges of keys for each query, all counts are O(n); a boolean n×m mask is read in blocks of rows.

Keys that match a query's token: sorted by the token that they represent, and within a token by position, they are one
range (for each range of the mask), so their weight is exp(LSE over the range − LSE of the row): one call of `attend` in
which each query is allowed its matches only. `DuplicateMass` and `InductionMass` compute the same from tiles; they are
used where the order of the keys enters a score.

Confidence is from a block bootstrap (Künsch 1989) over stretches of consecutive rows, since neighbouring
rows are correlated. It concerns the rows of these inputs only.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise.fields import Array
from headwise.map import AttentionMap
from headwise.map.attention import attend
from headwise.masks import Grid, Mask, Span, State, spans
from headwise.publishing.tokens import token_queries
from headwise.rule import TILE_ELEMENTS, Rule, compute
from headwise.scores import SoftCap
from headwise.stats import DuplicateMass, InductionMass


class Sight:
    """Counts of the keys in sight of queries [b or 1, h or 1, n], int64, on the CPU; `tokens` [b or 1, t] are the
    queries that are no padding, filled up with others, or None for all. `spans` is None if the mask has none."""

    def __init__(self, rule: Rule) -> None:
        self.grid, self._mask = rule.grid, rule.mask
        found = rule.mask.spans(rule.grid)
        self.spans = None if found is None else found.long()
        real = token_queries(rule.mask, rule.grid)
        most = 0 if real is None else max(1, int(real.sum(-1).max()))
        self.tokens = None if real is None else (~real).byte().argsort(dim=-1, stable=True)[:, :most]
        self.keys = self.count(torch.ones(1, self.grid.m, dtype=torch.bool))
        seen = self.seen()
        self.first = torch.where(seen.any(-1), seen.int().argmax(-1), self.grid.m)

    def count(self, members: Tensor) -> Tensor:
        """The number of `members` (boolean [b or 1, m]) in sight of each query, [b or 1, h or 1, n]."""
        members = members.cpu()
        if self.spans is None:
            return self.by_rows(lambda allowed, _: (allowed & members[:, None, None]).sum(-1))
        upto = pad(members.long().cumsum(1), (1, 0))  # [b or 1, m + 1]
        b = max(len(upto), len(self.spans))
        ends = self.spans.expand(b, -1, -1, -1)
        counts = upto.expand(b, -1).gather(1, ends.reshape(b, -1)).view(ends.shape)
        return (counts[..., 1] - counts[..., 0]).sum(-1)[:, None]

    def sees(self, keys: Tensor) -> Tensor:
        """Whether each of a query's `keys` [b or 1, n, w] is in sight, [b or 1, h or 1, n, w]; False out of range."""
        keys = keys.cpu()
        there = ((keys >= 0) & (keys < self.grid.m))[:, None]
        if self.spans is not None:
            at = keys[..., None]
            inside = (at >= self.spans[:, :, None, :, 0]) & (at < self.spans[:, :, None, :, 1])
            return inside.any(-1)[:, None] & there
        at = keys.clamp(0, max(0, self.grid.m - 1))[:, None]

        def pick(allowed: Tensor, rows: slice) -> Tensor:
            b, h = max(len(allowed), len(at)), allowed.shape[1]
            return allowed.expand(b, -1, -1, -1).gather(-1, at[:, :, rows].expand(b, h, -1, -1))

        return self.by_rows(pick, axis=2) & there

    def seen(self) -> Tensor:
        """Which keys are in sight of any query, boolean [b or 1, m]."""
        if self.spans is None:
            return self.by_rows(lambda allowed, _: allowed.any(2, keepdim=True), axis=2).any(2).any(1)
        ends = self.spans.flatten(1, 2)  # [b or 1, n · K, 2]
        change = torch.zeros(len(ends), self.grid.m + 1, dtype=torch.long)
        one = torch.ones((), dtype=torch.long).expand(ends.shape[:2])
        change.scatter_add_(1, ends[..., 0], one).scatter_add_(1, ends[..., 1], -one)
        return change.cumsum(1)[:, : self.grid.m] > 0

    def ahead(self) -> bool:
        """Whether any query has a key after it in sight."""
        position = torch.arange(self.grid.n) + self.grid.shift
        if self.spans is None:
            later = torch.arange(self.grid.m) > position[:, None]
            return bool(self.by_rows(lambda allowed, rows: (allowed & later[rows]).any(-1)).any())
        ends = self.spans[..., 1].masked_fill(self.spans[..., 0] >= self.spans[..., 1], 0)
        return bool((ends > position[:, None] + 1).any())

    def by_rows(self, read: Callable[[Tensor, slice], Tensor], axis: int = -1) -> Tensor:
        """Apply `read` to the mask [b or 1, h or 1, r, m] in blocks of rows, and join the results along `axis`."""
        return torch.cat([read(allowed, rows) for allowed, rows in self.blocks()], axis)

    def blocks(self) -> Iterator[tuple[Tensor, slice]]:
        """The mask [b or 1, h or 1, r, m] in blocks of rows, and the rows of each."""
        b, h, n, m = self.grid
        height, cols = max(1, TILE_ELEMENTS // max(1, b * h * m)), torch.arange(m)
        for start in range(0, n, height):
            rows = slice(start, min(start + height, n))
            yield self._mask.allowed(torch.arange(rows.start, rows.stop), cols, self.grid).cpu(), rows


def ranges(start: Tensor, stop: Tensor, m: int) -> Tensor:
    """Half-open ranges [b, n, K] as spans of a mask over m keys: sorted, the empty ones last."""
    empty = start >= stop
    ends = torch.stack((start, stop), -1).masked_fill(empty[..., None], 0).int()
    everything = spans.one(torch.zeros(1, start.shape[1], dtype=torch.long), torch.tensor(m), m)
    return spans.intersect(ends, everything)


TALL = 32  # queries in a block that is multiplied by the keys around it


def key_weights(amap: AttentionMap, sight: Sight, key: Tensor) -> Tensor:
    """p[i, key] for one key of each batch entry, [b or 1] as indices: [b, h, n], 0 where it is masked."""
    b, h, n, _ = amap.shape
    h_kv, d = amap.k.shape[1], amap.k.shape[3]
    at = key.to(amap.k.device).expand(b)
    vector = compute(amap.k)[torch.arange(b, device=at.device), :, at]  # [b, h_kv, d]
    products = compute(amap.q).reshape(b, h_kv, -1, d) @ vector[..., None]
    keys = key[:, None, None].expand(-1, n, 1)
    return _weights(amap, logits(amap, products.view(b, h, n, 1), keys.to(at.device)), sight.sees(keys))[..., 0]


def band(amap: AttentionMap, sight: Sight, reach: int) -> tuple[Tensor, Tensor, Tensor]:
    """The weights p[i, i + o], the scores before the softmax, and which of these keys are allowed, for the offsets o =
    −reach … reach: each [b, h, n, 2·reach + 1] (the last may be [b or 1, h or 1, …])."""
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
    """Exact p[i, i + offset] for queries at consecutive positions i on the key axis, [b, h, n]: O(n) products."""
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
    """Scores from the products q_i·k_j [b, h, n, w] with keys [b or 1, n, w]; terms ordered as in `rule.score_tile`."""
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
    """The keys j ≤ i in sight of query i with ids[j − shift] = ids[i], j − shift < i, counted: [b or 1, h or 1, n].
    shift: 0 for repeats of the token, 1 for the tokens that followed them."""
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
    order = _tokens(ids, sight.grid, 0)[0].argsort(dim=1, stable=True)
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
    """Tokens numbered 0, 1 …: of the queries [b or 1, n] (−2 before the first key), those that the keys represent [b or
    1, m] (−1 for none), and the positions of the queries on the key axis [n]."""
    token = torch.unique(ids.cpu(), return_inverse=True)[1]
    of_key = grid.of_keys(pad(token, (shift, 0), value=-1)[:, : token.shape[1]])
    position, at = torch.arange(grid.n) + grid.shift, torch.arange(grid.n) + grid.first_token
    return torch.where(at >= 0, token[:, at.clamp_min(0)], -2), of_key, position


def _sorted(ids: Tensor, sight: Sight, shift: int) -> tuple[Tensor, Tensor]:
    """The keys in the order of their tokens [b or 1, m], and each query's matching ranges of it, [b or 1, n, K, 2]."""
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


STRETCHES = 64  # about as many an input
MOST = 256  # of several merged inputs
DRAWS = 1000


@dataclass(frozen=True)
class Tally:
    """Sums over the eligible rows of each stretch, float64 [layers, stretches, heads, …]."""

    total: np.ndarray  # of the score
    count: np.ndarray  # eligible rows
    uniform: np.ndarray  # of the score of a uniform head

    def mean(self) -> tuple[np.ndarray, np.ndarray]:
        """Score and uniform baseline [layers, heads, …]; NaN where no row is eligible."""
        return _mean(self.total.sum(1), self.uniform.sum(1), self.count.sum(1))

    def drawn(self) -> tuple[np.ndarray, np.ndarray]:
        """`mean` of each draw of the bootstrap, [draws, layers, heads, …]."""
        weights = _draws(self.total.shape[1])
        total, uniform, count = (
            np.tensordot(weights, x, axes=(1, 1)) for x in (self.total, self.uniform, self.count)
        )  # fmt: skip
        return _mean(total, uniform, count)

    def at(self, index: np.ndarray) -> "Tally":
        """For a tally with one more axis, the entry `index` [layers, heads] of that axis."""
        where = index[:, None, :, None]
        return Tally(*(np.take_along_axis(x, where, -1)[..., 0] for x in (self.total, self.count, self.uniform)))

    def merge(self, other: "Tally") -> "Tally":
        """The tally of both inputs."""
        parts = zip((self.total, self.count, self.uniform), (other.total, other.count, other.uniform), strict=True)
        return Tally(*(pooled(np.concatenate(pair, 1)) for pair in parts))


def stack(layers: list[Tally]) -> Tally:
    """One tally of several layers, each [1, stretches, heads, …]."""
    return Tally(*(np.concatenate([getattr(x, name) for x in layers]) for name in ("total", "count", "uniform")))


def tally(score: Tensor, eligible: Tensor, uniform: Tensor, tokens: Tensor | None = None) -> Tally:
    """Sums of one layer over eligible rows. score: [b, h, n, …]; tokens: [b or 1, t], the rows that are no padding."""
    eligible = eligible.to(uniform.device)
    uniform = torch.where(eligible, uniform, 0.0)
    rows = [score.masked_fill(~eligible.to(score.device), 0.0), eligible, uniform]
    if tokens is not None:
        at = tokens.view(len(tokens), 1, -1, *(1,) * (score.ndim - 3))
        rows = [torch.take_along_dim(x.expand(*x.shape[:2], *score.shape[2:]), at.to(x.device), 2) for x in rows]
        score = rows[0]
    total, count, even = (by_stretch(x, score.shape) for x in rows)
    return Tally(total, *(np.broadcast_to(x, total.shape) for x in (count, even)))


def by_stretch(rows: Tensor, shape: Sequence[int]) -> np.ndarray:
    """Sums of [b or 1, h or 1, n, …] over stretches of rows, broadcast to `shape`: [1, b · stretches, h or 1, …]."""
    b, _, n = shape[:3]
    length = min(n, max(1, -(-n * b // STRETCHES)))
    many = -(-n // length)
    rows = rows if rows.dtype.is_floating_point else rows.float()
    if many * length > n:
        rows = pad(rows, (*(0, 0) * (rows.ndim - 3), 0, many * length - n))
    sums = rows.unflatten(2, (many, length)).sum(3, dtype=torch.float64)
    sums = sums.expand(b, *sums.shape[1:]).transpose(1, 2)
    return sums.reshape(1, b * many, *sums.shape[2:]).cpu().numpy()


def pooled(sums: np.ndarray) -> np.ndarray:
    """Sums of at most MOST stretches: neighbouring ones are added."""
    while sums.shape[1] > MOST:
        if sums.shape[1] % 2:
            sums = np.concatenate((sums, np.zeros_like(sums[:, :1])), 1)
        sums = sums[:, ::2] + sums[:, 1::2]
    return sums


def _mean(total: np.ndarray, uniform: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / count, uniform / count


@lru_cache(maxsize=8)
def _draws(stretches: int) -> np.ndarray:
    """How often each draw contains each stretch, [draws, stretches]; seeded, so that results repeat."""
    share = np.full(stretches, 1.0 / max(1, stretches))
    return np.random.default_rng(0).multinomial(stretches, share, size=DRAWS).astype(np.float64)
