"""A measure with a statistic of its own, which compiled kernels compute with a function that they already have."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headwise.masks import Span
from headwise.rule import Rule
from headwise.rule.tiles import Tile
from headwise.stats import MASS, Compiled, RowMeasure, Statistic
from headwise.stats.registry import register


@dataclass(frozen=True)
class WeightedIndex(Statistic):
    """Σ_j p_ij·j for a row whose keys have the indices `first` to `last`."""

    first: int
    last: int
    name = "weighted_index"
    per = "query"
    joins = MASS
    placed = False

    @cached_property
    def compiled(self) -> Compiled:
        return Compiled("key_weights", keys=torch.arange(self.first, self.last)[None].float())

    def at(self, cols: Span) -> Statistic:
        return WeightedIndex(self.first + cols.start, self.first + cols.stop)

    def rows(self, rows: Span) -> Statistic:
        return self

    def only(self, batch: int) -> Statistic:
        return self


@register
class KeyIndex(RowMeasure):
    """Σ_j p_ij·j, mean over queries: the mean index of the keys that a head attends to."""

    name, unit, range = "key_index", "keys", "0 to keys − 1"
    source = "this package"
    placed = False

    def partial(self, tile: Tile) -> Tensor:
        return (tile.weights * tile.keys).sum(-1)

    def needs(self, rule: Rule) -> tuple[Statistic, ...]:
        return (WeightedIndex(0, rule.grid.m),)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return found[WeightedIndex(0, rule.grid.m)]
