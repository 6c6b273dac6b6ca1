"""The operator as an `autograd.Function` for torch.func transforms, which do not support `register_autograd`."""

from typing import Any

import torch
from torch import Tensor

from headwise.errors import KernelError
from headwise.kernels.operator import ONCE, attend, attend_backward, second_derivative, spread


def arguments(count: int, plain: tuple[Any, ...], tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operators' arguments except the last, in their order.

    Args:
        count: number of biases.
        plain: the arguments that are not tensors: the mask's numbers, scale, soft cap, dropout, `learned`, the split.
        tensors: q, k, v, relative, sinks, the seed, the biases, and the mask's tensors.
    """
    q, k, v, relative, sinks, seed, *rest = tensors
    mask, scale, soft_cap, dropout_p, learned, split = plain
    biases, held = list(rest[:count]), list(rest[count:])
    return q, k, v, relative, sinks, biases, mask, held, scale, soft_cap, dropout_p, seed, learned, split


class Attend(torch.autograd.Function):
    """Output, log-sum-exp and the index of the kernel that ran; `plain` ends with the name of the kernel."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, plain: tuple[Any, ...], *tensors: Any) -> Any:
        return attend(*arguments(count, plain[:-1], tensors), plain[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.count, plain, *tensors = inputs
        ctx.plain = plain[:-1]
        ctx.save_for_backward(*output, *tensors)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *_: Tensor) -> tuple[Any, ...]:
        of_relative, of_sinks, _, *rest = ctx.needs_input_grad[5:]
        wanted = (of_relative, of_sinks, *rest[: ctx.count])
        dq, dk, dv, *found = _Backward.apply(ctx.count, ctx.plain, wanted, grad_out, *ctx.saved_tensors)
        d_relative, d_sinks, *d_biases = spread(found, wanted)
        d_held = [None] * (len(rest) - ctx.count)
        return None, None, dq, dk, dv, d_relative, d_sinks, None, *d_biases, *d_held

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise KernelError(
            "attention has no derivative in forward mode (torch.func.jvp, jacfwd, hessian; forward_ad); "
            "use reverse mode: torch.func.grad, vjp, jacrev"
        )


class _Backward(torch.autograd.Function):
    """The backward pass. torch.func requires it to be differentiable; using its derivative raises KernelError."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, plain: tuple[Any, ...], wanted: tuple[bool, ...], grad_out: Tensor, *kept: Any) -> Any:
        out, lse, ran, *tensors = kept
        given = arguments(count, plain, tuple(tensors))
        return tuple(attend_backward(*given, out, lse, ran, grad_out, list(wanted)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        used = torch.stack([grad.sum() for grad in grads]).sum()  # else torch.compile fails in the forward pass
        of_tensors = zip(ctx.saved_tensors, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(second_derivative(x, used) if wanted else None for x, wanted in of_tensors)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise KernelError(ONCE)
