"""A call of attention where PyTorch writes down what is done instead of doing it: as one operator of its graph.

That is so in torch.compile, torch.export, make_fx and torch.jit.trace, none of which can look into compiled code, and
in torch.func, whose tensors have no memory of their own.
"""

from typing import Any

import torch
from torch import Tensor

from headwise.errors import KernelError
from headwise.kernels.operator import attend, attend_backward, spread
from headwise.kernels.written import write
from headwise.rule import Rule, compute

_PROXY = torch._C._TorchDispatchModeKey.PROXY


def in_graph() -> bool:
    """Whether it is so now. Asked in every call, so it takes less than a microsecond."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    if torch._C._len_torch_dispatch_stack() > 0 and torch._C._get_dispatch_mode(_PROXY) is not None:
        return True
    return _within_func()


def _within_func() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def can_record(rule: Rule) -> bool:
    """Whether the rule can be given to an operator: not with a mask of somebody's own class, nor a rectangle's."""
    return rule.grid.at_end and write(rule.mask) is not None


def record(q: Tensor, k: Tensor, v: Tensor, rule: Rule, dropout_p: float, kernel: str) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; what is wrong with the mask's data is raised when the graph runs."""
    written = write(rule.mask)
    assert written is not None  # can_record() has been asked
    mask, held = written
    terms = rule.terms(compute(q[..., :0, :]))
    learned = any(x is not None and x.requires_grad for x in (terms.relative, *terms.biases))
    # The seed stays a tensor: a number would have to be read from it, which ends the graph.
    seed = torch.randint(1 << 40, ()) if dropout_p > 0 else None
    plain = mask, rule.scale, terms.soft_cap, dropout_p, learned
    tensors = q, k, v, terms.relative, terms.sinks, seed, *terms.biases, *held
    if not torch.compiler.is_compiling() and _within_func():
        out, lse, _ = _Attend.apply(len(terms.biases), (*plain, kernel), *tensors)
    else:
        out, lse, _ = attend(*_arguments(len(terms.biases), plain, tensors), kernel)
    return out, lse


def _arguments(count: int, plain: tuple[Any, ...], tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """All but the last of what the operators are given, in their order."""
    q, k, v, relative, sinks, seed, *rest = tensors
    mask, scale, soft_cap, dropout_p, learned = plain
    biases, held = list(rest[:count]), list(rest[count:])
    return q, k, v, relative, sinks, biases, mask, held, scale, soft_cap, dropout_p, seed, learned


class _Attend(torch.autograd.Function):
    """The operator for torch.func.grad and its kin, which know none that brings a backward pass of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, plain: tuple[Any, ...], *tensors: Any) -> Any:
        return attend(*_arguments(count, plain[:-1], tensors), plain[-1])

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


class _Backward(torch.autograd.Function):
    """The backward pass, which torch.func asks to be differentiable, and only says that it is not if it must be."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, plain: tuple[Any, ...], wanted: tuple[bool, ...], grad_out: Tensor, *kept: Any) -> Any:
        out, lse, ran, *tensors = kept
        given = _arguments(count, plain, tuple(tensors))
        return tuple(attend_backward(*given, out, lse, ran, grad_out, list(wanted)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """There is nothing to keep."""

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        raise KernelError("attention has no second derivative; torch.func.jacrev and grad can be taken of it once")
