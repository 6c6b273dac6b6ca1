"""Hooks on modules that copies of these modules do not keep."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


class Hook:
    """A hook of whoever follows a model. A copy of the model, by `deepcopy` or `pickle`, is not followed: its hooks do
    nothing and hold nothing of the original."""

    __name__ = "hook"

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        """Call it with the arguments of the module's hook."""
        return self._call(*args)

    @property
    def __globals__(self) -> Any:
        raise RuntimeError(
            "torch.jit.script does not support a module that is attached or watched: detach or stop first"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_nothing,)


def _nothing(*args: Any) -> None:
    pass


@contextmanager
def called(modules: Mapping[nn.Module, str]) -> Iterator[set[str]]:
    """Within it, the names of the modules that were called so far."""
    names: set[str] = set()
    with ExitStack() as stack:
        for module, name in modules.items():
            hook = Hook(lambda *args, name=name: names.add(name))
            stack.callback(module.register_forward_pre_hook(hook).remove)
        yield names
