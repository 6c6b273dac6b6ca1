"""What the claims are measured on: random numbers and small layers, in float64, the same in every run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headwise.nn.registry import DESIGNS, STANDARD
from headwise.seeds import seeded


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Independent standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(design: str, d_model: int, num_heads: int, *, seed: int = 0, **options: Any) -> Any:
    """A head design by name with random weights, in eval mode; `Any`, as a claim uses the parts of its own design."""
    with seeded(seed):
        module = DESIGNS[design].build(d_model, num_heads, **options).double().eval()
        with torch.no_grad():
            for parameter in module.parameters():
                if not parameter.any():  # biases start at zero, where they would prove nothing
                    parameter.copy_(0.1 * torch.randn_like(parameter))
    return module


def standard(d_model: int, num_heads: int, **options: Any) -> Any:
    """The standard layer as its constructor makes it."""
    return DESIGNS[STANDARD].build(d_model, num_heads, **options)


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread, and on as many as before afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
