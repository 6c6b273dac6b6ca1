"""Indexing of attention maps, as of a tensor [batch, heads, queries, keys]: integers, slices, `...`, lists of heads."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from headwise.errors import ShapeError, whole_number

AXES = "batch", "head", "query", "key"
LISTED = AXES[:2]  # a list of queries or keys would need all tiles between them


def read(index: Any, shape: tuple[int, ...], tile: Callable[..., Tensor]) -> Tensor:
    """What an index selects. tile: reads the numbers of a range of each axis."""
    parts = _parts(index)
    spans = [_range(name, part, size) for name, part, size in zip(AXES, parts, shape, strict=True)]
    found = tile(*spans)
    if not any(isinstance(part, list) for part in parts):
        return found.squeeze(tuple(axis for axis, part in enumerate(parts) if isinstance(part, int)))
    return found[tuple(
        [one % size - span.start for one in part] if isinstance(part, list) else 0 if isinstance(part, int) else
        slice(None) for part, span, size in zip(parts, spans, shape, strict=True)
    )]  # fmt: skip


def _parts(index: Any) -> list[Any]:
    """The index of each of the four axes; `...` and omitted indices become full slices."""
    found = list(index) if isinstance(index, tuple) else [index]
    dots = [at for at, part in enumerate(found) if part is Ellipsis]
    if len(dots) > 1 or len(found) - len(dots) > 4:
        raise ShapeError(f"amap[{index}]: expected at most four indices, [batch, head, queries, keys]")
    for at in dots:
        found[at : at + 1] = [slice(None)] * (4 - (len(found) - 1))
    found = [part if (number := whole_number(part)) is None else number for part in found]
    found = [_listed(part) if isinstance(part, list | Tensor | np.ndarray) else part for part in found]
    return found + [slice(None)] * (4 - len(found))


def _listed(part: Any) -> Any:
    """Whole numbers, in one axis, as a list of them; anything else unchanged."""
    try:
        numbers = part if isinstance(part, list) else part.tolist()
        return part if any(isinstance(one, bool) for one in numbers) else [operator.index(one) for one in numbers]
    except TypeError:
        return part


def _range(name: str, part: Any, size: int) -> range:
    """The range of an axis that covers what an index selects of it."""
    if isinstance(part, slice):
        return range(*part.indices(size))
    numbers = [part] if isinstance(part, int) and not isinstance(part, bool) else part
    if not isinstance(numbers, list) or (isinstance(part, list) and name not in LISTED):
        lists = ", a slice or a list" if name in LISTED else " or a slice"
        raise ShapeError(f"amap: expected an integer{lists} as {name} index, got {part!r}")
    for one in numbers:
        if not isinstance(one, int) or isinstance(one, bool):
            raise ShapeError(f"amap: expected whole numbers as {name} indices, got {part!r}")
        if not -size <= one < size:
            raise IndexError(f"amap: {name} {one} is out of range for {size}")
    places = [one % size for one in numbers]
    return range(min(places, default=0), max(places, default=-1) + 1)
