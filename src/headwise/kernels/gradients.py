"""Gradients of the kernels: one `autograd.Function` for all that have a backward pass of their own.

`save_for_backward` saves every tensor that the backward pass reads: q, k, v, output, log-sum-exp, and the tensors of
mask and scores. PyTorch thus detects in-place changes between the two passes, and saved-tensor hooks
(`torch.autograd.graph.save_on_cpu`, gradient checkpointing) apply to all of them; the backward pass rebuilds the call
from what these hooks return.

The backward pass also reports δ_i = Σ_c dO_ic·O_ic of each head and query (`with_delta`). It is the gradient with
respect to a factor ξ = 1 on the head's output at that query; its sum over queries is the head's importance (Michel et
al. 2019, 1905.10650, eq. 2). Every backward pass of attention computes it (Dao et al. 2022, 2205.14135, eq. 4): the
compiled kernel reports its own; for the others it is computed from dO and O.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor

from headwise.errors import KernelError
from headwise.events import OnDelta
from headwise.kernels.call import Call, Result
from headwise.kernels.kernel import Kernel
from headwise.masks import Grid, Mask
from headwise.masks.given import put_tensors, take_tensors
from headwise.rule import Rule, Terms, compute, own_dtypes
from headwise.stats import Statistic

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


LEVELS = 64  # of the vmap before torch.func
Run = Callable[..., tuple[Tensor | None, ...]]


def each_entry(run: Run, *tensors: Tensor) -> tuple[Tensor | None, ...]:
    """`run(*tensors)`; for each entry of the batch within torch.func.vmap, and for gradients that
    `torch.autograd.grad(is_grads_batched=True)` has batched, as `torch.autograd.functional.jacobian(vectorize=True)`
    does."""
    if any(map(torch._C._functorch.is_legacy_batchedtensor, tensors)):
        return _each_batched_gradient(run, tensors)
    if torch._C._functorch.peek_interpreter_stack() is None:
        return run(*tensors)
    found: tuple[Tensor | None, ...] = _EachEntry.apply(run, *tensors)
    return found


def _each_batched_gradient(run: Run, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """`torch.autograd` still uses the vmap before torch.func, whose batched tensors no `autograd.Function` receives
    one by one: the innermost batch is removed, and put back around the results."""
    batched = [torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors]
    level = max(_level(x) for x, b in zip(tensors, batched, strict=True) if b)
    whole = [torch._remove_batch_dim(x, level, 1, 0) if b else x for x, b in zip(tensors, batched, strict=True)]
    size = max(len(x) for x, b in zip(whole, batched, strict=True) if b)
    entries = ([x[at] if b else x for x, b in zip(whole, batched, strict=True)] for at in range(size))
    with _outside_vmap():
        results = _stacked_each([each_entry(run, *entry) for entry in entries])
    return tuple(None if x is None else torch._add_batch_dim(x, 0, level) for x in results)


def _level(x: Tensor) -> int:
    """The innermost vmap that has batched x: for any other, a dimension of the given size, 0, is added to x."""
    return next(level for level in range(LEVELS - 1, 0, -1) if len(torch._remove_batch_dim(x, level, 0, 0)))


@contextmanager
def _outside_vmap() -> Iterator[None]:
    """Leaves the innermost vmap of this thread, which forbids random numbers, such as dropout's."""
    within = torch._C._vmapmode_increment_nesting() > 1  # not in autograd's threads for other devices
    for _ in range(1 + within):
        torch._C._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        if within:
            torch._C._vmapmode_increment_nesting()


