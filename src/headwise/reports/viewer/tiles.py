"""A rectangle of one head's map, pooled in square cells."""

from collections.abc import Callable

import torch

from headwise.map import AttentionMap
from headwise.masks import Span, State
from headwise.pooling import Squares

SIDE = 256  # cells along a tile
REDUCES = ("mean", "max")
BAND = 1 << 27  # pairs of query and key between two checks whether the result is still wanted

Wanted = Callable[[], bool]


class Unwanted(Exception):
    """The result is no longer needed."""


def always() -> bool:
    """The default `wanted`."""
    return True


def tile_spans(n: int, m: int, cell: int, row: int, col: int) -> tuple[Span, Span]:
    """Queries and keys of a tile; empty ranges where it lies outside."""
    size = SIDE * cell
    return Span(min(n, row * size), min(n, (row + 1) * size)), Span(min(m, col * size), min(m, (col + 1) * size))


def rectangle(head: AttentionMap, rows: Span, cols: Span, cell: int, wanted: Wanted = always) -> Squares:
    """Weights of the rectangle in squares of `cell` × `cell`, each [⌈rows/cell⌉, ⌈cols/cell⌉]: the mean over the pairs
    that the mask allows, the largest weight (both NaN where it allows none), and the number of allowed pairs.

    Args:
        head: the map of one head, as returned by `AttentionMap.head`.
        rows, cols: queries and keys; the squares begin at the first of each.
        wanted: called regularly.
    Raises:
        Unwanted: if `wanted` returns False.
    """

    def check(*_: str | int) -> None:
        if not wanted():
            raise Unwanted

    high, wide = (-(-span.size // cell) for span in (rows, cols))
    mean, largest = (torch.full((high, wide), torch.nan) for _ in REDUCES)
    allowed = torch.zeros(high, wide, dtype=torch.int64)
    step = max(1, BAND // max(1, cols.size) // cell) * cell
    for start in range(rows.start, rows.stop, step):
        check()
        band = Span(start, min(start + step, rows.stop))
        if head.rule.mask.state(band, cols, head.rule.grid) is State.EMPTY:
            continue
        found = head.pooled(range(*band), range(*cols), cell, progress=check)
        at = slice((start - rows.start) // cell, -(-(band.stop - rows.start) // cell))
        allowed[at] = found.allowed[0, 0]
        hidden = allowed[at] == 0
        mean[at] = found.mean[0, 0].float().masked_fill(hidden, torch.nan)
        largest[at] = found.largest[0, 0].float().masked_fill(hidden, torch.nan)
    return Squares(mean, largest, allowed)
