"""What the backward pass tells beside the gradients: δ_i = Σ_c dO_ic·O_ic of each head and query.

δ is the gradient of a factor ξ = 1 on the head's output at that query, and so, summed over queries, how much the loss
would lose of it (Michel et al. 2019, 1905.10650, eq. 2). Every backward pass of attention needs it anyway (Dao et al.
2022, 2205.14135, eq. 4): the compiled kernel gives its own away, for the others it is made once more of dO and O.

    with listen(hear):              # hear(delta [b, h, n]) is called in the backward pass of what is computed within
        out = attend(q, k, v)
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Hearer = Callable[[Tensor], Any]

_here = threading.local()
_listening = 0  # in all threads: one look at a number is all that a call pays while nobody listens


def hearer() -> Hearer | None:
    """Who is to be told of a call that is made now, in this thread."""
    return getattr(_here, "hearer", None) if _listening else None


def anyone() -> bool:
    """Whether anybody may listen."""
    return _listening > 0


@contextmanager
def listen(hear: Hearer) -> Iterator[None]:
    """Within it, the backward passes of this thread's calls of `attend` tell δ to `hear`, float32 or float64."""
    before = begin(hear)
    try:
        yield
    finally:
        end(before)


def begin(hear: Hearer) -> Hearer | None:
    """The first half of `listen`, for hooks; what `end` has to be given."""
    global _listening
    before = getattr(_here, "hearer", None)
    _here.hearer = hear
    _listening += 1
    return before


def end(before: Hearer | None) -> None:
    """The second half."""
    global _listening
    _listening -= 1
    _here.hearer = before


def telling(out: Tensor, hear: Hearer) -> Tensor:
    """`out`, whose backward pass tells δ."""
    told: Tensor = _Telling.apply(out, hear)
    return told


class _Telling(torch.autograd.Function):
    """The identity. What is saved is saved as PyTorch wants it, so that checkpointing can leave it out."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, hear: Hearer) -> Tensor:
        ctx.save_for_backward(out)
        ctx.hear = hear
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        wide = torch.promote_types(out.dtype, torch.float32)
        ctx.hear((grad_out.detach().to(wide) * out.detach().to(wide)).sum(-1))
        return grad_out, None
