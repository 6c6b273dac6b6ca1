"""A `Call` run by the kernels, differentiable in q, k, v and the tensors of the scores."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise.kernels.call import Call
from headwise.kernels.triton_gpu.launch import Problem, Wanted, backward, columns, forward
from headwise.kernels.triton_gpu.sums import LSE
from headwise.lowering import Lowered


def attend(call: Call, lowered: Lowered, wanted: Wanted, *, received: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output [b, h, n, d_v]; float32 [planes, b, h, n] as in `sums`; with `received`, Σ_i p_ij [b, h, m]."""
    problem = Problem(
        call.q, call.k, call.v, call.rule.scale, lowered.spans, lowered.dense, lowered.soft_cap,
        lowered.relative, lowered.bias, lowered.sinks, call.dropout_p, call.seed,
    )  # fmt: skip
    out, planes = _Attend.apply(
        call.q, call.k, call.v, lowered.relative, lowered.bias, lowered.sinks, problem, wanted
    )  # fmt: skip
    with torch.no_grad():
        return out, planes, columns(_detached(problem), planes[LSE]) if received else None


def _detached(problem: Problem, *tensors: Tensor | None) -> Problem:
    """The same numbers without a graph; or with `tensors` in the place of q, k, v, relative, bias and sinks."""
    given = tensors or (problem.q, problem.k, problem.v, problem.relative, problem.bias, problem.sinks)
    q, k, v, relative, bias, sinks = (None if x is None else x.detach() for x in given)
    assert q is not None
    assert k is not None
    assert v is not None
    return Problem(
        q, k, v, problem.scale, problem.spans, problem.dense, problem.soft_cap, relative, bias, sinks,
        problem.drop, problem.seed,
    )  # fmt: skip


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, relative: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
        problem: Problem, wanted: Wanted,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        problem = _detached(problem)
        out, planes = forward(problem, wanted)
        ctx.save_for_backward(q, k, v, relative, bias, sinks, out, planes[LSE])
        # What is saved above is not held a second time: autograd could neither free nor check that copy.
        ctx.rest = (problem.scale, problem.spans, problem.dense, problem.soft_cap, problem.drop, problem.seed)
        ctx.mark_non_differentiable(planes)
        return out, planes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, relative, bias, sinks, out, lse = ctx.saved_tensors
        scale, spans, dense, soft_cap, drop, seed = ctx.rest
        problem = Problem(q, k, v, scale, spans, dense, soft_cap, relative, bias, sinks, drop, seed)
        needs = ctx.needs_input_grad
        found = backward(problem, out, lse, grad_out, score_gradients=(needs[3], needs[4], needs[5]))
        return found.q, found.k, found.v, found.relative, found.bias, found.sinks, None, None
