"""What a kernel sums up for each row beside the output, how two such sums join, and what is read from them.

For a row with running maximum m (base 2) and e_j = 2^(s_j − m):
    total    Σ e                       lse = m + log₂ Σ e
    tilt     Σ e (s − m)               entropy = lse − Σ p s, without a difference of large numbers
    squares  Σ e²                      Σ p², and Σ e² / (Σ e)², which no sink changes
    origin, first, second              weighted mean origin + first and sum of squares about it, of |i − j|
    masses   Σ e over given keys       one column each
"""
# mypy: allow-untyped-defs, disable-error-code="import-not-found,misc,untyped-decorator"

import triton
import triton.language as tl

from headwise.kernels.triton_gpu.tile import LN2

# Planes of the buffer of partial sums, and of the buffer of results; masses follow from MASSES on.
TOP, TOTAL, TILT, SQUARES, ORIGIN, FIRST, SECOND, MASSES = range(8)
LSE, MAX, ENTROPY, SQUARED, CONCENTRATED, DISTANCE, VARIANCE, SHARES = range(8)


@triton.jit
def join_moments(weight, origin, first, second, other, other_origin, other_first, other_second):
    """Mean and squares of two weighted sets together (Chan, Golub & LeVeque 1979).

    The mean is kept as a whole-number origin and the rest, and the origin moves to the heavier set, so that weights
    far from their query are as exact as near ones.
    """
    both = weight + other
    share = tl.where(both > 0, other / tl.where(both > 0, both, 1.0), 0.0)
    apart = (other_origin - origin) + (other_first - first)
    second = second + other_second + apart * apart * weight * share
    heavier = other > weight
    first = tl.where(heavier, other_first - apart * (1.0 - share), first + apart * share)
    return tl.where(heavier, other_origin, origin), first, second


@triton.jit
def block_moments(e, total, position, j, middle):
    """Origin, mean about it and squares about the mean of the distances |position − j| in one block of keys."""
    origin = tl.abs(position - middle)
    x = (tl.abs(position[:, None] - j[None, :]) - origin[:, None]).to(tl.float32)
    first = tl.sum(e * x, 1) / tl.where(total > 0, total, 1.0)
    rest = x - first[:, None]
    return origin.to(tl.float32), first, tl.sum(e * rest * rest, 1)


@triton.jit
def block_masses(
    masses, e, position, i_first, i_last, j, j_first, j_last, m, ranges, range_count,
    classes, class_stride, class_count, G: tl.constexpr, HAS_CLASSES: tl.constexpr,
):  # fmt: skip
    """`masses` [rows, G] with one block's share: mass on ranges of keys, then weighted by class.

    ranges: int32 [range_count, 3], start, stop, and 1 if they are relative to the position of the query.
    classes: float32, class_count rows of m: the weight of each key in the class.
    """
    column = tl.arange(0, G)[None, :]
    for r in range(range_count):
        start, stop, relative = tl.load(ranges + r * 3), tl.load(ranges + r * 3 + 1), tl.load(ranges + r * 3 + 2)
        if (j_first - relative * i_last < stop) & (j_last - relative * i_first >= start):
            x = j[None, :] - relative * position[:, None]
            hit = tl.sum(tl.where((x >= start) & (x < stop), e, 0.0), 1)
            masses += tl.where(column == r, hit[:, None], 0.0)
    if HAS_CLASSES:
        for c in range(class_count):
            weight = tl.load(classes + c * class_stride + j, mask=j < m, other=0.0)
            hit = tl.sum(e * weight[None, :], 1)
            masses += tl.where(column == range_count + c, hit[:, None], 0.0)
    return masses


@triton.jit
def finish(
    out, row, live, row_count, top, total, tilt, squares, origin, first, second, masses, mass_count, sink2,
    HAS_SINKS: tl.constexpr, ENT: tl.constexpr, SQ: tl.constexpr, DIST: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Store each row's results in `out` [planes, row_count] and return the factor from e to weights.

    A row that sees nothing has lse and maximum −∞, and 0 in all else.
    """
    dark = total == 0
    base = tl.where(top == -float("inf"), 0.0, top)
    whole, highest, ratio = tl.where(dark, 1.0, total), base, 1.0
    if HAS_SINKS:  # a sink is one more score in the denominator, without a value
        highest = tl.maximum(base, sink2)
        ratio = tl.exp2(base - highest)
        whole = whole * ratio + tl.exp2(sink2 - highest)
    scale = tl.where(dark, 0.0, ratio / whole)
    log_whole = tl.log2(whole)
    tl.store(out + row, tl.where(dark, -float("inf"), (highest + log_whole) * LN2), mask=live)
    tl.store(out + row_count + row, top * LN2, mask=live)
    mass = total * scale
    if ENT:
        entropy = ((highest - base) + log_whole) * mass - tilt * scale
        tl.store(out + 2 * row_count + row, entropy * LN2, mask=live)
    if SQ:
        tl.store(out + 3 * row_count + row, squares * scale * scale, mask=live)
        keys = tl.where(dark, 1.0, total)
        tl.store(out + 4 * row_count + row, squares / (keys * keys), mask=live)
    if DIST:
        mean = origin + first
        tl.store(out + 5 * row_count + row, mean * mass, mask=live)
        spread = second / tl.where(dark, 1.0, total)  # about the mean among the keys, whatever a sink takes
        tl.store(out + 6 * row_count + row, spread, mask=live)
    if G > 0:
        column = tl.arange(0, G)[None, :]
        at = out + (7 + column) * row_count + row[:, None]
        tl.store(at, masses * scale[:, None], mask=live[:, None] & (column < mass_count))
    return scale
