"""A mask passed through a model's own code, from transformers' mask function to the attention function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.masks import Mask
from headwise.models.adapters.huggingface.positions import Position
from headwise.models.adapters.lazy import LazyTensor


class MaskTensor(LazyTensor):
    """The floating [b, 1, n, m] that attn_implementation="eager" adds to scores, 0 = may attend, as a headwise `Mask`.

    It takes no n×m memory while a model only passes it on. A model that computes with it gets the tensor that eager
    attention would get, computed then; every result is an ordinary tensor.

    Attributes:
        mask: over the first `position.keys` of the m keys; None for everything. The rest, unfilled entries of a cache
            of fixed size, are hidden from all queries.
        position: where the queries and these keys are.
    """

    mask: Mask | None
    position: Position

    @staticmethod
    def __new__(
        cls: type["MaskTensor"],
        mask: Mask | None,
        shape: tuple[int, int, int],
        position: Position,
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
        position: Position,
        device: Any,
        dtype: torch.dtype,
        eager: Callable[[], Tensor],
    ) -> None:
        """
        Args:
            shape: b, n, m.
            eager: computes the dense tensor.
        """
        self.mask, self.position, self._eager = mask, position, eager

    def make(self) -> Tensor:
        with torch.inference_mode(False):  # tensors of inference mode have no version counter
            return self._eager()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.to and isinstance(args[0], MaskTensor):  # called by code that moves all inputs of a model
            small = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
            if small.to(*args[1:], **(kwargs or {})) is small:
                return args[0]
        if func is Tensor.contiguous and isinstance(args[0], MaskTensor) and not args[0].made:
            return args[0]  # called by generation with caches of a fixed size
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def origin(self) -> str:
        return "everything" if self.mask is None else repr(self.mask)
