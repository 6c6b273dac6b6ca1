"""Masks that depend on positions only, for all heads or each of them, and attention knocked out between tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import DTypeError, ShapeError, check_sequence, check_whole
from headwise.fields import Array, Counts, Section, Whole
from headwise.masks import spans
from headwise.masks.base import Mask, WithGap
from headwise.masks.grid import Grid, Span, State


class _Anywhere(Mask, abstract=True):
    """A mask that depends on distances at most, so that every rectangle has the same mask."""

    def part(self, rows: Span, cols: Span, grid: Grid) -> Mask:
        return self

    def with_gap(self, gap: Span, grid: Grid) -> Mask:
        return self

    def starts(self, grid: Grid) -> None:
        return None


@dataclass(frozen=True)
class Everything(_Anywhere):
    """Every query may attend to every key, as with `mask=None`."""

    holds = {}
    whole_past = True

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return torch.ones(1, 1, rows.shape[0], cols.shape[0], dtype=torch.bool, device=rows.device)

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
        return self if beyond or gap.start == 0 else WithGap(self, gap.start, gap.size)

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
        return (cols < self.count).expand(rows.shape[0], -1)[None, None]

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


class HeadWindows(Mask):
    """Head i may attend to keys less than `windows[i]` before the query (None: all), and to the first `sinks` keys.

    Keys after the query are not masked: combine it with `Causal() &`. There is one window per *query* head.
    """

    holds = {"windows": Counts("h"), "sinks": Whole()}
    saved_as = "headwise.masks.positional.HeadWindows"
    placed = True

    def __init__(self, windows: Sequence[int | None], sinks: int = 0) -> None:
        self.windows = check_windows("HeadWindows", windows)
        self.sinks = check_whole("HeadWindows", "sinks", sinks, 0)
        lengths = [spans.FAR if window is None else min(window, spans.FAR) for window in self.windows]
        self._least, self._most = min(lengths), max(lengths)
        # Not by torch.tensor: a graph that is decomposed can take up numbers, but no tensor of its own.
        self._lengths = torch.cat([torch.full((1,), length, device="cpu") for length in lengths])

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        distance = (rows + grid.shift)[:, None] - cols
        return (distance < self._lengths.to(rows.device)[:, None, None])[None] | (cols < self.sinks)

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        nearest = rows.start + grid.shift - (cols.stop - 1)
        farthest = rows.stop - 1 + grid.shift - cols.start
        if farthest < self._least or cols.stop <= self.sinks:
            return State.FULL
        return State.EMPTY if nearest >= self._most and cols.start >= self.sinks else State.MIXED

    def spans(self, grid: Grid) -> Tensor | None:
        if self._least != self._most:
            return None
        near = spans.one(grid.positions()[None] - self._most + 1, grid.m, grid.m)
        return spans.unite(spans.one(torch.zeros(1, grid.n, dtype=torch.long), self.sinks, grid.m), near)

    def starts(self, grid: Grid) -> None:
        return None

    def check(self, grid: Grid) -> None:
        if grid.h != len(self.windows):
            raise ShapeError(f"mask=HeadWindows: {len(self.windows)} windows for {grid.h} query heads")

    def __repr__(self) -> str:
        return f"HeadWindows({list(self.windows)}, sinks={self.sinks})"


def check_windows(owner: str, windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the windows; ConfigError naming `owner` if they are not whole numbers or None."""
    entries = check_sequence(owner, "windows", windows, "one window per head, such as [128, None]")
    return tuple(None if window is None else check_whole(owner, "window", window, 1) for window in entries)


MOST_RANGES = 64  # more ranges of keys than this would take as much memory as a dense mask


