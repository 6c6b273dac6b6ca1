"""What measures have added up, as the tensors that it is made of: to be sent, joined and put back."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def tensors_of(state: Any) -> list[Tensor]:
    """The tensors in a measure's state, in a fixed order."""
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, dict):
        return [x for part in state.values() for x in tensors_of(part)]
    if isinstance(state, list | tuple):
        return [x for part in state for x in tensors_of(part)]
    if is_dataclass(state):
        return [x for one in fields(state) for x in tensors_of(getattr(state, one.name))]
    return []


def with_tensors(state: Any, take: Callable[[Tensor], Tensor]) -> Any:
    """A measure's state with what `take` makes of each tensor, asked in the order of `tensors_of`."""
    if isinstance(state, Tensor):
        return take(state)
    if isinstance(state, dict):
        return {key: with_tensors(part, take) for key, part in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(with_tensors(part, take) for part in state)
    if is_dataclass(state) and not isinstance(state, type):
        return replace(state, **{one.name: with_tensors(getattr(state, one.name), take) for one in fields(state)})
    return state
