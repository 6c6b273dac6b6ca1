"""The operator for torch.func.grad and its kin, which know none that brings a backward pass of its own."""

from typing import Any

import torch
from torch import Tensor

from headwise.errors import KernelError
from headwise.kernels.operator import ONCE, attend, attend_backward, second_derivative, spread


def arguments(count: int, plain: tuple[Any, ...], tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """All but the last of what the operators are given, in their order.

    Args:
        count: of biases.
        plain: what is no tensor: the mask's numbers, scale, soft cap, dropout, and whether something is learned.
        tensors: q, k, v, relative, sinks, the seed, the biases, and those of the mask.
    """
    q, k, v, relative, sinks, seed, *rest = tensors
    mask, scale, soft_cap, dropout_p, learned = plain
    biases, held = list(rest[:count]), list(rest[count:])
    return q, k, v, relative, sinks, biases, mask, held, scale, soft_cap, dropout_p, seed, learned


class Attend(torch.autograd.Function):
    """Output, log-sum-exp and which kernel it was, of `arguments` and a kernel's name behind what is plain."""

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
            "torch.func.grad, vjp and jacrev have it in reverse mode"
        )


class _Backward(torch.autograd.Function):
    """The backward pass, which torch.func asks to be differentiable: that it is not is said where that is used."""

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
        used = torch.stack([grad.sum() for grad in grads]).sum()  # else torch.compile would refuse in the forward pass
        of_tensors = zip(ctx.saved_tensors, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(second_derivative(x, used) if wanted else None for x, wanted in of_tensors)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise KernelError(ONCE)
