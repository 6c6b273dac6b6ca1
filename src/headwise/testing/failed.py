"""How checks fail."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

from headwise.errors import HeadwiseError

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
