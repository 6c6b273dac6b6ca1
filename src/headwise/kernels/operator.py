"""Attention as two PyTorch operators, `headwise::attend` and `headwise::attend_backward`.

The operators take plain tensors and numbers. They call `headwise.kernels.run` when the graph runs and the data are
available, so that the choice of a kernel and the bits of the result are the same as outside of a graph.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import KernelError
from headwise.kernels import KERNELS, run
from headwise.kernels.autograd import complete
from headwise.kernels.call import Call
from headwise.kernels.written import read
from headwise.masks import Grid
from headwise.rule import Rule, Terms, compute

# Arguments of both operators: q, k, v, the rule as tensors and numbers (`Rule.terms`, and `written.write` of its mask),
# dropout, `learned`: whether relative or a bias requires a gradient, and the split of relative.
_RULE = (
    "Tensor q, Tensor k, Tensor v, Tensor? relative, Tensor? sinks, Tensor[] biases, SymInt[] mask, Tensor[] held, "
    "float scale, float soft_cap, float dropout_p, Tensor? seed, bool learned, SymInt split"
)
_FORWARD = f"({_RULE}, str kernel) -> (Tensor, Tensor, Tensor)"
_BACKWARD = f"({_RULE}, Tensor out, Tensor lse, Tensor ran, Tensor grad_out, bool[] wanted) -> Tensor[]"
ONCE = "attention has no second derivative; apply torch.func.jacrev or grad to it only once"


def _call(
    q: Tensor, k: Tensor, v: Tensor, relative: Tensor | None, sinks: Tensor | None, biases: Sequence[Tensor],
    mask: Sequence[int], held: Sequence[Tensor], scale: float, soft_cap: float, dropout_p: float, seed: Tensor | None,
    learned: bool, split: int,
) -> Call:  # fmt: skip
    """The recorded call; checks the mask's data."""
    b, h, n, _ = q.shape
    grid = Grid(b, h, n, k.shape[2])
    laid = read(mask, held)
    laid.check(grid)
    terms = Terms(
        n, soft_cap, None if relative is None else relative.detach().requires_grad_(learned),
        tuple(bias.detach().requires_grad_(learned) for bias in biases), None if sinks is None else sinks.detach(),
        split,
    )  # fmt: skip
    rule = Rule.of_terms(laid, scale, grid, terms)
    return Call(q.detach(), k.detach(), v.detach(), rule, dropout_p, 0 if seed is None else int(seed))


@torch.library.custom_op("headwise::attend", mutates_args=(), schema=_FORWARD)
def attend(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, and the index in KERNELS of the kernel that ran."""
    *of_call, kernel = given
    with torch.no_grad():
        result, chosen, _ = run(_call(*of_call), kernel)
    return (
        result.out.contiguous(),
        result.lse.contiguous(),
        torch.tensor(list(KERNELS).index(chosen.name), device="cpu"),
    )


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = q.shape[:3]
    lse = q.new_empty(rows, dtype=compute(q[..., :0, :]).dtype)
    return q.new_empty(*rows, v.shape[-1]), lse, torch.empty((), dtype=torch.long, device="cpu")


@torch.library.custom_op("headwise::attend_backward", mutates_args=(), schema=_BACKWARD)
def attend_backward(*given: Any) -> list[Tensor]:
    """Gradients of q, k and v, and the requested ones of (relative, sinks, *biases)."""
    *of_call, out, lse, ran, grad_out, wanted = given
    call, kernel = _call(*of_call), list(KERNELS.values())[int(ran)]
    with torch.no_grad():
        found = kernel.gradients(call, out, lse, grad_out, wanted)
    _, _, _, relative, sinks, biases, *_ = given
    found = complete(found, (relative, sinks, *biases), wanted)
    return [x.contiguous() for x in found if x is not None]


@attend_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, relative: Tensor | None, sinks: Tensor | None, biases: Sequence[Tensor],
    *rest: Any,
) -> list[Tensor]:  # fmt: skip
    learning = [x for x, want in zip((relative, sinks, *biases), rest[-1], strict=True) if want and x is not None]
    return [x.new_empty(x.shape) for x in (q, k, v, *learning)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, biases, mask, held, scale, soft_cap, dropout_p, seed, learned, split, _ = inputs
    _, lse, ran = output
    ctx.save_for_backward(*tensors, seed, *output, *biases, *held)
    ctx.plain = len(biases), mask, scale, soft_cap, dropout_p, learned, split
    ctx.mark_non_differentiable(lse, ran)


def _backward(ctx: Any, grad_out: Tensor, *_: Tensor) -> tuple[Any, ...]:
    count, mask, scale, soft_cap, dropout_p, learned, split = ctx.plain
    q, k, v, relative, sinks, seed, out, lse, ran, *rest = ctx.saved_tensors
    of_relative, of_sinks, of_biases = ctx.needs_input_grad[3:6]
    wanted = [of_relative, of_sinks, *of_biases]
    dq, dk, dv, *found = attend_backward(
        q, k, v, relative, sinks, rest[:count], mask, rest[count:], scale, soft_cap, dropout_p, seed, learned, split,
        out, lse, ran, grad_out, wanted,
    )  # fmt: skip
    d_relative, d_sinks, *d_biases = spread(found, wanted)
    return dq, dk, dv, d_relative, d_sinks, d_biases, None, [None] * len(rest[count:]), *[None] * 7


def spread(found: Iterable[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Place the gradients found where `wanted` is true; None elsewhere."""
    here = iter(found)
    return [next(here) if want else None for want in wanted]


attend.register_autograd(_backward, setup_context=_setup)


# torch.compile records derivatives that may never be computed, so the error for a missing one must be an operator too.
# Its own derivative is never needed: hence no custom_op.
torch.library.define("headwise::second_derivative", "(Tensor x, Tensor grad) -> Tensor")


@torch.library.impl("headwise::second_derivative", "CompositeExplicitAutograd")
def _(x: Tensor, grad: Tensor) -> Tensor:
    raise KernelError(ONCE)


@torch.library.register_fake("headwise::second_derivative")
def _(x: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(x)


second_derivative = torch.ops.headwise.second_derivative.default


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
        stacked = [_stacked(parts) for parts in zip(*found, strict=True)]
        return (tuple(stacked), (0,) * len(stacked)) if isinstance(found[0], tuple) else (stacked, [0] * len(stacked))

    return each


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Like torch.stack, which fails for float16 on a CPU under autocast, in vmap even if autocast is disabled."""
    whole = parts[0].new_empty(len(parts), *parts[0].shape)
    for at, part in enumerate(parts):
        whole[at] = part
    return whole


attend.register_vmap(_one_by_one(attend))
attend_backward.register_vmap(_one_by_one(attend_backward))
