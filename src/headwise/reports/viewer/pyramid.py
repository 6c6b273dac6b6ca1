"""Every head's map at all coarse levels, computed in one pass and stored as encoded tiles.

The finest stored level, the base, has the smallest cells that fit the budget for all heads together; finer tiles are
computed on request. Coarser levels are folded from the base: means weighted by the pairs that the mask allows, and
maxima.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwise.map import AttentionMap
from headwise.masks import Span
from headwise.pooling import Squares
from headwise.progress import Progress
from headwise.reports.viewer import wire
from headwise.reports.viewer.tiles import REDUCES, SIDE, Wanted, always, rectangle, tile_spans
from headwise.tiles import COMPUTING

BUDGET = 256 << 20  # bytes of all heads' pyramids
BAND = 1 << 28  # pairs of query and key pooled between two progress calls
LEAST_CELLS = 16  # maximum width of the coarsest level
FINE = 16  # tiles of smaller cells take milliseconds to compute, and are stored only if one tile is the whole map


@dataclass(frozen=True)
class Levels:
    """The cell sizes of a pyramid: powers of two, from `base` to `coarsest`."""

    n: int
    m: int
    base: int
    coarsest: int

    @property
    def cells(self) -> list[int]:
        """Cell sizes, ascending."""
        found = [self.base]
        while found[-1] < self.coarsest:
            found.append(2 * found[-1])
        return found


def choose_levels(n: int, heads: int, causal: bool, budget: int = BUDGET) -> Levels:
    """The levels with the finest base whose tiles, for all heads and both poolings, take at most `budget` bytes.

    They are chosen before the model runs, when windows, which would need less, are not known yet.
    """
    coarsest = 1
    while n > LEAST_CELLS * coarsest:
        coarsest *= 2
    base = 1
    while base < FINE and n > SIDE * base:
        base *= 2
    while base < coarsest and heads * _bytes(n, causal, base, coarsest) > budget:
        base *= 2
    return Levels(n, n, base, coarsest)


def _bytes(n: int, causal: bool, base: int, coarsest: int) -> int:
    """The bytes of a head's pyramid; fully masked tiles are not stored."""
    total, cell = 0, base
    while cell <= coarsest:
        for row, col in _tiles(n, n, cell):
            if not causal or col <= row:
                high, wide = (-(-span.size // cell) for span in tile_spans(n, n, cell, row, col))
                total += len(REDUCES) * (wire.HEADER.size + 2 * high * wide)
        cell *= 2
    return total


def _tiles(n: int, m: int, cell: int) -> list[tuple[int, int]]:
    """(row, col) of all tiles of a level."""
    high, wide = (-(-size // (SIDE * cell)) for size in (n, m))
    return [(row, col) for row in range(high) for col in range(wide)]


class HeadPyramid:
    """One head's levels.

    Attributes:
        levels: the cell sizes.
        size: bytes held.
    """

    def __init__(self, levels: Levels, tiles: dict[tuple[str, int, int, int], bytes]) -> None:
        self.levels, self._held = levels, tiles
        self.size = sum(map(len, tiles.values()))

    def tile(self, reduce: str, cell: int, row: int, col: int) -> bytes:
        """An encoded tile of one of the levels."""
        held = self._held.get((reduce, cell, row, col))
        if held is None:
            rows, cols = tile_spans(self.levels.n, self.levels.m, cell, row, col)
            return wire.empty(*(-(-span.size // cell) for span in (rows, cols)))
        return held

    def whole(self, reduce: str, cell: int) -> np.ndarray:
        """A whole level, float32 [⌈n/cell⌉, ⌈m/cell⌉]."""
        n, m = self.levels.n, self.levels.m
        out = np.full((-(-n // cell), -(-m // cell)), np.nan, np.float32)
        for row, col in _tiles(n, m, cell):
            found = wire.decode(self.tile(reduce, cell, row, col))[0]
            out[row * SIDE : row * SIDE + len(found), col * SIDE : col * SIDE + found.shape[1]] = found
        return out


def head_pyramid(
    head: AttentionMap, levels: Levels, progress: Progress | None = None, wanted: Wanted = always
) -> HeadPyramid:
    """All levels of one head, in one pass over its map.

    Args:
        head: the map of one head, as returned by `AttentionMap.head`.
        progress: called with the rows done and the total.
        wanted: called between bands of rows; Unwanted is raised if it returns False.
    """
    n, m, base = levels.n, levels.m, levels.base
    bands = []
    step = max(1, BAND // max(1, m) // base) * base
    for start in range(0, n, step):
        rows = Span(start, min(n, start + step))
        bands.append(rectangle(head, rows, Span(0, m), base, wanted))
        if progress is not None:
            progress(COMPUTING, rows.stop, n)
    level = Squares(*(torch.cat(parts) for parts in zip(*bands, strict=True)))
    tiles: dict[tuple[str, int, int, int], bytes] = {}
    for cell in levels.cells:
        if cell > base:
            level = _folded(level)
        _cut(tiles, "mean", cell, level.mean)
        _cut(tiles, "max", cell, level.largest)
    return HeadPyramid(levels, tiles)


def _folded(level: Squares) -> Squares:
    """The next coarser level: four squares become one. NaN where all of them are masked."""
    hidden = level.allowed == 0
    allowed = _fours(level.allowed, 0).sum((1, 3))
    total = _fours((level.mean.double() * level.allowed).masked_fill(hidden, 0.0), 0.0).sum((1, 3))
    largest = _fours(level.largest.masked_fill(hidden, -torch.inf), -torch.inf).amax((1, 3))
    mean = (total / allowed.clamp_min(1)).float()
    nothing = allowed == 0
    return Squares(mean.masked_fill(nothing, torch.nan), largest.masked_fill(nothing, torch.nan), allowed)


def _fours(x: Tensor, beyond: float) -> Tensor:
    """[r, c] as [⌈r/2⌉, 2, ⌈c/2⌉, 2], padded with `beyond`."""
    r, c = x.shape
    x = torch.nn.functional.pad(x, (0, c % 2, 0, r % 2), value=beyond)
    return x.view(x.shape[0] // 2, 2, x.shape[1] // 2, 2)


def _cut(tiles: dict[tuple[str, int, int, int], bytes], reduce: str, cell: int, level: Tensor) -> None:
    """Store the tiles of a level, except fully masked ones."""
    values = level.numpy()
    for i in range(0, len(values), SIDE):
        for j in range(0, values.shape[1], SIDE):
            part = values[i : i + SIDE, j : j + SIDE]
            if not np.isnan(part).all():
                tiles[reduce, cell, i // SIDE, j // SIDE] = wire.encode(part[None])
