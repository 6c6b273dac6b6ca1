"""Small summaries of an attention matrix: pooled to a picture, by distance, by key, largest weights.

Each is one pass over the tiles, with memory O(n) or the size of its result.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.base.run import Progress
from headwise.errors import ConfigError, ShapeError, check_whole
from headwise.masks import Grid, Span
from headwise.rule import KEY_BLOCK, Rule, diagonal_sums
from headwise.rule.lowering import lowered
from headwise.rule.tiles import Tile, stream


class Squares(NamedTuple):
    """An attention matrix, or a rectangle of it, in squares of cell × cell; each [b, h, ⌈n/cell⌉, ⌈m/cell⌉]."""

    mean: Tensor  # the mean weight of the unmasked pairs, 0 if there are none
    largest: Tensor  # the largest weight
    allowed: Tensor  # int64, the number of unmasked pairs


def squares(
    q: Tensor, k: Tensor, lse: Tensor, rule: Rule, cell: int, progress: Progress | None = None, *,
    read: Callable[[Tile], Tensor] = lambda tile: tile.weights,
) -> Squares:  # fmt: skip
    """Pool the weights over squares of `cell` × `cell`, or what else is read from their tiles, [b, h, r, c]."""
    b, h, n, m = rule.grid
    total = lse.new_zeros(b, h, -(-n // cell), -(-m // cell))
    largest, count = torch.zeros_like(total), torch.zeros_like(total, dtype=torch.int64)
    for tile in stream(q, k, lse, rule, width=max(1, KEY_BLOCK // cell) * cell, multiple=cell, progress=progress):
        i, j = tile.rows.start // cell, tile.cols.start // cell
        parts = in_squares(read(tile), cell)  # [b, h, R, cell, C, cell]
        place = (..., slice(i, i + parts.shape[2]), slice(j, j + parts.shape[4]))
        total[place] += parts.sum((3, 5))
        largest[place] = torch.maximum(largest[place], parts.amax((3, 5)))
        allowed = lse.new_ones(1, 1, *tile.shape[2:]) if tile.allowed is None else tile.allowed.to(lse)
        count[place] += in_squares(allowed, cell).sum((3, 5), dtype=torch.int64)
    return Squares(total / count.clamp_min(1), largest, count)


def cell_for(size: int, reduce: str, n: int, m: int) -> int:
    """The cell size of a picture at most `size` wide and high; ConfigError for invalid arguments of `pool`."""
    size = check_whole("pool", "size", size, 1)
    if reduce not in ("mean", "max"):
        raise ConfigError(f"pool(reduce={reduce!r}): expected 'mean' or 'max'")
    return max(1, -(-max(n, m) // size))


def side(name: str, given: range | slice, size: int) -> range:
    """Check rows or columns and return them as a range."""
    side = range(*given.indices(size)) if isinstance(given, slice) else given
    if not isinstance(side, range) or side.step != 1 or not 0 <= side.start < side.stop <= size:
        raise ShapeError(
            f"pooled({name}={given!r}): expected a non-empty range or slice with step 1 within 0 to {size}"
        )
    return side


def in_squares(x: Tensor, cell: int) -> Tensor:
    """Reshape [b, h, r, c] to [b, h, ⌈r/cell⌉, cell, ⌈c/cell⌉, cell], padded with zeros."""
    b, h, r, c = x.shape
    x = torch.nn.functional.pad(x, (0, -c % cell, 0, -r % cell))
    return x.view(b, h, x.shape[2] // cell, cell, x.shape[3] // cell, cell)


def top_keys(
    q: Tensor, k: Tensor, lse: Tensor, rule: Rule, count: int, progress: Progress | None = None
) -> tuple[Tensor, Tensor]:
    """The `count` largest weights of each row and their keys, of equal ones the lower key; beyond them 0 and −1."""
    b, h, n, _ = rule.grid
    logs = lse.new_full((b, h, n, count), -torch.inf)
    keys = torch.full((b, h, n, count), -1, dtype=torch.long, device=lse.device)
    for tile in stream(q, k, lse, rule, progress=progress):
        rows = slice(tile.rows.start, tile.rows.stop)
        both = torch.cat((logs[:, :, rows], tile.log_weights), -1)
        columns = torch.arange(*tile.cols, device=lse.device)
        names = torch.cat((keys[:, :, rows], columns.expand(tile.shape)), -1)
        best, order = both.sort(dim=-1, descending=True, stable=True)
        logs[:, :, rows], keys[:, :, rows] = best[..., :count], names.gather(-1, order[..., :count])
    bad = lse.isnan()[..., None]
    return logs.exp().masked_fill(bad, torch.nan), keys.masked_fill(bad, -1)


def column_sums(q: Tensor, k: Tensor, lse: Tensor, rule: Rule) -> Tensor:
    """Σ_i p_ij, [b, h, m]."""
    total = lse.new_zeros(rule.grid.b, rule.grid.h, rule.grid.m)
    for tile in stream(q, k, lse, rule):
        total[..., tile.cols.start : tile.cols.stop] += tile.weights.sum(-2)
    return total


def diagonal_means(parts: Sequence[tuple[Rule, Tensor]]) -> tuple[Tensor, Tensor]:
    """Offsets key − position [n + m − 1], ascending, and the mean weight over the unmasked pairs of each, [b, h, n + m
    − 1]; 0 without any. parts: rules of ranges of keys without a gap, and their sums by `diagonal_mass`, joined."""
    offsets = torch.cat([_offsets(rule.grid, mass.device) for rule, mass in parts])
    total = torch.cat([mass for _, mass in parts], -1)
    cells = torch.cat([_diagonal_cells(rule).to(total).expand_as(mass) for rule, mass in parts], -1)
    if len(parts) > 1:
        offsets, place = offsets.unique(return_inverse=True)
        total, cells = (x.new_zeros(*x.shape[:2], len(offsets)).index_add_(2, place, x) for x in (total, cells))
    return offsets, total / cells.clamp_min(1)


def _offsets(grid: Grid, device: torch.device) -> Tensor:
    """Key − position of each diagonal, [n + m − 1], for keys on one side of a gap."""
    first = grid.token(0) - (grid.first_token + grid.n - 1)
    return torch.arange(first, first + max(0, grid.n + grid.m - 1), device=device)


def diagonal_mass(q: Tensor, k: Tensor, lse: Tensor, rule: Rule) -> Tensor:
    """Sums of the weights along diagonals, [b, h, n + m − 1]; the first is that of the last query and first key."""
    b, h, n, m = rule.grid
    total = lse.new_zeros(b, h, max(0, n + m - 1))
    for tile in stream(q, k, lse, rule):
        total[..., _diagonals_of(tile.rows, tile.cols, n)] += diagonal_sums(tile.weights)
    return total


def _diagonal_cells(rule: Rule) -> Tensor:
    """The number of unmasked pairs on each diagonal, [b or 1, h or 1, n + m − 1]."""
    b, h, n, m = rule.grid
    found = lowered(rule)
    if isinstance(found, str) or found.dense is not None:
        count = torch.zeros(b, h, max(0, n + m - 1), dtype=torch.int64, device="cpu")
        for rows in rule.row_blocks():
            for cols, _ in rule.tiles(rows):
                allowed = rule.allowed(rows, cols, torch.device("cpu"))
                allowed = allowed.expand(-1, -1, rows.size, cols.size)
                count[..., _diagonals_of(rows, cols, n)] += diagonal_sums(allowed.long())
        return count
    # A range of keys is a range of diagonals: add 1 where it begins, subtract 1 where it ends.
    start, stop = (found.spans.long() - torch.arange(n, device="cpu")[:, None, None] + n - 1).flatten(1, 2).unbind(-1)
    change, one = start.new_zeros(len(start), n + m), torch.ones_like(start)
    change.scatter_add_(1, start, one).scatter_add_(1, stop, -one)
    return change.cumsum(1)[:, None, :-1]


def _diagonals_of(rows: Span, cols: Span, n: int) -> slice:
    """The diagonals of a tile; pair (i, j) is on diagonal j − i + n − 1."""
    first = cols.start - (rows.stop - 1) + n - 1
    return slice(first, first + rows.size + cols.size - 1)
