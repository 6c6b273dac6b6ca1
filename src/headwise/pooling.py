"""Views of an attention matrix that are small: pooled to a picture, by distance, by key, its largest weights.

Each is one pass over the tiles and keeps O(n) or the size of its result.
"""

import torch
from torch import Tensor

from headwise.rule import KEY_BLOCK, Rule, diagonal_sums
from headwise.tiles import Progress, stream


def pool(
    q: Tensor, k: Tensor, lse: Tensor, rule: Rule, cell: int, reduce: str, progress: Progress | None = None
) -> Tensor:
    """Weights in squares of `cell` × `cell`: [b, h, ⌈n/cell⌉, ⌈m/cell⌉], the mean over allowed cells, or the max.

    A square with no allowed cell is 0.
    """
    b, h, n, m = rule.grid
    height, width = -(-n // cell), -(-m // cell)
    top = lse.new_zeros(b, h, height, width)
    count = lse.new_zeros(b, h, height, width) if reduce == "mean" else None
    for tile in stream(q, k, lse, rule, width=max(1, KEY_BLOCK // cell) * cell, multiple=cell, progress=progress):
        i, j = tile.rows.start // cell, tile.cols.start // cell
        squares = _squares(tile.weights, cell)  # [b, h, R, cell, C, cell]
        place = top[:, :, i : i + squares.shape[2], j : j + squares.shape[4]]
        if count is None:
            place.copy_(torch.maximum(place, squares.amax((3, 5))))
            continue
        place += squares.sum((3, 5))
        cells = torch.ones(1, 1, *tile.shape[2:], device=lse.device) if tile.allowed is None else tile.allowed.float()
        count[:, :, i : i + squares.shape[2], j : j + squares.shape[4]] += _squares(cells, cell).sum((3, 5))
    return top if count is None else top / count.clamp_min(1)


def _squares(x: Tensor, cell: int) -> Tensor:
    b, h, r, c = x.shape
    x = torch.nn.functional.pad(x, (0, -c % cell, 0, -r % cell))
    return x.view(b, h, x.shape[2] // cell, cell, x.shape[3] // cell, cell)


def top_keys(
    q: Tensor, k: Tensor, lse: Tensor, rule: Rule, count: int, progress: Progress | None = None
) -> tuple[Tensor, Tensor]:
    """The `count` largest weights of each row and their keys, [b, h, n, count], largest first.

    Where a row may see fewer keys, the weights are 0 and the keys −1.
    """
    b, h, n, _ = rule.grid
    weights = lse.new_full((b, h, n, count), -1.0)
    keys = torch.full((b, h, n, count), -1, dtype=torch.long, device=lse.device)
    for tile in stream(q, k, lse, rule, progress=progress):
        rows = slice(tile.rows.start, tile.rows.stop)
        here = tile.weights if tile.allowed is None else tile.weights.masked_fill(~tile.allowed, -1.0)
        best, index = here.topk(min(count, here.shape[-1]))
        both = torch.cat((weights[:, :, rows], best), -1)
        names = torch.cat((keys[:, :, rows], index + tile.cols.start), -1)
        best, order = both.topk(count)
        weights[:, :, rows], keys[:, :, rows] = best, names.gather(-1, order)
    missing = weights < 0
    return weights.masked_fill(missing, 0.0), keys.masked_fill(missing, -1)


def column_sums(q: Tensor, k: Tensor, lse: Tensor, rule: Rule) -> Tensor:
    """Σ_i p_ij, [b, h, m]."""
    total = lse.new_zeros(rule.grid.b, rule.grid.h, rule.grid.m)
    for tile in stream(q, k, lse, rule):
        total[..., tile.cols.start : tile.cols.stop] += tile.weights.sum(-2)
    return total


def diagonal_means(q: Tensor, k: Tensor, lse: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Mean weight over the allowed cells of each diagonal: offsets [m + n − 1], means [b, h, m + n − 1].

    Offset = key − position, from −(m − 1) to n − 1... in ascending order; 0 where no cell is allowed.
    """
    b, h, n, m = rule.grid
    total = lse.new_zeros(b, h, n + m - 1)
    count = torch.zeros_like(total)
    for tile in stream(q, k, lse, rule):
        r, c = tile.shape[2:]
        # Entry (i, j) of the matrix lies on diagonal j - i + n - 1.
        first = tile.cols.start - (tile.rows.stop - 1) + n - 1
        place = slice(first, first + r + c - 1)
        total[..., place] += diagonal_sums(tile.weights)
        cells = torch.ones(1, 1, r, c, device=lse.device) if tile.allowed is None else tile.allowed.float()
        count[..., place] += diagonal_sums(cells)
    offsets = torch.arange(n + m - 1, device=lse.device) - (n - 1) - rule.grid.shift
    return offsets, total / count.clamp_min(1)
