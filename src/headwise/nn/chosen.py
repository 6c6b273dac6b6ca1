"""Masks over selected (query, head) pairs, for sparse mixtures of heads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.fields import Array
from headwise.kernels.graph import listed
from headwise.masks import Grid, Mask, Span, State, spans


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
        self._first = listed(positions.amin((0, 1)))  # of each row over all entries
        self._last = listed(positions.amax((0, 1)))

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
        found = self.mask.spans(self.grid)
        if found is None:
            return None
        b, i, c = self.positions.shape
        batch = torch.arange(b, device="cpu")[:, None, None] if len(found) > 1 else 0
        return found[batch, self.positions.cpu()].reshape(b * i, c, *found.shape[2:])

    def starts(self, grid: Grid) -> Tensor | None:
        found = self.mask.starts(self.grid)
        return found if found is None or len(found) == 1 else found.repeat_interleave(self.positions.shape[1], 0)

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

    def starts(self, grid: Grid) -> None:
        return None  # what is chosen divides no sequences

    def __repr__(self) -> str:
        return f"Rows(<{int(self.rows.sum())} of {self.rows.numel()}>)"


class Pairs(Mask):
    """Another mask over selected queries and selected keys, different ones for each batch entry and head.

    Laid over a grid of b·i entries, one head, c rows and m' keys: entry (b, j) is a batch entry and the head `heads[j]`
    of the other mask's grid, its row r the query `positions[b·j, r]`, its column the key `keys[b·j, …]`.

    Args:
        mask: the other mask, over `grid`.
        heads: int64 [i]. positions: int64 [b·i, c], −1 for a row without a query, which is fully masked.
        keys: int64 [b·i, m'], increasing; `grid.m` for a column without a key.
    """

    holds = None

    def __init__(self, mask: Mask, grid: Grid, heads: Tensor, positions: Tensor, keys: Tensor) -> None:
        self.mask, self.grid, self.heads, self.positions, self.keys = mask, grid, heads, positions, keys

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        at = self.positions[:, rows.to(self.positions.device)].to(cols.device)
        key = self.keys[:, cols.to(self.keys.device)].to(cols.device)
        start, stop = int(at.clamp_min(0).amin()), int(at.amax()) + 1
        if stop <= start:
            return torch.zeros(len(at), 1, *at.shape[1:], key.shape[1], dtype=torch.bool, device=cols.device)
        query = torch.arange(start, stop, device=cols.device)
        whole = self.mask.allowed(query, torch.arange(self.grid.m, device=cols.device), self.grid)
        cell = torch.arange(len(at), device=cols.device)
        batch = cell // len(self.heads) if len(whole) > 1 else 0 * cell
        head = self.heads.to(cols.device)[cell % len(self.heads)] if whole.shape[1] > 1 else 0 * cell
        row, col = (at - start).clamp_min(0), key.clamp_max(self.grid.m - 1)
        tile = whole[batch[:, None, None], head[:, None, None], row[:, :, None], col[:, None]]
        return (tile & (at >= 0)[..., None] & (key < self.grid.m)[:, None])[:, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        return State.MIXED

    def spans(self, grid: Grid) -> Tensor | None:
        found = self.mask.spans(self.grid)
        if found is None:
            return None
        at, keys = self.positions.cpu(), self.keys.cpu().contiguous()
        batch = torch.arange(len(at))[:, None] // len(self.heads) if len(found) > 1 else 0
        ends = found[batch, at.clamp_min(0)].long() * (at >= 0)[..., None, None]  # [b·i, c, K, 2]
        ends = torch.searchsorted(keys, ends.flatten(1)).view(ends.shape).int()
        return spans.tidy(ends[..., 0], ends[..., 1])

    def starts(self, grid: Grid) -> Tensor:
        keys = self.keys.cpu().contiguous()
        whole = self.mask.starts(self.grid)
        whole = torch.zeros(1, self.grid.m, dtype=torch.long) if whole is None else whole
        key = keys.clamp_max(self.grid.m - 1)
        start = whole.repeat_interleave(len(keys) // len(whole), 0).gather(1, key)
        column = torch.searchsorted(keys, start).clamp_max(grid.m - 1)
        there = (keys.gather(1, column) == start) & (keys < self.grid.m)
        return torch.where(there, column, grid.m)  # the first key is not among the selected ones: no weight

    def check(self, grid: Grid) -> None:
        self.mask.check(self.grid)

    def __repr__(self) -> str:
        return f"Pairs({self.mask!r}, <{self.positions.shape[-1]} of {self.grid.n} queries>)"


@dataclass(frozen=True, eq=False)
class Columns(Mask):
    """Only the keys of `columns`, boolean [b, h, m]."""

    columns: Tensor
    holds = {"columns": Array("bhm")}

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return self.columns.to(cols.device)[:, :, None, cols].expand(-1, -1, len(rows), -1)

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        part = self.columns[:, :, cols.start : cols.stop]
        if not bool(part.any()):
            return State.EMPTY
        return State.FULL if bool(part.all()) else State.MIXED

    def starts(self, grid: Grid) -> None:
        return None  # what is chosen divides no sequences

    def __repr__(self) -> str:
        return f"Columns(<{int(self.columns.sum())} of {self.columns.numel()}>)"
