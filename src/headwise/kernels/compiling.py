"""Functions that torch.compile must not trace, and its stance, which is one for all threads."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import RLock
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., object])


def eager(function: _Function) -> _Function:
    """`torch.compiler.disable`, but the compiler, which takes as long to import as PyTorch, is left to who uses it."""
    disabled = getattr(torch, "_disable_dynamo", torch.compiler.disable)(function)

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        used = torch.compiler.is_compiling() or "torch._dynamo" in sys.modules
        return (disabled if used else function)(*args, **kwargs)

    return cast(_Function, called)


_lock = RLock()  # reentrant: the end of a forward may be run by the garbage collector
_open: list[tuple[object, str]] = []  # in the order in which they began
_first: list[Any] = []  # what restores the stance from before all of them


@contextmanager
def stance(name: str) -> Iterator[None]:
    """`torch.compiler.set_stance` by the block that began last, but blocks may end in any order, as those of hooks and
    other threads do; then the stance is again that of before. Nothing is set while torch.compile is not imported."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    mine = (object(), name)
    with _lock:
        set_by = torch.compiler.set_stance(name)
        if not _open:
            _first[:] = [set_by]
        _open.append(mine)
    try:
        yield
    finally:
        with _lock:
            _open.remove(mine)
            if _open:
                torch.compiler.set_stance(_open[-1][1])
            else:
                _first.pop().__exit__(None, None, None)
