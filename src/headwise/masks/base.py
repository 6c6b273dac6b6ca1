"""The base class of masks, their composition, and data derived from a mask."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from headwise.errors import DTypeError, check_declared
from headwise.fields import Cuts, Described, Field, Inner, Section, Whole
from headwise.masks import spans, starts
from headwise.masks.grid import Grid, Span, State


class Kept(NamedTuple):
    """Data derived from a mask for one size, cached on the mask."""

    size: object
    made: Any


def kept(name: str, make: Callable[[], Any], mask: object, size: object) -> Any:
    """Return `make()`, cached on the mask until it is needed for another size."""
    found = mask.__dict__.get(name)
    if not isinstance(found, Kept) or found.size != size:
        found = Kept(size, make())
        object.__setattr__(mask, name, found)
    return found.made


class Mask(Described, ABC):
    """Base of all masks. Compose with `&` and `|`.

    A class declares `holds` (its fields, see `headwise.fields`), `allowed` and `state`; other methods have defaults.
    A mask differs between batch entries and heads only by fields with those axes, unless `holds` is None. `register`
    lets files and graphs contain it.
    """

    known: ClassVar[dict[str, type["Mask"]]] = {}
    called = "mask"
    whole_past: ClassVar[bool] = False  # shows each query all keys up to its own position; a subclass says it anew

    def __init_subclass__(cls, abstract: bool = False) -> None:
        super().__init_subclass__()
        if not abstract:
            check_declared(cls, Mask, {
                "holds": "the arguments of its constructor as fields, or None",
                "allowed": "which keys each query may attend to",
                "state": "whether a tile is empty, full or mixed",
            })  # fmt: skip

    @abstractmethod
    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        """Return boolean [b or 1, h or 1, r, c] for query indices `rows` [r] and key indices `cols` [c]. A size is
        `rows.shape[0]`: `len(rows)` would fix it in an exported program."""

    @abstractmethod
    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        """Return EMPTY or FULL only if it holds for all batch entries and heads; MIXED is always correct."""

    def spans(self, grid: Grid) -> Tensor | None:
        """Return the keys visible to each query as ranges, int32 [b or 1, n, K, 2] on the CPU (`headwise.masks.spans`);
        None if they are not a few ranges, or differ between heads."""
        return None

    def starts(self, grid: Grid) -> Tensor | None:
        """Return the token where the sequence of each key starts, int64 [b or 1, m] on the CPU (`masks.starts`), for a
        mask that keeps sequences apart or hides padding before them; for padding, a token beyond it. None: token 0 for
        all keys, also where a mask of positions hides it from later queries. By default as its ranges or `allowed` show
        them to the queries of the grid, or, if these are not all queries and the mask is `placed`, as a window, as
        those at the keys' own positions show padding (`starts.behind_hidden`)."""
        found = self.spans(grid)
        hidden = found is None and self.placed and grid.n < grid.m and not starts.of_each("m", self)
        return starts.behind_hidden(self, self.allowed, grid) if hidden else starts.shown(found, self.allowed, grid)

    @property
    def boolean(self) -> Tensor | None:
        """The caller's own boolean tensor [b or 1, h or 1, n, m], for a mask made from one; else None."""
        return None

    @property
    def causal(self) -> bool:
        """Whether the mask is known to hide all keys after each query."""
        return False

    @property
    def placed(self) -> bool:
        """Whether the mask is known to depend on the positions of the queries among the keys."""
        return self.causal

    @property
    def of_step(self) -> bool:
        """Whether it holds a number of dropped keys, so that the next step of a cache has another mask."""
        return False

    @property
    def padding(self) -> bool:
        """Whether the mask is known to hide the same keys from all queries."""
        return False

    def real_tokens(self, grid: Grid) -> Tensor | None:
        """Return which tokens are no padding, boolean [b or 1, tokens], as far as it is known; None if all are."""
        row, keys = torch.zeros(1, dtype=torch.long, device="cpu"), torch.arange(grid.m, device="cpu")
        return grid.of_tokens(self.allowed(row, keys, grid)[:, 0, 0]) if self.padding else None

    def over_tokens(self, grid: Grid) -> "Mask":
        """Return the mask of self attention in which queries at padding positions are fully masked."""
        return self

    @property
    def value(self) -> bool:
        """Whether it consists of plain numbers and compares by value, so that equal masks can share derived data."""
        kind = type(self)
        fields = kind.holds
        return fields is not None and kind.__eq__ is not object.__eq__ and all(x.plain for x in fields.values())

    def check(self, grid: Grid) -> None:
        """Raise ShapeError if the mask does not fit a matrix of this size."""

    def cut(self, cuts: Cuts) -> "Mask":
        """Return the mask of some batch entries and heads, for a grid of that size."""
        if self.holds is None:
            return Selected(self, cuts)
        found: Mask = super().cut(cuts)
        return found

    def only(self, batch: int, head: int, grid: Grid) -> "Mask":
        """Return the mask of one batch entry and head, for a grid with batch 1 and one head."""
        return self.cut({"b": Section(batch, batch + 1, grid.b), "h": Section(head, head + 1, grid.h)})

    def part(self, rows: Span, cols: Span, grid: Grid) -> "Mask":
        """Return the mask of a rectangle of the matrix, for `grid.part(rows, cols)`."""
        return Part(self, grid, rows, cols)

    def with_gap(self, gap: Span, grid: Grid) -> "Mask":
        """Return the mask of the keys that remain, a matrix of the size of `grid`, when a range of keys before all
        queries is dropped."""
        return WithGap(self, gap.start, gap.size)

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, _mask(other))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, _mask(other))

    def to_dense(self, n: int, m: int, *, batch: int = 1, heads: int = 1) -> Tensor:
        """Return the mask as a boolean tensor [b or 1, h or 1, n, m]; for small sizes."""
        grid = Grid(batch, heads, n, m)
        self.check(grid)
        rows, cols = (torch.arange(size, device="cpu") for size in (n, m))
        return self.allowed(rows, cols, grid).expand(-1, -1, n, m)


