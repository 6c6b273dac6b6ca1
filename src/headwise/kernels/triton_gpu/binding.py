"""Runs a `Call`, and computes the gradients of q, k, v and the tensors of the scores."""

from collections.abc import Sequence

from torch import Tensor

from headwise.kernels.call import Call, Result
from headwise.kernels.triton_gpu.gradients import backward
from headwise.kernels.triton_gpu.launch import columns, forward
from headwise.kernels.triton_gpu.problem import Problem
from headwise.kernels.triton_gpu.sums import LSE
from headwise.kernels.triton_gpu.wanted import Wanted
from headwise.lowering import Lowered, of_terms, requested


def attend(call: Call) -> Result:
    """Run a call that was not refused, with all requested statistics that the kernels support."""
    problem = _detached(_problem(call))
    wanted = Wanted.of(call.statistics, call.rule.grid)
    out, planes = forward(problem, wanted)
    found = {statistic: planes[at] for statistic, at in wanted.planes.items()}
    if wanted.columns:
        found |= dict.fromkeys(wanted.columns, columns(problem, planes[LSE]))
    return Result(out, planes[LSE], found)


def gradients(call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
    """`Kernel.gradients`. The kernels add all biases into one; its gradient is reduced to the shape of each."""
    terms = call.rule.terms(lse[..., :0])
    found = backward(_detached(_problem(call)), out, lse, grad_out, score_gradients=requested(terms, wanted))
    relative, biases = of_terms(terms, wanted, found.relative, found.bias)
    return [found.q, found.k, found.v, relative, found.sinks, *biases]


def _lowered(call: Call) -> Lowered:
    assert isinstance(call.lowered, Lowered)  # refuse() has checked
    return call.lowered


def _problem(call: Call) -> Problem:
    lowered = _lowered(call)
    return Problem(
        call.q, call.k, call.v, call.rule.scale, lowered.spans, lowered.dense, lowered.soft_cap,
        lowered.relative, lowered.bias, lowered.sinks, call.dropout_p, call.seed,
    )  # fmt: skip


def _detached(problem: Problem) -> Problem:
    """The call with its tensors detached."""
    given = problem.q, problem.k, problem.v, problem.relative, problem.bias, problem.sinks
    q, k, v, relative, bias, sinks = (None if x is None else x.detach() for x in given)
    assert q is not None
    assert k is not None
    assert v is not None
    return Problem(
        q, k, v, problem.scale, problem.spans, problem.dense, problem.soft_cap, relative, bias, sinks,
        problem.drop, problem.seed,
    )  # fmt: skip
