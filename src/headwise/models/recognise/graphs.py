"""Graphs of torch.fx, such as those of torch.export: which node is running, of which module, from which line."""

import re
from types import FrameType
from typing import Any

from torch import nn

_GENERATED = "<eval_with_key>"  # the file name of the code that torch.fx generates


def node_running(frame: FrameType) -> Any:
    """The node that a frame of generated code computes, or None."""
    if not frame.f_code.co_filename.startswith(_GENERATED):
        return None
    module: Any = frame.f_locals.get("self")
    lines = getattr(module, "_lineno_map", None)
    index = None if lines is None else lines.get(frame.f_lineno - frame.f_code.co_firstlineno + 1)
    nodes = list(module.graph.nodes) if index is not None and hasattr(module, "graph") else []
    return nodes[index] if index is not None and index < len(nodes) else None


def modules_of(node: Any, root: nn.Module) -> list[nn.Module]:
    """The modules of the original model that called the function of a node, the innermost first, as far as the graph
    has them."""
    found = []
    for path, _ in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
        try:
            module = root.get_submodule(re.sub(r"@\d+$", "", path))
        except AttributeError:
            continue
        if module is not root:
            found.append(module)
    return found


def line_of(node: Any) -> str:
    """file:line of the code that a node comes from; "" if it is not known."""
    places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return ":".join(places[-1]) if places else ""
