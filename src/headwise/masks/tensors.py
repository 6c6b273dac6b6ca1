"""A mask apart from its tensors, so that autograd can keep these as it keeps all others.

What is saved for a backward pass through `save_for_backward` is checked for changes in place, may be moved to the CPU
or dropped and computed again (saved-tensor hooks, gradient checkpointing). What an object holds beside it is not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headwise.masks.base import Kept, Mask


@dataclass(frozen=True)
class _Place:
    """Where a tensor was."""

    at: int


def take_tensors(mask: Mask) -> tuple[Mask, list[Tensor]]:
    """The mask with places in the stead of its tensors, and those tensors; the mask itself if it has none.

    Attributes are searched, and the lists and masks in them; masks of any class.
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
    """The mask that `take_tensors` was given, of what it returned."""
    if not tensors:
        return mask
    filled: Mask = _each(mask, lambda x: tensors[x.at] if isinstance(x, _Place) else x)
    return filled


def _each(x: Any, change: Callable[[Any], Any]) -> Any:
    """A copy in which everything but lists and masks is changed; what was kept with a mask is left out."""
    if isinstance(x, Mask):
        copy = object.__new__(type(x))
        held = getattr(x, "__dict__", {})
        copy.__dict__.update({name: _each(y, change) for name, y in held.items() if not isinstance(y, Kept)})
        return copy
    if type(x) in (list, tuple):
        return type(x)(_each(y, change) for y in x)
    return change(x)
