"""How far a head attends: the distance |position − key|, its mean and its variance."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from headwise.rule import Rule
from headwise.stats.base import RowMeasure
from headwise.stats.range_mass import RangeMass
from headwise.stats.statistic import Compiled, Join, OfWeights, Part, Statistic
from headwise.stats.values import SAME, RowValue
from headwise.stats.words import Chinese
from headwise.tiles import Tile, tops
from headwise.wording import Bilingual

# Σ_j p·|i − j|, i being the query's position on the key axis: without a gap (`Grid.gap`), whose size is added below
DISTANCE = OfWeights("distance", placed=True, compiled=Compiled("distance"))


class _Variance(Join):
    """Σ share · (x + (mean − mean of both)²) of the distance, among the keys alone."""

    beside = (DISTANCE,)

    def shared(self, x: Tensor, log_share: Tensor) -> Tensor:
        return log_share.exp() * x

    def both(self, statistic: Statistic, one: Part, other: Part) -> Tensor:
        mean = self.shared(one.of[DISTANCE], one.log_share) + self.shared(other.of[DISTANCE], other.log_share)
        here, there = (part.of[statistic] + (part.of[DISTANCE] - mean).square() for part in (one, other))
        return self.shared(here, one.log_share) + self.shared(there, other.log_share)

    def beside_sink(self, x: Tensor, log_share: Tensor) -> Tensor:
        return x


# Σ_j p·(|i − j| − mean)² / Σ_j p
DISTANCE_VARIANCE = OfWeights("variance", _Variance(), placed=True, compiled=Compiled("variance"))


class MeanDistance(RowMeasure):
    """Σ_j p_ij·|i − j| in tokens, mean over queries (positions on the key axis)."""

    name, unit, range = "mean_distance", "tokens", "0 to keys − 1"
    source = Bilingual(
        "Vig & Belinkov 2019, 1906.04284 (attention distance)", "Vig & Belinkov 2019, 1906.04284（注意力距离）"
    )
    chinese = Chinese("平均距离", "Σ_j p_ij·|i − j|，以词元计，对查询取平均（位置沿键轴计）。", range="0 至键数 − 1")
    short, placed = "distance", True
    shown: ClassVar[Mapping[str, int]] = {"report": 6, "viewer": 5, "watch": 6, "corpus": 6}

    def partial(self, tile: Tile) -> Tensor:
        return tile.mean_distance

    def row_value(self, rule: Rule) -> RowValue | None:
        return None if rule.grid.divided or rule.grid.extra else RowValue(SAME, DISTANCE)

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        if rule.grid.extra:
            return None  # their share would cancel
        return (DISTANCE, _before(rule)) if rule.grid.divided else (DISTANCE,)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        along = found[DISTANCE]
        return along + rule.grid.gap.size * found[_before(rule)] if rule.grid.divided else along


def _before(rule: Rule) -> Statistic:
    """The weight on the keys before the gap, which are farther from all queries by its size."""
    return RangeMass(0, rule.grid.gap.start, relative=False)


class DistanceVariance(RowMeasure):
    """Σ_j p_ij·(|i − j| − mean)² / Σ_j p_ij in tokens², mean over queries: 0 for a head at one fixed distance.

    It is of the keys alone, and so is the mean, Σ_j p_ij·|i − j| / Σ_j p_ij: a learned sink scales all weights of a
    row by one factor, which cancels.
    """

    name, unit, range = "distance_variance", "tokens²", "≥ 0"
    source = Bilingual("second central moment of the attention distance", "注意力距离的二阶中心矩")
    chinese = Chinese(
        "距离方差", "Σ_j p_ij·(|i − j| − 平均距离)² / Σ_j p_ij，以词元² 计，对查询取平均；距离固定的头为 0。"
    )
    placed = True

    def partial(self, tile: Tile) -> Tensor:
        return tile.distance_spread

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        """Masses, means and squares about the means of two sets together (Chan, Golub & LeVeque 1979)."""
        top, a, b = tops(one[..., 0], other[..., 0])
        mine, theirs = a * one[..., 1], b * other[..., 1]
        mass = mine + theirs
        share = theirs / mass.masked_fill(mass == 0, 1.0)
        apart = other[..., 2] - one[..., 2]
        second = a * one[..., 3] + b * other[..., 3] + apart.square() * mine * share
        return torch.stack((top, mass, one[..., 2] + apart * share, second), -1)

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        _, mass, _, second = total.unbind(-1)
        return second / mass.masked_fill(mass == 0, 1.0)

    def row_value(self, rule: Rule) -> RowValue | None:
        """None across a gap, or beside keys without a distance: the variance along the keys does not determine it."""
        return None if rule.grid.divided or rule.grid.extra else RowValue(SAME, DISTANCE_VARIANCE)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        one, zero = torch.ones_like(lse), torch.zeros_like(lse)
        return torch.stack((zero, one, zero, found[DISTANCE_VARIANCE]), -1).double()
