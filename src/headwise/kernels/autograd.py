"""One `autograd.Function` for all kernels that have a backward pass of their own.

`save_for_backward` saves every tensor that the backward pass reads: q, k, v, output, log-sum-exp, and the tensors of
mask and scores. PyTorch thus detects in-place changes between the two passes, and saved-tensor hooks
(`torch.autograd.graph.save_on_cpu`, gradient checkpointing) apply to all of them; the backward pass rebuilds the call
from what these hooks return.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.errors import KernelError
from headwise.kernels.call import Call, Result
from headwise.kernels.kernel import Kernel
from headwise.kernels.once import REMEDY, once
from headwise.masks import Grid, Mask
from headwise.masks.given import put_tensors, take_tensors
from headwise.rule import Rule, Terms, compute, own_dtypes
from headwise.stats import Statistic


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
