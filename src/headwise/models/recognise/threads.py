"""Modules that a forward pass calls in other threads, such as the replicas of `nn.DataParallel`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headwise.events import original
from headwise.models.hooks import Hook
from headwise.models.recognise.compiled import compiled_parts
from headwise.models.recognise.following import Following
from headwise.models.recognise.frames import runs
from headwise.models.recognise.tracked import Tracked

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class OtherThreads:
    """Follows calls of these modules and of replicas of them in other threads than that of the forward pass, since a
    `TorchFunctionMode` belongs to one thread.

    The hooks stay for as long as the model is watched: PyTorch iterates over them where a forward ends with an error,
    so that they could not be removed there.
    """

    def __init__(self, modules: Mapping[nn.Module, str]) -> None:
        self._modules = modules
        self._seen: Tracked | None = None  # of the forward that is running
        self._home = 0  # its thread, and the others
        self._running: dict[int, tuple[nn.Module, Following, Tracked, Tracked]] = {}

    def hooks(self) -> list[RemovableHandle]:
        """Register those that follow calls."""
        if compiled_parts((name, module) for module, name in self._modules.items()):
            return []  # what torch.compile has compiled has no hooks that are registered later
        own = [module for module in self._modules if _may_compute(module)]
        before = [module.register_forward_pre_hook(Hook(self._before)) for module in own]
        after = [module.register_forward_hook(Hook(self._after), prepend=True, always_call=True) for module in own]
        return [*before, *after]

    @contextmanager
    def followed(self, seen: Tracked) -> Iterator[None]:
        """Within it, the forward that `seen` belongs to runs in this thread."""
        self._seen, self._home = seen, get_ident()
        try:
            yield
        finally:
            self._seen = None

    def _before(self, module: nn.Module, args: Any) -> None:
        seen = self._seen  # None in most code that torch.compile traces
        if seen is None or (here := get_ident()) == self._home:
            return
        if here in self._running:
            if runs(here, self._running[here][0]):
                return
            self._ended(here).over = True  # without hooks, such as by the end of the thread
        if original(module, self._modules) in self._modules:  # which a copy of it, with its hooks, is not
            other = Tracked(seen.modules, seen.on_values, seen.aside)
            mode = Following(other)
            mode.__enter__()
            self._running[here] = module, mode, other, seen

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        if not self._running:  # as in most code that torch.compile traces
            return
        if (here := get_ident()) in self._running and self._running[here][0] is module:
            self._ended(here).__exit__(None, None, None)

    def _ended(self, thread: int) -> Following:
        """The mode of a call that has ended in a thread."""
        _, mode, other, seen = self._running.pop(thread)
        seen.join(other)
        return mode


def _may_compute(module: nn.Module) -> bool:
    """Whether a thread may begin with this module, and compute attention in it that has to be recognised. Layers of
    PyTorch compute none, or are known, and those of a transformer would not take their fused path with hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return not type(module).__module__.startswith("torch.nn.modules.") or isinstance(module, _CONTAINERS)
