"""The largest weights of a row, their keys, and what they sum to."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.masks import Span
from headwise.rule import Rule
from headwise.stats.base import RowMeasure
from headwise.stats.statistic import Compiled, Statistic
from headwise.stats.words import Chinese
from headwise.tiles import Tile
from headwise.wording import Bilingual


@dataclass(frozen=True)
class _Top(Statistic, abstract=True):
    count: int
    per = "query"
    joins = None
    placed = False

    def at(self, cols: Span) -> Statistic:
        return self

    def rows(self, rows: Span) -> Statistic:
        return self

    def only(self, batch: int) -> Statistic:
        return self


class TopWeights(_Top):
    """The `count` largest p_ij of a query, largest first: [b, h, n, count], 0 beyond what it may see."""

    name = "top_weights"

    @cached_property
    def compiled(self) -> Compiled:
        return Compiled(self.name, count=self.count)


class TopKeys(_Top):
    """The keys of the `count` largest p_ij of a query, int64 [b, h, n, count]: largest first, the lower key first where
    scores are equal, −1 beyond what it may see."""

    name = "top_keys"

    @cached_property
    def compiled(self) -> Compiled:
        return Compiled(self.name, count=self.count, dtype=torch.int64)


class TopKMass(RowMeasure):
    """Σ of the k largest p_ij of a row, mean over queries; k = 8 unless given, as `TopKMass(k=32)`."""

    name, unit, range = "topk_mass", "mass", "0 to 1"
    source = Bilingual(
        "weight that a cache of k keys a query could keep (cf. H2O, 2306.14048)",
        "每个查询缓存 k 个键时能保留的权重（参见 H2O, 2306.14048）",
    )
    chinese = Chinese("前 k 大权重之和", "一行中最大的 k 个 p_ij 之和，对查询取平均；k 缺省为 8。")
    placed = False

    def __init__(self, k: int = 8) -> None:
        if k < 1:
            raise ConfigError(f"TopKMass(k={k}): k must be >= 1")
        self.k = k

    def partial(self, tile: Tile) -> Tensor:
        return tile.weights.topk(min(self.k, tile.shape[-1]), sorted=False).values

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        both = torch.cat((one, other), -1)
        return both.topk(min(self.k, both.shape[-1]), sorted=False).values

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        return total.sum(-1)

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return (TopWeights(min(self.k, rule.grid.m)),)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return found[TopWeights(min(self.k, rule.grid.m))]
