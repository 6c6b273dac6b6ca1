"""Settings for torch.compile. Imported only while compiling, because these decorators load the compiler."""

from collections.abc import Callable
from typing import Any

import torch

from headwise.kernels.operators import differentiable


@torch.compiler.allow_in_graph
def apply(count: int, numbers: tuple[Any, ...], *given: Any) -> Any:
    """The operator inside torch.func, as one node of the graph that the compiler does not trace."""
    return differentiable(count, numbers, *given)


@torch.compiler.disable(
    reason="attend(measures=…), a custom mask class and gate_gradients break the "
    "graph: omit fullgraph=True, or move them out of the compiled code"
)
def outside(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call the function outside the graph (a graph break)."""
    return function(*args, **options)
