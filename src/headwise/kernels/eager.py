"""Functions that torch.compile must not trace."""

from collections.abc import Callable
from typing import TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., object])


def eager(function: _Function) -> _Function:
    """`torch.compiler.disable` without importing the compiler at decoration, which takes as long as importing PyTorch.

    PyTorch's private `_disable_dynamo` imports it at the first call; where that is missing, the public one is used.
    """
    disable = getattr(torch, "_disable_dynamo", torch.compiler.disable)
    return disable(function)
