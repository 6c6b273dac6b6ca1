"""Backward passes that have no derivative of their own, and an error that says so where one is wanted."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from headwise.errors import KernelError

Backward = Callable[..., tuple[Tensor | None, ...]]


def once(words: Callable[[Any], str]) -> Callable[[Backward], Callable[..., Any]]:
    """Decorates `backward(ctx, saved, *grads)` of an `autograd.Function`, `saved` being the saved tensors.

    It runs without a graph. With create_graph=True what it returns depends on all that it was given, and KernelError is
    raised when a derivative of it is computed. PyTorch's `once_differentiable` would raise only where the incoming
    gradients need one, and otherwise leave terms out of second derivatives in silence.

    Args:
        words: those of the error, of the context.
    """

    def decorate(backward: Backward) -> Callable[..., Any]:
        @wraps(backward)
        def first(ctx: Any, *grads: Tensor) -> Any:
            saved = ctx.saved_tensors  # once: checkpointing gives them a single time
            with torch.no_grad():
                found = backward(ctx, saved, *grads)
            if not torch.is_grad_enabled():
                return found
            return _Refused.apply(words(ctx), len(found), *found, *saved, *grads)

        return first

    return decorate


class _Refused(torch.autograd.Function):
    """The first `count` of the tensors, as a function of all of them whose derivative raises."""

    @staticmethod
    def forward(ctx: Any, words: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.words = words
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise KernelError(ctx.words)
