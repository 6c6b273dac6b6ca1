"""Gradients of the kernels: one `autograd.Function` for all that have a backward pass of their own.

`save_for_backward` saves every tensor that the backward pass reads: q, k, v, output, log-sum-exp, and the tensors of
mask and scores. PyTorch thus detects in-place changes between the two passes, and saved-tensor hooks
(`torch.autograd.graph.save_on_cpu`, gradient checkpointing) apply to all of them; the backward pass rebuilds the call
from what these hooks return.

The backward pass also reports δ_i = Σ_c dO_ic·O_ic of each head and query (`WithDelta`). It is the gradient with
respect to a factor ξ = 1 on the head's output at that query; its sum over queries is the head's importance (Michel et
al. 2019, 1905.10650, eq. 2). Every backward pass of attention computes it (Dao et al. 2022, 2205.14135, eq. 4): the
compiled kernel reports its own; for the others it is computed from dO and O.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from headwise.errors import KernelError
from headwise.kernels import operators
from headwise.kernels.call import Call, Result
from headwise.kernels.events import OnDelta
from headwise.kernels.joint import add_largest, joined
from headwise.kernels.kernel import Kernel
from headwise.masks import Grid, Mask
from headwise.masks.given import put_tensors, take_tensors
from headwise.rule import Rule, Terms, compute, own_dtypes

# What every error about a missing derivative of attention advises.
REMEDY = (
    "kernel='reference' has all derivatives outside of torch.compile, for a model within "
    "hw.use_kernel('reference'); it supports no dropout, and stores the n×m matrix"
)
ONCE = f"attention has no second derivative (torch.func.grad or jacrev, applied twice); {REMEDY}"
Run = Callable[..., tuple[Tensor | None, ...]]


def once(message: Callable[[Any], str]) -> Callable[[Run], Callable[..., Any]]:
    """Decorator for `backward(ctx, saved, grad_out)` of an `autograd.Function`, of whose outputs only the first one is
    differentiable, or others too if it sets `ctx.joint`: `backward` then takes their gradients after it. It runs
    without a graph, and a derivative of its results raises KernelError with the message."""
    # PyTorch's `once_differentiable` raises only if the incoming gradients require a derivative, and otherwise silently
    # omits terms of second derivatives.

    def decorate(backward: Run) -> Callable[..., Any]:
        @wraps(backward)
        def first(ctx: Any, *grads: Any) -> Any:
            saved = ctx.saved_tensors  # read only once: checkpointing allows no second read
            grads = grads if getattr(ctx, "joint", None) is not None else grads[:1]

            def run(*given: Tensor | None) -> tuple[Tensor | None, ...]:
                with torch.no_grad():
                    return backward(ctx, saved, *given[: len(grads)])

            if not torch.is_grad_enabled():
                return each_entry(run, "", *grads)
            return each_entry(run, message(ctx), *grads, *saved)

        return first

    return decorate


def each_entry(run: Run, message: str, *given: Tensor | None) -> tuple[Tensor | None, ...]:
    """`run(*given)`, gradients and other tensors, for each entry of a vmap, torch.func's or autograd's. message: of the
    error that a derivative of the results raises; "": `run` may be differentiated outside of vmap."""
    if any(map(_is_batched, given)):
        return _each_batched_gradient(run, message, given)
    if not message and torch._C._functorch.peek_interpreter_stack() is None:
        return run(*given)
    found: tuple[Tensor | None, ...] = PassBack.apply(run, message, *given)
    return found


def _is_batched(x: Tensor | None) -> bool:
    return x is not None and torch._C._functorch.is_legacy_batchedtensor(x)


class PassBack(torch.autograd.Function):
    """A backward pass. Its derivative, which torch.func requires it to have, raises KernelError: with `message`, or, if
    that is "", by an operator, as torch.compile records derivatives that may never be computed."""

    @staticmethod
    def forward(run: Run, message: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        _, ctx.message, *tensors = inputs
        if not ctx.message:
            ctx.save_for_backward(*tensors)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], run: Run, message: str, *tensors: Tensor | None) -> Any:
        found = [
            each_entry(run, message, *(entry(x, dim, at) for x, dim in zip(tensors, in_dims[2:], strict=True)))
            for at in range(info.batch_size)
        ]
        results = _stacked_each(found)
        return results, tuple(None if x is None else 0 for x in results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.message:
            raise KernelError(ctx.message)
        used = torch.stack([grad.sum() for grad in grads]).sum()  # else torch.compile fails in the forward pass
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(operators.second_derivative(x, used) if wanted else None for x, wanted in needed)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise KernelError(ctx.message or ONCE)


LEVELS = 64  # of the vmap before torch.func


def _each_batched_gradient(run: Run, message: str, given: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """`torch.autograd` still uses the vmap before torch.func, whose batched tensors no `autograd.Function` receives
    one by one: the innermost batch is removed, and put back around the results."""
    # For any other than the innermost vmap, a dimension of the given size, 0, is added.
    batched = [x for x in given if x is not None and _is_batched(x)]
    size = next(
        (level, count)
        for level in range(LEVELS - 1, 0, -1)
        if (count := max(len(torch._remove_batch_dim(x, level, 0, 0)) for x in batched))
    )
    # The innermost vmap of this thread forbids random numbers, such as dropout's.
    within = torch._C._vmapmode_increment_nesting() > 1  # not in autograd's threads for other devices
    for _ in range(1 + within):
        torch._C._vmapmode_decrement_nesting()
    try:
        parts = [
            torch._remove_batch_dim(x, *size, 0) if x is not None and _is_batched(x) else [x] * size[1] for x in given
        ]
        found = [each_entry(run, message, *entries) for entries in zip(*parts, strict=True)]
        results = _stacked_each(found)
    finally:
        if within:
            torch._C._vmapmode_increment_nesting()
    return tuple(None if x is None else torch._add_batch_dim(x, 0, size[0]) for x in results)


def entry(x: Any, dim: Any, at: int) -> Any:
    """An entry of a tensor, or of each tensor of a list, along the batched dimension; x itself if it has none."""
    if isinstance(x, list):
        return x if dim is None else [entry(part, of, at) for part, of in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, at)


def _stacked_each(found: Sequence[tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    return tuple(None if parts[0] is None else stacked(parts) for parts in zip(*found, strict=True))


def stacked(parts: Sequence[Any]) -> Tensor:
    """Like torch.stack, which fails for float16 on a CPU under autocast, in vmap even if autocast is disabled."""
    whole: Tensor = parts[0].new_empty(len(parts), *parts[0].shape)
    for at, part in enumerate(parts):
        whole[at] = part
    return whole


def run_kernel(kernel: Kernel, call: Call) -> Result:
    """`kernel.run(call)`, differentiable in q, k, v and the scores' tensors if autograd records it."""
    if kernel.by_autograd or not learns(call):
        return kernel.run(call)
    if torch._C._is_tracing():  # it would record the result as a constant
        raise KernelError(
            "torch.jit.trace cannot record this call with gradients, as it has measures (or is watched), or a mask of "
            "a class that is not registered: trace it under torch.no_grad(), or without them"
        )
    call = replace(call, keys=call.k, values=call.v)  # the backward pass reads floats
    terms = _terms(call)
    numbers = terms.soft_cap, terms.split
    out, lse, found, joint, *values = _Attend.apply(
        kernel, call, numbers, call.q, call.k, call.v, terms.relative, terms.sinks, *terms.biases
    )
    return Result(out, lse, {**found, **dict(zip(joint, values, strict=True))})


