"""The sums that a kernel accumulates for each row besides the output, how two of them are merged, and the results.

For a row with running maximum m (base 2) and e_j = 2^(s_j − m):
    total    Σ e                       lse = m + log₂ Σ e
    tilt     Σ e (s − m)               entropy = lse − Σ p s, without cancellation of large numbers
    squares  Σ e²                      Σ p², and Σ e² / (Σ e)², independent of sinks
    origin, first, second              weighted mean origin + first and sum of squares about it, of |i − j|
    masses   Σ e over given keys       one column per set of keys
"""
# mypy: allow-untyped-defs, disable-error-code="import-not-found,misc,untyped-decorator"

import triton
import triton.language as tl

from headwise.kernels.triton_gpu.tile import LN2

# Planes of the buffer of partial sums, and of the buffer of results; masses start at MASSES.
TOP, TOTAL, TILT, SQUARES, ORIGIN, FIRST, SECOND, MASSES = range(8)
LSE, MAX, ENTROPY, SQUARED, CONCENTRATED, DISTANCE, VARIANCE, SHARES = range(8)
RANGE, WEIGHTS = tl.constexpr(0), tl.constexpr(1)  # kinds of masses

# The statistics that the kernels compute, by the signature of `headwise.stats.Compiled`: the planes of results that
# `finish` writes, each with the flag of the kernels that accumulates its sums; kinds of masses; sums over the queries.
FORMULAS = {
    "largest(): float32[b, h, n]": (MAX, None),
    "entropy(): float32[b, h, n]": (ENTROPY, "ENT"),
    "squares(): float32[b, h, n]": (SQUARED, "SQ"),
    "concentration(): float32[b, h, n]": (CONCENTRATED, "SQ"),
    "distance(): float32[b, h, n]": (DISTANCE, "DIST"),
    "variance(): float32[b, h, n]": (VARIANCE, "DIST"),
}
KINDS = {
    "range_mass(int, int, int): float32[b, h, n]": RANGE.value,
    "key_weights(float32[m]): float32[b, h, n]": WEIGHTS.value,
}
COLUMNS = "column_mass(): float32[b, h, m]"


@triton.jit
def join_moments(weight, origin, first, second, other, other_origin, other_first, other_second):
    """Merge mean and sum of squares of two weighted sets (Chan, Golub & LeVeque 1979).

    The mean is stored as an integer origin plus a remainder. The origin of the merged set is that of the heavier one,
    so that weights far from their query are as accurate as near ones.
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
    masses, e, position, i_first, i_last, j, j_first, j_last, m, batch, table, mass_count, weights,
    G: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Add one block's share to `masses` [rows, G], which has one column per row of the table.

    table: int32 [mass_count, 4], a kind of `KINDS` and its arguments. weights: float32, rows of m, used if WEIGHTED.
    """
    column = tl.arange(0, G)[None, :]
    for r in range(mass_count):
        at = table + r * 4
        kind, a, b, c = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        # Keys [a, b), relative to the position of the query if c is 1.
        if (kind == RANGE) & (j_first - c * i_last < b) & (j_last - c * i_first >= a):
            x = j[None, :] - c * position[:, None]
            hit = tl.sum(tl.where((x >= a) & (x < b), e, 0.0), 1)
            masses += tl.where(column == r, hit[:, None], 0.0)
        if WEIGHTED:  # noqa: SIM102
            if kind == WEIGHTS:  # row a of the weights, or with b = 1 a row for each batch entry from there
                at_keys = weights + (a + b * batch).to(tl.int64) * m + j
                weight = tl.load(at_keys, mask=j < m, other=0.0)
                hit = tl.sum(e * weight[None, :], 1)
                masses += tl.where(column == r, hit[:, None], 0.0)
    return masses


@triton.jit
def finish(
    out, row, live, row_count, top, total, tilt, squares, origin, first, second, masses, mass_count, sink2,
    HAS_SINKS: tl.constexpr, ENT: tl.constexpr, SQ: tl.constexpr, DIST: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Store each row's results in `out` [planes, row_count] and return the factor from e to weights.

    A fully masked query has lse and maximum −∞, and 0 for all other results.
    """
    empty = total == 0
    base = tl.where(top == -float("inf"), 0.0, top)
    whole, highest, ratio = tl.where(empty, 1.0, total), base, 1.0
    if HAS_SINKS:  # a sink is one more score in the denominator, without a value
        highest = tl.maximum(base, sink2)
        ratio = tl.exp2(base - highest)
        whole = whole * ratio + tl.exp2(sink2 - highest)
    scale = tl.where(empty, 0.0, ratio / whole)
    log_whole = tl.log2(whole)
    tl.store(out + row, tl.where(empty, -float("inf"), (highest + log_whole) * LN2), mask=live)
    tl.store(out + row_count + row, top * LN2, mask=live)
    mass = total * scale
    if ENT:
        entropy = ((highest - base) + log_whole) * mass - tilt * scale
        tl.store(out + 2 * row_count + row, entropy * LN2, mask=live)
    if SQ:
        tl.store(out + 3 * row_count + row, squares * scale * scale, mask=live)
        keys = tl.where(empty, 1.0, total)
        tl.store(out + 4 * row_count + row, squares / (keys * keys), mask=live)
    if DIST:
        mean = origin + first
        tl.store(out + 5 * row_count + row, mean * mass, mask=live)
        spread = second / tl.where(empty, 1.0, total)  # about the mean over the keys, without the sink's share
        tl.store(out + 6 * row_count + row, spread, mask=live)
    if G > 0:
        column = tl.arange(0, G)[None, :]
        at = out + (7 + column) * row_count + row[:, None]
        tl.store(at, masses * scale[:, None], mask=live[:, None] & (column < mass_count))
    return scale
