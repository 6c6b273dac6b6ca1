"""Measures of where the weights are: on a range of keys, and how far away."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.masks import Span
from headwise.rule import Rule
from headwise.rule.tiles import Tile, tops
from headwise.stats.base import RowMeasure
from headwise.stats.keys import KeyWeights
from headwise.stats.statistic import (
    MASS,
    SAME,
    Alike,
    Compiled,
    Join,
    OfWeights,
    Part,
    RowValue,
    Slope,
    Statistic,
    ranges,
    sees_offset,
)
from headwise.wording import tr

FARTHEST = 1 << 40  # no key is as far from any query; numbers near 2⁶³ would overflow


@dataclass(frozen=True)
class RangeMass(Alike):
    """Σ p over the keys [start, stop), counted from the query's position if `relative`, else from the first key: along
    the key axis, whatever is missing from it (`Grid.gap`)."""

    start: int
    stop: int
    relative: bool
    name = "range_mass"
    per = "query"
    joins = MASS

    def __init__(self, start: int, stop: int, *, relative: bool) -> None:
        for attribute, value in (("start", start), ("stop", stop), ("relative", relative)):
            object.__setattr__(self, attribute, value)

    @property
    def compiled(self) -> Compiled:
        return _compiled(self.start, self.stop, self.relative)

    @property
    def placed(self) -> bool:  # type: ignore[override]
        return self.relative

    @property
    def slope(self) -> Slope:
        return Slope(within=(self.start, self.stop, self.relative))

    def at(self, cols: Span) -> Statistic | None:
        if self.relative:
            return self
        start, stop = (min(max(end - cols.start, 0), cols.size) for end in (self.start, self.stop))
        return RangeMass(start, stop, relative=False) if start < stop else None


@lru_cache
def _compiled(start: int, stop: int, relative: bool) -> Compiled:
    """Once for each range: measures make their statistic anew for each call."""
    first, last = (max(-FARTHEST, min(end, FARTHEST)) for end in (start, stop))
    return Compiled("range_mass", (first, last, int(relative)))


class LocalMass(RowMeasure):
    """Σ p_ij over |i − j| ≤ radius, mean over queries; radius = 8 unless given, as `LocalMass(radius=32)`."""

    name, unit, range = "local_mass", "mass", "0 to 1"
    source = tr("weight that a window of that size would keep (cf. Beltagy et al. 2020, 2004.05150)")
    short, dispensable, placed = "local", 5, True
    shown: ClassVar[Mapping[str, int]] = {"report": 7, "viewer": 6}

    def __init__(self, radius: int = 8) -> None:
        if radius < 0:
            raise ConfigError(f"LocalMass(radius={radius}): radius must be >= 0")
        self.radius = radius
        self._range = RangeMass(-radius, radius + 1, relative=True)

    def partial(self, tile: Tile) -> Tensor:
        first, last = int(tile.positions[0]), int(tile.positions[-1])
        if tile.extra or tile.tokens.stop - 1 < first - self.radius or tile.tokens.start > last + self.radius:
            return tile.lse.new_zeros(tile.lse.shape)
        near = (tile.positions[:, None] - tile.keys).abs() <= self.radius
        return (tile.weights * near).sum(-1)

    def row_value(self, rule: Rule) -> RowValue | None:
        return None if _reaches_gap(rule, -self.radius) else RowValue(SAME, self._range)


class SinkMass(RowMeasure):
    """Σ p_ij over the first `count` tokens of the query's own sequence (1 unless given), mean over queries: the
    attention sink. Sequences start after padding, and with each packed document, as the mask shows them.

    A query at the position of a sink key is counted too. Source: Xiao et al. 2023 (StreamingLLM, 2309.17453).
    """

    name, unit, range = "sink_mass", "mass", "0 to 1"
    source = "Xiao et al. 2023, 2309.17453"
    short, placed, of_first = "first", False, True
    shown: ClassVar[Mapping[str, int]] = {"report": 8, "viewer": 7, "watch": 5, "corpus": 5}

    def __init__(self, count: int = 1) -> None:
        if count < 1:
            raise ConfigError(f"SinkMass(count={count}): count must be >= 1")
        self.count = count
        self._range = RangeMass(0, count, relative=False)

    def partial(self, tile: Tile) -> Tensor:
        if (firsts := self._firsts(tile.rule)) is not None:
            members = firsts.weights[:, None, tile.cols.start : tile.cols.stop, None].to(tile.weights)
            return (tile.weights @ members).squeeze(-1)
        inside = self.count - tile.tokens.start
        if tile.extra or inside <= 0:
            return torch.zeros_like(tile.lse)
        return tile.weights[..., :inside].sum(-1)

    def row_value(self, rule: Rule) -> RowValue:
        if (firsts := self._firsts(rule)) is not None:
            return RowValue(SAME, firsts)
        grid = rule.grid
        if not (grid.gap.size or grid.extra):
            return RowValue(SAME, self._range)
        return RowValue(SAME, RangeMass(grid.extra, grid.extra + grid.keys_before(self.count), relative=False))

    def _firsts(self, rule: Rule) -> "FirstTokens | None":
        """The first tokens of all sequences as weights of the keys, each query sees its own; None if all start at 0."""
        found: dict[int, FirstTokens | None] = rule.__dict__.setdefault("_first_tokens", {})
        if self.count not in found:
            found[self.count] = first_tokens(rule, self.count)
        return found[self.count]


class FirstTokens(KeyWeights):
    """The first tokens of sequences, with weight 1; equal for equal weights, as of a call's rule and its map's."""

    @cached_property
    def _value(self) -> tuple[tuple[int, ...], bytes]:
        return tuple(self.weights.shape), self.weights.numpy().tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FirstTokens) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


def first_tokens(rule: Rule, count: int) -> FirstTokens | None:
    """The first `count` tokens of each sequence of the mask as weights [1 or b, m]; None if they are the first keys."""
    extra = rule.grid.extra
    part = rule.part(Span(0, rule.grid.n), Span(extra, rule.grid.m)) if extra else rule
    starts = part.mask.starts(part.grid)
    if starts is None:
        return None
    place = part.grid.key_tokens() - starts
    if not bool(((place >= 0) & (starts != 0)).any()):  # padding at the end has no weight
        return None
    members = ((place >= 0) & (place < count)).float()
    return FirstTokens(torch.nn.functional.pad(members, (extra, 0)))


def _reaches_gap(rule: Rule, offset: int) -> bool:
    """Whether the key at position + offset is not the one there along the key axis, or no token, for some query."""
    grid = rule.grid
    near = grid.shift + offset
    return (grid.divided and near < grid.gap.start) or (grid.extra > 0 and near < grid.extra)


class _Diagonal(RowMeasure, abstract=True):
    """Weight on the key at a fixed offset, per eligible query (one that may see such a key)."""

    offset: int
    blank = True  # a key that a query may not see has no weight
    unit, range = "mass", "0 to 1"
    source = tr("Voita et al. 2019, 1905.09418 (positional heads)")
    placed = True

    def row_value(self, rule: Rule) -> RowValue | None:
        if ranges(rule) is None or _reaches_gap(rule, self.offset):
            return None
        return RowValue(SAME, self._range(), sees_offset(rule, self.offset))

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        weight = found[self._range()]
        return torch.stack((weight, sees_offset(rule, self.offset).to(weight).expand(weight.shape)), -1)

    def _range(self) -> RangeMass:
        return RangeMass(self.offset, self.offset + 1, relative=True)

    def partial(self, tile: Tile) -> Tensor:
        weight, eligible = tile.diagonal(self.offset)
        return torch.stack((weight, eligible.to(weight.dtype)), -1)

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        return total[..., 0]

    def counted(self, total: Tensor, lse: Tensor) -> Tensor:
        return total[..., 1] > 0


class PreviousMass(_Diagonal):
    """p_{i,i−1}, mean over the queries that may see their previous key."""

    name, offset = "previous_mass", -1
    short = "previous"
    shown: ClassVar[Mapping[str, int]] = {"report": 9, "viewer": 8, "corpus": 7}


class SelfMass(_Diagonal):
    """p_{i,i}, mean over the queries that may see their own key."""

    name, offset = "self_mass", 0
    short, dispensable = "self", 1
    shown: ClassVar[Mapping[str, int]] = {"report": 10, "viewer": 9, "corpus": 8}


class NextMass(_Diagonal):
    """p_{i,i+1}, mean over the queries that may see their next key (none under a causal mask: 0)."""

    name, offset = "next_mass", 1
    short, ahead = "next", True
    shown: ClassVar[Mapping[str, int]] = {"report": 11}


# Σ_j p·|i − j|, i being the query's position on the key axis: without a gap (`Grid.gap`), whose size is added below
DISTANCE = OfWeights("distance", placed=True, compiled=Compiled("distance"), slope=Slope(distance=1.0))


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
    source = tr("Vig & Belinkov 2019, 1906.04284 (attention distance)")
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
    source = tr("second central moment of the attention distance")
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
