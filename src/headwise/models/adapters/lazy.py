"""Tensors that are computed on first use, for n×m matrices that are mostly never read.

A `LazyTensor` is a `torch.Tensor` with shape, dtype and device, and no memory. The first torch function that reads its
values computes the dense tensor, which is stored and used from then on; so every function returns what it returns for
the dense tensor, in-place ones included. `len`, `shape`, `dtype`, `device` and the like compute nothing.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

# Known without the values.
_ATTRIBUTES = "shape", "dtype", "device", "ndim", "layout", "is_nested", "is_sparse", "is_cuda", "is_cpu"
_KNOWN: frozenset[Any] = frozenset({
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.__len__, Tensor.element_size,
    Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, torch.numel,
})  # fmt: skip


class LazyTensor(Tensor):
    """Base of tensors that are computed by `make` on first use."""

    _made: Tensor | None = None
    _version_made: int | None = 0

    @staticmethod
    def empty_shell(cls: type["LazyTensor"], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        """A tensor of that class and shape without values."""
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    @abstractmethod
    def make(self) -> Tensor:
        """Compute the dense tensor."""

    @property
    def made(self) -> bool:
        """Whether the dense tensor has been computed."""
        return self._made is not None

    def dense(self) -> Tensor:
        """The dense tensor, computed once."""
        if self._made is None:
            self._made = self.make()
            self._version_made = None if self._made.is_inference() else self._made._version
        return self._made

    @property
    def changed(self) -> bool:
        """Whether the dense tensor was written to, so that it is no longer what `make` computes; True where tensors of
        inference mode, which count no versions, do not say."""
        return self._made is not None and (self._version_made is None or self._made._version != self._version_made)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*tree_map(dense, args), **tree_map(dense, kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*tree_map(dense, args), **tree_map(dense, kwargs or {}))

    def __hash__(self) -> int:
        return id(self)  # Tensor's own would compute the dense tensor and return its id

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        state = "made" if self.made else "not made yet"
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {state}; {self.origin})"

    @property
    @abstractmethod
    def origin(self) -> str:
        """Its source, for repr."""


def dense(x: Any) -> Any:
    """The dense tensor of a lazy one; anything else as it is."""
    return x.dense() if isinstance(x, LazyTensor) else x
