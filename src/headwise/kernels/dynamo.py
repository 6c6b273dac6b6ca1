"""What PyTorch's compiler is told of attention. Imported where it compiles and nowhere else, since telling loads it."""

from collections.abc import Callable
from typing import Any

import torch

from headwise.kernels.derivative import Attend


@torch.compiler.allow_in_graph
def apply(count: int, plain: tuple[Any, ...], *tensors: Any) -> Any:
    """`Attend` inside torch.func: one step, which the compiler does not look into."""
    return Attend.apply(count, plain, *tensors)


@torch.compiler.disable(
    reason="attend(measures=…), a mask of your own class, and gate_gradients end a "
    "graph: leave out fullgraph=True, or take them out of what is compiled"
)
def outside(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A call between two graphs, for what does not fit into one."""
    return function(*args, **options)
