"""The code of the PyTorch operators that `headwise.operators` declares.

The operators take plain tensors and numbers. They call `headwise.kernels.run` when the graph runs and the data are
available, so that the choice of a kernel and the bits of the result are the same as outside of a graph.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise import operators
from headwise.errors import KernelError
from headwise.kernels import KERNELS, run
from headwise.kernels.autograd import complete
from headwise.kernels.call import Call
from headwise.kernels.entries import stacked
from headwise.kernels.once import REMEDY
from headwise.kernels.written import read
from headwise.masks import Grid
from headwise.rule import Rule, Terms, compute
from headwise.spread import check_local

ONCE = f"attention has no second derivative (torch.func.grad or jacrev, applied twice); {REMEDY}"


def _call(
    tensors: Sequence[Tensor], count: int, relative: Tensor | None, sinks: Tensor | None, seed: Tensor | None,
    mask: Sequence[int], scale: float, soft_cap: float, dropout_p: float, learned: bool, split: int,
) -> Call:  # fmt: skip
    """The recorded call; checks the mask's data."""
    q, k, v, *rest = (x.detach() for x in tensors)
    b, h, n, _ = q.shape
    grid = Grid(b, h, n, k.shape[2])
    laid = read(mask, rest[count:])
    laid.check(grid)
    terms = Terms(
        n, soft_cap, None if relative is None else relative.detach().requires_grad_(learned),
        tuple(bias.requires_grad_(learned) for bias in rest[:count]), None if sinks is None else sinks.detach(), split,
    )  # fmt: skip
    rule = Rule.of_terms(laid, scale, grid, terms)
    return Call(q, k, v, rule, dropout_p, 0 if seed is None else int(seed))


def attend(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, and the index in KERNELS of the kernel that ran."""
    check_local()
    *of_call, kernel = given
    with torch.no_grad():
        result, chosen, _ = run(_call(*of_call), kernel)
    return (
        result.out.contiguous(),
        result.lse.contiguous(),
        torch.tensor(list(KERNELS).index(chosen.name), device="cpu"),
    )


def attend_fake(tensors: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes of `attend`."""
    q, v = tensors[0], tensors[2]
    rows = q.shape[:3]
    lse = q.new_empty(rows, dtype=compute(q[..., :0, :]).dtype)
    return q.new_empty(*rows, v.shape[-1]), lse, torch.empty((), dtype=torch.long, device="cpu")


def attend_backward(*given: Any) -> list[Tensor]:
    """Gradients of q, k and v, and the requested ones of (relative, sinks, *biases)."""
    *of_call, out, lse, ran, grad_out, wanted = given
    call, kernel = _call(*of_call), list(KERNELS.values())[int(ran)]
    with torch.no_grad():
        found = kernel.gradients(call, out, lse, grad_out, wanted)
    tensors, count, relative, sinks, *_ = given
    found = complete(found, (relative, sinks, *tensors[3 : 3 + count]), wanted)
    return [x.contiguous() for x in found if x is not None]


def attend_backward_fake(
    tensors: Sequence[Tensor], count: int, relative: Tensor | None, sinks: Tensor | None, *rest: Any
) -> list[Tensor]:
    """The shapes of `attend_backward`."""
    terms = relative, sinks, *tensors[3 : 3 + count]
    learning = [x for x, want in zip(terms, rest[-1], strict=True) if want and x is not None]
    return [x.new_empty(x.shape) for x in (*tensors[:3], *learning)]


def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save what `backward` reads."""
    tensors, ctx.count, relative, sinks, seed, *ctx.numbers, _ = inputs
    _, lse, ran = output
    ctx.save_for_backward(*output, relative, sinks, seed, *tensors)
    ctx.mark_non_differentiable(lse, ran)


def backward(ctx: Any, grad_out: Tensor, *_: Tensor) -> tuple[Any, ...]:
    """The gradients of the arguments of `attend`."""
    out, lse, ran, relative, sinks, seed, *tensors = ctx.saved_tensors
    of_tensors, _, of_relative, of_sinks, *_ = ctx.needs_input_grad
    wanted = [of_relative, of_sinks, *of_tensors[3 : 3 + ctx.count]]
    found = operators.attend_backward(
        tensors, ctx.count, relative, sinks, seed, *ctx.numbers, out, lse, ran, grad_out, wanted
    )
    d_tensors, d_relative, d_sinks = placed(found, wanted, len(tensors))
    return d_tensors, None, d_relative, d_sinks, *[None] * (len(ctx.numbers) + 2)


def placed(
    found: Iterable[Tensor], wanted: Sequence[bool], count: int
) -> tuple[list[Tensor | None], Tensor | None, Tensor | None]:
    """The gradients of the operator's list of `count` tensors, of relative and of sinks, from what `attend_backward`
    returned."""
    dq, dk, dv, *learned = found
    here = iter(learned)
    d_relative, d_sinks, *d_biases = (next(here) if want else None for want in wanted)
    return [dq, dk, dv, *d_biases, *[None] * (count - 3 - len(d_biases))], d_relative, d_sinks


def second_derivative(x: Tensor, grad: Tensor) -> Tensor:
    """Raise KernelError."""
    raise KernelError(ONCE)


def second_derivative_fake(x: Tensor, grad: Tensor) -> Tensor:
    """The shape of x: a graph may contain it without computing it."""
    return torch.empty_like(x)


def _one_by_one(operator: Any) -> Any:
    """The vmap rule of an operator: one call per entry, since entries may differ in every argument."""

    def each(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Any, Any]:
        def entry(x: Any, dims: Any, at: int) -> Any:
            if isinstance(x, list):
                return [entry(part, dim, at) for part, dim in zip(x, dims, strict=True)] if dims is not None else x
            return x if dims is None else x.select(dims, at)

        found = [
            operator(*(entry(x, dims, at) for x, dims in zip(given, in_dims, strict=True)))
            for at in range(info.batch_size)
        ]
        results = [stacked(parts) for parts in zip(*found, strict=True)]
        return (tuple(results), (0,) * len(results)) if isinstance(found[0], tuple) else (results, [0] * len(results))

    return each


attend_vmap = _one_by_one(operators.attend)
attend_backward_vmap = _one_by_one(operators.attend_backward)
