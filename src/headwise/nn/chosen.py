"""Masks over selected (query, head) pairs, for sparse mixtures of heads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.fields import Array
from headwise.masks import Grid, Mask, Span, State


class Picked(Mask):
    """The rows of another mask that were selected for some heads, different ones for each head.

    Laid over a grid of e entries, one head, c rows and m keys: entry (b, i) is a batch entry and a head of the other
    mask's grid, and its row r is the query `positions[b, i, r]`.

    Args:
        mask: the other mask, over `grid`.
        heads: int64 [b, i], which heads of it.
        positions: int64 [b, i, c], increasing along c, so that the rows of a block are close together.
    """

    holds = None

    def __init__(self, mask: Mask, grid: Grid, heads: Tensor, positions: Tensor) -> None:
        self.mask, self.grid, self.heads = mask, grid, heads
        self.positions = positions
        self._first = positions.amin((0, 1)).tolist()  # of each row over all entries
        self._last = positions.amax((0, 1)).tolist()

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        positions = self.positions[:, :, rows.to(self.positions.device)]
        start, stop = int(positions.min()), int(positions.max()) + 1
        whole = self.mask.allowed(torch.arange(start, stop, device=cols.device), cols, self.grid)
        batch = torch.arange(whole.shape[0], device=cols.device)[:, None, None]
        head = self.heads[:, :, None] if whole.shape[1] > 1 else 0
        tile = whole[batch, head, positions - start]  # [b, i, r, cols]
        return tile.reshape(-1, 1, len(rows), len(cols))

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        start = min(self._first[rows.start : rows.stop])
        stop = max(self._last[rows.start : rows.stop]) + 1
        return self.mask.state(Span(start, stop), cols, self.grid)

    def spans(self, grid: Grid) -> Tensor | None:
        spans = self.mask.spans(self.grid)
        if spans is None:
            return None
        b, i, c = self.positions.shape
        batch = torch.arange(b, device="cpu")[:, None, None] if len(spans) > 1 else 0
        return spans[batch, self.positions.cpu()].reshape(b * i, c, *spans.shape[2:])

    def check(self, grid: Grid) -> None:
        self.mask.check(self.grid)

    def __repr__(self) -> str:
        return f"Picked({self.mask!r}, <{self.positions.shape[-1]} of {self.grid.n} queries>)"


@dataclass(frozen=True, eq=False)
class Rows(Mask):
    """Only the queries of `rows`, boolean [b, h, n]; the others are fully masked."""

    rows: Tensor
    holds = {"rows": Array("bhn")}

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return self.rows.to(rows.device)[:, :, rows, None].expand(-1, -1, -1, len(cols))

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        part = self.rows[:, :, rows.start : rows.stop]
        if not bool(part.any()):
            return State.EMPTY
        return State.FULL if bool(part.all()) else State.MIXED

    def __repr__(self) -> str:
        return f"Rows(<{int(self.rows.sum())} of {self.rows.numel()}>)"
