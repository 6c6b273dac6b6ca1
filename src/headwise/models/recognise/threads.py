"""Modules that a forward pass calls in other threads, such as the replicas of `nn.DataParallel`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock, Thread, current_thread
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headwise.events import original
from headwise.models.recognise.compiled import compiled_parts
from headwise.models.recognise.tracked import Tracked

_lock = Lock()


class OtherThreads:
    """Follows calls of these modules and of replicas of them in other threads than that of the forward pass, since a
    `TorchFunctionMode` belongs to one thread.

    The hooks stay for as long as the model is watched: PyTorch iterates over them where a forward ends with an error,
    so that they could not be removed there.

    Args:
        follow: what is known of tensors in another thread → the context manager that follows them there.
    """

    def __init__(self, modules: Mapping[nn.Module, str], follow: Callable[[Tracked], Any]) -> None:
        self._modules, self._follow = modules, follow
        self._seen: Tracked | None = None  # of the forward that is running
        self._home: Thread | None = None
        self._running: WeakKeyDictionary[Thread, tuple[nn.Module, Any, Tracked, Tracked]] = WeakKeyDictionary()
        self._count = 0  # of them: torch.compile can trace a number

    def hooks(self) -> list[RemovableHandle]:
        """Register those that follow calls."""
        if compiled_parts((name, module) for module, name in self._modules.items()):
            return []  # what torch.compile has compiled has no hooks that are registered later
        own = [module for module in self._modules if _may_compute(module)]
        before = [module.register_forward_pre_hook(self._before) for module in own]
        return [*before, *(module.register_forward_hook(self._after, always_call=True) for module in own)]

    @contextmanager
    def followed(self, seen: Tracked) -> Iterator[None]:
        """Within it, the forward that `seen` belongs to runs in this thread."""
        self._seen, self._home = seen, current_thread()
        try:
            yield
        finally:
            self._seen = None

    def _before(self, module: nn.Module, args: Any) -> None:
        seen = self._seen  # None in most code that torch.compile traces
        if seen is None or (here := current_thread()) == self._home or here in self._running:
            return
        if original(module, self._modules) in self._modules:  # which a copy of it, with its hooks, is not
            other = Tracked(seen.modules, seen.on_values, seen.aside)
            mode = self._follow(other)
            mode.__enter__()
            with _lock:
                self._running[here] = module, mode, other, seen
                self._count += 1

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        if not self._count:
            return
        if (here := current_thread()) in self._running and self._running[here][0] is module:
            with _lock:
                _, mode, other, seen = self._running.pop(here)
                self._count -= 1
            mode.__exit__(None, None, None)
            seen.join(other)


def _may_compute(module: nn.Module) -> bool:
    """Whether its own code may compute attention, unlike that of most modules of PyTorch."""
    place = type(module).__module__
    own = place.startswith("torch.nn.modules.") and not place.endswith(".transformer")
    return (not own or isinstance(module, nn.MultiheadAttention)) and not isinstance(module, torch.jit.ScriptModule)
