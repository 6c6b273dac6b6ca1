"""Tiles of every head's map at all levels, and their encoding for the page: logarithms of weights in two bytes.

A tile is 8 bytes, little endian: uint16 rows, uint16 cols, uint32 count. Then count × rows × cols uint16, row major:
0 is a weight of 0, 1 a weight below `LEAST`, 65535 a cell of which the mask allows no pair; a code c between them is
the weight 2^((c − 65534)/1024).

Coarse levels are computed in one pass. The finest stored level, the base, has the smallest cells that fit the budget
for all heads together; finer tiles are computed on request. Coarser levels are folded from the base: means weighted by
the pairs that the mask allows, and maxima.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from headwise.base.run import Progress
from headwise.errors import ShapeError
from headwise.map import AttentionMap
from headwise.masks import Span, State
from headwise.rule.pooling import Squares
from headwise.rule.tiles import COMPUTING

HEADER = struct.Struct("<HHI")
LARGEST_SIDE = (1 << 16) - 1
ONE, NOTHING = 65534, 65535  # the codes of the weight 1 and of a masked cell
STEPS = 1024  # codes for each power of two
LEAST = 2.0 ** ((2 - ONE) / STEPS)  # 5.4e-20


def encode(maps: np.ndarray) -> bytes:
    """Weights [count, rows, cols] between 0 and 1, encoded; non-finite ones become NaN. From `LEAST` on an error is at
    most 2⁻¹¹ of the weight; smaller ones are only known to be smaller."""
    if maps.ndim != 3 or max(maps.shape[1:]) > LARGEST_SIDE:
        raise ShapeError(f"maps: expected [count, rows, cols], each side at most {LARGEST_SIDE}, got {maps.shape}")
    count, rows, cols = maps.shape
    known = np.isfinite(maps)
    positive = known & (maps > 0)
    codes = np.where(known, np.float32(0), np.float32(NOTHING))
    np.log2(maps, out=codes, where=positive)
    codes[positive] = np.clip(ONE + STEPS * codes[positive], 1, ONE).round()
    return HEADER.pack(rows, cols, count) + codes.astype("<u2").tobytes()


def empty(rows: int, cols: int) -> bytes:
    """One fully masked map, encoded."""
    return encode(np.full((1, rows, cols), np.nan, np.float32))


def decode(data: bytes) -> np.ndarray:
    """The inverse of `encode`; a weight below `LEAST` is half of that. ShapeError if the length is wrong."""
    if len(data) < HEADER.size:
        raise ShapeError(f"data: {len(data)} bytes are shorter than the header of {HEADER.size}")
    rows, cols, count = HEADER.unpack_from(data)
    expected = HEADER.size + 2 * count * rows * cols
    if len(data) != expected:
        raise ShapeError(f"data: expected {expected} bytes for {count} maps of {rows} × {cols}, got {len(data)}")
    codes = np.frombuffer(data, "<u2", offset=HEADER.size).reshape(count, rows, cols)
    return _weights()[codes]


@cache
def _weights() -> np.ndarray:
    """The weight of each code."""
    weights = np.exp2((np.arange(NOTHING + 1, dtype=np.float64) - ONE) / STEPS)
    weights[[0, 1, NOTHING]] = 0.0, LEAST / 2, np.nan
    return weights.astype(np.float32)


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
    """Weights of a head in squares of `cell` × `cell`: the mean over the pairs that the mask allows, the largest (both
    NaN where it allows none), the number of pairs. Unwanted if `wanted` returns False."""

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


BUDGET = 256 << 20  # bytes of all heads' pyramids
LEVELS_BAND = 1 << 28  # pairs of query and key pooled between two progress calls
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
    """The levels with the finest base whose tiles, for all heads and both poolings, take at most `budget` bytes; before
    the model runs, when windows, which would need less, are not known yet."""
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
                total += len(REDUCES) * (HEADER.size + 2 * high * wide)
        cell *= 2
    return total


def _tiles(n: int, m: int, cell: int) -> list[tuple[int, int]]:
    """(row, col) of all tiles of a level."""
    high, wide = (-(-size // (SIDE * cell)) for size in (n, m))
    return [(row, col) for row in range(high) for col in range(wide)]


class HeadPyramid:
    """One head's levels, by the sizes of their cells."""

    def __init__(self, levels: Levels, tiles: dict[tuple[str, int, int, int], bytes]) -> None:
        self.levels, self._held = levels, tiles
        self.size = sum(map(len, tiles.values()))

    def tile(self, reduce: str, cell: int, row: int, col: int) -> bytes:
        """An encoded tile of one of the levels."""
        held = self._held.get((reduce, cell, row, col))
        if held is None:
            rows, cols = tile_spans(self.levels.n, self.levels.m, cell, row, col)
            return empty(*(-(-span.size // cell) for span in (rows, cols)))
        return held

    def whole(self, reduce: str, cell: int) -> np.ndarray:
        """A whole level, float32 [⌈n/cell⌉, ⌈m/cell⌉]."""
        n, m = self.levels.n, self.levels.m
        out = np.full((-(-n // cell), -(-m // cell)), np.nan, np.float32)
        for row, col in _tiles(n, m, cell):
            found = decode(self.tile(reduce, cell, row, col))[0]
            out[row * SIDE : row * SIDE + len(found), col * SIDE : col * SIDE + found.shape[1]] = found
        return out


def head_pyramid(
    head: AttentionMap, levels: Levels, progress: Progress | None = None, wanted: Wanted = always
) -> HeadPyramid:
    """All levels of one head, in one pass over its map. progress: called with the rows done and the total. Unwanted if
    `wanted` returns False between bands of rows."""
    n, m, base = levels.n, levels.m, levels.base
    bands = []
    step = max(1, LEVELS_BAND // max(1, m) // base) * base
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
                tiles[reduce, cell, i // SIDE, j // SIDE] = encode(part[None])
