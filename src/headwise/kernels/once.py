"""Backward passes without a derivative, which raise an error if one is computed."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from headwise.errors import KernelError
from headwise.kernels.entries import each_entry

# What every error about a missing derivative of attention advises.
REMEDY = (
    "kernel='reference' has all derivatives outside of torch.compile, for a model within "
    "hw.use_kernel('reference'); it supports no dropout, and stores the n×m matrix"
)
Backward = Callable[..., tuple[Tensor | None, ...]]


def once(message: Callable[[Any], str]) -> Callable[[Backward], Callable[..., Any]]:
    """Decorator for `backward(ctx, saved, *grads)` of an `autograd.Function`, where `saved` are the saved tensors.

    The function runs without a graph, and for each entry of batched gradients. With create_graph=True its results
    depend on all its inputs, and computing a derivative of them raises KernelError. PyTorch's `once_differentiable`
    raises only if the incoming gradients require a derivative, and otherwise silently omits terms of second
    derivatives.

    Args:
        message: returns the error message for the context.
    """

    def decorate(backward: Backward) -> Callable[..., Any]:
        @wraps(backward)
        def first(ctx: Any, *grads: Tensor) -> Any:
            saved = ctx.saved_tensors  # read only once: checkpointing allows no second read

            def run(*grads: Tensor) -> tuple[Tensor | None, ...]:
                with torch.no_grad():
                    found = backward(ctx, saved, *grads)
                if not torch.is_grad_enabled():
                    return found
                refused: tuple[Tensor | None, ...] = _Refused.apply(message(ctx), len(found), *found, *saved, *grads)
                return refused

            return each_entry(run, *grads)

        return first

    return decorate


class _Refused(torch.autograd.Function):
    """Returns the first `count` tensors, as a function of all of them whose derivative raises."""

    @staticmethod
    def forward(ctx: Any, message: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.message = message
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise KernelError(ctx.message)
