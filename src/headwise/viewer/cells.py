"""How many pairs of a square of cells may be looked at: what a mean is over, and where there is nothing."""

import torch
from torch import Tensor

from headwise.masks import Span, State
from headwise.rule import Rule

BAND = 1 << 22  # pairs of a mask that is asked pair by pair, at once


def allowed_pairs(rule: Rule, cell: int) -> Tensor:
    """Allowed pairs in each square of `cell` × `cell`, float64 [⌈n/cell⌉, ⌈m/cell⌉], for a rule of one head.

    O(n) and the size of the result, where the mask is a few ranges of keys for each query.
    """
    n, m = rule.grid.n, rule.grid.m
    state = rule.mask.state(Span(0, n), Span(0, m), rule.grid)
    high, wide = sides(n, cell), sides(m, cell)
    if state is not State.MIXED:
        full = high[:, None] * wide
        return full if state is State.FULL else torch.zeros_like(full)
    spans = rule.mask.spans(rule.grid)
    return _pair_by_pair(rule, cell) if spans is None else _by_spans(spans[0].long(), m, cell, wide)


def sides(size: int, cell: int) -> Tensor:
    """Tokens in each cell of a side: all are full but the last. float64 [⌈size/cell⌉]"""
    found = torch.full((-(-size // cell),), cell, dtype=torch.float64)
    if size % cell:
        found[-1] = size % cell
    return found


def squares(x: Tensor, cell: int, beyond: float = 0.0) -> Tensor:
    """[r, c] as [⌈r/cell⌉, cell, ⌈c/cell⌉, cell], filled up with `beyond`."""
    r, c = x.shape
    x = torch.nn.functional.pad(x, (0, -c % cell, 0, -r % cell), value=beyond)
    return x.view(x.shape[0] // cell, cell, x.shape[1] // cell, cell)


def _by_spans(spans: Tensor, m: int, cell: int, wide: Tensor) -> Tensor:
    """Each range [n, K, 2] counts in all squares it touches, less what sticks out at its two ends."""
    height, width = -(-len(spans) // cell), len(wide)
    start, stop = spans.unbind(-1)  # [n, K]
    row = (torch.arange(len(spans)) // cell)[:, None].expand_as(start)
    seen = stop > start
    start, stop, row = start[seen], stop[seen], row[seen]
    first, last = start // cell, (stop - 1) // cell
    ones = torch.ones(len(row), dtype=torch.float64)
    touched = torch.zeros(height * (width + 1), dtype=torch.float64)
    touched.index_add_(0, row * (width + 1) + first, ones)
    touched.index_add_(0, row * (width + 1) + last + 1, -ones)
    pairs = (touched.view(height, width + 1).cumsum(1)[:, :width] * wide).flatten()
    pairs.index_add_(0, row * width + first, -(start - first * cell).double())
    pairs.index_add_(0, row * width + last, -(((last + 1) * cell).clamp_max(m) - stop).double())
    return pairs.view(height, width)


def _pair_by_pair(rule: Rule, cell: int) -> Tensor:
    n, m = rule.grid.n, rule.grid.m
    keys = torch.arange(m)
    step = max(1, BAND // max(1, m) // cell) * cell
    bands = []
    for start in range(0, n, step):
        queries = torch.arange(start, min(start + step, n))
        allowed = rule.mask.allowed(queries, keys, rule.grid).expand(1, 1, len(queries), m)[0, 0]
        bands.append(squares(allowed.double(), cell).sum((1, 3)))
    return torch.cat(bands)
