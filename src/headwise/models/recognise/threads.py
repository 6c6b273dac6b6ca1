"""Modules that a forward pass calls in other threads, such as the replicas of `nn.DataParallel`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

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
        yield  # PyTorch's compiler does not support hooks of all modules
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

    # Hooks of each module could not be removed where a forward ends with an error, as PyTorch iterates over them there.
    handles = register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
