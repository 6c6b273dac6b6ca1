"""Operations on one tile: load it, compute its scores, mask them, their gradient, and the sums of its rows.

Scores are in base 2 (multiplied by log₂ e), because the hardware computes exp2. `i` and `j` are query and key
indices of shape [rows, 1] and [1, cols], or [1, rows] and [cols, 1] for a transposed tile.

For a row with running maximum m (base 2) and e_j = 2^(s_j − m), the sums are:
    total    Σ e                       lse = m + log₂ Σ e
    tilt     Σ e (s − m)               entropy = lse − Σ p s, without cancellation of large numbers
    squares  Σ e²                      Σ p², and Σ e² / (Σ e)², independent of sinks
    origin, first, second              weighted mean origin + first and sum of squares about it, of |i − j|
    masses   Σ e over given keys       one column per set of keys
"""
# mypy: allow-untyped-defs, disable-error-code="import-not-found,misc,untyped-decorator"

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(base, index, stride_row, stride_col, limit, D: tl.constexpr, DP: tl.constexpr, BOUND: tl.constexpr):
    """Load rows `index` of a [limit, D] matrix as [len(index), DP]; zeros outside of the matrix."""
    column = tl.arange(0, DP)
    at = base + index[:, None].to(tl.int64) * stride_row + column[None, :] * stride_col
    if BOUND and DP != D:
        return tl.load(at, mask=(index[:, None] < limit) & (column[None, :] < D), other=0.0)
    if BOUND:
        return tl.load(at, mask=index[:, None] < limit, other=0.0)
    if DP != D:
        return tl.load(at, mask=column[None, :] < D, other=0.0)
    return tl.load(at)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a b, summed in float32. "upcast" multiplies in float32, exact for bfloat16, whose bits Triton's interpreter
    treats as integers."""
    if PRECISION == "upcast":
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        c = tl.dot(a, b, input_precision=PRECISION)
    return c


@triton.jit
def narrowed(x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Round float32 x to another dtype, to nearest even; the interpreter would truncate to bfloat16."""
    if PRECISION == "upcast":
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def finite(x):
    """Whether x is neither NaN nor infinite."""
    y = x.to(tl.float32)
    return (y == y) & (tl.abs(y) != float("inf"))


@triton.jit
def tanh(x):
    """tanh to float32 precision; near 0 by a polynomial fitted to (tanh(x)/x − 1)/x²."""
    y = x * x
    small = -0.00832003 + 0.00227098 * y
    small = 0.02175929 + small * y
    small = -0.05395756 + small * y
    small = 0.13333291 + small * y
    small = -0.33333333 + small * y
    size = tl.abs(x)
    large = 1.0 - 2.0 / (tl.exp2(size * (2 * LOG2E)) + 1.0)
    return tl.where(size < 0.63, x + x * y * small, tl.where(x < 0, -large, large))


@triton.jit
def visible(i, j, spans, count, dense, dense_i, dense_j, n, m, HAS_DENSE: tl.constexpr):
    """Whether query i may attend to key j; False for j ≥ m. Without spans, every query attends to every key."""
    if spans is None:
        seen = (i >= 0) & (j < m)
    else:
        row = tl.minimum(i, n - 1)
        seen = (i < 0) & (j < 0)
        for slot in range(count):
            at = spans + (row * count + slot) * 2
            seen = seen | ((j >= tl.load(at)) & (j < tl.load(at + 1)))
    if HAS_DENSE:
        at = dense + i.to(tl.int64) * dense_i + j * dense_j
        seen = seen & (tl.load(at, mask=(i < n) & (j < m), other=0) != 0)
    return seen


