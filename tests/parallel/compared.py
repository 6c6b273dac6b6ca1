"""One process against many: the same call by `attend` over the whole, in float64, and by ranks over their parts."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

import headwise as hw
from headwise import parallel
from headwise.fields import inside
from headwise.scores import Score

HOW = {"ring": parallel.ring_attend, "ulysses": parallel.ulysses_attend}
Scores = Callable[..., tuple[Score, ...]]


def nothing(*_: int) -> tuple[Score, ...]:
    return ()


def leaves(scores: Sequence[Score]) -> list[Tensor]:
    """The tensors of scores that learn."""
    held = [x for score in scores for one in inside(score) for x in vars(one).values()]
    return [x for x in held if isinstance(x, Tensor) and x.requires_grad]


def compare(
    how: str, q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, scores: Scores = nothing, layout: str = "zigzag",
    group: Any = None, near: float = 2e-5, measures: Sequence[Any] = (), **options: Any,
) -> Any:  # fmt: skip
    """Outputs, log-sum-exps and all gradients of a rank against those of one process; returns the rank's map.

    near: the largest difference allowed, relative to the largest number of each.
    """
    sizes = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    score = scores(*sizes)
    wide = {name: value for name, value in options.items() if name != "kernel"}
    out, amap = hw.attend(*exact, mask=mask, score=score, return_map=True, measures=measures, **wide)
    toward = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = [*exact, *leaves(score)]
    wanted = torch.autograd.grad((out * toward).sum(), inputs)

    def part(x: Tensor) -> Tensor:
        return parallel.shard(x, layout, group=group)

    own = [part(x).detach().requires_grad_() for x in (q, k, v)]
    score = scores(*sizes)
    found, own_map = HOW[how](
        *own, mask=mask, score=score, layout=layout, group=group, return_map=True, measures=measures, **options
    )
    assert found.dtype == q.dtype
    gradients = list(torch.autograd.grad((found * part(toward).to(q.dtype)).sum(), [*own, *leaves(score)]))
    for gradient in gradients[3:]:
        dist.all_reduce(gradient, group=group)  # each rank has its share
    close("out", found, part(out), near)
    lse = own_map.lse if how == "ring" else own_map.own.lse
    whole = amap.lse if how == "ulysses" else part(amap.lse[..., None])[..., 0]
    close("lse", lse, whole[:, own_map.heads.start : own_map.heads.stop] if how == "ulysses" else whole, near)
    for name, gradient, want in zip(("dq", "dk", "dv"), gradients, wanted, strict=False):
        close(name, gradient, part(want), near)
    for at, (gradient, want) in enumerate(zip(gradients[3:], wanted[3:], strict=True)):
        close(f"gradient {at} of {scores}", gradient, want, near)
    for name in own_map.measured or ():
        close(name, own_map.measured[name], amap.measured[name], near)
    return own_map, amap


def close(what: str, found: Tensor, wanted: Tensor, near: float) -> None:
    """Equal but for `near` times the largest number that is wanted, or 1; NaN and infinity where they are wanted."""
    assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)}, not {tuple(wanted.shape)}"
    found, wanted = found.detach(), wanted.detach()
    finite = wanted[wanted.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    assert_close(
        found.double(), wanted.double(), rtol=0, atol=near * max(largest, 1.0), equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip


def raises(kind: type[Exception], words: str, call: Callable[..., Any], *given: Any, **options: Any) -> None:
    """It raises, and says so."""
    with pytest.raises(kind, match=re.escape(words)):
        call(*given, **options)
