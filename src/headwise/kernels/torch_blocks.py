"""Exact blockwise attention in plain PyTorch, and long calls of any kernel in blocks of queries.

Any device, mask and score, O(n) memory forward and backward. An online softmax over key blocks (Milakov & Gimelshein
2018; Rabe & Staats 2021; Dao et al. 2022) keeps a maximum, a sum and a weighted sum of values per query. The backward
pass recomputes each tile of weights from q, k and the log-sum-exp, so training stores no n×m matrix either.

    with within(progress=progress):     # called before each block of a long call and at its end, in this thread
        model(ids)                      # an exception raised by `progress` cancels the call

A row of a query does not depend on the rows computed with it, so the result of blocks is that of the whole call. Only
inference is split: calls with gradients or dropout run in one piece, as do those whose kernel only supports the whole
matrix.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headwise.base.run import Progress
from headwise.kernels.call import Call, Result
from headwise.kernels.gradients import run_kernel
from headwise.kernels.joint import RowGradients, TermGradients, statistics_of
from headwise.kernels.kernel import Kernel
from headwise.kernels.reads import TileReads
from headwise.masks import Span, State
from headwise.rule import (
    Terms,
    compute,
    grouped,
    grouped_t,
    score_tile,
    seen_nonfinite,
    without_masked_queries,
)
from headwise.rule.tiles import COMPUTING
from headwise.stats import Statistic


class TorchBlocks:
    """The portable kernel, which supports every call."""

    name = "torch_blocks"
    gives_delta = False
    by_autograd = False
    twice = True
    adds_rows = True
    reads = TileReads()

    def refuse(self, call: Call) -> str | None:
        """Supports every call that passed the checks of `attend`."""
        return None

    def run(self, call: Call) -> Result:
        out, lse = _forward(call, call.rule.terms(compute(call.q[..., :0, :])))
        return Result(out, lse, statistics_of(call, lse) if call.differentiable else {})

    def gradients(
        self, call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, wanted: Sequence[bool],
        more: RowGradients | None = None,
    ) -> list[Tensor | None]:  # fmt: skip
        """For its own output, or for that of any kernel if there is no dropout."""
        terms = call.rule.terms(lse[..., :0])
        sums = TermGradients(terms, wanted, lse)
        return [*_backward(call, terms, sums, call.q, call.k, call.v, out, lse, grad_out, more), *sums.finish()]


def _forward(call: Call, terms: Terms) -> tuple[Tensor, Tensor]:
    q, k, v = call.q, call.k, call.v
    b, h, n, _ = q.shape
    out = q.new_empty(b, h, n, v.shape[-1])
    lse = torch.empty(b, h, n, dtype=compute(q[..., :0, :]).dtype, device=q.device)
    drop = _Dropout(call)
    for rows in call.rule.row_blocks():
        queries = q[:, :, rows.start : rows.stop]
        top = lse.new_full(queries.shape[:-1], -torch.inf)  # running maximum
        total = lse.new_zeros(queries.shape[:-1])  # running sum of exp(score - top)
        mixed = lse.new_zeros(*queries.shape[:-1], v.shape[-1])  # running sum of exp(score - top) · value
        poison: Tensor | None = None
        for cols, state in call.rule.tiles(rows):
            values = v[:, :, cols.start : cols.stop]
            keys = k[:, :, cols.start : cols.stop]
            scores = score_tile(queries, keys, call.rule.scale, terms.soft_cap, terms.added(rows, cols))
            allowed = None
            if state is State.MIXED:
                allowed = call.rule.allowed(rows, cols, q.device)
                scores.masked_fill_(~allowed, -torch.inf)
            if not call.values_finite:
                bad = seen_nonfinite(allowed, values, scores)
                poison = bad if poison is None else poison | bad
                values = values.nan_to_num(0.0, 0.0, 0.0)
            new_top = torch.maximum(top, scores.amax(-1))
            # The maximum is -inf while all keys so far are masked; 0 in its place keeps exp() from returning NaN.
            base = new_top.masked_fill(new_top == -torch.inf, 0.0)
            weights = scores.sub_(base[..., None]).exp_()
            keep = (top - base).exp_()
            total = total.mul_(keep).add_(weights.sum(-1))
            mixed = mixed.mul_(keep[..., None]).add_(grouped(drop(weights, rows, cols), values))
            top = new_top
        empty = total == 0  # fully masked queries
        if terms.sinks is not None:
            base = torch.maximum(top, terms.sinks[:, None]).masked_fill(empty, 0.0)
            keep = (top - base).exp_()
            total = torch.where(empty, 0.0, total * keep + (terms.sinks[:, None] - base).exp_())
            mixed, top = mixed.mul_(keep[..., None]), torch.where(empty, top, base)
        rows_out = mixed / total.masked_fill(empty, 1.0)[..., None]
        if poison is not None:
            rows_out.masked_fill_(poison, torch.nan)
        out[:, :, rows.start : rows.stop] = rows_out
        lse[:, :, rows.start : rows.stop] = top + total.masked_fill(empty, 1.0).log()
    return out, lse


def _backward(
    call: Call, terms: Terms, sums: "TermGradients", q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    grad_out: Tensor, more: RowGradients | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    h_kv = k.shape[1]
    dq = torch.zeros_like(q, dtype=lse.dtype)
    dk = torch.zeros_like(k, dtype=lse.dtype)
    dv = torch.zeros_like(v, dtype=lse.dtype)
    drop = _Dropout(call)
    for rows in call.rule.row_blocks():
        r = slice(rows.start, rows.stop)
        queries = without_masked_queries(q[:, :, r], lse[:, :, r])
        d_out = without_masked_queries(compute(grad_out[:, :, r]), lse[:, :, r])
        # A fully masked query has lse = -inf; +inf instead makes all its weights exp(-inf) = 0.
        row_lse = lse[:, :, r].masked_fill(lse[:, :, r] == -torch.inf, torch.inf)
        delta = (d_out * compute(out[:, :, r])).sum(-1, keepdim=True)  # rowsum(dO ∘ O), Dao 2022 eq. 4
        if more is not None:
            delta += more.shift[:, :, r, None]
        sums.take_rows(row_lse, delta if more is None or more.logs is None else delta + more.logs[:, :, r, None])
        for cols, state in call.rule.tiles(rows):
            c = slice(cols.start, cols.stop)
            keys, values = k[:, :, c], v[:, :, c]
            slope = lse.new_empty(*row_lse.shape, cols.size) if terms.soft_cap else None
            biases = terms.added(rows, cols)
            weights = score_tile(queries, keys, call.rule.scale, terms.soft_cap, biases, minus=row_lse, slope=slope)
            allowed = call.rule.allowed(rows, cols, q.device) if state is State.MIXED else None
            if allowed is not None:
                weights.masked_fill_(~allowed, -torch.inf)
            added = None if more is None else more.of_tile(weights, rows, cols, call.rule.grid.shift)
            weights.exp_()
            if not call.values_finite:
                keys, values = keys.nan_to_num(0.0, 0.0, 0.0), values.nan_to_num(0.0, 0.0, 0.0)
            dv[:, :, c] += grouped_t(drop(weights, rows, cols), d_out, h_kv)
            d_weights = drop(grouped(d_out, values.mT), rows, cols)
            if added is not None:
                d_weights += added.masked_fill_(weights == 0, 0.0)
            d_scores = d_weights.sub_(delta).mul_(weights)
            if allowed is not None:
                d_scores.masked_fill_(~allowed, 0.0)  # 0 · NaN of a poisoned row must not spread
            sums.take_tile(d_scores, rows, cols)
            if slope is not None:
                # The slope of a masked key may be NaN, too.
                d_scores.mul_(slope if allowed is None else slope.masked_fill_(~allowed, 0.0))
            d_scores.mul_(call.rule.scale)
            dq[:, :, r] += grouped(d_scores, keys)
            dk[:, :, c] += grouped_t(d_scores, queries, h_kv)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Dropout:
    """Drops weights with probability p and scales the others by 1 / (1 - p); the same for every pass over a tile."""

    def __init__(self, call: Call) -> None:
        self.p, self.seed, self.m = call.dropout_p, call.seed, call.k.shape[2]
        self.generator = torch.Generator(call.q.device) if self.p > 0 else None

    def __call__(self, weights: Tensor, rows: Span, cols: Span) -> Tensor:
        if self.generator is None:
            return weights
        self.generator.manual_seed(self.seed + rows.start * self.m + cols.start)
        noise = torch.rand(weights.shape, generator=self.generator, dtype=torch.float32, device=weights.device)
        return weights * (noise >= self.p) / (1.0 - self.p)


PAIRS = 1 << 26  # (query, key) pairs of a block over all heads, per thread: about 0.2 s of one core
ROWS = 64  # block sizes are multiples of this, as kernels compute several rows at a time


def in_blocks(kernel: Kernel, call: Call, progress: Progress) -> Result:
    """Run a call that the kernel does not refuse in blocks. Raises Declined as the kernel does."""
    b, h, n, m = call.rule.grid
    rows = max(ROWS, PAIRS * torch.get_num_threads() // max(1, b * h * m) // ROWS * ROWS)
    blocks = [Span(start, min(n, start + rows)) for start in range(0, n, rows)]
    if len(blocks) < 2 or torch.is_grad_enabled() or call.dropout_p > 0:
        return run_kernel(kernel, call)
    parts: list[Result] = []
    found: list[dict[Statistic, Tensor]] = []
    for block in blocks:
        progress(COMPUTING, block.start, n)
        local = {statistic: statistic.rows(block) for statistic in call.statistics}
        part = replace(
            call, q=call.q[:, :, slice(*block)], rule=call.rule.rows(block), statistics=tuple(local.values())
        )
        if kernel.refuse(part) is not None:
            return kernel.run(call)
        parts.append(kernel.run(part))
        given = parts[-1].statistics
        found.append({statistic: given[here] for statistic, here in local.items() if here in given})
    progress(COMPUTING, n, n)
    statistics = {s: s.of_blocks([part[s] for part in found]) for s in found[0] if all(s in part for part in found)}
    return Result(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2), statistics)
