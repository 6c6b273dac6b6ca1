"""Memory that grows, and that copies of a cache share until one of them writes where another has written."""

import os
from collections.abc import Sequence
from functools import cache
from threading import Lock

import torch
from torch import Tensor

_CLAIM = Lock()
if hasattr(os, "register_at_fork"):  # a lock that another thread holds at a fork would stay locked in the child
    os.register_at_fork(before=_CLAIM.acquire, after_in_parent=_CLAIM.release, after_in_child=_CLAIM.release)


class Room:
    """Memory of a cache, and of copies of that cache, for vectors along axis 2.

    Attributes:
        parts: tensors [b, h, capacity, …].
        written: how many of the vectors have been written, by whichever cache wrote the most.
        shared: whether another cache may refer to it, or has.
    """

    def __init__(self, parts: Sequence[Tensor], written: int) -> None:
        self.parts, self.written, self.shared = tuple(parts), written, False
        self._inference = not torch.compiler.is_compiling() and any(part.is_inference() for part in parts)

    @property
    def capacity(self) -> int:
        """The number of vectors that fit."""
        return self.parts[0].shape[2]

    @property
    def differentiable(self) -> bool:
        """Whether gradients flow to what it holds: it must then not be written to."""
        return any(part.requires_grad for part in self.parts)

    def writable(self, at: int) -> bool:
        """Whether vectors from `at` on can be written without a change of what others hold or were given."""
        if self.differentiable:
            return False
        if self._forbidden():
            return False
        return at >= self.written or (not self.shared and _are_alone(self.parts))

    def claimed(self, at: int, stop: int) -> bool:
        """`writable(at)`; the vectors up to `stop` are then the caller's: caches of other threads have to move."""
        if torch.compiler.is_compiling():  # a graph has no locks
            return self.writable(at)
        with _CLAIM:
            if not self.writable(at):
                return False
            self.written = stop
            return True

    def _forbidden(self) -> bool:
        """Whether PyTorch forbids to write: to tensors of `torch.inference_mode`, outside of it."""
        if torch.compiler.is_compiling():
            return self._inference  # a graph cannot ask for the mode
        return not torch.is_inference_mode_enabled() and any(part.is_inference() for part in self.parts)

    def write(self, at: int, new: Sequence[Tensor]) -> None:
        """Write vectors [b, h, n, …] from `at` on. Through `.data` it is no change of the vectors before, of which
        attention maps and autograd hold views."""
        self.written = at + new[0].shape[2]
        self.overwrite(at, new)

    def overwrite(self, at: int, new: Sequence[Tensor]) -> None:
        """`write` between vectors that have been written."""
        end = at + new[0].shape[2]
        for part, x in zip(self.parts, new, strict=True):
            part = part if torch.compiler.is_compiling() else part.data
            part[:, :, at:end] = x


def _are_alone(parts: Sequence[Tensor]) -> bool:
    """Whether no other tensor, such as a view that an attention map holds, refers to the memory of these."""
    if torch.compiler.is_compiling() or not all(type(part) is Tensor for part in parts):
        return False
    alone = _references_alone()
    return all(_references(part) == alone for part in parts)


def _references(x: Tensor) -> int:
    """How many tensors and Python objects refer to the memory of x; 0 if PyTorch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else int(count(x.untyped_storage()._cdata))


@cache
def _references_alone() -> int:
    """The same for a tensor without views."""
    return _references(torch.empty(1, device="cpu")) or -1