@triton.jit
def scores(
    a, b, i, j, factor, cap2, rel, bias, bias_i, bias_j, n, m,
    HAS_CAP: tl.constexpr, HAS_REL: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """a bᵀ → scale → soft cap → relative table → bias, in base 2, before the mask; and the soft cap's slope. `factor`
    is scale · log₂ e, or scale / cap with a soft cap, and cap2 is cap · log₂ e."""
    s = product(a, tl.trans(b), PRECISION) * factor
    slope = 1.0
    if HAS_CAP:
        t = tanh(s)
        slope = (1.0 - t) * (1.0 + t)
        s = t * cap2
    if HAS_REL:
        at = j - i + (n - 1)
        s += tl.load(rel + at, mask=(at >= 0) & (at < n + m - 1), other=0.0) * LOG2E
    if HAS_BIAS:
        at = bias + i.to(tl.int64) * bias_i + j * bias_j
        s += tl.load(at, mask=(i < n) & (j < m), other=0.0) * LOG2E
    return s, slope


@triton.jit
def kept(row, j, m, seed, drop):
    """Whether dropout keeps the weight of key j in row `row` of all b·h·n rows; the same in every pass."""
    return tl.rand(seed, row.to(tl.int64) * m + j) >= drop


@triton.jit
def added_by_statistics(dp, p, log2, i, j, row, n, m, batch, more):
    """dP with the gradients of statistics of rows, `more` of `problem.of_rows`, by their weights p = 2^log2."""
    shift, logs, distance, by_key, by_range = more
    live, position = i < n, i + shift
    if logs is not None:
        dp += tl.load(logs + row, mask=live, other=0.0) * LN2 * tl.where(p > 0, log2, 0.0)
    if distance is not None:
        dp += tl.load(distance + row, mask=live, other=0.0) * tl.abs(j.to(tl.float32) - position.to(tl.float32))
    for at in tl.static_range(len(by_key)):
        factor, keys, keys_b = by_key[at]
        number = tl.load(keys + batch * keys_b + j, mask=j < m, other=0.0)
        dp += tl.load(factor + row, mask=live, other=0.0) * number
    for at in tl.static_range(len(by_range)):
        factor, ends = by_range[at]
        first = tl.load(ends) + tl.load(ends + 2) * position  # fewer registers than the differences of all pairs
        inside = (j >= first) & (j < first + tl.load(ends + 1))
        dp += tl.where(inside, tl.load(factor + row, mask=live, other=0.0), 0.0)
    return dp


@triton.jit
def score_gradient(
    a, b, d_a, d_b, i, j, row, lse2, delta,
    factor, cap2, rel, bias, bias_i, bias_j, spans, count, dense, dense_i, dense_j, seed, drop, n, m,
    batch, more, HAS_CAP: tl.constexpr, HAS_REL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DENSE: tl.constexpr,
    DROP: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Weights after dropout, the gradient of the scores P ∘ (dP − δ) (Dao et al. 2022, eq. 4), the soft cap's slope. a
    bᵀ are the products of queries and keys and d_a d_bᵀ those of output gradients and values, in either order. more: as
    of `added_by_statistics`, or None."""
    s, slope = scores(a, b, i, j, factor, cap2, rel, bias, bias_i, bias_j, n, m, HAS_CAP, HAS_REL, HAS_BIAS, PRECISION)
    if MASKED:
        seen = visible(i, j, spans, count, dense, dense_i, dense_j, n, m, HAS_DENSE)
        s = tl.where(seen, s, -float("inf"))
    p = tl.exp2(s - lse2)
    dp = product(d_a, tl.trans(d_b), PRECISION)
    used = p
    if DROP:
        keep = kept(row, j, m, seed, drop)
        used = tl.where(keep, p / (1.0 - drop), 0.0)
        dp = tl.where(keep, dp / (1.0 - drop), 0.0)
    if more is not None:
        dp = added_by_statistics(dp, p, s - lse2, i, j, row, n, m, batch, more)
    ds = p * (dp - delta)
    if MASKED:  # select, do not multiply: 0 · NaN of a masked value must not spread
        ds = tl.where(seen, ds, 0.0)
    return used, ds, slope


# Planes of the buffer of partial sums, and of the buffer of results; masses start at MASSES.
TOP, TOTAL, TILT, SQUARES, ORIGIN, FIRST, SECOND, MASSES = range(8)
LSE, MAX, ENTROPY, SQUARED, CONCENTRATED, DISTANCE, VARIANCE, SHARES = range(8)
RANGE, WEIGHTS, LARGEST_OTHER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of masses

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
    "largest_other(float32[m]): float32[b, h, n]": LARGEST_OTHER.value,
}
COLUMNS = "column_mass(): float32[b, h, m]"


@triton.jit
def join_moments(weight, origin, first, second, other, other_origin, other_first, other_second):
    """Merge mean and squares of two weighted sets (Chan, Golub & LeVeque 1979). The mean is an integer origin, that of
    the heavier set, plus a remainder, so that weights far from their query are as accurate as near ones."""
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
    masses, e, position, i_first, i_last, j, j_first, j_last, m, batch, table, weights,
    G: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Add one block's share to `masses` [rows, G], one column per row of the table, int32 [G, 4]: a kind of `KINDS`, or
    −1 for none, and its arguments. weights: float32, rows of m, used if WEIGHTED."""
    column = tl.arange(0, G)[None, :]
    for r in tl.static_range(G):  # a loop in the loop over blocks would keep it from being pipelined
        at = table + r * 4
        kind, a, b, c = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        # Keys [a, b), relative to the position of the query if c is 1.
        if (kind == RANGE) & (j_first - c * i_last < b) & (j_last - c * i_first >= a):
            x = j[None, :] - c * position[:, None]
            hit = tl.sum(tl.where((x >= a) & (x < b), e, 0.0), 1)
            masses += tl.where(column == r, hit[:, None], 0.0)
        if WEIGHTED:  # noqa: SIM102
            if kind >= WEIGHTS:  # row a of the weights, or with b = 1 a row for each batch entry from there
                at_keys = weights + (a + b * batch).to(tl.int64) * m + j
                weight = tl.load(at_keys, mask=j < m, other=0.0)
                if kind == WEIGHTS:
                    hit = tl.sum(e * weight[None, :], 1)
                    masses += tl.where(column == r, hit[:, None], 0.0)
                else:
                    counts = (weight > 0)[None, :] & (j[None, :] != position[:, None])
                    hit = tl.max(tl.where(counts, e, 0.0), 1)
                    masses = tl.where(column == r, tl.maximum(masses, hit[:, None]), masses)
    return masses


@triton.jit
def finish(
    out, row, live, row_count, top, total, tilt, squares, origin, first, second, masses, mass_count, sink2,
    HAS_SINKS: tl.constexpr, ENT: tl.constexpr, SQ: tl.constexpr, DIST: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Store each row's results in `out` [planes, row_count] and return the factor from e to weights. A fully masked
    query has lse and maximum −∞, and 0 for all other results."""
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
