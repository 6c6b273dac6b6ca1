"""How strongly a head attends in a window: its strongest query, and the keys that this query attends to most.

The strength of a query is the largest of its weights that says something about the text: weights on the first token of
the window, which many heads use as a sink, on the query itself and on special tokens are left out. Instead, it can be
the value of any measure of queries, such as `induction_mass`. Queries that may attend to fewer than `KEYS` keys have no
strength: with little choice, every weight is large.
"""

import numpy as np
import torch
from torch import Tensor

from headwise.corpus.selection import NOTHING
from headwise.errors import unknown_name
from headwise.map import AttentionMap
from headwise.masks import Forbidden, Grid, Mask, Span, State, spans
from headwise.rule import Rule
from headwise.stats import GIVEN, MEASURES, MaxLogit, RowMeasure, Tokens, of_tokens
from headwise.stats.rows import allowed_keys, ranges
from headwise.tiles import Tile

KEYS = 8  # of a query that are kept
WEIGHT = "weight"


def strengths() -> tuple[str, ...]:
    """The names of all strengths."""
    return (WEIGHT, *(name for name in (*MEASURES, *GIVEN) if _of_rows(name, NOTHING) is not None))


def check_strength(name: str) -> None:
    """Raise ConfigError for an unknown name, and for a measure that has no value for each query."""
    if name != WEIGHT and (name not in (*MEASURES, *GIVEN) or _of_rows(name, NOTHING) is None):
        raise unknown_name("strongest_by", name, strengths())


def unit_of(name: str) -> str:
    """The unit of a strength."""
    found = None if name == WEIGHT else _of_rows(name, NOTHING)
    return "mass" if found is None else found.unit


def _of_rows(name: str, tokens: Tokens) -> RowMeasure | None:
    found = of_tokens(name, tokens)
    return found if isinstance(found, RowMeasure) and type(found).update is RowMeasure.update else None


class Elsewhere(Mask):
    """A query may not attend to itself."""

    holds = {}

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return ((rows + grid.shift)[:, None] != cols)[None, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        first, last = rows.start + grid.shift, rows.stop - 1 + grid.shift
        return State.FULL if cols.stop <= first or cols.start > last else State.MIXED

    def spans(self, grid: Grid) -> Tensor:
        at = grid.positions()
        start, stop = torch.stack((0 * at, at + 1), -1), torch.stack((at, 0 * at + grid.m), -1)
        return spans.tidy(start[None], stop[None]).int()

    def part(self, rows: Span, cols: Span, grid: Grid) -> Mask:
        return self


class LargestOther(RowMeasure):
    """The largest weight of a query on keys other than itself and the hidden ones, by tiles."""

    name, unit, range, source = "largest_other", "mass", "0 to 1", "headwise"

    def __init__(self, hidden: Tensor) -> None:
        self._hidden = hidden  # [b, m]

    def partial(self, tile: Tile) -> Tensor:
        hidden = self._hidden.to(tile.lse.device)[:, None, None, tile.cols.start : tile.cols.stop]
        return tile.weights.masked_fill(hidden | (tile.positions[:, None] == tile.keys), 0.0).amax(-1)

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.maximum(one, other)


def strongest(amap: AttentionMap, by: str, tokens: Tokens, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The strongest query of each window and head: its strength, −∞ if no query has one, and its position, both [b, h].
    Of equally strong ones the first.

    Args:
        amap: of self attention. by: a name as in `strengths()`. tokens: of the windows. mask: [b, n], True for
            tokens and False for padding; None without padding.
    """
    assert tokens.special is not None
    special = tokens.special if mask is None else tokens.special | ~mask.to(tokens.special.device)
    if by == WEIGHT:
        strength = _largest(amap, special)
    else:
        inner = _of_rows(by, tokens)
        assert inner is not None  # checked by `check_strength`
        strength = amap.measure(inner, rows=True).rows[inner.name]
    device = strength.device
    blank = special[:, None].to(device) | (_choice(amap.rule, amap.lse) < KEYS) | strength.isnan()
    strength = strength.masked_fill(blank, -torch.inf)
    most = strength.amax(-1)
    n = strength.shape[-1]
    return most, torch.where(strength == most[..., None], torch.arange(n, device=device), n).amin(-1)


def largest_keys(weights: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The keys of the `KEYS` largest weights of a row [m] that are above 0, and these weights, largest first."""
    found, keys = weights.cpu().sort(descending=True, stable=True)
    found, keys = found[:KEYS], keys[:KEYS]
    return keys[found > 0].numpy(), found[found > 0].numpy()


def _largest(amap: AttentionMap, special: Tensor) -> Tensor:
    """The largest weight of each query on the text, without the first token and itself, [b, h, n]."""
    hidden = special.clone()
    hidden[:, 0] = True
    if type(amap) is not AttentionMap:  # its weights are not those of its scores
        return amap.measure(LargestOther(hidden), rows=True).rows[LargestOther.name]
    rule = amap.rule
    every = torch.ones(rule.grid.n, dtype=torch.bool)
    others = Rule(rule.mask & Elsewhere() & Forbidden(every, hidden.cpu()), rule.scale, rule.grid, rule.scores)
    seen = AttentionMap(amap.q, amap.k, amap.lse, others, kernel=amap.kernel, named=amap.named, whole=False)
    return (seen.measure(MaxLogit(), rows=True).rows[MaxLogit.name] - amap.lse).clamp_max(0.0).exp()


def _choice(rule: Rule, like: Tensor) -> Tensor:
    """How many keys each query may attend to, [b or 1, h or 1, n]."""
    if ranges(rule) is not None:
        return allowed_keys(rule, like)
    count = like.new_zeros(rule.grid.b, rule.grid.h, rule.grid.n)
    for rows in rule.row_blocks():
        for cols, _ in rule.tiles(rows):
            count[:, :, rows.start : rows.stop] += rule.allowed(rows, cols, like.device).sum(-1)
    return count
