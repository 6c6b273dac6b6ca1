"""A mask on its way from where transformers makes it to where attention is computed, through the model's own code."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.masks import Mask
from headwise.models.adapters.lazy import LazyTensor


class MaskTensor(LazyTensor):
    """The floating [b, 1, n, m] that attn_implementation="eager" adds to scores, 0 = may attend, as a headwise `Mask`.

    A model that only passes it on pays nothing: no n×m memory. One that computes with it gets the tensor that its own
    attention would have got, made then, and every result is an ordinary tensor.

    Attributes:
        mask: over the first `keys` of the m keys; None for everything. No query sees those beyond, which a cache of a
            fixed size has not filled yet.
    """

    mask: Mask | None
    keys: int

    @staticmethod
    def __new__(
        cls: type["MaskTensor"],
        mask: Mask | None,
        shape: tuple[int, int, int],
        keys: int,
        device: Any,
        dtype: torch.dtype,
        eager: Callable[[], Tensor],
    ) -> Any:
        b, n, m = shape
        return LazyTensor.empty_shell(cls, (b, 1, n, m), dtype, torch.device(device))

    def __init__(
        self,
        mask: Mask | None,
        shape: tuple[int, int, int],
        keys: int,
        device: Any,
        dtype: torch.dtype,
        eager: Callable[[], Tensor],
    ) -> None:
        """
        Args:
            shape: b, n, m.
            eager: makes the whole tensor.
        """
        self.mask, self.keys, self._eager = mask, keys, eager
        self._version_made = 0

    @property
    def changed(self) -> bool:
        """Whether it was written to, so that `mask` no longer says what it holds."""
        return self._made is not None and self._made._version != self._version_made

    def make(self) -> Tensor:
        with torch.inference_mode(False):  # tensors of inference mode do not count what is written to them
            made = self._eager()
        self._version_made = made._version
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.to and isinstance(args[0], MaskTensor):  # what moves a model's inputs calls it on every one
            small = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
            if small.to(*args[1:], **(kwargs or {})) is small:
                return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def origin(self) -> str:
        return "everything" if self.mask is None else repr(self.mask)
