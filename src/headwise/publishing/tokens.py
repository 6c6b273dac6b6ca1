"""What subscribers receive of padded batches: the map of self attention whose padded queries are fully masked, and
measures of the others."""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from headwise.map import AttentionMap
from headwise.masks import Grid, Mask, real_tokens
from headwise.masks.base import kept
from headwise.rule import Rule
from headwise.rule.tiles import Tile
from headwise.stats import Measure, Measurements, RowMeasure, Statistic
from headwise.stats.base import RowState


class OverTokens(RowMeasure):
    """A measure of rows over the queries that are not padding; for self attention."""

    name: str
    unit: str
    range: str
    source: str

    def __init__(self, inner: RowMeasure) -> None:
        self.inner = inner
        self.name = f"{inner.name} over tokens"
        self.unit, self.range, self.source = inner.unit, inner.range, inner.source
        self.reduce = inner.reduce  # type: ignore[misc]  # a class variable elsewhere

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
    """The measure over tokens; one that is not made of rows, such as `received_mass`, is returned as it is."""
    own = isinstance(measure, RowMeasure) and type(measure).update is RowMeasure.update
    return OverTokens(measure) if own and isinstance(measure, RowMeasure) else measure


def copied(amap: Any, *, learned: bool) -> Any:
    """A map of its own for subscribers, with gradients or without; layers may have maps of other kinds."""
    return amap.detach() if isinstance(amap, AttentionMap) and not learned else copy(amap)


def token_map(
    amap: AttentionMap, measures: Sequence[Measure], asked: Sequence[Measure], *, learned: bool = False
) -> AttentionMap:
    """The map of self attention in which padded queries are fully masked, and its measures. `amap` is measured by
    `asked`, which are `measures` or `over_tokens` of them; only measures not made of rows are computed anew. learned:
    whether it has gradients, if `amap` has."""
    result, rule, measured = copied(amap, learned=learned), amap.rule, amap.measured
    states = {} if measured is None else measured.states
    whole = isinstance(amap, AttentionMap) and token_queries(rule.mask, rule.grid) is not None
    if whole:
        of = amap.with_exact() if learned and amap.differentiable else amap  # tensors with their graph, or without
        seen = Rule(token_mask(rule.mask, rule.grid), rule.scale, rule.grid, of.rule.scores)
        result = AttentionMap(
            of.q, of.k, _seen(amap.lse, rule, 0), seen, kernel=amap.kernel, named=amap.named, refusals=amap.refusals,
            nonfinite_values=amap.nonfinite_values, differentiable=of is not amap,
        )  # fmt: skip
        others = [one for one, other in zip(measures, asked, strict=True) if one is other]
        states |= result.measure(*others).states if others else {}
    if measured is not None and measures:
        result.measured = renamed(measured, measures, [states[one.name] for one in asked])
        if whole:
            result.measured.nonfinite = (torch.isnan(result.lse) | (result.lse == torch.inf)).sum(-1)
    return result


def renamed(measured: Measurements, measures: Sequence[Measure], states: Sequence[Any]) -> Measurements:
    """Other measurements of the same call, made of these states."""
    found = Measurements(measures, states, measured.nonfinite)
    found.nonfinite_values = measured.nonfinite_values
    return found


def token_queries(mask: Mask, grid: Grid) -> Tensor | None:
    """Which queries of self attention are tokens, boolean [b or 1, n]; None if all are. Computed once for each mask
    and size."""

    def queries() -> Tensor | None:
        real = None if grid.n > grid.m else real_tokens(mask, grid)
        here = None if real is None else real[:, grid.first_token :]
        return None if here is None or bool(here.all()) else here

    found: Tensor | None = kept("_token_queries", queries, mask, (grid.n, grid.m))
    return found


def token_mask(mask: Mask, grid: Grid) -> Mask:
    """The mask of self attention under which padded queries are fully masked. It is made once for each mask and size,
    so that layers that share a mask share this one too."""
    made: Mask = kept("_token_mask", lambda: mask.over_tokens(grid), mask, (grid.n, grid.m))
    return made


def _seen(lse: Tensor, rule: Rule, first: int) -> Tensor:
    """The log-sum-exp [b, h, r] of rows from `first` on, −∞ where the query is padding."""
    real = token_queries(rule.mask, rule.grid)
    if real is None:
        return lse
    here = real[:, None, first : first + lse.shape[-1]].to(lse.device)
    return lse.masked_fill(~here, -torch.inf)
