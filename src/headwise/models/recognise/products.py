"""Products of two tensors, however they are written, and where each number of a view lies in its tensor."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from string import ascii_letters
from typing import Any, NamedTuple

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
    """The views that func(x, *args, **kwargs) returns, None for a tensor that is none: from a contiguous tensor of x's
    shape without data, as the order of the numbers, not their place, defines what a reshape is."""
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


NAMES = frozenset({"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "mm", "addmm", "mv", "einsum", "dot"})


class Contraction(NamedTuple):
    """alpha · Σ left · right + beta · added; a, b and out have a letter for each dimension, "1" where an operand is
    broadcast."""

    left: Tensor
    right: Tensor
    a: str
    b: str
    out: str
    alpha: float = 1.0
    added: Tensor | None = None  # a tensor that broadcasts to the result, or None
    beta: float = 1.0

    @property
    def summed(self) -> str:
        """The letters that the result does not have."""
        return "".join(letter for letter in self.a if letter not in self.out and letter != "1")


def contraction(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Contraction | None:
    """The product that a call computes; None if it is none of two tensors."""
    if name == "einsum":
        found_terms = terms(args)
        if found_terms is None or len(found_terms[0]) != 2:
            return None
        (left, right), (a, b), out = found_terms
        return pair(left, right, a, b, out)
    args = [*args, *(kwargs[key] for key in ("input", "other", "mat2", "batch1", "batch2", "vec") if key in kwargs)]
    if name in ("baddbmm", "addmm"):
        if len(args) != 3:
            return None
        added, left, right = args
        alpha, beta = float(kwargs.get("alpha", 1.0)), float(kwargs.get("beta", 1.0))
        found = _matmul(left, right)
        if found is None:
            return None
        return Contraction(left, right, found.a, found.b, found.out, alpha, added if beta else None, beta)
    if len(args) != 2 or not all(isinstance(x, Tensor) for x in args):
        return None
    return _matmul(*(reversed(args) if name == "__rmatmul__" else args))


def _matmul(left: Tensor, right: Tensor) -> Contraction | None:
    letters = _letters(left.shape, right.shape)
    return None if letters is None else Contraction(left, right, *letters)


@lru_cache(maxsize=1024)
def _letters(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[str, str, str] | None:
    """Those of matmul of two tensors of these shapes, and of its result; None for a scalar."""
    if not left or not right:
        return None
    rows, cols = ("N" if len(left) > 1 else ""), ("M" if len(right) > 1 else "")
    one, two = left[:-2] if rows else (), right[:-2] if cols else ()
    letters = ascii_letters[: max(len(one), len(two))]
    a, b = _broadcast(letters, one, two)
    return a + rows + "D", b + ("D" + cols if cols else "D"), letters + rows + cols


def pair(left: Tensor, right: Tensor, a: str, b: str, out: str) -> Contraction | None:
    """The product of two tensors by letters; None if it also sums over one of them alone, takes a diagonal, or
    broadcasts within a letter."""
    if len(set(a)) < len(a) or len(set(b)) < len(b) or len(a) != left.ndim or len(b) != right.ndim:
        return None
    sizes: dict[str, set[int]] = {}
    for letter, size in [*zip(a, left.shape, strict=True), *zip(b, right.shape, strict=True)]:
        sizes.setdefault(letter, set()).add(size)
    if (set(a) ^ set(b)) - set(out) or any(len(found) > 1 for found in sizes.values()):
        return None
    return Contraction(left, right, a, b, out)


def terms(args: Sequence[Any]) -> tuple[list[Tensor], list[str], str] | None:
    """The operands of an einsum, the letters of each, and those of the result, without dots; None if it has none."""
    if not args:
        return None
    if isinstance(args[0], str):
        operands = list(args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else list(args[1:])
        inputs, arrow, out = args[0].replace(" ", "").partition("->")
        letters = inputs.split(",")
    else:  # tensors, each followed by the numbers of its dimensions
        operands, numbers = list(args[0 : len(args) - len(args) % 2 : 2]), [*args[1::2]]
        arrow, last = "->" * (len(args) % 2), [args[-1]] if len(args) % 2 else [()]
        *letters, out = (
            "".join("..." if one is Ellipsis else ascii_letters[one] for one in dims) for dims in [*numbers, *last]
        )
    if len(operands) != len(letters) or not all(isinstance(x, Tensor) for x in operands):
        return None
    if any("..." in term for term in letters):
        free = [letter for letter in ascii_letters if not any(letter in term for term in (*letters, out))]
        counts = [x.ndim - len(t) + 3 if "..." in t else 0 for x, t in zip(operands, letters, strict=True)]
        dots = "".join(free[: max(counts)])
        letters = [t.replace("...", dots[len(dots) - c :]) for t, c in zip(letters, counts, strict=True)]
        out = out.replace("...", dots) if arrow else out
    if not arrow:
        every = "".join(letters)
        out = "".join(sorted(letter for letter in set(every) if every.count(letter) == 1))
    return operands, letters, out


def outer(left: Tensor, right: Tensor, summed: Sequence[int], ndim: int) -> Contraction | None:
    """(left * right).sum(summed) as a product; None if it sums over a dimension that one of them does not have."""
    letters = ascii_letters[:ndim]
    out = "".join(letter for i, letter in enumerate(letters) if i not in summed)
    a, b = _broadcast(letters, left.shape, right.shape)
    return Contraction(left, right, a, b, out) if set(letters) - set(out) <= set(a) & set(b) else None


def is_outer(kind: str, one: Any, other: Any, out: Tensor) -> bool:
    """Whether a function multiplies two tensors of different shapes, so that a sum over it may be a product."""
    return (
        kind == "mul" and isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape != other.shape
        and min(one.numel(), other.numel()) > 1 and out.ndim > 2
    )  # fmt: skip


def _broadcast(letters: str, one: Sequence[int], two: Sequence[int]) -> tuple[str, str]:
    """The letters of two shapes that broadcast to the dimensions of these letters: "1" where one has size 1."""
    sizes = [(1,) * (len(letters) - len(x)) + tuple(x) for x in (one, two)]
    a, b = (
        "".join("1" if x == 1 < y else letter for letter, x, y in zip(letters, *pair, strict=True))
        for pair in (sizes, sizes[::-1])
    )
    return a[len(letters) - len(one) :], b[len(letters) - len(two) :]
