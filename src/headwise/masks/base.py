"""What a mask is, and how two become one."""

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from headwise.errors import DTypeError
from headwise.masks import spans


class State(enum.Enum):
    """What a mask says of a whole tile."""

    EMPTY = 0
    MIXED = 1
    FULL = 2


class Grid(NamedTuple):
    """The size of the attention matrix that a mask is asked about: batch, heads, queries, keys."""

    b: int
    h: int
    n: int
    m: int

    @property
    def shift(self) -> int:
        """Position of query 0 on the key axis."""
        return self.m - self.n

    def positions(self) -> Tensor:
        """Where the queries stand on the key axis, [n]."""
        return torch.arange(self.shift, self.m)


class Span(NamedTuple):
    """A half-open range of rows or columns."""

    start: int
    stop: int


class Mask(ABC):
    """Base of all masks. Compose with `&` and `|`."""

    @abstractmethod
    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        """Boolean [b or 1, h or 1, len(rows), len(cols)] for query indices `rows` and key indices `cols`."""

    @abstractmethod
    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        """EMPTY or FULL only if that holds in every batch and head of the tile; MIXED is always allowed."""

    def spans(self, grid: Grid) -> Tensor | None:
        """The keys each query may see as ranges, int32 [b or 1, n, K, 2] on the CPU (`headwise.masks.spans`); None
        if they are not a few ranges, or differ between heads."""
        return None

    def check(self, grid: Grid) -> None:  # noqa: B027 - most masks fit any size
        """Raise ShapeError if the mask cannot be laid over such a matrix."""

    def only(self, batch: int, head: int) -> "Mask":
        """The mask as one batch entry and head sees it, for a grid of batch 1 and one head."""
        return self

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, _mask(other))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, _mask(other))

    def to_dense(self, n: int, m: int, *, batch: int = 1, heads: int = 1) -> Tensor:
        """The mask as a boolean tensor [b or 1, h or 1, n, m]; for small sizes, to look at."""
        grid = Grid(batch, heads, n, m)
        self.check(grid)
        return self.allowed(torch.arange(n), torch.arange(m), grid).expand(-1, -1, n, m)


@dataclass(frozen=True)
class _Pair(Mask):
    """Two masks together; what is the same for `&` and `|`."""

    left: Mask
    right: Mask
    sign: ClassVar[str]

    def check(self, grid: Grid) -> None:
        self.left.check(grid)
        self.right.check(grid)

    def only(self, batch: int, head: int) -> Mask:
        return type(self)(self.left.only(batch, head), self.right.only(batch, head))

    def __repr__(self) -> str:
        return f"({self.left!r} {self.sign} {self.right!r})"


class And(_Pair):
    """Keys that both masks allow."""

    sign = "&"

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return self.left.allowed(rows, cols, grid) & self.right.allowed(rows, cols, grid)

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        left = self.left.state(rows, cols, grid)
        if left is State.EMPTY:
            return left
        return min(left, self.right.state(rows, cols, grid), key=lambda state: state.value)

    def spans(self, grid: Grid) -> Tensor | None:
        left, right = self.left.spans(grid), self.right.spans(grid)
        return None if left is None or right is None else spans.intersect(left, right)


class Or(_Pair):
    """Keys that either mask allows."""

    sign = "|"

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return self.left.allowed(rows, cols, grid) | self.right.allowed(rows, cols, grid)

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        left = self.left.state(rows, cols, grid)
        if left is State.FULL:
            return left
        return max(left, self.right.state(rows, cols, grid), key=lambda state: state.value)

    def spans(self, grid: Grid) -> Tensor | None:
        left, right = self.left.spans(grid), self.right.spans(grid)
        return None if left is None or right is None else spans.unite(left, right)


def _mask(value: object) -> Mask:
    if not isinstance(value, Mask):
        raise DTypeError(f"masks combine with masks, got {type(value).__name__}; wrap a boolean tensor in Dense(…)")
    return value
