"""Which queries are tokens: measures of a model's health leave out the rows of padding.

In self attention a query that stands on a hidden key is padding itself. Its row is computed like any other where the
padding comes after the tokens, and may well hold the largest score of the head.
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from headwise.masks import And, Dense, Grid, Lengths, Mask
from headwise.measures import Measure, RowMeasure
from headwise.measures.base import RowState
from headwise.measures.registry import resolve
from headwise.rule import Rule
from headwise.statistics import Statistic
from headwise.tiles import Tile


class OverTokens(RowMeasure):
    """A measure of rows, over the queries that are no padding. For self attention; otherwise as the measure is."""

    def __init__(self, inner: RowMeasure) -> None:
        self.inner = inner
        self.name = f"{inner.name} over tokens"
        self.unit, self.range, self.source = inner.unit, inner.range, inner.source
        self.reduce = inner.reduce  # type: ignore[misc]  # it is that of the class for all but this one

    def partial(self, tile: Tile) -> Tensor:
        return self.inner.partial(tile)

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        return self.inner.combine(one, other)

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        return self.inner.value(total, lse)

    def counted(self, total: Tensor, lse: Tensor) -> Tensor:
        return self.inner.counted(total, lse) & (lse != -torch.inf)

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return self.inner.needs(rule)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return self.inner.from_rows(found, lse, rule)

    def start(self, grid: Grid, like: Tensor, keep_rows: bool = False) -> RowState:
        return self.inner.start(grid, like, keep_rows)

    def take(self, state: RowState, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> None:
        self._close(state, self.from_rows(found, lse, rule), _seen(lse, rule, 0), 0)

    def update(self, state: RowState, tile: Tile) -> None:
        part = self.partial(tile)
        state.current = part if tile.first or state.current is None else self.combine(state.current, part)
        if tile.last:
            self._close(state, state.current, _seen(tile.lse, tile.rule, tile.rows.start), tile.rows.start)
            state.current = None


def over_tokens(measure: Measure) -> Measure:
    """The measure over tokens; one that is not made of rows, such as `received_mass`, stays as it is."""
    own = isinstance(measure, RowMeasure) and type(measure).update is RowMeasure.update
    return OverTokens(measure) if own and isinstance(measure, RowMeasure) else measure


@lru_cache(maxsize=64)
def named(name: str) -> tuple[Measure, Measure]:
    """A measure of that name and the same over tokens; always the same two, so that several records can share them."""
    (measure,) = resolve([name])
    return measure, over_tokens(measure)


def token_queries(rule: Rule) -> Tensor | None:
    """Which queries of self attention are tokens, boolean [b or 1, n]; None if all are."""
    grid = rule.grid
    if grid.n > grid.m:
        return None
    real: Tensor | None = None
    for part in _parts(rule.mask):
        if _is_padding(part):
            keys = part.allowed(torch.zeros(1, dtype=torch.long), torch.arange(grid.m), grid)[:, 0, 0]
            here = keys[:, grid.m - grid.n :]
            real = here if real is None else real & here
    return real


def _parts(mask: Mask) -> list[Mask]:
    return [*_parts(mask.left), *_parts(mask.right)] if isinstance(mask, And) else [mask]


def _is_padding(mask: Mask) -> bool:
    """Whether it hides keys from all queries alike."""
    if isinstance(mask, Lengths):
        return mask.queries is None
    return isinstance(mask, Dense) and mask.mask.ndim == 4 and mask.mask.stride(2) == 0 and mask.mask.shape[1] == 1


def _seen(lse: Tensor, rule: Rule, first: int) -> Tensor:
    """The log-sum-exp [b, h, r] of rows from `first` on, −∞ where the query is padding."""
    real = token_queries(rule)
    if real is None:
        return lse
    here = real[:, None, first : first + lse.shape[-1]].to(lse.device)
    return lse.masked_fill(~here, -torch.inf)
