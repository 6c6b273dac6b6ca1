"""Where in the model, and in the user's code, a function of PyTorch is called: read from the Python frames, or from a
graph of torch.fx."""

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import RLock, get_ident
from types import FrameType
from typing import Any

import torch
from torch import nn

from headwise.kernels.events import original

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


_INSIDE = tuple(str(Path(file).parent) for file in (str(torch.__file__), str(Path(__file__).parents[1])))
_CHECKPOINT = str(Path("torch", "utils", "checkpoint.py"))
_CALL = nn.Module._call_impl.__code__


def modules_in_call(modules: Mapping[nn.Module, str], like: list[nn.Module] | None = None) -> list[nn.Module]:
    """Those of the modules whose forward, or that of a replica, is running, the innermost first; `like`, what was found
    before, if that has the same innermost module."""
    found: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            module = original(frame.f_locals["self"], modules)
            if module in modules:
                if like and not found and module is like[0]:
                    return like
                found.append(module)
        elif frame.f_code.co_filename[:1] == "<" and (node := node_running(frame)) is not None:
            root = frame.f_locals["self"]
            for path, _ in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
                with suppress(AttributeError):  # modules of the original model, as far as the graph has them
                    module = root.get_submodule(re.sub(r"@\d+$", "", path))
                    found += [module] if module is not root and module in modules else []
        frame = frame.f_back
    return found


def runs(thread: int, module: nn.Module) -> bool:
    """Whether a call of a module is running in the thread of this identifier."""
    return _count(sys._current_frames().get(thread), module) > 0


def _count(frame: FrameType | None, module: nn.Module) -> int:
    calls = 0
    while frame is not None:
        calls += frame.f_code is _CALL and frame.f_locals["self"] is module
        frame = frame.f_back
    return calls


turn = RLock()  # held while a forward begins or ends


class Calls:
    """The calls of some modules that are running, by thread."""

    def __init__(self) -> None:
        self._running: dict[int, list[nn.Module]] = {}  # the outermost first

    def begin(self, module: nn.Module) -> bool:
        """In a hook before a call: whether it is not within another one in this thread."""
        mine = self._running.setdefault(get_ident(), [])
        if mine and mine[0] is module and _count(sys._getframe(1), module) == 1:
            mine.clear()  # a KeyboardInterrupt ended it, such as that of a notebook, and ran no hooks
        mine.append(module)
        return len(mine) == 1

    def end(self, module: nn.Module) -> bool:
        """In a hook after a call: whether it was not within another one in this thread."""
        mine = self._running.get(get_ident())
        if not mine or mine[-1] is not module:
            return False
        mine.pop()
        if mine:
            return False
        del self._running[get_ident()]
        return True

    def elsewhere(self) -> dict[int, nn.Module]:
        """The other threads in which calls are running, and the outermost, but for those that ended without hooks."""
        others = [one for one in list(self._running) if one != get_ident()]
        for one in others:
            mine = self._running.get(one)
            if mine and not runs(one, mine[0]):
                self._running.pop(one, None)
        return {one: mine[0] for one in others if (mine := self._running.get(one))}

    def clear(self) -> None:
        """Forget all."""
        self._running.clear()


def user_line() -> str:
    """file:line of the innermost frame that is neither PyTorch's nor headwise's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_INSIDE) and not file.startswith("<frozen"):
            node = node_running(frame)
            trace = "" if node is None else node.meta.get("stack_trace") or ""
            places = re.findall(r'File "([^"]+)", line (\d+)', trace)
            return ":".join(places[-1]) if places else f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def line_of_error(error: BaseException) -> str:
    """file:line of the innermost frame of an error that is neither PyTorch's nor headwise's; "" if there is none."""
    found, at = "", error.__traceback__
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if not file.startswith(_INSIDE) and not file.startswith("<"):
            found = f"{Path(file).name}:{at.tb_lineno}"
        at = at.tb_next
    return found


def in_checkpoint() -> bool:
    """Whether a part of a module's forward is running under torch.utils.checkpoint, not a whole module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL:
        if frame.f_code.co_filename.endswith(_CHECKPOINT):
            return True
        frame = frame.f_back
    return False
