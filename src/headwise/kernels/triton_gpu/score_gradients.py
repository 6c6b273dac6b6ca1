"""Gradients of the terms added to the scores: a bias, and a table over key − query offsets. Without atomics.

Both are sums of dS over a set of tiles: a bias sums over the axes that it is broadcast along, a table along the
diagonals. Each program owns its sum and visits its tiles in a fixed order.
"""
# mypy: allow-untyped-defs, disable-error-code="import-not-found,misc,untyped-decorator"

import triton
import triton.language as tl

from headwise.kernels.triton_gpu.backward import row_logs
from headwise.kernels.triton_gpu.tile import load_rows, score_gradient


@triton.jit
def _add_tile(
    total, batch, head, i_start, j_start,
    q, k, v, qb, qh, qi, qd, kb, kh, kj, kd, vb, vh, vj, vd, h, h_kv, n, m,
    factor, cap2, rel, rel_h, bias, bias_b, bias_h, bias_i, bias_j,
    spans, spans_b, count, dense, dense_b, dense_h, dense_i, dense_j, seed, drop,
    extent, extent_b, d_out, ob, oh, oi, od, lse, delta,
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
            seed, drop, n, m, HAS_CAP, HAS_REL, HAS_BIAS, HAS_DENSE, DROP, PRECISION, True,
        )  # fmt: skip
        total += ds
    return total


@triton.jit(do_not_specialize=["seed"])
def bias_gradient_kernel(
    q, k, v, qb, qh, qi, qd, kb, kh, kj, kd, vb, vh, vj, vd, h, h_kv, n, m,
    factor, cap2, rel, rel_h, bias, bias_b, bias_h, bias_i, bias_j,
    spans, spans_b, count, dense, dense_b, dense_h, dense_i, dense_j, seed, drop,
    extent, extent_b, d_out, ob, oh, oi, od, lse, delta,
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
                        extent, extent_b, d_out, ob, oh, oi, od, lse, delta,
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
    extent, extent_b, d_out, ob, oh, oi, od, lse, delta,
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
                extent, extent_b, d_out, ob, oh, oi, od, lse, delta,
                D, DP, DV, DVP, BM, BM, HAS_CAP, HAS_REL, HAS_BIAS, HAS_DENSE, DROP, PRECISION,
            )  # fmt: skip
    offset = tl.arange(0, BM)[None, :] - tl.arange(0, BM)[:, None] + (BM - 1)
    result += tl.program_id(0).to(tl.int64) * (2 * BM)
    for u in range(2 * BM):
        tl.store(result + u, tl.sum(tl.sum(tl.where(offset == u, total, 0.0), 1), 0))
