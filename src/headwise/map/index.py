"""Indexing of attention maps, as of a tensor [batch, heads, queries, keys]: integers, slices, `...`, lists of heads.

And products with them: operands, the transpose, SciPy's linear operators.
"""

import operator
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from headwise.errors import DTypeError, ShapeError, whole_number
from headwise.map import shares
from headwise.rule import own_dtypes

AXES = "batch", "head", "query", "key"
LISTED = AXES[:2]  # a list of queries or keys would need all tiles between them


def select(index: Any, shape: tuple[int, ...], tile: Callable[..., Tensor]) -> Tensor:
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
    found = [_listed(part) if isinstance(part, (list, Tensor, np.ndarray)) else part for part in found]
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


if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


class Readable(Protocol):
    """An `AttentionMap` as this module uses it."""

    @property
    def lse(self) -> Tensor: ...
    @property
    def q(self) -> Tensor: ...
    @property
    def k(self) -> Tensor: ...
    @property
    def shape(self) -> tuple[int, int, int, int]: ...
    def _read(self, what: str, *given: Any) -> Any: ...


Method = TypeVar("Method", bound=Callable[..., Any])
Map = TypeVar("Map", bound=Readable)


def reading(method: Method) -> Method:
    """Decorator for methods that read a map: disables autocast, which would lower the precision, and autograd unless
    the map is differentiable."""

    @wraps(method)
    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        maps = self, *args, *options.values()
        graph = torch.is_grad_enabled() and any(getattr(x, "differentiable", False) for x in maps)
        with torch.set_grad_enabled(graph), own_dtypes(self.q):
            return method(self, *args, **options)

    return cast(Method, wrapped)


def operand(x: Tensor, amap: Readable, what: str) -> Tensor:
    """Convert x [size, e] or [b, h or h_kv, size, e], size of "keys" or "queries", to the map's dtype and that of all
    heads, or, of keys, of all KV heads."""
    (b, h, n, m), h_kv = amap.shape, amap.k.shape[1]
    size = m if what == "keys" else n
    if not isinstance(x, Tensor) or x.is_complex():
        came = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise DTypeError(f"attention map @ x: expected a tensor of real numbers, got {came}")
    given = tuple(x.shape)
    x = x.to(amap.lse)
    x = x[None, None] if x.ndim == 2 else x
    if not (x.ndim == 4 and x.shape[0] in (1, b) and x.shape[1] in (1, h_kv, h) and x.shape[2] == size):
        raise ShapeError(
            f"attention map @ x: x has shape {given}, expected ({size}, e) or ({b}, {h}, {size}, e) for {size} {what}"
        )
    return x.expand(b, h_kv if what == "keys" and x.shape[1] != h else h, -1, -1)


class TransposedMap(Generic[Map]):
    """The transposed map Pᵀ, for products."""

    def __init__(self, amap: Map) -> None:
        self._map = amap

    @property
    def q(self) -> Tensor:
        """The map's queries."""
        return self._map.q

    @property
    def differentiable(self) -> bool:
        """Whether the map is."""
        return bool(getattr(self._map, "differentiable", False))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, h, m, n)"""
        b, h, n, m = self._map.shape
        return b, h, m, n

    @property
    def T(self) -> Map:
        """The map itself."""
        return self._map

    @reading
    def __matmul__(self, y: Tensor) -> Tensor:
        """Pᵀ @ y for y [n, e] or [b, h, n, e]: [b, h, m, e]."""
        y = operand(y, self._map, "queries")
        product: Tensor = self._map._read("transposed_times", y.detach())
        if not self.differentiable:
            return product
        return cast(Tensor, cast(Any, self._map)._with_graph(product, shares.TransposedProduct(), operand=y))


def linear_operator(one: Any) -> "LinearOperator":
    """The map of one head as a `LinearOperator`; see `AttentionMap.as_linear_operator`."""
    from scipy.sparse.linalg import LinearOperator

    def apply(matrix: Any, x: Any) -> Any:
        if x.dtype.kind == "c":
            return apply(matrix, x.real) + 1j * apply(matrix, x.imag)
        columns = torch.as_tensor(x, dtype=one.lse.dtype, device=one.lse.device).reshape(len(x), -1)
        return (matrix @ columns)[0, 0].cpu().numpy().reshape(-1, *x.shape[1:])

    return LinearOperator(
        dtype=str(one.lse.dtype).removeprefix("torch."),
        shape=one.shape[2:],
        matvec=lambda x: apply(one, x),
        matmat=lambda x: apply(one, x),
        rmatvec=lambda y: apply(one.T, y),
        rmatmat=lambda y: apply(one.T, y),
    )
