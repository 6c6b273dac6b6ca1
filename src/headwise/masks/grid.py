"""The matrix that a mask is laid over: its size, its rectangles, and what can be said of one."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class State(enum.Enum):
    """What a mask says of a whole tile."""

    EMPTY = 0
    MIXED = 1
    FULL = 2


@dataclass(frozen=True)
class Grid:
    """The size of the attention matrix that a mask is asked about: batch, heads, queries, keys. It unpacks to these.

    first: position of query 0 on the key axis; None where the queries stand at the end of the keys. A rectangle of a
    larger matrix has one of its own, below 0 or beyond the keys if need be.
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
        """Whether the queries stand at the end of the keys."""
        return self.shift == self.m - self.n

    def positions(self) -> Tensor:
        """Where the queries stand on the key axis, [n]."""
        return torch.arange(self.shift, self.shift + self.n, device="cpu")

    def part(self, rows: "Span", cols: "Span") -> "Grid":
        """The rectangle of these rows and columns, its positions counted from its own first key."""
        n, m = rows.stop - rows.start, cols.stop - cols.start
        return Grid(self.b, self.h, n, m, self.shift + rows.start - cols.start)


class Span(NamedTuple):
    """A half-open range of rows or columns."""

    start: int
    stop: int
