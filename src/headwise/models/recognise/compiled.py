"""Modules that torch.compile has compiled, and hooks that leave its code."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame

IN_GRAPH = (
    "{}(model): the model is called by a module that was compiled with fullgraph=True, in which attention cannot be "
    "recognised; give the module that torch.compile returned, which then runs uncompiled"
)


def compiled_parts(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """The names of those of these modules that torch.compile has compiled."""
    if "torch._dynamo" not in sys.modules:
        return []
    kind = torch._dynamo.OptimizedModule
    return [
        ".".join(part for part in name.split(".") if part != "_orig_mod") for name, module in modules
        if isinstance(module, kind) or getattr(module, "_compiled_call_impl", None) is not None
    ]  # fmt: skip


def uncompiled(hook: Callable[..., Any]) -> None:
    """Never compile this function: torch.compile would set its callback again after it, where `compile_with` had set
    another one."""
    from torch._dynamo.eval_frame import skip_code  # its import takes as long as that of PyTorch

    skip_code(hook.__code__)


def not_in_one_graph(caller: str) -> None:
    """In such a hook: raise if the code that is compiled must be one graph."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=IN_GRAPH.format(caller))  # the error of fullgraph=True


def compile_with(callback: Any) -> Any:
    """Set the callback that compiles the frames of this thread; None for none.

    `torch.compiler.set_stance` and `disable` hold for whole calls, not from a hook before a call to a hook after it.

    Returns:
        The callback until now.
    """
    return set_eval_frame(callback)
