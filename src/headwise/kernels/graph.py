"""Attention as one operator of the graph where PyTorch records operations instead of running them.

This holds for torch.compile, torch.export, make_fx and torch.jit.trace, which cannot trace compiled code, and for
torch.func, whose tensors have no memory of their own, and forward-mode derivatives.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from headwise.kernels import KERNELS, named, run
from headwise.kernels.call import Call
from headwise.kernels.derivative import Attend
from headwise.kernels.tracing import traced
from headwise.kernels.written import write
from headwise.masks import Dense, Everything, Span
from headwise.operators import attend
from headwise.rule import Rule, compute


def in_graph() -> bool:
    """Whether a graph is being recorded now. It is checked in every call, and takes less than a microsecond."""
    return recording() or has_derivatives()


def recording() -> bool:
    """Whether operations are recorded now, by torch.compile, torch.export, make_fx or torch.jit.trace."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and traced()


def has_derivatives() -> bool:
    """Whether tensors may be wrapped by torch.func or have a tangent."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def in_transform() -> bool:
    """Whether a function runs within torch.func (grad, vmap, …) or forward-mode derivatives, uncompiled."""
    return has_derivatives() and not recording()


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Within it, operations are not those of the torch.func transforms that run: results are plain tensors, if what
    they are made of is `plain`."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield


def plain(x: Tensor) -> Tensor:
    """The numbers of a tensor that torch.func has wrapped, unless vmap has batched it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x.detach()


def listed(x: Tensor) -> list[Any]:
    """x.tolist() of a vector, within torch.func too, where PyTorch 2.9 raises."""
    return [one.item() for one in x] if torch._C._functorch.is_functorch_wrapped_tensor(x) else x.tolist()


def can_record(rule: Rule) -> bool:
    """Whether the rule can be passed to an operator: its mask class is registered, and it is not a rectangle's."""
    return rule.grid.at_end and write(rule.mask) is not None


def recordable(rule: Rule, device: torch.device) -> Rule:
    """The rule; within torch.func, with its mask as a boolean tensor if its class is not registered."""
    if torch.compiler.is_dynamo_compiling() or not has_derivatives() or not rule.grid.at_end or can_record(rule):
        return rule
    rule.mask.check(rule.grid)
    whole = rule.allowed(Span(0, rule.grid.n), Span(0, rule.grid.m), device)
    return replace(rule, mask=Dense(whole))


def is_batched(x: Tensor) -> bool:
    """Whether torch.func.vmap has batched x."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def has_no_numbers(x: Tensor) -> bool:
    """Whether x only has a shape, a dtype and a device: it is on "meta" or a FakeTensor."""
    return x.is_meta or isinstance(x, FakeTensor)


def shapes(q: Tensor, k: Tensor, v: Tensor, rule: Rule, dropout_p: float, kernel: str) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a call on tensors without data: also without data, differentiable. The mask has no
    effect."""
    return record(q, k, v, replace(rule, mask=Everything()), 0.0, kernel)


def record(q: Tensor, k: Tensor, v: Tensor, rule: Rule, dropout_p: float, kernel: str) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; invalid data of the mask raise when the graph runs."""
    written = write(rule.mask)
    assert written is not None  # the caller has checked can_record()
    mask, held = written
    if _by_operations(kernel):
        if not traced():  # its data are known
            rule.mask.check(rule.grid)
        (out, lse, _), _, _ = run(Call(q, k, v, rule, dropout_p), kernel)
        return out, lse
    terms = rule.terms(compute(q[..., :0, :]))
    learned = any(x is not None and x.requires_grad for x in (terms.relative, *terms.biases))
    # The seed stays a tensor: reading a number from it would break the graph.
    seed = torch.randint(1 << 40, (), device="cpu") if dropout_p > 0 else None
    numbers = mask, rule.scale, terms.soft_cap, dropout_p, learned, terms.split, kernel
    tensors = q, k, v, *terms.biases, *held
    out, lse, _ = _operator()(len(terms.biases), numbers, terms.relative, terms.sinks, seed, *tensors)
    return out, lse


def _by_operations(kernel: str) -> bool:
    """Whether derivatives may be taken of the operations of a kernel that consists of PyTorch's, all of them: those of
    the operator are only the first, in reverse mode. The compiler cannot see which kernel is in force."""
    if torch.compiler.is_dynamo_compiling() or not has_derivatives():
        return False
    chosen = KERNELS.get(named(kernel))
    return chosen is not None and chosen.by_autograd


def _operator() -> Callable[..., Any]:
    """The function that runs a call given as the arguments of `derivative.Attend`."""
    if not has_derivatives():
        return _attend
    if torch.compiler.is_dynamo_compiling():
        from headwise.kernels.dynamo import apply

        return apply
    return Attend.apply


def _attend(count: int, numbers: tuple[Any, ...], *given: Any) -> Any:
    return attend(given[3:], count, *given[:3], *numbers)
