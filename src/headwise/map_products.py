"""Products with an attention map: operands, the transpose, SciPy's linear operators."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from headwise.errors import DTypeError, ShapeError
from headwise.rule import own_dtypes

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


class Readable(Protocol):
    """An `AttentionMap` as this module uses it."""

    lse: Tensor

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
    """Decorator for methods that read a map: disables autograd, and autocast, which would lower the precision."""

    @wraps(method)
    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        with torch.no_grad(), own_dtypes(self.q):
            return method(self, *args, **options)

    return cast(Method, wrapped)


def operand(x: Tensor, amap: Readable, size: int, what: str) -> Tensor:
    """Convert x [size, e] or [b, h or h_kv, size, e] to the map's dtype and [b, 1 or h or h_kv, size, e]."""
    b, h = amap.shape[:2]
    if not isinstance(x, Tensor) or x.is_complex():
        came = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise DTypeError(f"attention map @ x: expected a tensor of real numbers, got {came}")
    given = tuple(x.shape)
    x = x.detach().to(amap.lse)
    x = x[None, None] if x.ndim == 2 else x
    if not (x.ndim == 4 and x.shape[0] in (1, b) and x.shape[1] in (1, amap.k.shape[1], h) and x.shape[2] == size):
        raise ShapeError(
            f"attention map @ x: x has shape {given}, expected ({size}, e) or ({b}, {h}, {size}, e) for {size} {what}"
        )
    return x.expand(b, -1, -1, -1)


class TransposedMap(Generic[Map]):
    """The transposed map Pᵀ, for products."""

    def __init__(self, amap: Map) -> None:
        self._map = amap

    @property
    def q(self) -> Tensor:
        """The map's queries."""
        return self._map.q

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
        _, h, n, _ = self._map.shape
        y = operand(y, self._map, n, "queries").expand(-1, h, -1, -1)
        product: Tensor = self._map._read("transposed_times", y)
        return product


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
