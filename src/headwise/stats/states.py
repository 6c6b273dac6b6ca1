"""What measures have added up, as the tensors that it is made of: to be sent, joined and put back."""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.stats.base import Measure


def tensors_of(state: Any) -> list[Tensor]:
    """The tensors in a measure's state, in a fixed order."""
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, dict):
        return [x for part in state.values() for x in tensors_of(part)]
    if isinstance(state, (list, tuple)):
        return [x for part in state for x in tensors_of(part)]
    if is_dataclass(state):
        return [x for one in fields(state) for x in tensors_of(getattr(state, one.name))]
    return []


def with_tensors(state: Any, take: Callable[[Tensor], Tensor]) -> Any:
    """A measure's state with `take(x)` in place of each tensor x, in the order of `tensors_of`."""
    if isinstance(state, Tensor):
        return take(state)
    if isinstance(state, dict):
        return {key: with_tensors(part, take) for key, part in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(with_tensors(part, take) for part in state)
    if is_dataclass(state) and not isinstance(state, type):
        return replace(state, **{one.name: with_tensors(getattr(state, one.name), take) for one in fields(state)})
    return state


def side_by_side(measure: Measure, states: Sequence[Any], heads: Sequence[int]) -> Any:
    """The state of a measure for all heads, of its states for some of them each.

    Args:
        heads: how many each state is of; their tensors [batch, heads, …] are laid beside one another.
    Raises:
        ConfigError: if the joined state gives other values: the measure stores its heads in another layout.
    """
    columns = zip(*(tensors_of(state) for state in states), strict=True)
    joined = (
        torch.cat(xs, 1) if all(x.shape[1:2] == (h,) for x, h in zip(xs, heads, strict=True)) else xs[0]
        for xs in columns
    )
    whole = with_tensors(states[0], lambda _: next(joined))
    found, expected = measure.finish(whole), torch.cat([measure.finish(state) for state in states], 1)
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=0.0, atol=0.0, equal_nan=True):
        raise ConfigError(f"measure {measure.name!r} keeps its heads otherwise than as [batch, heads, …]")
    return whole
