"""What parts are compared with, a softmax in float64 on inputs of odd sizes, written apart; and how checks fail."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

from headwise.errors import HeadwiseError

SIZES = (2, 6, 17, 29)  # batch, heads, queries, keys: sizes that differ, so that a swapped axis shows
KV_HEADS, HEAD_DIM, VALUE_DIM = 3, 5, 3
Formula = Callable[[Tensor, Tensor, Tensor], Any]


def vectors(sizes: tuple[int, int, int, int], value_dim: int = VALUE_DIM) -> list[Tensor]:
    """Queries, keys and values that require gradients."""
    b, h, n, m = sizes
    generator = torch.Generator().manual_seed(3)
    shapes = (b, h, n, HEAD_DIM), (b, KV_HEADS, m, HEAD_DIM), (b, KV_HEADS, m, value_dim)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def truth(q: Tensor, k: Tensor, v: Tensor, formula: Formula, dense: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, weights and log-sum-exp in float64, with their graph, by the formula and the cells of the mask."""
    group, (n, m) = q.shape[1] // k.shape[1], dense.shape[2:]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    found = formula(q.double() @ keys.mT / q.shape[-1] ** 0.5, torch.arange(n)[:, None] + m - n, torch.arange(m))
    scores, sinks = found if isinstance(found, tuple) else (found, None)
    scores = scores.masked_fill(~dense, -torch.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(*scores.shape[:3], 1).masked_fill(~dense.any(-1, True), -torch.inf)
        scores = torch.cat((scores, sink), -1)
    lse = scores.logsumexp(-1)
    seen = dense.any(-1, keepdim=True)
    base = lse.where(seen[..., 0], torch.zeros_like(lse))[..., None]
    weights = torch.where(seen, (scores - base).exp(), 0.0)[..., :m]
    return weights @ values, weights, lse


Arguments = ParamSpec("Arguments")


class CheckFailed(AssertionError):
    """A part does not hold what is required of its kind."""


def require(holds: bool | Tensor, part: object, what: str) -> None:
    """Raise CheckFailed that names the part unless it holds."""
    if not holds:
        raise CheckFailed(f"{part}: {what}")


def require_close(
    got: Tensor, expected: Tensor, part: object, what: str, *, rtol: float = 1e-5, atol: float = 1e-5
) -> None:
    """Raise CheckFailed with the largest difference unless two tensors are close; NaN equals NaN."""
    require(got.shape == expected.shape, part, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    got, expected = got.detach().double(), expected.detach().double()
    if not torch.allclose(got, expected, rtol=rtol, atol=atol, equal_nan=True):
        far = (got - expected).abs().nan_to_num(nan=torch.inf)
        far = far.masked_fill((got == expected) | (got.isnan() & expected.isnan()), 0.0)
        at = tuple(int(i) for i in torch.unravel_index(far.argmax(), far.shape))
        raise CheckFailed(f"{part}: {what}: {float(got[at]):.6g} at {list(at)}, expected {float(expected[at]):.6g}")


def check(function: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """A check in which an error of the library is a failure too."""

    @wraps(function)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except HeadwiseError as error:
            raise CheckFailed(f"{args[0] if args else function.__name__}: {error}") from error

    return checked
