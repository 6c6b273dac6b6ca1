"""Backward passes without a derivative, and the error that is raised where one is computed."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from headwise.errors import KernelError

Backward = Callable[..., tuple[Tensor | None, ...]]


def once(words: Callable[[Any], str]) -> Callable[[Backward], Callable[..., Any]]:
    """Decorates `backward(ctx, saved, *grads)` of an `autograd.Function`, `saved` being the saved tensors.

    It runs without a graph. With create_graph=True its results depend on all of its inputs, and KernelError is raised
    when a derivative of them is computed. PyTorch's `once_differentiable` raises only where the incoming gradients
    require one, and otherwise silently omits terms of second derivatives.

    Args:
        words: the message of the error, as a function of the context.
    """

    def decorate(backward: Backward) -> Callable[..., Any]:
        @wraps(backward)
        def first(ctx: Any, *grads: Tensor) -> Any:
            saved = ctx.saved_tensors  # read once: checkpointing allows a single read
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
