"""Functions that torch.compile must not look into."""

from collections.abc import Callable
from typing import TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., object])


def eager(function: _Function) -> _Function:
    """`torch.compiler.disable`, which would import PyTorch's compiler here and now, and that takes as long as PyTorch.

    PyTorch has the same for its own use, which imports it at the first call; where that is missing, there is the other.
    """
    disable = getattr(torch, "_disable_dynamo", torch.compiler.disable)
    return disable(function)
