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
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headwise.errors import KernelError
from headwise.kernels import operators
from headwise.kernels.call import Call, Declined, Result
from headwise.kernels.events import OnDelta
from headwise.kernels.joint import add_largest, joined
from headwise.kernels.kernel import Answer, Kernel
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


class Derivatives(Protocol):
    """The derivatives of a pass, from its tensors; None of a tensor that does not move, or of a result without any."""

    def pull(self, tensors: Any, needed: Sequence[bool], grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """In reverse mode: the gradients of the tensors that need one."""

    def push(self, tensors: Any, moves: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """In forward mode: the directions of the results."""


def once(beyond: Callable[[Any], "str | Derivatives"]) -> Callable[[Run], Callable[..., Any]]:
    """Decorator for `backward(ctx, saved, grad_out)` of an `autograd.Function`, of whose outputs only the first one is
    differentiable, or others too if it sets `ctx.joint`: `backward` then takes their gradients after it. It runs
    without a graph, and has the derivatives `beyond(ctx)`, or raises KernelError with it."""
    # PyTorch's `once_differentiable` raises only if the incoming gradients require a derivative, and otherwise silently
    # omits terms of second derivatives.

    def decorate(backward: Run) -> Callable[..., Any]:
        @wraps(backward)
        def first(ctx: Any, *grads: Any) -> Any:
            saved = ctx.saved_tensors  # read only once: checkpointing allows no second read
            grads = grads if getattr(ctx, "joint", None) is not None else grads[:1]

            def run(*given: Tensor | None) -> tuple[Tensor | None, ...]:
                if not torch.is_grad_enabled():  # the context takes microseconds
                    return backward(ctx, saved, *given[: len(grads)])
                with torch.no_grad():
                    return backward(ctx, saved, *given[: len(grads)])

            if not torch.is_grad_enabled() and forward_ad._current_level < 0:
                return each_entry(run, "", *grads)
            return each_entry(run, beyond(ctx), *grads, *saved)

        return first

    return decorate


def each_entry(run: Run, beyond: str | Derivatives, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """`run(*tensors)`, for each entry of a vmap, torch.func's or autograd's. beyond: its derivatives, or the message of
    the error that one raises; "": `run` may be differentiated outside of vmap."""
    if any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors):
        return _each_batched_gradient(run, beyond, tensors)
    moving = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    if not moving and (beyond == "" or not torch.is_grad_enabled()):
        return run(*tensors)
    found: tuple[Tensor | None, ...] = PassBack.apply(run, beyond, *tensors)
    return found


class PassBack(torch.autograd.Function):
    """A pass. Its derivatives are `beyond`, or raise KernelError: with that message, or, if it is "", by an operator,
    as torch.compile records derivatives that may never be computed."""

    @staticmethod
    def forward(run: Run, beyond: str | Derivatives, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        _, ctx.beyond, *tensors = inputs
        if isinstance(ctx.beyond, str):
            if not ctx.beyond:
                ctx.save_for_backward(*tensors)
            return
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], run: Run, beyond: Any, *tensors: Tensor | None) -> Any:
        found = [
            each_entry(run, beyond, *(entry(x, dim, at) for x, dim in zip(tensors, in_dims[2:], strict=True)))
            for at in range(info.batch_size)
        ]
        results = _stacked_each(found)
        return results, tuple(None if x is None else 0 for x in results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if not isinstance(ctx.beyond, str):
            return None, None, *ctx.beyond.pull(ctx.saved_tensors, ctx.needs_input_grad[2:], grads)
        if ctx.beyond:
            raise KernelError(ctx.beyond)
        used = torch.stack(
            [grad.sum() for grad in grads if grad is not None]
        ).sum()  # else torch.compile fails in the forward pass
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(operators.second_derivative(x, used) if wanted else None for x, wanted in needed)

    @staticmethod
    def jvp(ctx: Any, *moves: Any) -> Any:
        if isinstance(ctx.beyond, str):
            raise KernelError(ctx.beyond or ONCE)
        return ctx.beyond.push(ctx.saved_tensors, moves[2:])


LEVELS = 64  # of the vmap before torch.func


def _each_batched_gradient(
    run: Run, beyond: str | Derivatives, tensors: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """`torch.autograd` still uses the vmap before torch.func, whose batched tensors no `autograd.Function` receives
    one by one: the innermost batch is removed, and put back around the results."""
    batched = [x for x in tensors if x is not None and torch._C._functorch.is_legacy_batchedtensor(x)]
    # For any other than the innermost vmap, a dimension of the given size, 0, is added.
    level, size = next(
        (level, size) for level in range(LEVELS - 1, 0, -1)
        if (size := max(len(torch._remove_batch_dim(x, level, 0, 0)) for x in batched))
    )  # fmt: skip
    # The innermost vmap of this thread forbids random numbers, such as dropout's.
    within = torch._C._vmapmode_increment_nesting() > 1  # not in autograd's threads for other devices
    for _ in range(1 + within):
        torch._C._vmapmode_decrement_nesting()
    try:
        each: list[Any] = [
            torch._remove_batch_dim(x, level, size, 0)
            if x is not None and any(x is one for one in batched)
            else [x] * size
            for x in tensors
        ]
        found = [each_entry(run, beyond, *one) for one in zip(*each, strict=True)]
        results = _stacked_each(found)
    finally:
        if within:
            torch._C._vmapmode_increment_nesting()
    return tuple(None if x is None else torch._add_batch_dim(x, 0, level) for x in results)


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

    def of_inputs(self, inputs: Sequence[Any], held: Sequence[Tensor]) -> Rule:
        """As `rule`, from q, k, v, relative, sinks and biases."""
        return self.rule(inputs[3], inputs[4], inputs[5:], held)


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
    @once(lambda ctx: _after_attend(ctx))
    def backward(ctx: Any, saved: tuple[Any, ...], grad_out: Tensor | None, *more: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *rest = saved
        values = dict(zip(ctx.joint or (), rest, strict=False))
        relative, sinks, *rest = rest[len(values) :]
        _check_saved(ctx.rule.grid, q, k, v, out, lse)
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


class Learned(NamedTuple):
    """`Prepared` of calls that record gradients, with no tensors but q, k and v. forward: of these, output and
    log-sum-exp; backward: of all five and the output's gradient, the gradients. None: the data rule it out."""

    kernel: Kernel
    rule: Rule
    forward: Callable[..., tuple[Tensor, Tensor] | None]
    backward: Callable[..., tuple[Tensor, ...] | None] = lambda *_: None

    def run(self, q: Tensor, memory: Sequence[Tensor], m: int, gap: tuple[int, int] | None) -> Answer | None:
        """As `Prepared.run`."""
        try:
            return _Again.apply(self, q, *memory, None, None), None
        except Declined:
            return None


class _Again(torch.autograd.Function):
    """`_Attend` of what is `Learned`; it saves the same tensors, so that checkpointing may compute either again."""

    @staticmethod
    def forward(ctx: Any, prepared: Learned, q: Tensor, k: Tensor, v: Tensor, relative: None, sinks: None) -> Tensor:
        if (found := prepared.forward(q, k, v)) is None:
            raise Declined
        out, lse = found
        ctx.save_for_backward(q, k, v, out, lse, relative, sinks)
        ctx.prepared, ctx.kernel = prepared, prepared.kernel
        return out

    @staticmethod
    @once(lambda ctx: _beyond(ctx.kernel, 0.0, lambda *_: ctx.prepared.rule))
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *_ = saved
        found = ctx.prepared.backward(q, k, v, out, lse, grad_out)
        if found is None:
            _check_saved(ctx.prepared.rule.grid, q, k, v, out, lse)
            with own_dtypes(q):
                call = Call(q, k, v, ctx.prepared.rule)
                found = ctx.kernel.gradients(call, out, lse, grad_out, (False, False))[:3]
        return None, *found, None, None


def _check_saved(grid: Grid, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """Compiled kernels trust that these tensors fit together, and hooks return what they like."""
    (b, h, n, m), d, d_v, h_kv = grid, q.shape[-1], out.shape[-1], k.shape[1] if k.ndim == 4 else 0
    expected = [(b, h, n, d), (b, h_kv, m, d), (b, h_kv, m, d_v), (b, h, n, d_v), (b, h, n)]
    found = [tuple(x.shape) for x in (q, k, v, out, lse)]
    kinds = {(x.dtype, x.device) for x in (q, k, v, out)} | {(q.dtype, lse.device)}
    if found != expected or len(kinds) > 1 or lse.dtype != torch.promote_types(q.dtype, torch.float32):
        dtypes = sorted({str(x.dtype) for x in (q, k, v, out, lse)})
        raise KernelError(
            f"saved tensors came back as {found} in {', '.join(dtypes)}; a hook (torch.autograd.graph."
            "saved_tensors_hooks) must return what it was given"
        )


def _after_attend(ctx: Any) -> str | Derivatives:
    if ctx.joint is not None:
        return "a call with differentiable=True has no second derivative (create_graph=True, double backward)"
    return _beyond(ctx.kernel, ctx.dropout_p, ctx.rule.of_inputs, ctx.biases, ctx.needs_input_grad[6:], 3)


def _beyond(
    kernel: Kernel, dropout_p: float, rule_of: Callable[..., Rule], biases: int = 0,
    wanted: Sequence[bool] = (False, False), lead: int = 1,
) -> str | Derivatives:  # fmt: skip
    """The derivatives of the backward pass of a call; see `headwise.kernels.second`."""
    if reason := once_only(kernel, dropout_p):
        return f"{reason} (create_graph=True, double backward); {REMEDY}"
    derivatives = import_module("headwise.kernels.second").OfBackward  # it needs this module
    found: Derivatives = derivatives(rule_of, biases, wanted, lead)
    return found


def once_only(kernel: Kernel, dropout_p: float) -> str | None:
    """Why a call has no second derivative, and none of forward mode; None if it has them."""
    if not getattr(kernel, "twice", False):
        return f"kernel={kernel.name!r} has no second derivative, nor one of forward mode"
    if dropout_p > 0:
        return f"kernel={kernel.name!r} with dropout has no second derivative, nor one of forward mode"
    return None


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
