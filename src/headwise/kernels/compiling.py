"""Functions that torch.compile must not trace, and its stance, which is one for all threads."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., object])


def eager(function: _Function) -> _Function:
    """`torch.compiler.disable` without importing the compiler at decoration, which takes as long as importing PyTorch.

    PyTorch's private `_disable_dynamo` imports it at the first call; where that is missing, the public one is used.
    """
    disable = getattr(torch, "_disable_dynamo", torch.compiler.disable)
    return disable(function)


_lock = RLock()  # reentrant: the end of a forward may be run by the garbage collector
_open: list[tuple[object, str]] = []  # in the order in which they began
_first: list[Any] = []  # what restores the stance from before all of them


@contextmanager
def stance(name: str) -> Iterator[None]:
    """`torch.compiler.set_stance`, but the blocks may end in any order, such as those of hooks or of other threads.

    The stance is that of the block that began last among those that have not ended. After all of them it is again what
    it was before the first. Nothing is set while torch.compile has not been imported.
    """
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