class Forbidden(Mask):
    """The selected queries may not attend to the selected keys; all other pairs are allowed. O(n + m) memory.

    Args:
        queries: boolean [n] or [b, n]; True selects a query. keys: boolean [m] or [b, m].
        heads: boolean [h], one per query head, if only these heads are affected; None for all.
    Raises:
        DTypeError, ShapeError: naming the argument.
    """

    holds = {"queries": Array("bn"), "keys": Array("bm"), "heads": Array("h", optional=True)}

    def __init__(
        self, queries: Sequence[bool] | Tensor, keys: Sequence[bool] | Tensor,
        heads: Sequence[bool] | Tensor | None = None,
    ) -> None:  # fmt: skip
        self.queries, self.keys = _selection("queries", queries, 2), _selection("keys", keys, 2)
        self.heads = None if heads is None else _selection("heads", heads, 1)

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        queries, keys = self.queries.to(rows.device)[:, rows], self.keys.to(cols.device)[:, cols]
        pairs = (queries[:, :, None] & keys[:, None, :])[:, None]
        return ~(pairs if self.heads is None else pairs & self.heads.to(rows.device)[:, None, None])

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        queries, keys = self.queries[:, slice(*rows)], self.keys[:, slice(*cols)]
        if self._everywhere and bool(queries.all()) and bool(keys.all()):
            return State.EMPTY
        pairs = queries.any(-1) & keys.any(-1)
        anywhere = self.heads is None or bool(self.heads.any())
        return State.MIXED if anywhere and bool(pairs.any()) else State.FULL

    def spans(self, grid: Grid) -> Tensor | None:
        if not self._everywhere:
            return None
        queries, open_ = self.queries.cpu(), ~self.keys.cpu()
        edge = torch.nn.functional.pad(open_, (1, 1)).int().diff(dim=-1)  # 1 where a range starts, −1 where it stops
        count = max([1, *(edge == 1).sum(-1).tolist()])
        if count > MOST_RANGES:
            return None
        ranges = torch.zeros(len(open_), count, 2, dtype=torch.long, device="cpu")
        for at, sign in enumerate((1, -1)):
            entry, place = (edge == sign).nonzero(as_tuple=True)
            ranges[entry, ((edge == sign).cumsum(-1) - 1)[entry, place], at] = place
        whole = torch.zeros(count, 2, dtype=torch.long, device="cpu")
        whole[0, 1] = grid.m
        found = torch.where(queries[:, :, None, None], ranges[:, None], whole)
        return spans.tidy(found[..., 0], found[..., 1]).int()

    def starts(self, grid: Grid) -> None:
        return None  # what is forbidden on trial divides no sequences

    def check(self, grid: Grid) -> None:
        for name, selection, size in (("queries", self.queries, grid.n), ("keys", self.keys, grid.m)):
            if selection.shape[0] not in (1, grid.b) or selection.shape[1] != size:
                raise ShapeError(
                    f"mask=Forbidden({name}=…): shape {tuple(selection.shape)}, expected ({size},) or "
                    f"({grid.b}, {size})"
                )
        if self.heads is not None and len(self.heads) != grid.h:
            raise ShapeError(f"mask=Forbidden(heads=…): {len(self.heads)} entries for {grid.h} query heads")

    @property
    def _everywhere(self) -> bool:
        return self.heads is None or bool(self.heads.all())

    def part(self, rows: Span, cols: Span, grid: Grid) -> Mask:
        found: Mask = self.cut({"n": Section(*rows, grid.n), "m": Section(*cols, grid.m)})
        return found

    def __repr__(self) -> str:
        heads = "" if self.heads is None else f", heads {self.heads.nonzero().flatten().tolist()}"
        queries, keys = (int(one.any(0).sum()) for one in (self.queries, self.keys))
        return f"Forbidden({queries} queries × {keys} keys{heads})"


def _selection(name: str, values: Sequence[bool] | Tensor, most: int) -> Tensor:
    """Boolean [size], or [b or 1, size] if `most` is 2."""
    found = torch.as_tensor(values, device="cpu") if not isinstance(values, Tensor) else values
    if found.dtype != torch.bool:
        raise DTypeError(f"Forbidden({name}=…): expected a boolean tensor, got {found.dtype}")
    if not 1 <= found.ndim <= most:
        expected = "[size]" if most == 1 else "[size] or [batch, size]"
        raise ShapeError(f"Forbidden({name}=…): expected {expected}, got shape {tuple(found.shape)}")
    return found[None] if found.ndim < most else found
