"""Functions for torch.compile. Imported only while it compiles, since importing them loads the compiler."""

from collections.abc import Callable
from typing import Any

import torch

from headwise.kernels.derivative import Attend


@torch.compiler.allow_in_graph
def apply(count: int, plain: tuple[Any, ...], *tensors: Any) -> Any:
    """`Attend` inside torch.func, as one step that the compiler does not trace."""
    return Attend.apply(count, plain, *tensors)


@torch.compiler.disable(
    reason="attend(measures=…), a mask of your own class, and gate_gradients end a "
    "graph: leave out fullgraph=True, or take them out of what is compiled"
)
def outside(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A call between two graphs, for what cannot be traced."""
    return function(*args, **options)
