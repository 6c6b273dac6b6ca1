"""Operations on one tile: load it, compute its scores, mask them, and compute their gradient.

Scores are in base 2 (multiplied by log₂ e), because the hardware computes exp2. `i` and `j` are query and key
indices of shape [rows, 1] and [1, cols], or [1, rows] and [cols, 1] for a transposed tile.
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
    """a b, summed in float32.

    PRECISION "upcast" multiplies in float32, in which a product of bfloat16 numbers is exact: Triton's interpreter
    treats the bits of bfloat16 as integers.
    """
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
    """Whether query i may attend to key j; False for j ≥ m."""
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
    """a bᵀ → scale → soft cap → relative table → bias, in base 2, before the mask; and the soft cap's slope.

    `factor` is scale · log₂ e, or scale / cap with a soft cap, and cap2 is cap · log₂ e.
    """
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
def score_gradient(
    a, b, d_a, d_b, i, j, row, lse2, delta,
    factor, cap2, rel, bias, bias_i, bias_j, spans, count, dense, dense_i, dense_j, seed, drop, n, m,
    HAS_CAP: tl.constexpr, HAS_REL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DENSE: tl.constexpr,
    DROP: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Weights after dropout, the gradient of the scores P ∘ (dP − δ) (Dao et al. 2022, eq. 4), the soft cap's slope.

    a bᵀ are the products of queries and keys and d_a d_bᵀ those of output gradients and values, in either order.
    """
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
    ds = p * (dp - delta)
    if MASKED:  # select, do not multiply: 0 · NaN of a masked value must not spread
        ds = tl.where(seen, ds, 0.0)
    return used, ds, slope
