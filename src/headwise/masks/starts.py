"""Where the sequences begin that a mask keeps apart: behind padding, and with each packed document.

A sequence starts at a key that no query has in sight together with an earlier key.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headwise.fields import Array, Described, Inner
from headwise.masks.grid import Grid

ROWS = 256  # of a boolean n×m in memory at once
DIAGONAL = 64  # rows and columns of a square on the diagonal


def of_spans(spans: Tensor, m: int) -> Tensor:
    """Return the start of each key's sequence, int64 [b or 1, m], from spans; m for keys before all sequences."""
    spans = spans.long()
    ends = spans.flatten(1, 2)
    some = (spans[:, :, 0, 1] > spans[:, :, 0, 0]).long()
    change = torch.zeros(len(spans), m + 1, dtype=torch.long, device="cpu")
    one = torch.ones((), dtype=torch.long, device="cpu").expand(ends.shape[:2])
    change.scatter_add_(1, ends[..., 0], one).scatter_add_(1, ends[..., 1], -one)
    first = torch.zeros_like(change).scatter_add_(1, spans[:, :, 0, 0], some)
    return _of_counts(change.cumsum(1)[:, :m], first[:, :m], spans.shape[1] >= m)


def of_rows(allowed: Callable[[int, int], Tensor], n: int, m: int, padding: bool = False) -> Tensor:
    """Return the same from a function of two rows to boolean [b, h, rows, m]; of padding, one row is enough."""
    seen = first = torch.zeros(1, m, dtype=torch.long, device="cpu")
    for start in range(0, n if m else 0, ROWS):
        rows = allowed(start, min(start + ROWS, n))
        seen = seen + rows.view(torch.uint8).sum((1, 2), dtype=torch.int32).cpu()  # three times as fast as of bool
        some, index = (x.flatten(1).cpu() for x in rows.max(-1))  # the first key that is seen, if there is one
        first = first.expand(len(rows), m).scatter_add(1, index, some.long())
    return _of_counts(seen, first, padding or n >= m)


def of_each(axis: str, mask: Described, inner: bool = False) -> bool:
    """Whether the mask holds something for each query ("n") of its grid, or each key ("m"), such as its document."""
    if mask.holds is None:
        return inner
    return any(
        (isinstance(field, Array) and axis in field.axes)
        or (isinstance(field, Inner) and of_each(axis, getattr(mask, name), True))
        for name, field in mask.holds.items()
    )


def shown(spans: Tensor | None, allowed: Callable[[Tensor, Tensor, Grid], Tensor], grid: Grid) -> Tensor:
    """Return the same of the mask with these `spans` and `allowed`, as the queries of the grid show them."""
    if spans is not None:
        return of_spans(spans, grid.m)
    cols = torch.arange(grid.m, device="cpu")
    return of_rows(lambda *ends: allowed(torch.arange(*ends, device="cpu"), cols, grid), grid.n, grid.m)


def behind_hidden(mask: Described, allowed: Callable[[Tensor, Tensor, Grid], Tensor], grid: Grid) -> Tensor | None:
    """The same of a mask of positions, for the last queries: one sequence an entry, behind the first keys hidden from
    the query at their position. None without any, if a query may attend to one, or keys are no tokens."""
    if not grid.at_end or grid.gap.size or grid.extra or of_each("n", mask):
        return None
    first = torch.zeros(1, dtype=torch.long, device="cpu")
    for start in range(0, grid.m, DIAGONAL):
        own = torch.arange(start, min(start + DIAGONAL, grid.m), device="cpu")
        square = allowed(own - start, own, replace(grid, n=len(own), first=start))
        seen = square.diagonal(dim1=2, dim2=3).any(1).cpu()
        first = torch.where(first == start, start + (seen.cumsum(1) == 0).sum(1), first)
        if not bool((first == start + len(own)).any()):
            break
    key = torch.arange(int(first.max()), device="cpu")
    if not len(key):
        return None
    later = allowed(torch.arange(grid.n, device="cpu"), key, grid).flatten(1, 2).any(1).cpu()
    if bool((later & (key < first[:, None])).any()):
        return None
    return torch.where(torch.arange(grid.m, device="cpu") < first[:, None], grid.m, first[:, None])


def of_both(one: Tensor, other: Tensor, grid: Grid) -> Tensor:
    """Return the same of two masks together: of each key the later start, or, where that is of another sequence, as if
    padding hides the first of several runs of a document, the first key behind it that is of the same two sequences."""
    one, other = torch.broadcast_tensors(one, other)
    start = torch.maximum(one, other)
    at = grid.keys_at(start)
    there = at.clamp_min(0)
    same = (one.gather(1, there) == one) & (other.gather(1, there) == other)
    elsewhere = (at >= 0) & ~same
    if not bool(elsewhere.any()):
        return start
    token = grid.key_tokens().expand_as(start)
    entry = torch.arange(len(start), device="cpu")[:, None].expand_as(start)
    pair = torch.stack((entry, one, other)).flatten(1).unique(dim=1, return_inverse=True)[1]
    behind = token.masked_fill(token < start, grid.tokens).flatten()
    first = torch.full_like(behind, grid.tokens).scatter_reduce(0, pair, behind, "amin")
    return torch.where(elsewhere, first[pair].view_as(start), start)


def _of_counts(seen: Tensor, first: Tensor, every: bool) -> Tensor:
    """Return the starts from the rows that see each key, and those whose first key it is; `every`: of all rows."""
    m = seen.shape[1]
    key = torch.arange(m, device="cpu")
    latest = torch.where((seen > 0) & (seen == first), key, -1).cummax(1).values
    return torch.where((latest < 0) | (seen == 0) if every else latest < 0, m, latest)
