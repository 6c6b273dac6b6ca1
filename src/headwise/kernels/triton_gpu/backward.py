"""The backward pass: dQ, dK with dV, and the gradients of what is added to the scores, in passes without atomics.

P is recomputed from q, k and the log-sum-exp; dS = P ∘ (dP − δ) with δ = rowsum(dO ∘ O) (Dao et al. 2022, eq. 4).
Gradients of a bias and of a table over key − query offsets are sums of dS over a set of tiles: a bias sums over the
axes that it is broadcast along, a table along the diagonals. Each program owns its sum and visits its tiles in a fixed
order, so that the same call gives the same bits.
"""
# mypy: allow-untyped-defs, disable-error-code="import-not-found,misc,untyped-decorator"

import triton
import triton.language as tl

from headwise.kernels.triton_gpu.tile import (
    LOG2E,
    finite,
    load_rows,
    narrowed,
    product,
    score_gradient,
    scores,
    visible,
)


@triton.jit
def row_logs(lse, row, live):
    """Base-2 log-sum-exp of rows; +∞ for fully masked queries and past the end, so that their weights are 0."""
    found = tl.load(lse + row, mask=live, other=-float("inf"))
    return tl.where(found == -float("inf"), float("inf"), found * LOG2E)


@triton.jit
def delta_kernel(
    out, d_out, delta, ob, oh, oi, od, h, n, row_count, DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr
):
    """δ = rowsum(dO ∘ O), [b, h, n] float32; out is contiguous, d_out has strides."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.arange(0, DVP)
    inside = (row < row_count)[:, None] & (column[None, :] < DV)
    a = tl.load(out + row[:, None] * DV + column[None, :], mask=inside, other=0.0)
    lane = row // n
    start = (lane // h) * ob + (lane % h) * oh + (row % n) * oi
    b = tl.load(d_out + start[:, None] + column[None, :] * od, mask=inside, other=0.0)
    tl.store(delta + row, tl.sum(a.to(tl.float32) * b.to(tl.float32), 1), mask=row < row_count)


@triton.jit
def _query_step(
    dq, queries, d_out, k, kj, kd, v, vj, vd, block, i, row, lse2, delta,
    factor, cap2, rel, bias, bias_i, bias_j, spans, count, dense, dense_i, dense_j, seed, drop, n, m,
    batch, more, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_REL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DENSE: tl.constexpr,
    DROP: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dQ += dS K over one block of keys."""
    j = block * BN + tl.arange(0, BN)
    keys = load_rows(k, j, kj, kd, m, D, DP, MASKED)
    values = load_rows(v, j, vj, vd, m, DV, DVP, MASKED)
    _, ds, slope = score_gradient(
        queries, keys, d_out, values, i, j[None, :], row, lse2, delta,
        factor, cap2, rel, bias, bias_i, bias_j, spans, count, dense, dense_i, dense_j, seed, drop, n, m,
        batch, more, HAS_CAP, HAS_REL, HAS_BIAS, HAS_DENSE, DROP, PRECISION, MASKED,
    )  # fmt: skip
    if HAS_CAP:
        ds = ds * slope
    if MASKED:
        keys = tl.where(finite(keys), keys, 0.0)
    return dq + product(narrowed(ds, keys.dtype, PRECISION), keys, PRECISION)