class _EachEntry(torch.autograd.Function):
    @staticmethod
    def forward(run: Run, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Nothing is saved: only vmap runs it, and records what `run` does."""

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], run: Run, *tensors: Tensor) -> Any:
        def entry(at: int) -> list[Tensor]:
            return [x if dim is None else x.select(dim, at) for x, dim in zip(tensors, in_dims[1:], strict=True)]

        results = _stacked_each([each_entry(run, *entry(at)) for at in range(info.batch_size)])
        return results, tuple(None if x is None else 0 for x in results)


def _stacked_each(found: Sequence[tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    return tuple(None if parts[0] is None else stacked(parts) for parts in zip(*found, strict=True))


def stacked(parts: Sequence[Any]) -> Tensor:
    """Like torch.stack, which fails for float16 on a CPU under autocast, in vmap even if autocast is disabled."""
    whole: Tensor = parts[0].new_empty(len(parts), *parts[0].shape)
    for at, part in enumerate(parts):
        whole[at] = part
    return whole


def run_kernel(kernel: Kernel, call: Call) -> Result:
    """`kernel.run(call)` for a call that it does not refuse; differentiable if autograd records the call."""
    return _differentiable(kernel, call) if not kernel.by_autograd and learns(call) else kernel.run(call)


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


def _differentiable(kernel: Kernel, call: Call) -> Result:
    """`kernel.run(call)`, whose output is differentiable in q, k, v and the tensors of the scores."""
    if torch._C._is_tracing():  # it would record the result as a constant
        raise KernelError(
            "torch.jit.trace cannot record this call with gradients, as it has measures (or is watched), or a mask of "
            "a class that is not registered: trace it under torch.no_grad(), or without them"
        )
    call = replace(call, keys=call.k, values=call.v)  # the backward pass reads floats
    terms = _terms(call)
    statistics: dict[Statistic, Tensor] = {}
    out, lse = _Attend.apply(
        kernel, call, (terms.soft_cap, terms.split), statistics, call.q, call.k, call.v, terms.relative, terms.sinks,
        *terms.biases,
    )  # fmt: skip
    return Result(out, lse, statistics)


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
        ctx: Any, kernel: Kernel, call: Call, numbers: tuple[float, int], statistics: dict[Statistic, Tensor],
        q: Tensor, k: Tensor, v: Tensor, relative: Tensor | None, sinks: Tensor | None, *biases: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        result = kernel.run(call)
        statistics.update(result.statistics)
        ctx.rule, held = SavedRule.of(call.rule, *numbers)
        ctx.save_for_backward(q, k, v, result.out, result.lse, relative, sinks, *biases, *held)
        ctx.kernel, ctx.biases = kernel, len(biases)
        ctx.dropout_p, ctx.seed = call.dropout_p, call.seed
        ctx.on_delta, ctx.values_finite = call.on_delta, call.__dict__.get("values_finite")
        ctx.mark_non_differentiable(result.lse)
        return result.out, result.lse

    @staticmethod
    @once(
        lambda ctx: (
            f"kernel={ctx.kernel.name!r} has no second derivative (create_graph=True, double backward); {REMEDY}"
        )
    )
    def backward(ctx: Any, saved: tuple[Any, ...], grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, relative, sinks, *rest = saved
        rule = ctx.rule.rule(relative, sinks, rest[: ctx.biases], rest[ctx.biases :])
        call = Call(q, k, v, rule, ctx.dropout_p, ctx.seed, on_delta=ctx.on_delta)
        if ctx.values_finite is not None:
            call.__dict__["values_finite"] = ctx.values_finite  # computed in the forward pass
        learned, wanted = (relative, sinks, *rest[: ctx.biases]), ctx.needs_input_grad[7:]
        with own_dtypes(q):
            found = ctx.kernel.gradients(call, out, lse, grad_out, wanted)
        return None, None, None, None, *complete(found, learned, wanted)


def complete(
    found: Iterable[Tensor | None], learned: Iterable[Tensor | None], wanted: Iterable[bool]
) -> list[Tensor | None]:
    """The gradients of q, k, v and `learned`, with zeros for those wanted that the kernel does not have: a table of
    distances without entries is not passed to it."""
    dq, dk, dv, *others = found
    each = zip(others, learned, wanted, strict=True)
    return [dq, dk, dv, *(torch.zeros_like(x) if d is None and want and x is not None else d for d, x, want in each)]


def _terms(call: Call) -> Terms:
    return call.rule.terms(compute(call.q[..., :0, :]))


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
