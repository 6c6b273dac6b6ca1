"""δ_i = Σ_c dO_ic·O_ic of each head and query, reported by the backward pass beside the gradients.

δ is the gradient of a factor ξ = 1 on the head's output at that query, and so, summed over queries, how much the loss
would lose of it (Michel et al. 2019, 1905.10650, eq. 2). Every backward pass of attention needs it anyway (Dao et al.
2022, 2205.14135, eq. 4): the compiled kernel reports its own, for the others it is computed again from dO and O.
"""

from typing import Any, cast

import torch
from torch import Tensor

from headwise.events import OnDelta


def with_delta(out: Tensor, on_delta: OnDelta) -> Tensor:
    """`out`, whose backward pass calls `on_delta`."""
    return cast(Tensor, _WithDelta.apply(out, on_delta))


class _WithDelta(torch.autograd.Function):
    """The identity. What is saved is saved as PyTorch wants it, so that checkpointing can leave it out."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, on_delta: OnDelta) -> Tensor:
        ctx.save_for_backward(out)
        ctx.on_delta = on_delta
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        wide = torch.promote_types(out.dtype, torch.float32)
        ctx.on_delta((grad_out.detach().to(wide) * out.detach().to(wide)).sum(-1))
        return grad_out, None
