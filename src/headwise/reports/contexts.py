"""Codes of weights in the order of their contexts, which compresses better than the order of rows.

The context of a cell is a size on a logarithmic scale: that of the codes above it and to its left. Codes of one context
are alike, and the codes of each context follow those of the one before. A reader that restores the cells row by row
knows the context of the next cell, and takes the next code of that context: see codes.js.
"""

import numpy as np

from headwise.reports.pack import planes
from headwise.reports.ranges import LEVELS

NEIGHBOURS = ((1, 0, 3), (2, 0, 1), (0, 1, 3), (0, 2, 1))  # rows above, columns to the left, share in eighths
CONTEXTS = 41


def sorted_codes(codes: np.ndarray, *, lower: bool) -> bytes:
    """Codes [heads, rows, columns] of weights as bytes: the number of codes of each context, in four bytes, then the
    codes, all high bytes before all low ones.

    lower: without the cells above the diagonal, whose codes are 0.
    """
    context = _contexts(codes)
    if lower:
        kept = np.tri(*codes.shape[1:], dtype=np.bool_)
        codes, context = codes[:, kept], context[:, kept]
    context = context.ravel()
    counts = np.bincount(context, minlength=CONTEXTS).astype(">u4")
    ordered = codes.ravel()[np.argsort(context, kind="stable")].astype(np.uint16)
    return counts.tobytes() + planes(ordered)


def _contexts(codes: np.ndarray) -> np.ndarray:
    """[heads, rows, columns] uint8: four contexts for each power of two of the neighbours' sum plus 8."""
    assert int(codes.max(initial=0)) <= LEVELS
    near = np.full(codes.shape, 8, np.int32)
    rows, columns = codes.shape[1:]
    for up, left, share in NEIGHBOURS:
        near[:, up:, left:] += share * codes[:, : max(rows - up, 0), : max(columns - left, 0)].astype(np.int32)
    power = np.frexp(near)[1] - 1  # 2**power <= near, at least 3
    return (4 * (power - 3) + ((near >> (power - 2)) & 3)).astype(np.uint8)
