"""δ_i = Σ_c dO_ic·O_ic for each head and query, reported by the backward pass in addition to the gradients.

δ is the gradient with respect to a factor ξ = 1 on the head's output at that query; its sum over queries is the head's
importance (Michel et al. 2019, 1905.10650, eq. 2). Every backward pass of attention computes it (Dao et al. 2022,
2205.14135, eq. 4): the compiled kernel reports its own; for the others it is computed from dO and O.
"""

from typing import Any, cast

import torch
from torch import Tensor

from headwise.events import OnDelta
from headwise.kernels.entries import each_entry


def with_delta(out: Tensor, on_delta: OnDelta) -> Tensor:
    """Return `out` with a backward pass that calls `on_delta`."""
    return cast(Tensor, _WithDelta.apply(out, on_delta))


class _WithDelta(torch.autograd.Function):
    """The identity. `save_for_backward` saves its input, so that checkpointing can drop it."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, on_delta: OnDelta) -> Tensor:
        ctx.save_for_backward(out)
        ctx.on_delta = on_delta
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, None]:
        (out,) = ctx.saved_tensors
        wide = torch.promote_types(out.dtype, torch.float32)

        def report(grad_out: Tensor) -> tuple[Tensor]:
            ctx.on_delta((grad_out.detach().to(wide) * out.detach().to(wide)).sum(-1))
            return (grad_out,)

        (grad,) = each_entry(report, grad_out)
        return grad, None
