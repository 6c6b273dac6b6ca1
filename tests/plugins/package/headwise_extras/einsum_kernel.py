"""A kernel: the formula by einsum, with the matrix stored."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.kernels import register
from headwise.kernels.call import Call, Result
from headwise.kernels.reads import TileReads


class Einsum:
    """softmax(scale · q kᵀ + mask) v for calls without scores and dropout; differentiated by autograd."""

    name = "einsum"
    gives_delta = False
    by_autograd = True
    reads = TileReads()

    def refuse(self, call: Call) -> str | None:
        """What the formula above leaves out."""
        if call.rule.scores:
            return "it has no scores"
        if call.dropout_p > 0:
            return "it does not support dropout"
        return "it does not compute statistics" if call.statistics else None

    def run(self, call: Call) -> Result:
        """The output and the log-sum-exp."""
        grid = call.rule.grid
        wide = torch.promote_types(call.q.dtype, torch.float32)
        q = call.q.to(wide)
        k, v = (x.to(wide).repeat_interleave(grid.h // x.shape[1], 1) for x in (call.k, call.v))
        allowed = call.rule.mask.to_dense(grid.n, grid.m, batch=grid.b, heads=grid.h).to(k.device)
        scores = call.rule.scale * torch.einsum("bhnd,bhmd->bhnm", q, k)
        scores = scores.masked_fill(~allowed, -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
        hidden = ~allowed.any(-2).expand(v.shape[:3])  # a key that nobody sees has no say, even if its value is NaN
        out = torch.einsum("bhnm,bhme->bhne", weights, v.masked_fill(hidden[..., None], 0.0))
        return Result(out.to(call.q.dtype), lse.detach())

    def gradients(self, call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, wanted: Sequence[bool]) -> Any:
        """By autograd, of the call made again."""
        inputs = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
        again = Call(*inputs, call.rule)
        with torch.enable_grad():
            found = torch.autograd.grad(self.run(again).out, inputs, grad_out)
        return [*found, None, None]


register(Einsum())
