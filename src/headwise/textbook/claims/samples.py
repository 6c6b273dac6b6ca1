"""Inputs of the measurements: random numbers and small layers in float64, the same in every run; Adam."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headwise.base.run import seeded
from headwise.kernels import use_kernel
from headwise.nn.registry import DESIGNS, STANDARD


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Independent standard normal numbers, float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(design: str, d_model: int, num_heads: int, *, seed: int = 0, **options: Any) -> Any:
    """A layer of a design with random weights, in eval mode. The type is `Any`: claims use the parts of one design."""
    with seeded(seed):
        module = DESIGNS[design].build(d_model, num_heads, **options).double().eval()
        with torch.no_grad():
            for parameter in module.parameters():
                if not parameter.any():  # biases are initialised to zero, which would hide errors in them
                    parameter.copy_(0.1 * torch.randn_like(parameter))
    return module


def multi_head() -> Any:
    """The standard layer with three heads of four channels."""
    return layer(STANDARD, 12, 3)


def standard(d_model: int, num_heads: int, **options: Any) -> Any:
    """The standard layer as constructed: float32, in training mode."""
    return DESIGNS[STANDARD].build(d_model, num_heads, **options)


def counted(run: Callable[[], Tensor]) -> int:
    """FLOPs of matrix products, counted at run time with a kernel whose products PyTorch counts."""
    with torch.no_grad(), use_kernel("torch_blocks"), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def adam(
    parameters: Iterable[Tensor], loss: Callable[[], Tensor], steps: int, lr: float, *, last: float = 1.0
) -> Iterator[float]:
    """Minimise a loss with Adam; yields the loss of each step after the step.

    Args:
        last: the learning rate decreases linearly from `lr` to this multiple of it.
    """
    optimizer = torch.optim.Adam(parameters, lr=lr)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, last, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        rate.step()
        yield value.item()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the block with one thread of PyTorch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
