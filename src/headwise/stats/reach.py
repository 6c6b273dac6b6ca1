"""How far a head looks: measures of the distance |position − key|."""

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.rule import Rule
from headwise.stats.base import RowMeasure
from headwise.stats.statistics import DISTANCE, DISTANCE_VARIANCE, RangeMass, Statistic
from headwise.tiles import Tile, tops


class MeanDistance(RowMeasure):
    """Σ_j p_ij·|i − j| in tokens, mean over queries (positions on the key axis)."""

    name, unit, range = "mean_distance", "tokens", "0 to keys − 1"
    source = "Vig & Belinkov 2019, 1906.04284 (attention distance)"

    def partial(self, tile: Tile) -> Tensor:
        return tile.mean_distance

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return (DISTANCE,)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return found[DISTANCE]


class DistanceVariance(RowMeasure):
    """Σ_j p_ij·(|i − j| − mean)² in tokens², mean over queries: 0 for a head at one fixed distance."""

    name, unit, range = "distance_variance", "tokens²", "≥ 0"
    source = "second central moment of the attention distance"

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

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return (DISTANCE_VARIANCE,)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        one, zero = torch.ones_like(lse), torch.zeros_like(lse)
        return torch.stack((zero, one, zero, found[DISTANCE_VARIANCE]), -1).double()

    def told(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> tuple[Tensor, None]:
        return found[DISTANCE_VARIANCE], None


class LocalMass(RowMeasure):
    """Σ p_ij over |i − j| ≤ radius, mean over queries; radius = 8 unless given, as `LocalMass(radius=32)`."""

    name, unit, range = "local_mass", "mass", "0 to 1"
    source = "weight that a window of that size would keep (cf. Beltagy et al. 2020, 2004.05150)"

    def __init__(self, radius: int = 8) -> None:
        if radius < 0:
            raise ConfigError(f"LocalMass(radius={radius}): radius must be >= 0")
        self.radius = radius
        self._range = RangeMass(-radius, radius + 1, relative=True)

    def partial(self, tile: Tile) -> Tensor:
        first, last = int(tile.positions[0]), int(tile.positions[-1])
        if tile.cols.stop - 1 < first - self.radius or tile.cols.start > last + self.radius:
            return tile.lse.new_zeros(tile.lse.shape)
        near = (tile.positions[:, None] - tile.keys).abs() <= self.radius
        return (tile.weights * near).sum(-1)

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return (self._range,)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return found[self._range]
