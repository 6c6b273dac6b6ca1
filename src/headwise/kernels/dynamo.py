"""Settings for torch.compile. Imported only while compiling, because these decorators load the compiler."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headwise.kernels import events
from headwise.kernels.operators import differentiable


@torch.compiler.allow_in_graph
def apply(count: int, numbers: tuple[Any, ...], *given: Any) -> Any:
    """The operator inside torch.func, as one node of the graph that the compiler does not trace."""
    return differentiable(count, numbers, *given)


@torch._dynamo.assume_constant_result
def key_of(module: nn.Module) -> int:
    """The key of a module in `events.recorded`."""
    events.recorded[id(module)] = module
    return id(module)


@torch.compiler.disable(
    reason="attend(measures=…), a custom mask class, gate_gradients, and weights (output_attentions) and edits of "
    "attached models break the graph: omit fullgraph=True, or move them out of the compiled code"
)
def outside(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call the function outside the graph (a graph break)."""
    return function(*args, **options)
