"""The operator as an `autograd.Function` for torch.func transforms, which do not support `register_autograd`."""

from typing import Any

import torch
from torch import Tensor

from headwise.errors import KernelError
from headwise.kernels.once import REMEDY
from headwise.kernels.operator import ONCE, placed
from headwise.operators import attend, attend_backward, second_derivative


class Attend(torch.autograd.Function):
    """Output, log-sum-exp and the index of the kernel that ran.

    `count` and `numbers` are the operator's arguments that are not tensors; `given` are relative, sinks, the seed, and
    the operator's list of tensors.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, numbers: tuple[Any, ...], *given: Any) -> Any:
        return attend(given[3:], count, *given[:3], *numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.count, (*ctx.numbers, _), *given = inputs  # all numbers but the kernel
        ctx.save_for_backward(*output, *given)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *_: Tensor) -> tuple[Any, ...]:
        _, _, of_relative, of_sinks, _, *of_tensors = ctx.needs_input_grad
        wanted = of_relative, of_sinks, *of_tensors[3 : 3 + ctx.count]
        found = _Backward.apply(ctx.count, tuple(ctx.numbers), wanted, grad_out, *ctx.saved_tensors)
        d_tensors, d_relative, d_sinks = placed(found, wanted, len(of_tensors))
        return None, None, d_relative, d_sinks, None, *d_tensors

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise KernelError(
            f"attention has no derivative in forward mode (torch.func.jvp, jacfwd, hessian; forward_ad); use reverse "
            f"mode (torch.func.grad, vjp, jacrev) for first derivatives; {REMEDY}"
        )


class _Backward(torch.autograd.Function):
    """The backward pass. torch.func requires it to be differentiable; using its derivative raises KernelError."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, numbers: tuple[Any, ...], wanted: tuple[bool, ...], grad_out: Tensor, *kept: Any) -> Any:
        out, lse, ran, *given = kept
        return tuple(attend_backward(given[3:], count, *given[:3], *numbers, out, lse, ran, grad_out, list(wanted)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        used = torch.stack([grad.sum() for grad in grads]).sum()  # else torch.compile fails in the forward pass
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(second_derivative(x, used) if wanted else None for x, wanted in needed)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise KernelError(ONCE)
