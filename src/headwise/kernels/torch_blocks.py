"""Exact blockwise attention in plain PyTorch: any device, any mask, O(n) memory forward and backward.

The softmax is kept running over key blocks (Milakov & Gimelshein 2018; Rabe & Staats 2021; Dao et al. 2022):
per query a maximum, a sum and a weighted sum of values. The backward pass recomputes each tile of weights
from q, k and the log-sum-exp, so nothing n×m is kept for training either.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise.kernels.call import Call
from headwise.masks import Span, State
from headwise.rule import compute, grouped, grouped_t, raw_scores


class TorchBlocks:
    """The portable kernel; it refuses nothing."""

    name = "torch_blocks"

    def refuse(self, call: Call) -> str | None:
        """Every call that passed the checks of `attend` can be done."""
        return None

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = _Blocks.apply(call.q, call.k, call.v, call)
        return out, lse


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = _forward(call)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        return *_backward(ctx.call, q, k, v, out, lse, grad_out), None


def _forward(call: Call) -> tuple[Tensor, Tensor]:
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
            scores = raw_scores(queries, k[:, :, cols.start : cols.stop], call.rule.scale)
            allowed = None
            if state is State.MIXED:
                allowed = call.rule.allowed(rows, cols, q.device)
                scores.masked_fill_(~allowed, -torch.inf)
            if not call.values_finite:
                bad = _poison(allowed, values, scores)
                poison = bad if poison is None else poison | bad
                values = values.nan_to_num(0.0, 0.0, 0.0)
            new_top = torch.maximum(top, scores.amax(-1))
            # While a row has seen nothing its maximum is -inf; 0 in its place keeps exp() from making NaN.
            base = new_top.masked_fill(new_top == -torch.inf, 0.0)
            weights = scores.sub_(base[..., None]).exp_()
            keep = (top - base).exp_()
            total = total.mul_(keep).add_(weights.sum(-1))
            mixed = mixed.mul_(keep[..., None]).add_(grouped(drop(weights, rows, cols), values))
            top = new_top
        dark = total == 0
        rows_out = mixed / total.masked_fill(dark, 1.0)[..., None]
        if poison is not None:
            rows_out.masked_fill_(poison, torch.nan)
        out[:, :, rows.start : rows.stop] = rows_out
        lse[:, :, rows.start : rows.stop] = top + total.masked_fill(dark, 1.0).log()
    return out, lse


def _backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    h_kv = k.shape[1]
    dq = torch.zeros_like(q, dtype=lse.dtype)
    dk = torch.zeros_like(k, dtype=lse.dtype)
    dv = torch.zeros_like(v, dtype=lse.dtype)
    drop = _Dropout(call)
    for rows in call.rule.row_blocks():
        r = slice(rows.start, rows.stop)
        queries, d_out = q[:, :, r], compute(grad_out[:, :, r])
        # A row that sees nothing has lse = -inf; +inf instead makes all its weights exp(-inf) = 0.
        row_lse = lse[:, :, r].masked_fill(lse[:, :, r] == -torch.inf, torch.inf)
        delta = (d_out * compute(out[:, :, r])).sum(-1, keepdim=True)  # rowsum(dO ∘ O), Dao 2022 eq. 4
        for cols, state in call.rule.tiles(rows):
            c = slice(cols.start, cols.stop)
            keys, values = k[:, :, c], v[:, :, c]
            weights = raw_scores(queries, keys, call.rule.scale, row_lse)
            allowed = call.rule.allowed(rows, cols, q.device) if state is State.MIXED else None
            if allowed is not None:
                weights.masked_fill_(~allowed, -torch.inf)
            weights.exp_()
            if not call.values_finite:
                keys, values = keys.nan_to_num(0.0, 0.0, 0.0), values.nan_to_num(0.0, 0.0, 0.0)
            dv[:, :, c] += grouped_t(drop(weights, rows, cols), d_out, h_kv)
            d_weights = drop(grouped(d_out, values.mT), rows, cols)
            d_scores = d_weights.sub_(delta).mul_(weights).mul_(call.rule.scale)
            if allowed is not None:
                d_scores.masked_fill_(~allowed, 0.0)  # 0 · NaN of a poisoned row must not spread
            dq[:, :, r] += grouped(d_scores, keys)
            dk[:, :, c] += grouped_t(d_scores, queries, h_kv)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _poison(allowed: Tensor | None, values: Tensor, scores: Tensor) -> Tensor:
    """Where the output must be NaN: [b, h, r, d_v], queries that may see a non-finite value."""
    seen = torch.ones_like(scores) if allowed is None else allowed.to(scores.dtype).expand_as(scores)
    return grouped(seen, (~torch.isfinite(values)).to(scores.dtype)) > 0


class _Dropout:
    """Drops weights with probability p and scales the rest by 1 / (1 - p), the same at every visit of a tile."""

    def __init__(self, call: Call) -> None:
        self.p, self.seed, self.m = call.dropout_p, call.seed, call.k.shape[2]
        self.generator = torch.Generator(call.q.device) if self.p > 0 else None

    def __call__(self, weights: Tensor, rows: Span, cols: Span) -> Tensor:
        if self.generator is None:
            return weights
        self.generator.manual_seed(self.seed + rows.start * self.m + cols.start)
        keep = torch.rand(weights.shape, generator=self.generator, device=weights.device) >= self.p
        return weights * keep / (1.0 - self.p)
