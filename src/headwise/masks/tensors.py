"""Separates a mask from its tensors, so that autograd saves these like any others.

Tensors saved by `save_for_backward` are checked for in-place changes, and can be offloaded or recomputed (saved-tensor
hooks, gradient checkpointing). Tensors inside other objects are not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headwise.masks.base import Mask
from headwise.masks.kept import Kept


@dataclass(frozen=True)
class _Place:
    """The placeholder of a tensor."""

    at: int


def take_tensors(mask: Mask) -> tuple[Mask, list[Tensor]]:
    """Return the mask with placeholders instead of its tensors, and the tensors; the mask itself if it has none.

    Supports masks of any class: their attributes are searched, and the lists and masks in these.
    """
    tensors: list[Tensor] = []

    def take(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        tensors.append(x)
        return _Place(len(tensors) - 1)

    emptied: Mask = _each(mask, take)
    return (emptied, tensors) if tensors else (mask, tensors)


def put_tensors(mask: Mask, tensors: Sequence[Tensor]) -> Mask:
    """Return the original mask from the results of `take_tensors`."""
    if not tensors:
        return mask
    filled: Mask = _each(mask, lambda x: tensors[x.at] if isinstance(x, _Place) else x)
    return filled


def _each(x: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy with `change` applied to everything but lists and masks, without cached data."""
    if isinstance(x, Mask):
        copy = object.__new__(type(x))
        held = getattr(x, "__dict__", {})
        copy.__dict__.update({name: _each(y, change) for name, y in held.items() if not isinstance(y, Kept)})
        return copy
    if type(x) in (list, tuple):
        return type(x)(_each(y, change) for y in x)
    return change(x)
