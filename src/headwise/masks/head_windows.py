"""Sliding windows that differ between heads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.errors import ShapeError, check_sequence, check_whole
from headwise.fields import Counts, Whole
from headwise.masks import spans
from headwise.masks.base import Mask
from headwise.masks.grid import Grid, Span, State


class HeadWindows(Mask):
    """Head i may attend to keys less than `windows[i]` before the query (None: all), and to the first `sinks` keys.

    Keys after the query are not masked: combine it with `Causal() &`. There is one window per *query* head.
    """

    holds = {"windows": Counts("h"), "sinks": Whole()}
    placed = True

    def __init__(self, windows: Sequence[int | None], sinks: int = 0) -> None:
        self.windows = check_windows("HeadWindows", windows)
        self.sinks = check_whole("HeadWindows", "sinks", sinks, 0)
        lengths = [spans.FAR if window is None else min(window, spans.FAR) for window in self.windows]
        self._least, self._most, self._lengths = min(lengths), max(lengths), torch.tensor(lengths, device="cpu")

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
