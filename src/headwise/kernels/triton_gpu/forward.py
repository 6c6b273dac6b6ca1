"""The forward pass: output, log-sum-exp and row statistics in one pass over the keys (Dao 2023, algorithm 1).

Each program computes a block of queries of one head. In decoding (FOLD) its rows are the queries of all heads that
share keys, and with `partial` each program computes a range of the keys; `merge_kernel` joins their partial sums.
"""
# mypy: allow-untyped-defs, disable-error-code="import-not-found,misc,untyped-decorator"

import triton
import triton.language as tl

from headwise.kernels.triton_gpu.tile import (
    LARGEST_OTHER,
    LOG2E,
    block_masses,
    block_moments,
    finish,
    finite,
    join_moments,
    kept,
    load_rows,
    narrowed,
    product,
    scores,
    visible,
)


@triton.jit
def _step(
    queries, acc, top, total, tilt, squares, origin, first, second, masses, poisoned,
    k, kj, kd, v, vj, vd, block, i, position, row, i_first, i_last,
    factor, cap2, rel, bias, bias_i, bias_j, spans, count, dense, dense_i, dense_j, seed, drop,
    batch, table, weights, n, m,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_REL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DENSE: tl.constexpr,
    DROP: tl.constexpr, PRECISION: tl.constexpr, ENT: tl.constexpr, SQ: tl.constexpr, DIST: tl.constexpr,
    G: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys for one block of queries."""
    j = block * BN + tl.arange(0, BN)
    keys = load_rows(k, j, kj, kd, m, D, DP, MASKED)
    s, _ = scores(
        queries, keys, i, j[None, :], factor, cap2, rel, bias, bias_i, bias_j, n, m,
        HAS_CAP, HAS_REL, HAS_BIAS, PRECISION,
    )  # fmt: skip
    values = load_rows(v, j, vj, vd, m, DV, DVP, MASKED)
    if MASKED:
        seen = visible(i, j[None, :], spans, count, dense, dense_i, dense_j, n, m, HAS_DENSE)
        s = tl.where(seen, s, -float("inf"))
        # 0 · NaN is NaN: a non-finite value must affect the rows that attend to it, and only those. See `_poison`.
        bad = ~finite(values)
        any_bad = tl.max(tl.max(bad.to(tl.int32), 1), 0)
        if any_bad > 0:
            values = tl.where(bad, 0.0, values)
        poisoned = tl.maximum(poisoned, any_bad)
    new_top = tl.maximum(top, tl.max(s, 1))
    # The maximum is −∞ while all keys so far are masked; 0 in its place keeps exp2 from returning NaN.
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    e = tl.exp2(s - base[:, None])
    decay = tl.exp2(top - base)
    here = tl.sum(e, 1)
    if ENT:
        drift = tl.where(total > 0, top - base, 0.0)
        below = tl.where(e > 0, s - base[:, None], 0.0)  # 0 · −∞ would be NaN
        tilt = (tilt + total * drift) * decay + tl.sum(e * below, 1)
    if SQ:
        squares = squares * decay * decay + tl.sum(e * e, 1)
    if DIST:
        b_origin, b_first, b_second = block_moments(e, here, position, j, block * BN + BN // 2)
        origin, first, second = join_moments(
            total * decay, origin, first, second * decay, here, b_origin, b_first, b_second
        )
    if G > 0:
        masses = block_masses(
            masses * decay[:, None], e, position, i_first, i_last, j, block * BN, block * BN + BN - 1, m,
            batch, table, weights, G, WEIGHTED,
        )  # fmt: skip
    total = total * decay + here
    if DROP:
        e = tl.where(kept(row, j[None, :], m, seed, drop), e, 0.0)
    acc = acc * decay[:, None] + product(narrowed(e, values.dtype, PRECISION), values, PRECISION)
    return acc, new_top, total, tilt, squares, origin, first, second, masses, poisoned


@triton.jit
def _visit(
    visits, visit_count, floor, ceiling,
    queries, acc, top, total, tilt, squares, origin, first, second, masses, poisoned,
    k, kj, kd, v, vj, vd, i, position, row, i_first, i_last,
    factor, cap2, rel, bias, bias_i, bias_j, spans, count, dense, dense_i, dense_j, seed, drop,
    batch, table, weights, n, m,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_REL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DENSE: tl.constexpr,
    DROP: tl.constexpr, PRECISION: tl.constexpr, ENT: tl.constexpr, SQ: tl.constexpr, DIST: tl.constexpr,
    G: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The blocks of keys of some intervals from `floor` to `ceiling`; without intervals, of all keys: the whole blocks,
    or with MASKED the last one, if it is a part."""
    # In decoding these are few keys, and a pipeline of their own would spill registers.
    STAGES: tl.constexpr = 1 if MASKED and BM <= 16 else None
    for slot in range(visit_count):
        if visits is None:
            low = m // BN if MASKED else 0
            high = tl.cdiv(m, BN) if MASKED else m // BN
        else:
            low, high = tl.load(visits + slot * 2), tl.load(visits + slot * 2 + 1)
        for block in tl.range(tl.maximum(low, floor), tl.minimum(high, ceiling), num_stages=STAGES):
            acc, top, total, tilt, squares, origin, first, second, masses, poisoned = _step(
                queries, acc, top, total, tilt, squares, origin, first, second, masses, poisoned,
                k, kj, kd, v, vj, vd, block, i, position, row, i_first, i_last,
                factor, cap2, rel, bias, bias_i, bias_j, spans, count, dense, dense_i, dense_j, seed, drop,
                batch, table, weights, n, m, D, DP, DV, DVP, BM, BN,
                HAS_CAP, HAS_REL, HAS_BIAS, HAS_DENSE, DROP, PRECISION, ENT, SQ, DIST, G, WEIGHTED, MASKED,
            )  # fmt: skip
    return acc, top, total, tilt, squares, origin, first, second, masses, poisoned


@triton.jit
def _poison(
    stored, live, visits, visit_count, floor, ceiling, v, vj, vd, i, spans, count, dense, dense_i, dense_j, n, m,
    BM: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    HAS_DENSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """NaN over the stored outputs of the rows that attend to a non-finite value. Within the loop over the keys this
    rare work would take registers from every block."""
    hits = tl.zeros([BM, DVP], tl.float32)
    for slot in range(visit_count):
        if visits is None:
            low, high = m // BN, tl.cdiv(m, BN)
        else:
            low, high = tl.load(visits + slot * 2), tl.load(visits + slot * 2 + 1)
        for block in range(tl.maximum(low, floor), tl.minimum(high, ceiling)):
            j = block * BN + tl.arange(0, BN)
            bad = ~finite(load_rows(v, j, vj, vd, m, DV, DVP, True))
            seen = visible(i, j[None, :], spans, count, dense, dense_i, dense_j, n, m, HAS_DENSE)
            seen = seen.to(tl.float32).to(v.dtype.element_ty)
            hits += product(seen, bad.to(tl.float32).to(v.dtype.element_ty), PRECISION)
    column = tl.arange(0, DVP)[None, :]
    tl.debug_barrier()  # the threads that stored these outputs may be others
    tl.store(stored[:, None] + column, float("nan"), mask=live[:, None] & (column < DV) & (hits > 0))


@triton.jit
def _empty(BM: tl.constexpr, DVP: tl.constexpr, G: tl.constexpr):
    """The sums of no keys."""
    acc = tl.zeros([BM, DVP], tl.float32)
    top = tl.full([BM], -float("inf"), tl.float32)
    zero = tl.zeros([BM], tl.float32)
    masses = tl.zeros([BM, G if G > 0 else 1], tl.float32)
    return acc, top, zero, zero, zero, zero, zero, zero, masses


@triton.jit
def _store_partial(
    partial, row, live, row_count, acc, top, total, tilt, squares, origin, first, second, masses,
    DV: tl.constexpr, DVP: tl.constexpr, ENT: tl.constexpr, SQ: tl.constexpr, DIST: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """The sums of one range of keys: the outputs of all ranges are first in `partial`."""
    column = tl.arange(0, DVP)
    part, parts = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    at = partial + (part * row_count + row)[:, None] * DV + column[None, :]
    tl.store(at, acc, mask=live[:, None] & (column[None, :] < DV))
    at = partial + (parts * DV + part * (7 + G)) * row_count + row
    tl.store(at, top, mask=live)
    tl.store(at + row_count, total, mask=live)
    if ENT:
        tl.store(at + 2 * row_count, tilt, mask=live)
    if SQ:
        tl.store(at + 3 * row_count, squares, mask=live)
    if DIST:
        tl.store(at + 4 * row_count, origin, mask=live)
        tl.store(at + 5 * row_count, first, mask=live)
        tl.store(at + 6 * row_count, second, mask=live)
    if G > 0:
        plane = (7 + tl.arange(0, G)) * row_count
        tl.store(at[:, None] + plane[None, :], masses, mask=live[:, None])


@triton.jit
def _store_output(
    out, results, row, live, row_count, acc, top, total, tilt, squares, origin, first, second, masses,
    mass_count, sink2, drop, DV: tl.constexpr, DVP: tl.constexpr, HAS_SINKS: tl.constexpr, DROP: tl.constexpr,
    ENT: tl.constexpr, SQ: tl.constexpr, DIST: tl.constexpr, G: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and results of rows from the sums over all keys."""
    scale = finish(
        results, row, live, row_count, top, total, tilt, squares, origin, first, second, masses, mass_count, sink2,
        HAS_SINKS, ENT, SQ, DIST, G,
    )  # fmt: skip
    if DROP:
        scale = scale / (1.0 - drop)
    column = tl.arange(0, DVP)
    tl.store(
        out + row[:, None] * DV + column[None, :],
        narrowed(acc * scale[:, None], out.dtype.element_ty, PRECISION),
        mask=live[:, None] & (column[None, :] < DV),
    )


@triton.jit(do_not_specialize=["chunk", "row_count", "seed", "shift"])
def attend_kernel(
    q, k, v, out, results, partial, m, chunk, kb, kh, vb, vh, qb, qh, qi, qd, kj, kd, vj, vd, h, h_kv, n,
    factor, cap2, rel, rel_h, bias, bias_b, bias_h, bias_i, bias_j,
    spans, spans_b, count, dense, dense_b, dense_h, dense_i, dense_j, sinks, seed, drop,
    full, full_b, full_count, mixed, mixed_b, mixed_count, row_blocks, row_count, table, mass_count, weights, shift,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_REL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DENSE: tl.constexpr,
    HAS_SINKS: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr, ENT: tl.constexpr, SQ: tl.constexpr,
    DIST: tl.constexpr, G: tl.constexpr, WEIGHTED: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """out [b, h, n, DV] and results [planes, b·h·n], or with `partial` the sums of the range of keys."""
    # The last rows, the most work under a causal mask, start first.
    which = row_blocks - 1 - tl.program_id(0) % row_blocks
    lane = tl.program_id(0) // row_blocks
    r = which * BM + tl.arange(0, BM)
    group = h // h_kv
    if FOLD:
        batch, head_kv = lane // h_kv, lane % h_kv
        i = r % n
        live = r < group * n
        heads = tl.where(live, head_kv * group + r // n, 0)  # [BM]
        head_2d, walk = heads[:, None], 0
        i_first, i_last = shift, shift + n - 1
    else:
        batch, heads = lane // h, lane % h
        head_kv = heads // group
        i, live = r, r < n
        head_2d, walk = heads, which
        i_first, i_last = which * BM + shift, which * BM + BM - 1 + shift
    b64 = batch.to(tl.int64)
    row = (b64 * h + heads) * n + i  # index of the row among all b·h·n
    column = tl.arange(0, DP)
    at = q + b64 * qb + (heads.to(tl.int64) * qh + i.to(tl.int64) * qi)[:, None] + column[None, :] * qd
    queries = tl.load(at, mask=live[:, None] & (column[None, :] < D), other=0.0)
    k += b64 * kb + head_kv.to(tl.int64) * kh
    v += b64 * vb + head_kv.to(tl.int64) * vh
    if HAS_REL:
        rel += head_2d * rel_h
    if HAS_BIAS:
        bias += b64 * bias_b + head_2d.to(tl.int64) * bias_h
    if HAS_DENSE:
        dense += b64 * dense_b + head_2d.to(tl.int64) * dense_h
    if spans is not None:
        spans += batch * spans_b
    position = i + shift
    acc, top, total, tilt, squares, origin, first, second, masses = _empty(BM, DVP, G)
    clean = tl.full([], 0, tl.int32)
    floor, ceiling = 0, tl.cdiv(m, BN)
    if partial is not None:
        floor = tl.program_id(1) * chunk
        ceiling = floor + chunk
    if full is not None:
        full += batch * full_b + walk * full_count * 2
        mixed += batch * mixed_b + walk * mixed_count * 2
    acc, top, total, tilt, squares, origin, first, second, masses, _ = _visit(
        full, full_count, floor, ceiling,
        queries, acc, top, total, tilt, squares, origin, first, second, masses, clean,
        k, kj, kd, v, vj, vd, i[:, None], position, row[:, None], i_first, i_last,
        factor, cap2, rel, bias, bias_i, bias_j, spans, count, dense, dense_i, dense_j, seed, drop,
        batch, table, weights, n, m, D, DP, DV, DVP, BM, BN,
        HAS_CAP, HAS_REL, HAS_BIAS, HAS_DENSE, DROP, PRECISION, ENT, SQ, DIST, G, WEIGHTED, False,
    )  # fmt: skip
    acc, top, total, tilt, squares, origin, first, second, masses, poisoned = _visit(
        mixed, mixed_count, floor, ceiling,
        queries, acc, top, total, tilt, squares, origin, first, second, masses, clean,
        k, kj, kd, v, vj, vd, i[:, None], position, row[:, None], i_first, i_last,
        factor, cap2, rel, bias, bias_i, bias_j, spans, count, dense, dense_i, dense_j, seed, drop,
        batch, table, weights, n, m, D, DP, DV, DVP, BM, BN,
        HAS_CAP, HAS_REL, HAS_BIAS, HAS_DENSE, DROP, PRECISION, ENT, SQ, DIST, G, WEIGHTED, True,
    )  # fmt: skip
    if partial is not None:
        _store_partial(
            partial, row, live, row_count, acc, top, total, tilt, squares, origin, first, second, masses,
            DV, DVP, ENT, SQ, DIST, G,
        )  # fmt: skip
    else:
        sink2 = top
        if HAS_SINKS:
            sink2 = tl.load(sinks + heads) * LOG2E
        _store_output(
            out, results, row, live, row_count, acc, top, total, tilt, squares, origin, first, second, masses,
            mass_count, sink2, drop, DV, DVP, HAS_SINKS, DROP, ENT, SQ, DIST, G, PRECISION,
        )  # fmt: skip
    if poisoned > 0:
        part = tl.program_id(1).to(tl.int64)
        stored = out + row * DV if partial is None else partial + (part * row_count + row) * DV
        _poison(
            stored, live, mixed, mixed_count, floor, ceiling, v, vj, vd, i[:, None],
            spans, count, dense, dense_i, dense_j, n, m, BM, DV, DVP, BN, HAS_DENSE, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["parts", "row_count"])
def merge_kernel(
    out, results, partial, parts, sinks, h, n, row_count, table, mass_count, drop,
    DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, HAS_SINKS: tl.constexpr, DROP: tl.constexpr,
    ENT: tl.constexpr, SQ: tl.constexpr, DIST: tl.constexpr, G: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Join the partial sums of `parts` ranges of keys, in their order (Dao et al. 2023, flash-decoding)."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    live = row < row_count
    column = tl.arange(0, DVP)
    inside = live[:, None] & (column[None, :] < DV)
    acc, top, total, tilt, squares, origin, first, second, masses = _empty(BM, DVP, G)
    for part in range(parts):
        part = tl.cast(part, tl.int64)
        at = partial + (parts * DV + part * (7 + G)) * row_count + row
        b_top = tl.load(at, mask=live, other=-float("inf"))
        b_total = tl.load(at + row_count, mask=live, other=0.0)
        new_top = tl.maximum(top, b_top)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        decay, b_decay = tl.exp2(top - base), tl.exp2(b_top - base)
        if ENT:
            b_tilt = tl.load(at + 2 * row_count, mask=live, other=0.0)
            drift = tl.where(total > 0, top - base, 0.0)
            b_drift = tl.where(b_total > 0, b_top - base, 0.0)
            tilt = (tilt + total * drift) * decay + (b_tilt + b_total * b_drift) * b_decay
        if SQ:
            b_squares = tl.load(at + 3 * row_count, mask=live, other=0.0)
            squares = squares * decay * decay + b_squares * b_decay * b_decay
        if DIST:
            b_origin = tl.load(at + 4 * row_count, mask=live, other=0.0)
            b_first = tl.load(at + 5 * row_count, mask=live, other=0.0)
            b_second = tl.load(at + 6 * row_count, mask=live, other=0.0)
            origin, first, second = join_moments(
                total * decay, origin, first, second * decay, b_total * b_decay, b_origin, b_first, b_second * b_decay
            )
        if G > 0:
            plane = (7 + tl.arange(0, G)) * row_count
            b_masses = tl.load(at[:, None] + plane[None, :], mask=live[:, None], other=0.0)
            masses, b_masses = masses * decay[:, None], b_masses * b_decay[:, None]
            kinds = tl.load(table + tl.arange(0, G) * 4)
            masses = tl.where(kinds[None, :] == LARGEST_OTHER, tl.maximum(masses, b_masses), masses + b_masses)
        total = total * decay + b_total * b_decay
        at_out = partial + (part * row_count + row)[:, None] * DV + column[None, :]
        acc = acc * decay[:, None] + tl.load(at_out, mask=inside, other=0.0) * b_decay[:, None]
        top = new_top
    sink2 = top
    if HAS_SINKS:
        sink2 = tl.load(sinks + (row // n) % h, mask=live, other=0.0) * LOG2E
    _store_output(
        out, results, row.to(tl.int64), live, row_count, acc, top, total, tilt, squares, origin, first, second, masses,
        mass_count, sink2, drop, DV, DVP, HAS_SINKS, DROP, ENT, SQ, DIST, G, PRECISION,
    )  # fmt: skip