def learns(call: Call) -> bool:
    """Whether autograd records this call."""
    if not torch.is_grad_enabled():
        return False
    if any(isinstance(x, Tensor) and x.requires_grad for x in (call.q, call.keys, call.values)):
        return True
    if not call.rule.scores:
        return False
    terms = _terms(call)
    return any(x is not None and x.requires_grad for x in (terms.relative, terms.sinks, *terms.biases))


@dataclass(frozen=True)
class SavedRule:
    """A rule without its tensors."""

    mask: Mask
    scale: float
    grid: Grid
    soft_cap: float
    split: int
    plain: Rule | None  # the rule itself, if it has no tensors

    @classmethod
    def of(cls, rule: Rule, soft_cap: float, split: int) -> tuple["SavedRule", list[Tensor]]:
        """Return the saved rule and its mask's tensors; the caller saves these and the tensors of the terms."""
        value = rule.mask.value
        mask, held = (rule.mask, []) if value else take_tensors(rule.mask)
        plain = rule if value and not rule.scores else None
        return cls(mask, rule.scale, rule.grid, soft_cap, split, plain), held

    def rule(
        self, relative: Tensor | None, sinks: Tensor | None, biases: Sequence[Tensor], held: Sequence[Tensor]
    ) -> Rule:
        """Rebuild the rule from its terms and its mask's tensors."""
        if self.plain is not None:
            return self.plain
        terms = Terms(self.grid.n, self.soft_cap, relative, tuple(biases), sinks, self.split)
        return Rule.of_terms(put_tensors(self.mask, held), self.scale, self.grid, terms)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Kernel, call: Call, numbers: tuple[float, int], q: Tensor, k: Tensor, v: Tensor,
        relative: Tensor | None, sinks: Tensor | None, *biases: Tensor,
    ) -> tuple[Any, ...]:  # fmt: skip
        result = kernel.run(call)
        ctx.rule, held = SavedRule.of(call.rule, *numbers)
        ctx.joint, values = None, []
        if call.differentiable and getattr(kernel, "adds_rows", False):
            ctx.joint = [statistic for statistic in result.statistics if statistic.slope is not None]
            values = [result.statistics[statistic] for statistic in ctx.joint]
            ctx.set_materialize_grads(False)
        else:
            ctx.mark_non_differentiable(result.lse)
        ctx.save_for_backward(q, k, v, result.out, result.lse, *values, relative, sinks, *biases, *held)
        ctx.kernel, ctx.biases = kernel, len(biases)
        ctx.dropout_p, ctx.seed = call.dropout_p, call.seed
        ctx.on_delta, ctx.values_finite = call.on_delta, call.__dict__.get("values_finite")
        return result.out, result.lse, result.statistics, ctx.joint or (), *values

    @staticmethod
    @once(
        lambda ctx: (
            f"kernel={ctx.kernel.name!r} has no second derivative (create_graph=True, double backward); {REMEDY}"
        )
    )
    def backward(ctx: Any, saved: tuple[Any, ...], grad_out: Tensor | None, *more: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *rest = saved
        values = dict(zip(ctx.joint or (), rest, strict=False))
        relative, sinks, *rest = rest[len(values) :]
        rule = ctx.rule.rule(relative, sinks, rest[: ctx.biases], rest[ctx.biases :])
        call = Call(q, k, v, rule, ctx.dropout_p, ctx.seed, on_delta=ctx.on_delta)
        if ctx.values_finite is not None:
            call.__dict__["values_finite"] = ctx.values_finite  # computed in the forward pass
        learned, wanted = (relative, sinks, *rest[: ctx.biases]), ctx.needs_input_grad[6:]
        with own_dtypes(q):
            rows, largest = None, None
            if more:
                of_lse, _, _, *grads = more
                rows, largest = joined(call, lse, values, grads, of_lse)
            if grad_out is None:
                grad_out = torch.zeros_like(out)
            added = () if rows is None else (rows,)
            found = ctx.kernel.gradients(call, out, lse, grad_out, wanted, *added)
            if largest is not None:
                found = add_largest(call, lse, largest, wanted, found)
        return None, None, None, *complete(found, learned, wanted)


def complete(
    found: Iterable[Tensor | None], learned: Iterable[Tensor | None], wanted: Iterable[bool]
) -> list[Tensor | None]:
    """Gradients of q, k, v and `learned`: zeros for wanted ones without any, as of a table without entries."""
    dq, dk, dv, *others = found
    each = zip(others, learned, wanted, strict=True)
    return [dq, dk, dv, *(torch.zeros_like(x) if d is None and want and x is not None else d for d, x, want in each)]


def _terms(call: Call) -> Terms:
    return call.rule.terms(compute(call.q[..., :0, :]))


class WithDelta(torch.autograd.Function):
    """The identity, whose backward pass calls `on_delta`; its input is saved, so that checkpointing can drop it."""

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

        (grad,) = each_entry(report, "", grad_out)
        return grad, None
