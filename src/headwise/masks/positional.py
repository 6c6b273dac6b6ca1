"""Masks that depend on the positions of queries and keys only."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import ShapeError, check_whole
from headwise.fields import Whole
from headwise.masks import spans
from headwise.masks.base import Mask
from headwise.masks.grid import Grid, Span, State


class _Anywhere(Mask, abstract=True):
    """A mask that depends on distances at most, so that every rectangle has the same mask."""

    def part(self, rows: Span, cols: Span, grid: Grid) -> Mask:
        return self

    def starts(self, grid: Grid) -> None:
        return None


@dataclass(frozen=True)
class Everything(_Anywhere):
    """Every query may attend to every key, as with `mask=None`."""

    holds = {}
    whole_past = True

    def with_gap(self, gap: Span, grid: Grid) -> Mask:
        return self

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return torch.ones(1, 1, len(rows), len(cols), dtype=torch.bool, device=rows.device)

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        return State.FULL

    def spans(self, grid: Grid) -> Tensor:
        return spans.one(torch.zeros(1, grid.n, dtype=torch.long, device="cpu"), grid.m, grid.m)


@dataclass(frozen=True)
class Causal(_Anywhere):
    """A query may attend to keys up to and including its own position."""

    holds = {}
    causal = True
    whole_past = True

    def with_gap(self, gap: Span, grid: Grid) -> Mask:
        return self

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return ((rows + grid.shift)[:, None] >= cols)[None, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        if cols.start > rows.stop - 1 + grid.shift:
            return State.EMPTY
        return State.FULL if cols.stop - 1 <= rows.start + grid.shift else State.MIXED

    def spans(self, grid: Grid) -> Tensor:
        return spans.one(0, grid.positions()[None] + 1, grid.m)

    def check(self, grid: Grid) -> None:
        if grid.first is None and grid.n > grid.m:
            raise ShapeError(
                f"mask=Causal(): {grid.n} queries are aligned to the end of {grid.m} keys; expected at most as "
                f"many queries as keys. For cross attention leave Causal() out"
            )


@dataclass(frozen=True)
class Window(_Anywhere):
    """A sliding window: a query may attend to `left` keys up to and including its own position, and `right` after it.

    `Causal() & Window(128)` is the usual form: 128 keys including the query's own (Beltagy et al. 2020;
    Mistral's `sliding_window`). `right` defaults to 0.
    """

    left: int
    right: int = 0
    holds = {"left": Whole(), "right": Whole()}
    placed = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "left", check_whole("Window", "left", self.left, 1))
        object.__setattr__(self, "right", check_whole("Window", "right", self.right, 0))

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        distance = (rows + grid.shift)[:, None] - cols
        return ((distance < self.left) & (distance >= -self.right))[None, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        nearest = rows.start + grid.shift - (cols.stop - 1)  # smallest distance in the tile
        farthest = rows.stop - 1 + grid.shift - cols.start
        if nearest >= self.left or farthest < -self.right:
            return State.EMPTY
        return State.FULL if farthest < self.left and nearest >= -self.right else State.MIXED

    def spans(self, grid: Grid) -> Tensor:
        position = grid.positions()[None]
        left, right = (min(size, spans.FAR) for size in (self.left, self.right))
        return spans.one(position - left + 1, position + right + 1, grid.m)

    def with_gap(self, gap: Span, grid: Grid) -> Mask:
        beyond = grid.shift - gap.start + 1 >= self.left  # all keys before the gap are, with it and without
        return self if beyond or gap.start == 0 else super().with_gap(gap, grid)

    @property
    def causal(self) -> bool:
        return self.right == 0


@dataclass(frozen=True)
class Sinks(Mask):
    """Only the first `count` keys; combine it with a window by `|` (StreamingLLM, Xiao et al. 2023)."""

    count: int
    holds = {"count": Whole()}

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", check_whole("Sinks", "count", self.count, 0))

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return (cols < self.count).expand(len(rows), -1)[None, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        if cols.start >= self.count:
            return State.EMPTY
        return State.FULL if cols.stop <= self.count else State.MIXED

    def part(self, rows: Span, cols: Span, grid: Grid) -> Mask:
        return Sinks(max(0, self.count - cols.start))

    def with_gap(self, gap: Span, grid: Grid) -> Mask:
        return Sinks(min(self.count, gap.start) + max(0, self.count - gap.stop))

    def spans(self, grid: Grid) -> Tensor:
        return spans.one(torch.zeros(1, grid.n, dtype=torch.long, device="cpu"), self.count, grid.m)

    def starts(self, grid: Grid) -> None:
        return None