@dataclass(frozen=True)
class _Pair(Mask, abstract=True):
    """The common part of `And` and `Or`."""

    left: Mask
    right: Mask
    sign: ClassVar[str]
    holds: ClassVar[dict[str, Field] | None] = {"left": Inner(Mask), "right": Inner(Mask)}

    @property
    def value(self) -> bool:
        return self.left.value and self.right.value

    @property
    def placed(self) -> bool:
        return self.left.placed or self.right.placed

    @property
    def of_step(self) -> bool:
        return self.left.of_step or self.right.of_step

    def check(self, grid: Grid) -> None:
        self.left.check(grid)
        self.right.check(grid)

    def part(self, rows: Span, cols: Span, grid: Grid) -> Mask:
        return type(self)(self.left.part(rows, cols, grid), self.right.part(rows, cols, grid))

    def with_gap(self, gap: Span, grid: Grid) -> Mask:
        return type(self)(self.left.with_gap(gap, grid), self.right.with_gap(gap, grid))

    def __repr__(self) -> str:
        return f"({self.left!r} {self.sign} {self.right!r})"


class And(_Pair):
    """Keys that both masks allow."""

    sign = "&"

    @property
    def causal(self) -> bool:
        return self.left.causal or self.right.causal

    def over_tokens(self, grid: Grid) -> Mask:
        return And(self.left.over_tokens(grid), self.right.over_tokens(grid))

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

    def starts(self, grid: Grid) -> Tensor | None:
        left, right = self.left.starts(grid), self.right.starts(grid)
        if left is None or right is None:
            return right if left is None else left
        return starts.of_both(left, right, grid)


class Or(_Pair):
    """Keys that either mask allows."""

    sign = "|"

    @property
    def causal(self) -> bool:
        return self.left.causal and self.right.causal

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

    def starts(self, grid: Grid) -> Tensor | None:
        if self.left.starts(grid) is None and self.right.starts(grid) is None:
            return None
        own = starts.of_each("n", self)
        return starts.shown(self.spans(grid), self.allowed, grid) if own else super().starts(grid)


@dataclass(frozen=True)
class Part(Mask):
    """A rectangle of a mask that depends on more than positions."""

    whole: Mask
    grid: Grid
    rows: Span
    cols: Span
    holds = None

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return self.whole.allowed(rows + self.rows.start, cols + self.cols.start, self.grid)

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        return self.whole.state(rows.moved(self.rows.start), cols.moved(self.cols.start), self.grid)

    def spans(self, grid: Grid) -> Tensor | None:
        found: Tensor | None = kept("_spans", lambda: self.whole.spans(self.grid), self.whole, self.grid)
        if found is None:
            return None
        here = found[:, self.rows.start : self.rows.stop].long() - self.cols.start
        return spans.tidy(here[..., 0].clamp(0, grid.m), here[..., 1].clamp(0, grid.m)).int()

    def starts(self, grid: Grid) -> Tensor | None:
        if self.grid.extra:  # which may be in sight together with the tokens of any sequence
            return starts.shown(self.spans(grid), self.allowed, grid)
        found = self.whole.starts(self.grid)
        first = self.grid.token(self.cols.start) if self.cols.start else 0
        return None if found is None else found[:, self.cols.start : self.cols.stop] - first

    def cut(self, cuts: Cuts) -> Mask:
        return Part(self.whole.cut(cuts), self.grid.cut(cuts), self.rows, self.cols)

    def joined(self, axis: str, size: int, join: Callable[[Tensor, int], Tensor]) -> Mask:
        return Part(self.whole.joined(axis, size, join), self.grid, self.rows, self.cols)

    def __repr__(self) -> str:
        return f"{self.whole!r}[{self.rows.start}:{self.rows.stop}, {self.cols.start}:{self.cols.stop}]"


