"""Modules that a forward pass calls in other threads, such as the replicas of `nn.DataParallel`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn

from headwise.events import original
from headwise.models.recognise.compiled import compiled_parts
from headwise.models.recognise.tracked import Tracked


@contextmanager
def in_other_threads(seen: Tracked, follow: Callable[[Tracked], Any]) -> Iterator[None]:
    """Within it, calls of the modules of `seen` and of replicas of them are followed in other threads too, since a
    `TorchFunctionMode` belongs to one thread.

    Args:
        follow: what is known of tensors in another thread → the context manager that follows them there.
    """
    if compiled_parts((name, module) for module, name in seen.modules.items()):
        yield  # what torch.compile has compiled has no hooks that are registered later
        return
    home = get_ident()
    running: dict[int, tuple[nn.Module, Any, Tracked]] = {}

    def before(module: nn.Module, args: Any) -> None:
        here = get_ident()
        if here != home and here not in running and original(module, seen.modules) in seen.modules:
            other = Tracked(seen.modules, seen.on_values, seen.aside)
            mode = follow(other)
            mode.__enter__()
            running[here] = module, mode, other

    def after(module: nn.Module, args: Any, result: Any) -> None:
        here = get_ident()
        if here in running and running[here][0] is module:
            _, mode, other = running.pop(here)
            mode.__exit__(None, None, None)
            seen.join(other)

    with ExitStack() as hooks:
        for module in seen.modules:
            if _may_compute(module):
                hooks.callback(module.register_forward_pre_hook(before).remove)
                hooks.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


def _may_compute(module: nn.Module) -> bool:
    """Whether its own code may compute attention, unlike that of most modules of PyTorch."""
    place = type(module).__module__
    own = place.startswith("torch.nn.modules.") and not place.endswith(".transformer")
    return (not own or isinstance(module, nn.MultiheadAttention)) and not isinstance(module, torch.jit.ScriptModule)
