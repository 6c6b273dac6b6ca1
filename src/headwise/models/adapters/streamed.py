"""Reductions of attention weights, and products with them, in O(n) memory.

`FUNCTIONS` maps functions of torch to functions (weights, *arguments) that return what torch returns for the dense
tensor, or `NotImplemented` where that takes the dense tensor. Sums and means are computed in the precision of the map
and rounded once.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from headwise.map import AttentionMap


class Weights(Protocol):
    """`AttentionWeights` as this module uses it."""

    map: AttentionMap
    averaged: bool
    batched: bool
    appended: int

    @property
    def shape(self) -> torch.Size: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def numel(self) -> int: ...
    def __getitem__(self, index: Any) -> Tensor: ...
    def over_heads(self) -> Tensor: ...
    def as_dtype(self, dtype: torch.dtype) -> Tensor: ...
    def without_graph(self) -> Tensor: ...


MOST = 1 << 22  # weights at once: 16 MB in float32
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}


def streams(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that registers a function for functions of torch."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for one in functions:
            FUNCTIONS[one] = function
        return function

    return register


def blocks(weights: Weights) -> Iterator[Tensor]:
    """The weights as dense blocks of rows, [..., r, m]."""
    n, m = weights.shape[-2:]
    height = max(1, MOST // max(1, weights.numel() // max(1, n * m) * m))
    for start in range(0, n, height):
        yield weights[..., start : start + height, :]


def _axes(weights: Weights, dim: Any) -> list[int] | None:
    """The axes of `dim=…`, counted from the end (−1 is the keys); None if torch must check them."""
    given = range(weights.ndim) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    if not isinstance(given, Sequence) or any(type(at) is not int for at in given):
        return None
    axes = [at - weights.ndim if at >= 0 else at for at in given]
    return axes if len(set(axes)) == len(axes) and all(-weights.ndim <= at < 0 for at in axes) else None


def _by_rows(function: Callable[..., Any], weights: Weights, *, keepdim: bool, **options: Any) -> Any:
    """A function that reduces the keys, block by block."""
    found = [function(block, dim=-1, keepdim=keepdim, **options) for block in blocks(weights)]
    at = -2 if keepdim else -1
    if isinstance(found[0], Tensor):
        return torch.cat(found, at)
    return type(found[0])([torch.cat(parts, at) for parts in zip(*found, strict=True)])


def _total(weights: Weights, axes: list[int], keepdim: bool) -> Tensor | None:
    """The sum over axes that include queries or keys, in the dtype of the map."""
    amap, wide = weights.map, weights.map.lse
    if -2 in axes and not weights.appended:
        first, found = -2, amap.received()  # [b, h, m]
    elif -1 in axes:
        first, found = -1, (amap @ wide.new_ones(amap.shape[3], 1))[..., 0]  # [b, h, n]
    else:
        return None
    found = found.mean(1) if weights.averaged else found
    found = (found if weights.batched else found[0]).unsqueeze(first)
    rest = [at for at in axes if at != first]
    found = found.sum(rest, keepdim=True) if rest else found
    return found if keepdim else found.squeeze(tuple(axes))


@streams(Tensor.sum, torch.sum)
def _sum(weights: Weights, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    axes = _axes(weights, dim)
    found = None if axes is None else _total(weights, axes, keepdim)
    return NotImplemented if found is None else found.to(dtype or weights.dtype)


@streams(Tensor.mean, torch.mean)
def _mean(weights: Weights, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    axes = _axes(weights, dim)
    if axes == [-3] and weights.ndim - weights.batched == 3 and not keepdim and dtype is None:
        return weights.over_heads()
    found = None if axes is None else _total(weights, axes, keepdim)
    if found is None or axes is None:
        return NotImplemented
    count = 1
    for at in axes:
        count *= weights.shape[at]
    return (found / count).to(dtype or weights.dtype)


def _extreme(function: Callable[..., Tensor], weights: Weights, dim: Any = (), keepdim: bool = False) -> Any:
    axes = _axes(weights, dim)
    if axes is None or -1 not in axes or 0 in weights.shape:
        return NotImplemented
    found = _by_rows(function, weights, keepdim=True)
    return function(found, dim=axes, keepdim=keepdim)


streams(torch.amax, Tensor.amax)(partial(_extreme, torch.amax))
streams(torch.amin, Tensor.amin)(partial(_extreme, torch.amin))


def _extreme_with_place(function: Callable[..., Any], weights: Weights, *given: Any, **named: Any) -> Any:
    if not given and not named:
        return _extreme(torch.amax if function is torch.max else torch.amin, weights, None)
    return _row_function(function, weights, *given, **named)


streams(torch.max, Tensor.max)(partial(_extreme_with_place, torch.max))
streams(torch.min, Tensor.min)(partial(_extreme_with_place, torch.min))


def _row_function(function: Callable[..., Any], weights: Weights, dim: Any, keepdim: bool = False) -> Any:
    if type(dim) is not int or _axes(weights, dim) != [-1] or 0 in weights.shape:
        return NotImplemented
    return _by_rows(function, weights, keepdim=keepdim)


streams(torch.argmax, Tensor.argmax)(partial(_row_function, torch.argmax))
streams(torch.argmin, Tensor.argmin)(partial(_row_function, torch.argmin))


@streams(Tensor.topk, torch.topk)
def _topk(weights: Weights, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if _axes(weights, dim) != [-1] or 0 in weights.shape:
        return NotImplemented
    found = [block.topk(k, -1, largest, sorted) for block in blocks(weights)]
    values, indices = zip(*found, strict=True)
    return torch.return_types.topk((torch.cat(values, -2), torch.cat(indices, -2)))


@streams(Tensor.matmul, torch.matmul, Tensor.__matmul__)
def _matmul(left: Any, right: Any) -> Any:
    """Products from either side."""
    if type(left) is type(right):
        return NotImplemented
    from_left = not hasattr(left, "map")
    weights, x = (right, left) if from_left else (left, right)
    if not isinstance(x, Tensor) or weights.appended or torch.is_autocast_enabled(weights.device.type):
        return NotImplemented
    if x.dtype != weights.dtype or x.device != weights.device or (x.requires_grad and torch.is_grad_enabled()):
        return NotImplemented
    size = weights.shape[-2 if from_left else -1]
    if x.ndim not in (2, weights.ndim) or x.shape[-1 if from_left else -2] != size:
        return NotImplemented
    b, h, _, _ = weights.map.shape
    operand = x.mT if from_left else x
    if operand.ndim > 2:
        lead = (*((b,) if weights.batched else ()), *(() if weights.averaged else (h,)))
        if operand.shape[:-2] != lead:
            return NotImplemented
        operand = operand if weights.batched else operand[None]
        operand = operand[:, None].expand(-1, h, -1, -1) if weights.averaged else operand
    found = weights.map.T @ operand if from_left else weights.map @ operand
    found = found.mean(1) if weights.averaged else found
    found = (found if weights.batched else found[0]).to(weights.dtype)
    return found.mT if from_left else found


@streams(Tensor.detach)
def _detach(weights: Weights) -> Any:
    return weights.without_graph()


@streams(torch.nn.functional.dropout)
def _dropout(weights: Weights, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return NotImplemented if training and p != 0 else weights


@streams(Tensor.float)
def _float(weights: Weights) -> Any:
    return weights.as_dtype(torch.float32)


@streams(Tensor.double)
def _double(weights: Weights) -> Any:
    return weights.as_dtype(torch.float64)