@dataclass(frozen=True)
class Selected(Mask):
    """Some batch entries and heads of a mask without fields."""

    whole: Mask
    cuts: Cuts
    holds = None

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        found = self.whole.allowed(rows, cols, self._grid(grid))
        for at, axis in enumerate("bh"):
            if axis in self.cuts and found.shape[at] > 1:
                start, stop, _ = self.cuts[axis]
                found = found.narrow(at, start, stop - start)
        return found

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        return self.whole.state(rows, cols, self._grid(grid))

    def spans(self, grid: Grid) -> Tensor | None:
        return self._of_entries(self.whole.spans(self._grid(grid)))

    def starts(self, grid: Grid) -> Tensor | None:
        return self._of_entries(self.whole.starts(self._grid(grid)))

    def check(self, grid: Grid) -> None:
        self.whole.check(self._grid(grid))

    def part(self, rows: Span, cols: Span, grid: Grid) -> Mask:
        return Selected(self.whole.part(rows, cols, self._grid(grid)), self.cuts)

    def joined(self, axis: str, size: int, join: Callable[[Tensor, int], Tensor]) -> Mask:
        rest = {letter: section for letter, section in self.cuts.items() if letter != axis}
        return Selected(self.whole, rest) if rest else self.whole

    def _of_entries(self, found: Tensor | None) -> Tensor | None:
        """Return what these batch entries have of a tensor [b or 1, …] of the whole mask."""
        if found is None or len(found) == 1 or "b" not in self.cuts:
            return found
        return found[self.cuts["b"].start : self.cuts["b"].stop]

    def _grid(self, grid: Grid) -> Grid:
        """Return the grid of the whole mask."""
        sizes: dict[str, Any] = {axis: of for axis, (_, _, of) in self.cuts.items()}
        return replace(grid, **sizes)

    def __repr__(self) -> str:
        parts = ", ".join(f"{axis}={start}:{stop}" for axis, (start, stop, _) in self.cuts.items())
        return f"{self.whole!r}[{parts}]"


@dataclass(frozen=True)
class WithGap(Mask):
    """The rest of a mask when a range of keys before all queries is dropped, as by a cache.

    Args:
        whole: the mask over all keys.
        start, count: the first of the dropped keys, and how many they are.
    """

    whole: Mask
    start: int
    count: int
    holds = {"whole": Inner(Mask), "start": Whole(), "count": Whole()}

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return self.whole.allowed(rows, torch.where(cols < self.start, cols, cols + self.count), self._grid(grid))

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        before = Span(cols.start, min(cols.stop, self.start))
        after = Span(max(cols.start, self.start), cols.stop).moved(self.count)
        found = {self.whole.state(rows, part, self._grid(grid)) for part in (before, after) if part.start < part.stop}
        return found.pop() if len(found) == 1 else State.MIXED

    def spans(self, grid: Grid) -> Tensor | None:
        found = self.whole.spans(self._grid(grid))
        if found is None:
            return None
        ends = found - (found - self.start).clamp(0, self.count)
        return spans.tidy(ends[..., 0], ends[..., 1])

    def starts(self, grid: Grid) -> Tensor | None:
        found = self.whole.starts(self._grid(grid))
        return None if found is None else torch.cat((found[:, : self.start], found[:, self.start + self.count :]), 1)

    @property
    def of_step(self) -> bool:
        return True

    @property
    def causal(self) -> bool:
        return self.whole.causal

    @property
    def placed(self) -> bool:
        return self.whole.placed

    @property
    def padding(self) -> bool:
        return self.whole.padding

    @property
    def value(self) -> bool:
        return self.whole.value

    def real_tokens(self, grid: Grid) -> Tensor | None:
        return self.whole.real_tokens(self._grid(grid))

    def over_tokens(self, grid: Grid) -> Mask:
        return replace(self, whole=self.whole.over_tokens(self._grid(grid)))

    def check(self, grid: Grid) -> None:
        self.whole.check(self._grid(grid))

    def _grid(self, grid: Grid) -> Grid:
        """Return the grid of the whole mask."""
        return grid.with_dropped(self.count)

    def __repr__(self) -> str:
        return f"{self.whole!r}.with_gap({self.start}:{self.start + self.count})"


def _mask(value: object) -> Mask:
    if not isinstance(value, Mask):
        raise DTypeError(f"& and |: expected a mask, got {type(value).__name__}; wrap a boolean tensor in Dense(…)")
    return value
