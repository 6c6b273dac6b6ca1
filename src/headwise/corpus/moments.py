"""Measures with their distribution: count, mean, sum of squared deviations, minimum and maximum, all of which merge.

A measure of rows has a value for each query, other measures one for each window. Quantiles cannot be merged, so they
are not kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from headwise.masks import Grid
from headwise.rule import Rule
from headwise.stats import Measure, RowMeasure, Statistic
from headwise.tiles import Tile

FIELDS = ("count", "mean", "squares", "least", "largest")


def empty(*shape: int, like: Tensor | None = None) -> Tensor:
    """Moments of no values, [*shape[:-1], 5, shape[-1]] in float64."""
    numbers = torch.zeros(*shape[:-1], len(FIELDS), shape[-1], dtype=torch.float64)
    numbers[..., 3, :], numbers[..., 4, :] = torch.inf, -torch.inf
    return numbers if like is None else numbers.to(like.device)


def joined(one: Tensor, other: Tensor) -> Tensor:
    """Merge two sets of moments [..., 5, h]. Source: Chan, Golub & LeVeque 1983, eq. 2.1."""
    n1, mean1, squares1, least1, largest1 = one.unbind(-2)
    n2, mean2, squares2, least2, largest2 = other.unbind(-2)
    n = n1 + n2
    share = n2 / n.clamp_min(1)
    apart = mean2 - mean1
    squares = squares1 + squares2 + apart.square() * n1 * share
    least, largest = torch.minimum(least1, least2), torch.maximum(largest1, largest2)
    return torch.stack((n, mean1 + apart * share, squares, least, largest), -2)


def of_values(value: Tensor, counted: Tensor) -> Tensor:
    """The moments [b, 5, h] of the `counted` values [b, h, r]."""
    value = value.double()
    n = counted.sum(-1).double()
    mean = value.masked_fill(~counted, 0.0).sum(-1) / n.clamp_min(1)
    squares = (value - mean[..., None]).masked_fill(~counted, 0.0).square().sum(-1)
    least = value.masked_fill(~counted, torch.inf).amin(-1)
    largest = value.masked_fill(~counted, -torch.inf).amax(-1)
    return torch.stack((n, mean, squares, least, largest), -2)


@dataclass
class State:
    """The accumulated moments. inner: the state of a measure that is not one of rows."""

    numbers: Tensor  # [b, 5, h] float64
    current: Tensor | None = None
    inner: Any = None


class Varied(Measure):
    """A measure with its moments; `numbers` of its state are [b, 5, h], one set for each batch entry."""

    name: str
    unit: str
    range: str
    source: str
    per: str
    largest: bool  # whether the value of the measure is the maximum instead of the mean

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.name, self.unit, self.range, self.source = measure.name, measure.unit, measure.range, measure.source

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return self.measure.needs(rule)

    def merge(self, one: State, other: State) -> State:
        entries = torch.cat((one.numbers, other.numbers)).split(1)
        return State(reduce(joined, entries))

    def finish(self, state: State) -> Tensor:
        at = FIELDS.index("largest" if self.largest else "mean")
        return state.numbers[:, at].masked_fill(state.numbers[:, 0] == 0, 0.0).float()


class OfRows(Varied):
    """Moments over the queries that a measure of rows counts."""

    per = "query"
    measure: RowMeasure

    def __init__(self, measure: RowMeasure) -> None:
        super().__init__(measure)
        self.largest = measure.reduce == "max"

    def start(self, grid: Grid, like: Tensor) -> State:
        self.measure.start(grid, like)  # checks its arguments about the tokens
        return State(empty(grid.b, grid.h, like=like))

    def update(self, state: State, tile: Tile) -> None:
        part = self.measure.partial(tile)
        state.current = part if tile.first or state.current is None else self.measure.combine(state.current, part)
        if tile.last:
            total = state.current
            self._add(state, self.measure.value(total, tile.lse), self.measure.counted(total, tile.lse))
            state.current = None

    def take(self, state: State, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> None:
        value, counted = self.measure.row_values(found, lse, rule)
        self._add(state, value, lse != -torch.inf if counted is None else counted)

    def _add(self, state: State, value: Tensor, counted: Tensor) -> None:
        state.numbers = joined(state.numbers, of_values(value, counted.expand_as(value)))


class OfWindows(Varied):
    """Moments over the windows, for a measure with one number for each."""

    per = "window"
    largest = True  # how such measures merge several inputs

    def start(self, grid: Grid, like: Tensor) -> State:
        return State(empty(grid.b, grid.h, like=like), inner=self.measure.start(grid, like))

    def update(self, state: State, tile: Tile) -> None:
        self.measure.update(state.inner, tile)
        self._count(state)

    def take(self, state: State, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> None:
        self.measure.take(state.inner, found, lse, rule)
        self._count(state)

    def _count(self, state: State) -> None:
        value = self.measure.finish(state.inner)[..., None]
        state.numbers = of_values(value, torch.ones_like(value, dtype=torch.bool))


def varied(measure: Measure) -> OfRows | OfWindows:
    """A measure with its moments."""
    if isinstance(measure, RowMeasure) and type(measure).update is RowMeasure.update:
        return OfRows(measure)
    return OfWindows(measure)
