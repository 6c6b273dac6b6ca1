"""Compiled models run uncompiled while tensors are followed, so that their functions are seen."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

_lock = Lock()
_open = 0
_held: Any = None  # what restores the stance that was found


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within it, whatever torch.compile returned runs uncompiled.

    PyTorch's stance belongs to the process, and each `set_stance` restores the one that it found. Several of them that
    do not end in the reverse order, as in threads, would leave the process uncompiled; so the first here sets it, and
    the last restores it. Without the compiler imported nothing is compiled.
    """
    global _open, _held
    with _lock:
        if _held is None and "torch._dynamo" in sys.modules:
            _held = torch.compiler.set_stance("force_eager")
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if not _open and _held is not None:
                _held.__exit__(None, None, None)
                _held = None
