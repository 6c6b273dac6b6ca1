"""A rectangle of one head's map, pooled in square cells: the one place where the viewer computes weights."""

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from headwise import pooling
from headwise.kernels.observe import pooled
from headwise.map import AttentionMap
from headwise.masks import Span, State

SIDE = 256  # cells along a tile
REDUCES = ("mean", "max")
BAND = 1 << 27  # pairs of query and key between two looks at whether the result is still wanted

Wanted = Callable[[], bool]


class Unwanted(Exception):
    """Nobody waits for the result any more."""


def always() -> bool:
    """For who waits to the end."""
    return True


def tile_spans(n: int, m: int, cell: int, row: int, col: int) -> tuple[Span, Span]:
    """Queries and keys of a tile; empty ranges where it lies outside."""
    size = SIDE * cell
    return Span(min(n, row * size), min(n, (row + 1) * size)), Span(min(m, col * size), min(m, (col + 1) * size))


@torch.no_grad()
def rectangle(
    head: AttentionMap, rows: Span, cols: Span, cell: int, reduces: Sequence[str] = REDUCES, wanted: Wanted = always
) -> dict[str, Tensor]:
    """Weights of the rectangle in squares of `cell` × `cell`: reduce → float32 [⌈rows/cell⌉, ⌈cols/cell⌉].

    "mean" is over the pairs that the mask allows, "max" their largest; NaN where it allows none.

    Args:
        head: the map of one head, as `AttentionMap.head` gives it.
        rows, cols: queries and keys; the squares begin at the first of each.
        wanted: asked now and then.
    Raises:
        Unwanted: once `wanted` says no.
    """
    high, wide = (-(-(span.stop - span.start) // cell) for span in (rows, cols))
    found = {reduce: torch.full((high, wide), torch.nan) for reduce in reduces}
    step = max(1, BAND // max(1, cols.stop - cols.start) // cell) * cell
    for start in range(rows.start, rows.stop, step):
        if not wanted():
            raise Unwanted
        band = Span(start, min(start + step, rows.stop))
        if head.rule.mask.state(band, cols, head.rule.grid) is State.EMPTY:
            continue
        at = (start - rows.start) // cell
        for reduce, values in _band(head, band, cols, cell, reduces, wanted).items():
            found[reduce][at : at + len(values)] = values
    return found


def _band(
    head: AttentionMap, rows: Span, cols: Span, cell: int, reduces: Sequence[str], wanted: Wanted
) -> dict[str, Tensor]:
    part = head.rule.part(rows, cols)
    q, lse = head.q[:, :, rows.start : rows.stop], head.lse[:, :, rows.start : rows.stop]
    k = head.k[:, :, cols.start : cols.stop]
    squares = pooled(q, k, lse, part, cell)
    if squares is None:
        squares = pooling.squares(q, k, lse, part, cell, lambda *_: None if wanted() else _stop())
    nothing = squares.allowed[0, 0] == 0
    by_name = {"mean": squares.mean, "max": squares.largest}
    return {reduce: by_name[reduce][0, 0].float().masked_fill_(nothing, torch.nan) for reduce in reduces}


def _stop() -> NoReturn:
    raise Unwanted
