"""Where each number of a view lies in the tensor that it was made from, through reshapes, transposes and slices.

A dimension of a view is a list of factors (size, stride), the outer one first. Strides count numbers of the original
tensor in row-major order. `[b·h, n, m]` as a view of `[b, h, n, m]` has the dimensions ((b, h·n·m), (h, n·m)),
((n, m)), ((m, 1)), merged where two factors are as good as one.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

Factor = tuple[int, int]  # size and stride
View = tuple[tuple[int, ...], tuple[int, ...], int]  # sizes, strides and offset, in numbers of a contiguous tensor


@dataclass(frozen=True)
class Layout:
    """The factors of every dimension, and the place of the first number."""

    dims: tuple[tuple[Factor, ...], ...]
    offset: int = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # of nested tuples, it takes longer than all else that is done with a key
        return hash((self.dims, self.offset))

    def through(self, view: View) -> "Layout | None":
        """The layout of a view of the tensor that has this one; None if it cannot be written in factors."""
        return _through(self, view)


@lru_cache(maxsize=4096)
def _through(layout: Layout, view: View) -> Layout | None:
    sizes, strides, offset = view
    modes = [factor for dim in layout.dims for factor in dim]
    start = _place(modes, offset)
    dims = [_composed(modes, size, stride) for size, stride in zip(sizes, strides, strict=True)]
    if start is None or any(dim is None for dim in dims):
        return None
    return Layout(tuple(dim for dim in dims if dim is not None), layout.offset + start)


@lru_cache(maxsize=1024)
def contiguous(shape: tuple[int, ...]) -> View:
    """The view of all of a contiguous tensor in this shape."""
    return shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))), 0


@lru_cache(maxsize=1024)
def whole(shape: tuple[int, ...]) -> Layout:
    """The layout of a tensor in itself."""
    _, strides, _ = contiguous(shape)
    return Layout(tuple(((size, stride),) if size > 1 else () for size, stride in zip(shape, strides, strict=True)))


def merged(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    """Neighbouring factors as one where that is the same, outer first."""
    result: list[Factor] = []
    for size, stride in factors:
        if size == 1:
            continue
        if result and result[-1][1] == size * stride:
            result[-1] = (result[-1][0] * size, stride)
        else:
            result.append((size, stride))
    return tuple(result)


def views(func: Callable[..., Any], x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> list[View | None]:
    """The views that func(x, *args, **kwargs) returns, one for each tensor; None for a tensor that is none.

    The function is called with a contiguous tensor of x's shape that has no data, because the order of the numbers,
    not their place in memory, defines what a reshape is.
    """
    shape = tuple(x.shape)
    if not kwargs and all(type(one) is int for one in args):
        return _cached(func, shape, ("tuple", *args), ("tuple",))
    try:
        return _cached(func, shape, _frozen(args), _frozen(tuple(sorted(kwargs.items()))))
    except TypeError:  # arguments that cannot be hashed
        return _probed(func, shape, tuple(args), kwargs)


@lru_cache(maxsize=4096)
def _cached(func: Callable[..., Any], shape: tuple[int, ...], args: Any, kwargs: Any) -> list[View | None]:
    return _probed(func, shape, _thawed(args), dict(_thawed(kwargs)))


def _probed(func: Callable[..., Any], shape: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[
    View | None
]:  # fmt: skip
    with torch.inference_mode(False), torch.no_grad():
        probe = torch.empty(shape, device="meta")
        args = tuple(torch.empty(x.shape, device="meta") if isinstance(x, Tensor) else x for x in args)
        try:
            found = func(probe, *args, **kwargs)
        except (RuntimeError, TypeError, IndexError, NotImplementedError):
            return [None]
        outs = [found] if isinstance(found, Tensor) else list(found)
        storage = probe.untyped_storage()._cdata
        return [
            (tuple(out.shape), out.stride(), int(out.storage_offset()))
            if isinstance(out, Tensor) and out.untyped_storage()._cdata == storage
            else None
            for out in outs
        ]


def interleaved(x: Tensor, repeats: int, dim: int) -> Tensor:
    """`x.repeat_interleave(repeats, dim)` as a view, before the dimension and its repeats become one."""
    dim %= x.ndim
    return x.unsqueeze(dim + 1).expand(*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :])


def tiled(x: Tensor, *repeats: int) -> Tensor:
    """`x.repeat(repeats)` as a view, before each dimension and its repeats become one."""
    shape = (1,) * (len(repeats) - x.ndim) + tuple(x.shape)
    pairs = zip(repeats, shape, strict=True)
    return x.view([one for size in shape for one in (1, size)]).expand([one for pair in pairs for one in pair])


def _frozen(x: Any) -> Any:
    """Arguments as a key; TypeError for tensors and others that have no value to compare."""
    if isinstance(x, tuple | list):
        return ("tuple", *map(_frozen, x))
    if isinstance(x, slice):
        return ("slice", x.start, x.stop, x.step)
    if x is None or x is Ellipsis or isinstance(x, int | str | torch.dtype | torch.memory_format):
        return x
    raise TypeError


def _thawed(x: Any) -> Any:
    if isinstance(x, tuple):
        return slice(*x[1:]) if x[0] == "slice" else tuple(map(_thawed, x[1:]))
    return x


def _place(modes: Sequence[Factor], flat: int) -> int | None:
    """Where the number with this index in row-major order lies."""
    place = 0
    for size, stride in reversed(modes):
        place += flat % size * stride
        flat //= size
    return place if flat == 0 else None


def _composed(modes: Sequence[Factor], size: int, stride: int) -> tuple[Factor, ...] | None:
    """The factors of a dimension of `size` numbers, every stride-th one in row-major order of a tensor of `modes`."""
    if size == 1:
        return ()
    if stride == 0:
        return ((size, 0),)
    found: list[Factor] = []
    inner = 1  # numbers in the modes that are passed
    for extent, step in reversed(modes):
        outer = inner * extent
        if stride >= outer:
            if stride % outer:
                return None
        else:
            if stride % inner or (extent % (stride // inner)):
                return None
            available = extent // (stride // inner)
            if size <= available:
                return merged([(size, step * (stride // inner)), *reversed(found)])
            if size % available:
                return None
            found.append((available, step * (stride // inner)))
            size, stride = size // available, outer
        inner = outer
    return None
