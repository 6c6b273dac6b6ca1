"""The encoding of maps for the page: half floats with their range.

16 bytes, little endian: float32 lo, float32 hi, uint16 rows, uint16 cols, uint32 count. Then count × rows × cols
float16, row major: weight = lo + (hi − lo)·x, NaN where the mask allows no pair of a cell.
"""

import struct

import numpy as np

from headwise.errors import ShapeError

HEADER = struct.Struct("<ffHHI")
LARGEST_SIDE = (1 << 16) - 1


def encode(maps: np.ndarray) -> bytes:
    """Maps [count, rows, cols], encoded; non-finite values become NaN.

    An error is at most 2⁻¹¹ of the distance to the smallest weight, and 2⁻²⁵ of the range near it.
    """
    if maps.ndim != 3 or max(maps.shape[1:]) > LARGEST_SIDE:
        raise ShapeError(f"maps: expected [count, rows, cols], each side at most {LARGEST_SIDE}, got {maps.shape}")
    count, rows, cols = maps.shape
    values = np.where(np.isfinite(maps), maps, np.nan).astype(np.float32, copy=False)
    known = ~np.isnan(values)
    lo = float(values.min(where=known, initial=np.inf))
    hi = float(values.max(where=known, initial=-np.inf))
    if lo > hi:  # all values are NaN
        lo = hi = 0.0
    scaled = (values - np.float32(lo)) / np.float32(hi - lo or 1.0)
    return HEADER.pack(lo, hi, rows, cols, count) + scaled.astype("<f2").tobytes()


def empty(rows: int, cols: int) -> bytes:
    """One fully masked map, encoded."""
    return encode(np.full((1, rows, cols), np.nan, np.float32))


def decode(data: bytes) -> np.ndarray:
    """The inverse of `encode`, float32 [count, rows, cols]. Raises ShapeError if the length does not fit the header."""
    if len(data) < HEADER.size:
        raise ShapeError(f"data: {len(data)} bytes are shorter than the header of {HEADER.size}")
    lo, hi, rows, cols, count = HEADER.unpack_from(data)
    expected = HEADER.size + 2 * count * rows * cols
    if len(data) != expected:
        raise ShapeError(f"data: expected {expected} bytes for {count} maps of {rows} × {cols}, got {len(data)}")
    halves = np.frombuffer(data, "<f2", offset=HEADER.size).reshape(count, rows, cols).astype(np.float32)
    return np.float32(lo) + np.float32(hi - lo) * halves
