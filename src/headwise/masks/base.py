"""What a mask is, and how two become one."""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from headwise.errors import DTypeError
from headwise.masks import spans


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

    def part(self, rows: Span, cols: Span, grid: Grid) -> "Mask":
        """The mask as a rectangle of the matrix sees it, for `grid.part(rows, cols)`."""
        return Part(self, grid, rows, cols)

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, _mask(other))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, _mask(other))

    def to_dense(self, n: int, m: int, *, batch: int = 1, heads: int = 1) -> Tensor:
        """The mask as a boolean tensor [b or 1, h or 1, n, m]; for small sizes, to look at."""
        grid = Grid(batch, heads, n, m)
        self.check(grid)
        rows, cols = (torch.arange(size, device="cpu") for size in (n, m))
        return self.allowed(rows, cols, grid).expand(-1, -1, n, m)


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

    def part(self, rows: Span, cols: Span, grid: Grid) -> Mask:
        return type(self)(self.left.part(rows, cols, grid), self.right.part(rows, cols, grid))

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


@dataclass(frozen=True)
class Part(Mask):
    """A rectangle of a mask that says more than where a query and a key stand."""

    whole: Mask
    grid: Grid
    rows: Span
    cols: Span

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return self.whole.allowed(rows + self.rows.start, cols + self.cols.start, self.grid)

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        return self.whole.state(_moved(rows, self.rows.start), _moved(cols, self.cols.start), self.grid)

    def spans(self, grid: Grid) -> Tensor | None:
        found = _kept_spans(self.whole, self.grid)
        if found is None:
            return None
        here = found[:, self.rows.start : self.rows.stop].long() - self.cols.start
        return spans.tidy(here[..., 0].clamp(0, grid.m), here[..., 1].clamp(0, grid.m)).int()

    def only(self, batch: int, head: int) -> Mask:
        return Part(self.whole.only(batch, head), replace(self.grid, b=1, h=1), self.rows, self.cols)

    def __repr__(self) -> str:
        (i, j), (r, c) = self.rows, self.cols
        return f"{self.whole!r}[{i}:{j}, {r}:{c}]"


def conjuncts(mask: Mask) -> list[Mask]:
    """The masks that all must allow a key: those that `&` joined, or the mask alone."""
    return [*conjuncts(mask.left), *conjuncts(mask.right)] if isinstance(mask, And) else [mask]


class Kept(NamedTuple):
    """What has been made of a mask for one size, and is kept with it."""

    size: object
    made: Any


def kept(name: str, make: Callable[[], Any], mask: Mask, size: object) -> Any:
    """What is made of a mask, made again only where the size is another than the last time."""
    found = mask.__dict__.get(name)
    if not isinstance(found, Kept) or found.size != size:
        found = Kept(size, make())
        object.__setattr__(mask, name, found)
    return found.made


def _kept_spans(mask: Mask, grid: Grid) -> Tensor | None:
    """The ranges of a whole mask, made once for many rectangles of it."""
    found: Tensor | None = kept("_spans", lambda: mask.spans(grid), mask, grid)
    return found


def _moved(span: Span, by: int) -> Span:
    return Span(span.start + by, span.stop + by)


def _mask(value: object) -> Mask:
    if not isinstance(value, Mask):
        raise DTypeError(f"masks combine with masks, got {type(value).__name__}; wrap a boolean tensor in Dense(…)")
    return value
