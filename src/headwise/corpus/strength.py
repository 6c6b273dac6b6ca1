"""How strongly a head attends in a window: its strongest query, and the keys that this query attends to most.

The strength of a query is the largest of its weights that says something about the text: weights on the first token of
the window, which many heads use as a sink, on the query itself and on special tokens are left out. Instead, it can be
the value of any measure of queries, such as `induction_mass`. Queries that may attend to fewer than `KEYS` keys have no
strength: with little choice, every weight is large.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.corpus.selection import NOTHING
from headwise.errors import unknown_name
from headwise.masks import Grid
from headwise.pooling import add_top
from headwise.rule import Rule
from headwise.stats import GIVEN, MEASURES, Measure, RowMeasure, Statistic, Tokens, TopKeys, TopWeights, of_tokens
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


@dataclass
class State:
    """The largest weights of each query and their keys, [b, h, n, KEYS] (−1 beyond the keys that it may attend to), and
    the state of a measure of queries."""

    weights: Tensor
    keys: Tensor
    inner: Any = None


@dataclass(frozen=True)
class Found:
    """The strongest query of each batch entry and head, [b, h]: its strength (−∞ if no query has one), its position,
    and its largest weights and their keys [b, h, KEYS]."""

    strength: Tensor
    query: Tensor
    weights: Tensor
    keys: Tensor


class Strongest(Measure):
    """The strongest query of each head in each window; `found` returns it from a state.

    Args:
        by: a name as in `strengths()`. tokens: of a batch of windows. mask: [b, n], True for tokens and False for
            padding; None without padding.
    """

    name, unit, range, source = "strongest_query", "", "any", "headwise"

    def __init__(self, by: str, tokens: Tokens, mask: Tensor | None) -> None:
        self._inner = None if by == WEIGHT else _of_rows(by, tokens)
        assert tokens.special is not None
        self._special = tokens.special if mask is None else tokens.special | ~mask.to(tokens.special.device)

    def start(self, grid: Grid, like: Tensor) -> State:
        shape = grid.b, grid.h, grid.n, min(KEYS, grid.m)
        keys = torch.full(shape, -1, dtype=torch.long, device=like.device)
        inner = None if self._inner is None else self._inner.start(grid, like, keep_rows=True)
        return State(like.new_full(shape, -torch.inf), keys, inner)  # logarithms until the last tile

    def update(self, state: State, tile: Tile) -> None:
        add_top(state.weights, state.keys, tile)
        if tile.last:
            rows = slice(tile.rows.start, tile.rows.stop)
            state.weights[:, :, rows] = state.weights[:, :, rows].exp()
        if self._inner is not None:
            self._inner.update(state.inner, tile)

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        count = min(KEYS, rule.grid.m)
        inner = () if self._inner is None else self._inner.needs(rule)
        return None if inner is None else (TopWeights(count), TopKeys(count), *inner)

    def take(self, state: State, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> None:
        count = min(KEYS, rule.grid.m)
        state.weights, state.keys = found[TopWeights(count)], found[TopKeys(count)].long()
        if self._inner is not None:
            self._inner.take(state.inner, found, lse, rule)

    def merge(self, one: State, other: State) -> State:
        raise NotImplementedError("windows are kept apart")

    def finish(self, state: State) -> Tensor:
        return state.weights.new_zeros(state.weights.shape[:2])

    def found(self, state: State) -> Found:
        """The strongest query of each window and head; of equally strong ones the first."""
        b, _, n, count = state.keys.shape
        if count < KEYS:  # a short window
            state = State(_wider(state.weights, 0.0), _wider(state.keys, -1), state.inner)
        special = self._special.to(state.keys.device)[:, None]  # [b, 1, n]
        if self._inner is None:
            query = torch.arange(n, device=state.keys.device)[:, None]
            keys = state.keys.clamp_min(0)
            hidden = special[:, :, None].expand(-1, keys.shape[1], n, -1).gather(3, keys)
            counts = (state.keys > 0) & (state.keys != query) & ~hidden
            strength = state.weights.masked_fill(~counts, -torch.inf).amax(-1)
        else:
            strength = state.inner.rows.clone()
        strength = strength.masked_fill(special | strength.isnan() | (state.keys[..., -1] < 0), -torch.inf)
        most = strength.amax(-1, keepdim=True)
        first = torch.where(strength == most, torch.arange(n, device=most.device), n).amin(-1)
        at = first[..., None, None].expand(b, -1, 1, KEYS)
        return Found(most[..., 0], first, *(x.gather(2, at)[:, :, 0] for x in (state.weights, state.keys)))


def _wider(x: Tensor, value: float) -> Tensor:
    return torch.nn.functional.pad(x, (0, KEYS - x.shape[-1]), value=value)
