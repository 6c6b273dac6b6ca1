"""The truth: the formula in float64, with the whole matrix. For small sizes and for comparing with."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headwise.kernels.call import Call, Result
from headwise.kernels.torch_blocks import TorchBlocks


class Reference:
    """softmax(cap(scale · q kᵀ) + biases + mask) v, line by line as it is written (Vaswani et al. 2017, eq. 1)."""

    name = "reference"
    tells = False
    by_autograd = True

    def refuse(self, call: Call) -> str | None:
        """Only dropout is refused: this kernel is for comparing, and dropout is random."""
        return "it has no dropout" if call.dropout_p > 0 else None

    def run(self, call: Call) -> Result:
        weights, lse, allowed = dense_weights(call)
        group = call.q.shape[1] // call.v.shape[1]
        v = call.v.double().repeat_interleave(group, dim=1)  # [b, h, m, d_v]
        # A key that a query may not see has no say, even if its value is NaN.
        clean = v.nan_to_num(0.0, 0.0, 0.0)
        poisoned = torch.matmul(allowed.double(), (~torch.isfinite(v)).double()) > 0
        out = torch.matmul(weights, clean).masked_fill(poisoned, torch.nan)
        return Result(out.to(call.q.dtype), lse.to(torch.promote_types(call.q.dtype, torch.float32)))

    def gradients(
        self, call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """In blocks, in float64."""
        exact = replace(call, q=call.q.double(), keys=call.k.double(), values=call.v.double())
        result = TorchBlocks().run(exact)
        found = TorchBlocks().gradients(exact, result.out, result.lse, grad_out.double(), wanted)
        terms = call.rule.terms(lse[..., :0])
        given = (call.q, call.k, call.v, terms.relative, terms.sinks, *terms.biases)
        return [x if x is None or like is None else x.to(like.dtype) for x, like in zip(found, given, strict=True)]


def dense_weights(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [b, h, n, m], log-sum-exp [b, h, n] (float64; 0 and −inf in rows that see nothing), and what
    is allowed, [b or 1, h or 1, n, m]. With a learned sink, weights are the softmax over the keys and one key more."""
    grid = call.rule.grid
    q, k = call.q.double(), call.k.double()
    k = k.repeat_interleave(grid.h // k.shape[1], dim=1)
    i = torch.arange(grid.n, device=q.device)
    j = torch.arange(grid.m, device=q.device)
    allowed = call.rule.mask.allowed(i, j, grid)
    terms = call.rule.terms(q)
    scores = torch.matmul(q, k.mT) * call.rule.scale
    if terms.soft_cap > 0.0:
        scores = terms.soft_cap * torch.tanh(scores / terms.soft_cap)
    for term in terms.added_at(i, j):
        scores = scores + term
    scores = scores.masked_fill(~allowed, -torch.inf)
    dark = (scores == -torch.inf).all(-1)  # rows that see nothing
    safe = scores.masked_fill(dark[..., None], 0.0)
    if terms.sinks is not None:
        safe = torch.cat((safe, terms.sinks[:, None, None].expand(grid.b, -1, grid.n, 1)), -1)
    weights = safe.softmax(-1)[..., : grid.m].masked_fill(~allowed | dark[..., None], 0.0)
    lse = safe.logsumexp(-1).masked_fill(dark, -torch.inf)
    return weights, lse.detach(), allowed
