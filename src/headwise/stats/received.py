"""What keys receive: the weight of all queries on each key, and the key that gets most."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from headwise.masks import Grid, Span
from headwise.rule import Rule
from headwise.stats.base import Measure
from headwise.stats.rows import queries_of_keys, ranges
from headwise.stats.statistic import Compiled, Statistic
from headwise.stats.words import Chinese
from headwise.tiles import Tile
from headwise.wording import Bilingual


@dataclass(frozen=True)
class _ColumnMass(Statistic):
    name = "column_mass"
    per = "key"
    joins = None  # a row's part of it depends on the log-sum-exp over all keys
    placed = False
    compiled = Compiled("column_mass", per="key")

    def at(self, cols: Span) -> Statistic:
        return self

    def rows(self, rows: Span) -> Statistic:
        return self

    def only(self, batch: int) -> Statistic:
        return self


COLUMN_MASS = _ColumnMass()  # Σ_i p, what each key receives: [b, h, m]


@dataclass
class ColumnState:
    """Per key: the mass received and the queries that may see it, [b, h, m] in float64; pooled after a merge."""

    mass: Tensor
    eligible: Tensor
    largest: Tensor | None = None  # [b, h], once no more is added


class ReceivedMass(Measure):
    """max_j (Σ_i p_ij / queries that may see j): the mean weight of the key that gets most.

    Above 0.3 the key is commonly called a sink. Merging keeps the largest over the inputs. `amap.received()`
    gives Σ_i p_ij of every key.
    """

    name, unit, range = "received_mass", "mass", "0 to 1"
    source = Bilingual("Gu et al. 2024, 2410.10781 (sink metric)", "Gu et al. 2024, 2410.10781（汇聚的度量）")
    chinese = Chinese("所受最大权重", "max_j (Σ_i p_ij / 可见 j 的查询数)：得到最多的那个键所受的平均权重。")
    short, dispensable, placed = "received", 7, False
    shown: ClassVar[Mapping[str, int]] = {"report": 12}

    def start(self, grid: Grid, like: Tensor) -> ColumnState:
        zero = torch.zeros(grid.b, grid.h, grid.m, dtype=torch.float64, device=like.device)
        return ColumnState(zero, torch.zeros_like(zero))

    def update(self, state: ColumnState, tile: Tile) -> None:
        cols = slice(tile.cols.start, tile.cols.stop)
        state.mass[..., cols] += tile.weights.sum(-2)
        rows = tile.shape[2]
        state.eligible[..., cols] += rows if tile.allowed is None else tile.allowed.sum(-2)

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return (COLUMN_MASS,) if ranges(rule) is not None else None

    def take(self, state: ColumnState, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> None:
        state.mass += found[COLUMN_MASS]
        state.eligible += queries_of_keys(rule, lse)

    def of_blocks(self) -> Mapping[str, Literal["sum", "max"]]:
        return {"mass": "sum", "eligible": "sum"}

    def closed(self, state: ColumnState) -> ColumnState:
        return ColumnState(state.mass[:0], state.eligible[:0], self._largest(state))

    def merge(self, one: ColumnState, other: ColumnState) -> ColumnState:
        both = torch.cat((self._largest(one), self._largest(other)))
        largest = (both if len(both) else both.new_zeros(1, both.shape[1])).amax(0, keepdim=True)
        return ColumnState(one.mass[:0], one.eligible[:0], largest)

    def finish(self, state: ColumnState) -> Tensor:
        return self._largest(state).float()

    def _largest(self, state: ColumnState) -> Tensor:
        if state.largest is not None:
            return state.largest
        received = state.mass / state.eligible.clamp_min(1)
        return received.amax(-1) if received.shape[-1] else received.sum(-1)  # no keys receive 0
