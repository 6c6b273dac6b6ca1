"""The size of an attention matrix, its rectangles, and the state of a tile."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class State(enum.Enum):
    """Whether a mask allows none, some or all cells of a tile."""

    EMPTY = 0
    MIXED = 1
    FULL = 2


@dataclass(frozen=True)
class Grid:
    """The size of an attention matrix: batch, heads, queries, keys. It unpacks to these.

    first: position of query 0 on the key axis; None if queries are aligned to the end of the keys. For a rectangle of a
    larger matrix it can be negative or beyond the keys.
    """

    b: int
    h: int
    n: int
    m: int
    first: int | None = None

    def __iter__(self) -> Iterator[int]:
        return iter((self.b, self.h, self.n, self.m))

    @property
    def shift(self) -> int:
        """Position of query 0 on the key axis."""
        return self.m - self.n if self.first is None else self.first

    @property
    def at_end(self) -> bool:
        """Whether queries are aligned to the end of the keys."""
        return self.shift == self.m - self.n

    def positions(self) -> Tensor:
        """Return the positions of the queries on the key axis, [n]."""
        return torch.arange(self.shift, self.shift + self.n, device="cpu")

    def with_dropped(self, count: int) -> "Grid":
        """Return the grid with `count` more keys before all queries, such as those that a cache has dropped."""
        return replace(self, m=self.m + count, first=self.shift + count)

    def part(self, rows: "Span", cols: "Span") -> "Grid":
        """Return the grid of a rectangle, with positions relative to its first key."""
        return Grid(self.b, self.h, rows.size, cols.size, self.shift + rows.start - cols.start)


class Span(NamedTuple):
    """A half-open range of rows or columns. It unpacks to `start` and `stop`, so `len` is 2; see `size`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many rows or columns it has."""
        return self.stop - self.start