@triton.jit(do_not_specialize=["seed"])
def query_gradient_kernel(
    q, k, v, qb, qh, qi, qd, kb, kh, kj, kd, vb, vh, vj, vd, h, h_kv, n, m,
    factor, cap2, rel, rel_h, bias, bias_b, bias_h, bias_i, bias_j,
    spans, spans_b, count, dense, dense_b, dense_h, dense_i, dense_j, seed, drop,
    full, full_b, full_count, mixed, mixed_b, mixed_count,
    d_out, ob, oh, oi, od, lse, delta, more, dq, row_blocks, scale,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_REL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DENSE: tl.constexpr,
    DROP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [b, h, n, D] contiguous: one program per block of queries of one head."""
    which = row_blocks - 1 - tl.program_id(0) % row_blocks
    lane = tl.program_id(0) // row_blocks
    batch, head = (lane // h).to(tl.int64), (lane % h).to(tl.int64)
    i = which * BM + tl.arange(0, BM)
    live = i < n
    row = (batch * h + head) * n + i
    queries = load_rows(q + batch * qb + head * qh, i, qi, qd, n, D, DP, True)
    grads = load_rows(d_out + batch * ob + head * oh, i, oi, od, n, DV, DVP, True)
    lse2 = row_logs(lse, row, live)[:, None]
    d = tl.load(delta + row, mask=live, other=0.0)[:, None]
    head_kv = head // (h // h_kv)
    k += batch * kb + head_kv * kh
    v += batch * vb + head_kv * vh
    if HAS_REL:
        rel += head * rel_h
    if HAS_BIAS:
        bias += batch * bias_b + head * bias_h
    if HAS_DENSE:
        dense += batch * dense_b + head * dense_h
    spans += batch * spans_b
    result = tl.zeros([BM, DP], tl.float32)
    full += batch * full_b + which * full_count * 2
    for slot in range(full_count):
        for block in range(tl.load(full + slot * 2), tl.load(full + slot * 2 + 1)):
            result = _query_step(
                result, queries, grads, k, kj, kd, v, vj, vd, block, i[:, None], row[:, None], lse2, d,
                factor, cap2, rel, bias, bias_i, bias_j, spans, count, dense, dense_i, dense_j, seed, drop, n, m,
                batch, more, D, DP, DV, DVP, BN, HAS_CAP, HAS_REL, HAS_BIAS, HAS_DENSE, DROP, PRECISION, False,
            )  # fmt: skip
    mixed += batch * mixed_b + which * mixed_count * 2
    for slot in range(mixed_count):
        for block in range(tl.load(mixed + slot * 2), tl.load(mixed + slot * 2 + 1)):
            result = _query_step(
                result, queries, grads, k, kj, kd, v, vj, vd, block, i[:, None], row[:, None], lse2, d,
                factor, cap2, rel, bias, bias_i, bias_j, spans, count, dense, dense_i, dense_j, seed, drop, n, m,
                batch, more, D, DP, DV, DVP, BN, HAS_CAP, HAS_REL, HAS_BIAS, HAS_DENSE, DROP, PRECISION, True,
            )  # fmt: skip
    column = tl.arange(0, DP)
    at = dq + row[:, None] * D + column[None, :]
    tl.store(at, narrowed(result * scale, queries.dtype, PRECISION), mask=live[:, None] & (column[None, :] < D))


@triton.jit
def _key_step(
    dk, dv, keys, values, q, qi, qd, d_out, oi, od, lse, delta, first_row, block, j,
    factor, cap2, rel, bias, bias_i, bias_j, spans, count, dense, dense_i, dense_j, seed, drop, n, m,
    batch, more, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_REL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DENSE: tl.constexpr,
    DROP: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dK += dSᵀ Q and dV += Pᵀ dO over one block of queries; the tile is transposed, [keys, queries]."""
    i = block * BM + tl.arange(0, BM)
    row = first_row + i
    queries = load_rows(q, i, qi, qd, n, D, DP, True)
    grads = load_rows(d_out, i, oi, od, n, DV, DVP, True)
    lse2 = row_logs(lse, row, i < n)[None, :]
    d = tl.load(delta + row, mask=i < n, other=0.0)[None, :]
    used, ds, slope = score_gradient(
        keys, queries, values, grads, i[None, :], j, row[None, :], lse2, d,
        factor, cap2, rel, bias, bias_i, bias_j, spans, count, dense, dense_i, dense_j, seed, drop, n, m,
        batch, more, HAS_CAP, HAS_REL, HAS_BIAS, HAS_DENSE, DROP, PRECISION, MASKED,
    )  # fmt: skip
    if HAS_CAP:
        ds = ds * slope
    dv += product(narrowed(used, grads.dtype, PRECISION), grads, PRECISION)
    dk += product(narrowed(ds, queries.dtype, PRECISION), queries, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["seed"])
def key_gradient_kernel(
    q, k, v, qb, qh, qi, qd, kb, kh, kj, kd, vb, vh, vj, vd, h, h_kv, n, m,
    factor, cap2, rel, rel_h, bias, bias_b, bias_h, bias_i, bias_j,
    spans, spans_b, count, dense, dense_b, dense_h, dense_i, dense_j, seed, drop,
    full, full_b, full_count, mixed, mixed_b, mixed_count,
    d_out, ob, oh, oi, od, lse, delta, more, dk, dv, col_blocks, scale,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_REL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DENSE: tl.constexpr,
    DROP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk [b, h_kv, m, D] and dv [b, h_kv, m, DV] contiguous: one program per block of keys, for all its query heads."""
    which = tl.program_id(0) % col_blocks  # the first keys, the most work under a causal mask, start first
    lane = tl.program_id(0) // col_blocks
    batch, head_kv = (lane // h_kv).to(tl.int64), (lane % h_kv).to(tl.int64)
    j = which * BN + tl.arange(0, BN)
    keys = load_rows(k + batch * kb + head_kv * kh, j, kj, kd, m, D, DP, True)
    values = load_rows(v + batch * vb + head_kv * vh, j, vj, vd, m, DV, DVP, True)
    spans += batch * spans_b
    full += batch * full_b + which * full_count * 2
    mixed += batch * mixed_b + which * mixed_count * 2
    sum_k = tl.zeros([BN, DP], tl.float32)
    sum_v = tl.zeros([BN, DVP], tl.float32)
    group = h // h_kv
    for member in range(group):
        head = head_kv * group + member
        q_h = q + batch * qb + head * qh
        o_h = d_out + batch * ob + head * oh
        rel_h_ = rel
        bias_h_ = bias
        dense_h_ = dense
        if HAS_REL:
            rel_h_ = rel + head * rel_h
        if HAS_BIAS:
            bias_h_ = bias + batch * bias_b + head * bias_h
        if HAS_DENSE:
            dense_h_ = dense + batch * dense_b + head * dense_h
        first_row = (batch * h + head) * n
        for slot in range(full_count):
            for block in range(tl.load(full + slot * 2), tl.load(full + slot * 2 + 1)):
                sum_k, sum_v = _key_step(
                    sum_k, sum_v, keys, values, q_h, qi, qd, o_h, oi, od, lse, delta, first_row, block, j[:, None],
                    factor, cap2, rel_h_, bias_h_, bias_i, bias_j, spans, count, dense_h_, dense_i, dense_j, seed,
                    drop, n, m, batch, more, D, DP, DV, DVP, BM, HAS_CAP, HAS_REL, HAS_BIAS, HAS_DENSE, DROP, PRECISION,
                    False,
                )  # fmt: skip
        for slot in range(mixed_count):
            for block in range(tl.load(mixed + slot * 2), tl.load(mixed + slot * 2 + 1)):
                sum_k, sum_v = _key_step(
                    sum_k, sum_v, keys, values, q_h, qi, qd, o_h, oi, od, lse, delta, first_row, block, j[:, None],
                    factor, cap2, rel_h_, bias_h_, bias_i, bias_j, spans, count, dense_h_, dense_i, dense_j, seed,
                    drop, n, m, batch, more, D, DP, DV, DVP, BM, HAS_CAP, HAS_REL, HAS_BIAS, HAS_DENSE, DROP, PRECISION,
                    True,
                )  # fmt: skip
    at = ((batch * h_kv + head_kv) * m + j)[:, None]
    live = (j < m)[:, None]
    column = tl.arange(0, DP)[None, :]
    tl.store(dk + at * D + column, narrowed(sum_k * scale, keys.dtype, PRECISION), mask=live & (column < D))
    column = tl.arange(0, DVP)[None, :]
    tl.store(dv + at * DV + column, narrowed(sum_v, values.dtype, PRECISION), mask=live & (column < DV))


@triton.jit
def column_mass_kernel(
    q, k, qb, qh, qi, qd, kb, kh, kj, kd, h, h_kv, n, m,
    factor, cap2, rel, rel_h, bias, bias_b, bias_h, bias_i, bias_j,
    spans, spans_b, count, dense, dense_b, dense_h, dense_i, dense_j,
    full, full_b, full_count, mixed, mixed_b, mixed_count, lse, received, col_blocks,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_REL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DENSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """received [b, h, m]: Σ_i p_ij, the weight that each key receives, from the log-sum-exp of each row."""
    which = tl.program_id(0) % col_blocks
    lane = tl.program_id(0) // col_blocks
    batch, head = (lane // h).to(tl.int64), (lane % h).to(tl.int64)
    j = which * BN + tl.arange(0, BN)
    keys = load_rows(k + batch * kb + (head // (h // h_kv)) * kh, j, kj, kd, m, D, DP, True)
    q += batch * qb + head * qh
    if HAS_REL:
        rel += head * rel_h
    if HAS_BIAS:
        bias += batch * bias_b + head * bias_h
    if HAS_DENSE:
        dense += batch * dense_b + head * dense_h
    spans += batch * spans_b
    first_row = (batch * h + head) * n
    result = tl.zeros([BN], tl.float32)
    full += batch * full_b + which * full_count * 2
    mixed += batch * mixed_b + which * mixed_count * 2
    for slot in range(full_count):
        for block in range(tl.load(full + slot * 2), tl.load(full + slot * 2 + 1)):
            i = block * BM + tl.arange(0, BM)
            queries = load_rows(q, i, qi, qd, n, D, DP, True)
            s, _ = scores(
                keys, queries, i[None, :], j[:, None], factor, cap2, rel, bias, bias_i, bias_j, n, m,
                HAS_CAP, HAS_REL, HAS_BIAS, PRECISION,
            )  # fmt: skip
            result += tl.sum(tl.exp2(s - row_logs(lse, first_row + i, i < n)[None, :]), 1)
    for slot in range(mixed_count):
        for block in range(tl.load(mixed + slot * 2), tl.load(mixed + slot * 2 + 1)):
            i = block * BM + tl.arange(0, BM)
            queries = load_rows(q, i, qi, qd, n, D, DP, True)
            s, _ = scores(
                keys, queries, i[None, :], j[:, None], factor, cap2, rel, bias, bias_i, bias_j, n, m,
                HAS_CAP, HAS_REL, HAS_BIAS, PRECISION,
            )  # fmt: skip
            seen = visible(i[None, :], j[:, None], spans, count, dense, dense_i, dense_j, n, m, HAS_DENSE)
            s = tl.where(seen, s, -float("inf"))
            result += tl.sum(tl.exp2(s - row_logs(lse, first_row + i, i < n)[None, :]), 1)
    tl.store(received + (batch * h + head) * m + j, result, mask=j < m)


@triton.jit
def _add_tile(
    total, batch, head, i_start, j_start,
    q, k, v, qb, qh, qi, qd, kb, kh, kj, kd, vb, vh, vj, vd, h, h_kv, n, m,
    factor, cap2, rel, rel_h, bias, bias_b, bias_h, bias_i, bias_j,
    spans, spans_b, count, dense, dense_b, dense_h, dense_i, dense_j, seed, drop,
    extent, extent_b, d_out, ob, oh, oi, od, lse, delta, more,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_REL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DENSE: tl.constexpr,
    DROP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """total + dS of the tile that starts at (i_start, j_start); keys before 0 and from m on have no gradient."""
    at = extent + batch * extent_b + (i_start // BM) * 2
    if (j_start < tl.load(at + 1)) & (j_start + BN > tl.load(at)):
        i = i_start + tl.arange(0, BM)
        j = j_start + tl.arange(0, BN)
        b64, h64 = batch.to(tl.int64), head.to(tl.int64)
        row = (b64 * h + h64) * n + i
        head_kv = h64 // (h // h_kv)
        inside = tl.where(j < 0, m, j)  # a negative key is loaded as zeros, like one past the end
        queries = load_rows(q + b64 * qb + h64 * qh, i, qi, qd, n, D, DP, True)
        keys = load_rows(k + b64 * kb + head_kv * kh, inside, kj, kd, m, D, DP, True)
        values = load_rows(v + b64 * vb + head_kv * vh, inside, vj, vd, m, DV, DVP, True)
        grads = load_rows(d_out + b64 * ob + h64 * oh, i, oi, od, n, DV, DVP, True)
        if HAS_REL:
            rel += h64 * rel_h
        if HAS_BIAS:
            bias += b64 * bias_b + h64 * bias_h
        if HAS_DENSE:
            dense += b64 * dense_b + h64 * dense_h
        _, ds, _ = score_gradient(
            queries, keys, grads, values, i[:, None], inside[None, :], row[:, None],
            row_logs(lse, row, i < n)[:, None], tl.load(delta + row, mask=i < n, other=0.0)[:, None],
            factor, cap2, rel, bias, bias_i, bias_j, spans + batch * spans_b, count, dense, dense_i, dense_j,
            seed, drop, n, m, b64, more, HAS_CAP, HAS_REL, HAS_BIAS, HAS_DENSE, DROP, PRECISION, True,
        )  # fmt: skip
        total += ds
    return total


@triton.jit(do_not_specialize=["seed"])
def bias_gradient_kernel(
    q, k, v, qb, qh, qi, qd, kb, kh, kj, kd, vb, vh, vj, vd, h, h_kv, n, m,
    factor, cap2, rel, rel_h, bias, bias_b, bias_h, bias_i, bias_j,
    spans, spans_b, count, dense, dense_b, dense_h, dense_i, dense_j, seed, drop,
    extent, extent_b, d_out, ob, oh, oi, od, lse, delta, more,
    result, rb, rh, ri, rj, batches, heads, row_steps, col_steps, row_blocks, col_blocks,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_REL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DENSE: tl.constexpr,
    DROP: tl.constexpr, PRECISION: tl.constexpr, ALL_ROWS: tl.constexpr, ALL_COLS: tl.constexpr,
):  # fmt: skip
    """result [b|1, h|1, n|1, m|1]: a program sums `batches` × `heads` × `row_steps` × `col_steps` tiles."""
    pid = tl.program_id(0)
    col_block = pid % col_blocks
    row_block = (pid // col_blocks) % row_blocks
    lane = pid // (col_blocks * row_blocks)
    own_heads = h // heads
    own_batch, own_head = lane // own_heads, lane % own_heads
    total = tl.zeros([BM, BN], tl.float32)
    for batch in range(own_batch, own_batch + batches):
        for head in range(own_head, own_head + heads):
            for down in range(row_block, row_block + row_steps):
                for along in range(col_block, col_block + col_steps):
                    total = _add_tile(
                        total, tl.cast(batch, tl.int32), tl.cast(head, tl.int32), down * BM, along * BN,
                        q, k, v, qb, qh, qi, qd, kb, kh, kj, kd, vb, vh, vj, vd, h, h_kv, n, m,
                        factor, cap2, rel, rel_h, bias, bias_b, bias_h, bias_i, bias_j,
                        spans, spans_b, count, dense, dense_b, dense_h, dense_i, dense_j, seed, drop,
                        extent, extent_b, d_out, ob, oh, oi, od, lse, delta, more,
                        D, DP, DV, DVP, BM, BN, HAS_CAP, HAS_REL, HAS_BIAS, HAS_DENSE, DROP, PRECISION,
                    )  # fmt: skip
    i = row_block * BM + tl.arange(0, BM)
    j = col_block * BN + tl.arange(0, BN)
    result += own_batch.to(tl.int64) * rb + own_head.to(tl.int64) * rh
    if ALL_ROWS and ALL_COLS:
        tl.store(result, tl.sum(tl.sum(total, 1), 0))
    elif ALL_ROWS:
        tl.store(result + j * rj, tl.sum(total, 0), mask=j < m)
    elif ALL_COLS:
        tl.store(result + i * ri, tl.sum(total, 1), mask=i < n)
    else:
        at = result + i[:, None].to(tl.int64) * ri + j[None, :] * rj
        tl.store(at, total, mask=(i < n)[:, None] & (j < m)[None, :])


@triton.jit(do_not_specialize=["seed"])
def relative_gradient_kernel(
    q, k, v, qb, qh, qi, qd, kb, kh, kj, kd, vb, vh, vj, vd, h, h_kv, n, m,
    factor, cap2, rel, rel_h, bias, bias_b, bias_h, bias_i, bias_j,
    spans, spans_b, count, dense, dense_b, dense_h, dense_i, dense_j, seed, drop,
    extent, extent_b, d_out, ob, oh, oi, od, lse, delta, more,
    result, batches, row_blocks, bands,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_REL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DENSE: tl.constexpr,
    DROP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """result [h, bands, 2·BM]: sums of dS along diagonals.

    Band t holds the tiles [i, i + BM) × [j, j + BM) with j = i + t·BM − (n − 1). Cell (r, c) of each has index
    t·BM + c − r in the table, so the tiles are added elementwise first, and along diagonals once at the end.
    """
    band = tl.program_id(0) % bands
    head = tl.program_id(0) // bands
    total = tl.zeros([BM, BM], tl.float32)
    for batch in range(batches):
        for down in range(row_blocks):
            total = _add_tile(
                total, tl.cast(batch, tl.int32), head, down * BM, (down + band) * BM - (n - 1),
                q, k, v, qb, qh, qi, qd, kb, kh, kj, kd, vb, vh, vj, vd, h, h_kv, n, m,
                factor, cap2, rel, rel_h, bias, bias_b, bias_h, bias_i, bias_j,
                spans, spans_b, count, dense, dense_b, dense_h, dense_i, dense_j, seed, drop,
                extent, extent_b, d_out, ob, oh, oi, od, lse, delta, more,
                D, DP, DV, DVP, BM, BM, HAS_CAP, HAS_REL, HAS_BIAS, HAS_DENSE, DROP, PRECISION,
            )  # fmt: skip
    offset = tl.arange(0, BM)[None, :] - tl.arange(0, BM)[:, None] + (BM - 1)
    result += tl.program_id(0).to(tl.int64) * (2 * BM)
    for u in range(2 * BM):
        tl.store(result + u, tl.sum(tl.sum(tl.where(offset == u, total, 0.0), 1), 0))
