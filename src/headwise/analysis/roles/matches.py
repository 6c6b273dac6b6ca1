"""Weight on the keys that match a query's token, for all queries, without the n×m matrix.

Sort the keys by the token that they stand for, and within a token by position. The keys that match a query are then
one range (for each range of its mask), so the weight on all of them is exp(LSE over the range − LSE of the row): one
call to attention in which each query sees its matches only, and blocks without a match are never computed.

`DuplicateMass` and `InductionMass` say the same by tiles; they are used where the order of keys enters a score.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.analysis.roles.sight import Sight, ranges
from headwise.attention import attend
from headwise.fields import Array
from headwise.map import AttentionMap
from headwise.masks import Grid, Mask, Span, State
from headwise.scores import SoftCap
from headwise.stats import DuplicateMass, InductionMass

KINDS = {0: DuplicateMass, 1: InductionMass}


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
    """How many keys j ≤ i with token[j − shift] = token[i], j − shift < i, each query i may see: [b or 1, h or 1, n].

    Args:
        ids: integer tokens [b or 1, m]; shift: 0 for repeats of the token, 1 for what followed them.
    """
    if sight.spans is not None:
        _, found = _sorted(ids, sight, shift)
        return (found[..., 1] - found[..., 0]).sum(-1)[:, None]
    of_query, of_key, position = _tokens(ids, sight.grid, shift)
    before = torch.arange(sight.grid.m) < position[:, None] + shift  # a key that matches stands there

    def count(allowed: Tensor, rows: slice) -> Tensor:
        same = (of_query[:, rows, None] == of_key[:, None]) & before[rows]
        return (allowed & same[:, None]).sum(-1)

    return sight.by_rows(count)


def match_masses(amap: AttentionMap, ids: Tensor, sight: Sight, shifts: Sequence[int] = (0, 1)) -> list[Tensor]:
    """Σ p_ij over those keys, [b, h, n] for each shift."""
    terms = amap.rule.terms(amap.lse[..., :0])
    if sight.spans is None or terms.relative is not None or terms.biases:
        measures = [KINDS[shift](ids) for shift in shifts]
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
    """Tokens as 0, 1, 2 …: those of the queries [b or 1, n] (−2 before the first key), those that the keys stand for
    [b or 1, m] (−1 for none), and the queries' positions [n]."""
    token = torch.unique(ids.cpu(), return_inverse=True)[1]
    of_key = torch.full_like(token, -1)
    of_key[:, shift:] = token[:, : grid.m - shift]
    position = torch.arange(grid.n) + grid.shift
    return torch.where(position >= 0, token[:, position.clamp_min(0)], -2), of_key, position


def _query_order(ids: Tensor, grid: Grid) -> Tensor:
    """The queries by their token, [b or 1, n]."""
    return _tokens(ids, grid, 0)[0].argsort(dim=1, stable=True)


def _sorted(ids: Tensor, sight: Sight, shift: int) -> tuple[Tensor, Tensor]:
    """The order of keys by the token they stand for [b or 1, m], and of each query the ranges of matching keys in that
    order, [b or 1, n, K, 2]."""
    assert sight.spans is not None
    of_query, of_key, position = _tokens(ids, sight.grid, shift)
    stride = sight.grid.m + 1
    code, cols = (of_key * stride + torch.arange(sight.grid.m)).sort(1)
    b = max(len(of_query), len(sight.spans))
    code, of_query = code.expand(b, -1).contiguous(), of_query.expand(b, -1)
    # A key that matches also stands before the query, or at most `shift` − 1 behind.
    before = (position + shift).clamp_min(0)[None, :, None, None]
    ends = torch.minimum(sight.spans, before).expand(b, -1, -1, -1) + of_query[..., None, None] * stride
    return cols, torch.searchsorted(code, ends.reshape(b, -1)).view(ends.shape)
