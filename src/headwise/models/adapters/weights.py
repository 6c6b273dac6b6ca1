"""Attention weights as a tensor that is computed when it is read; reductions of them, and products with them, in O(n)
memory.

`FUNCTIONS` maps functions of torch to functions (weights, *arguments) that return what torch returns for the dense
tensor, or `NotImplemented` where that takes the dense tensor. Sums and means are computed in the precision of the map
and rounded once.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from headwise.errors import ConfigError
from headwise.kernels.call import Call
from headwise.kernels.reference import weights_of
from headwise.map import AttentionMap
from headwise.rule import Rule

MOST = 1 << 22  # weights at once: 16 MB in float32
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}


def streams(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that registers a function for functions of torch."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for one in functions:
            FUNCTIONS[one] = function
        return function

    return register


def blocks(weights: "AttentionWeights") -> Iterator[Tensor]:
    """The weights as dense blocks of rows, [..., r, m]."""
    n, m = weights.shape[-2:]
    height = max(1, MOST // max(1, weights.numel() // max(1, n * m) * m))
    for start in range(0, n, height):
        yield weights[..., start : start + height, :]


def _axes(weights: "AttentionWeights", dim: Any) -> list[int] | None:
    """The axes of `dim=…`, counted from the end (−1 is the keys); None if torch must check them."""
    given = range(weights.ndim) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    if not isinstance(given, Sequence) or any(type(at) is not int for at in given):
        return None
    axes = [at - weights.ndim if at >= 0 else at for at in given]
    return axes if len(set(axes)) == len(axes) and all(-weights.ndim <= at < 0 for at in axes) else None


def _by_rows(function: Callable[..., Any], weights: "AttentionWeights", *, keepdim: bool, **options: Any) -> Any:
    """A function that reduces the keys, block by block."""
    found = [function(block, dim=-1, keepdim=keepdim, **options) for block in blocks(weights)]
    at = -2 if keepdim else -1
    if isinstance(found[0], Tensor):
        return torch.cat(found, at)
    return type(found[0])([torch.cat(parts, at) for parts in zip(*found, strict=True)])


def _total(weights: "AttentionWeights", axes: list[int], keepdim: bool) -> Tensor | None:
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
def _sum(weights: "AttentionWeights", dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    axes = _axes(weights, dim)
    found = None if axes is None else _total(weights, axes, keepdim)
    return NotImplemented if found is None else found.to(dtype or weights.dtype)


@streams(Tensor.mean, torch.mean)
def _mean(weights: "AttentionWeights", dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    axes = _axes(weights, dim)
    if axes == [-3] and weights.ndim - weights.batched == 3 and not keepdim and dtype is None:
        return weights.like(averaged=True)
    found = None if axes is None else _total(weights, axes, keepdim)
    if found is None or axes is None:
        return NotImplemented
    count = 1
    for at in axes:
        count *= weights.shape[at]
    return (found / count).to(dtype or weights.dtype)


def _extreme(function: Callable[..., Tensor], weights: "AttentionWeights", dim: Any = (), keepdim: bool = False) -> Any:
    axes = _axes(weights, dim)
    if axes is None or -1 not in axes or 0 in weights.shape:
        return NotImplemented
    found = _by_rows(function, weights, keepdim=True)
    return function(found, dim=axes, keepdim=keepdim)


streams(torch.amax, Tensor.amax)(partial(_extreme, torch.amax))
streams(torch.amin, Tensor.amin)(partial(_extreme, torch.amin))


def _extreme_with_place(function: Callable[..., Any], weights: "AttentionWeights", *given: Any, **named: Any) -> Any:
    if not given and not named:
        return _extreme(torch.amax if function is torch.max else torch.amin, weights, None)
    return _row_function(function, weights, *given, **named)


streams(torch.max, Tensor.max)(partial(_extreme_with_place, torch.max))
streams(torch.min, Tensor.min)(partial(_extreme_with_place, torch.min))


def _row_function(function: Callable[..., Any], weights: "AttentionWeights", dim: Any, keepdim: bool = False) -> Any:
    if type(dim) is not int or _axes(weights, dim) != [-1] or 0 in weights.shape:
        return NotImplemented
    return _by_rows(function, weights, keepdim=keepdim)


streams(torch.argmax, Tensor.argmax)(partial(_row_function, torch.argmax))
streams(torch.argmin, Tensor.argmin)(partial(_row_function, torch.argmin))


@streams(Tensor.topk, torch.topk)
def _topk(weights: "AttentionWeights", k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
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


@streams(torch.nn.functional.dropout)
def _dropout(weights: "AttentionWeights", p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return NotImplemented if training and p != 0 else weights


@streams(Tensor.detach)
def _detach(weights: "AttentionWeights") -> Any:
    """The same values in shared memory."""
    found = weights.like()
    found._source = weights
    return found


def _as_dtype(dtype: torch.dtype, weights: "AttentionWeights") -> Any:
    return weights if dtype == weights.dtype else weights.like(dtype=dtype)


streams(Tensor.float)(partial(_as_dtype, torch.float32))
streams(Tensor.double)(partial(_as_dtype, torch.float64))


# Known without the values.
_ATTRIBUTES = "shape", "dtype", "device", "ndim", "layout", "is_nested", "is_sparse", "is_cuda", "is_cpu"
_KNOWN: frozenset[Any] = frozenset({
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.__len__, Tensor.element_size,
    Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, torch.numel,
})  # fmt: skip


class LazyTensor(Tensor):
    """Base of tensors that are computed by `make` on first use."""

    _made: Tensor | None = None
    _version_made: int | None = 0

    @staticmethod
    def empty_shell(cls: type["LazyTensor"], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        """A tensor of that class and shape without values."""
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    @abstractmethod
    def make(self) -> Tensor:
        """Compute the dense tensor."""

    @property
    def made(self) -> bool:
        """Whether the dense tensor has been computed."""
        return self._made is not None

    def dense(self) -> Tensor:
        """The dense tensor, computed once."""
        if self._made is None:
            self._made = self.make()
            self._version_made = None if self._made.is_inference() else self._made._version
        return self._made

    @property
    def changed(self) -> bool:
        """Whether the dense tensor was written to, so that it is no longer what `make` computes; True where tensors of
        inference mode, which count no versions, do not say."""
        return self._made is not None and (self._version_made is None or self._made._version != self._version_made)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*tree_map(dense, args), **tree_map(dense, kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*tree_map(dense, args), **tree_map(dense, kwargs or {}))

    def __hash__(self) -> int:
        return id(self)  # Tensor's own would compute the dense tensor and return its id

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        state = "made" if self.made else "not made yet"
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {state}; {self.origin})"

    @property
    @abstractmethod
    def origin(self) -> str:
        """Its source, for repr."""


def dense(x: Any) -> Any:
    """The dense tensor of a lazy one; anything else as it is."""
    return x.dense() if isinstance(x, LazyTensor) else x


# Functions that return the weights themselves, so that they may record gradients.
_UNREAD = frozenset({Tensor.detach, torch.nn.functional.dropout})


class AttentionWeights(LazyTensor):
    """Weights [b, h, n, m] (averaged: [b, n, m]; of an unbatched call: without b), computed on first use.

    It is a `torch.Tensor`: any torch function, NumPy and `.tolist()` work, and return what they return for the dense
    tensor. Before its first use it takes O(n) memory. An index of integers and slices, `weights[0, 3, 10:20]`, computes
    that tile alone. Sums, means, extremes, `topk` and products (`weights @ v`, `x @ weights`) are computed in O(n)
    memory where that is possible (`FUNCTIONS`). Anything else computes the n×m tensor once and stores it, as the
    other library would have done in the call. If the call recorded gradients, they flow through it to queries, keys and
    biases; the first use that autograd records then computes all of it, in float64. The output of the call is not
    computed from it, so that gradients of the output do not reach it: asking for them raises ConfigError, where
    the other library would have them.

    Weights are those before dropout, and rows of fully masked queries are 0, where PyTorch's are NaN. With a learned
    sink (`s_aux` of gpt-oss and others), rows sum to less than 1, by as much as the sink takes, as in gpt-oss's own
    code. The eager code of Granite's models with sinks (granite_swa, granitemoe_swa) returns rows without the sink,
    which sum to 1: `weights / weights.sum(-1, keepdim=True)`.

    Attributes:
        map: the `AttentionMap` [b, h, n, m] behind it. Keys that `add_bias_kv` and `add_zero_attn` append are the
            map's first ones, and the last ones here.
        averaged: whether it is the mean over heads. batched: whether it has a batch axis. appended: the number of
            such keys. unfilled: the number of columns of 0 after the map's keys, entries of a cache of fixed size.
    """

    map: AttentionMap
    _source: "AttentionWeights | None" = None  # whose values it shares

    @staticmethod
    def __new__(cls: type["AttentionWeights"], amap: AttentionMap, dtype: torch.dtype, **how: Any) -> Any:
        b, h, n, m = amap.shape
        m += how.get("unfilled", 0)
        shape = (*((b,) if how.get("batched", True) else ()), *(() if how.get("averaged") else (h,)), n, m)
        return LazyTensor.empty_shell(cls, shape, dtype, amap.lse.device)

    def __init__(
        self,
        amap: AttentionMap,
        dtype: torch.dtype,
        *,
        averaged: bool = False,
        batched: bool = True,
        appended: int = 0,
        unfilled: int = 0,
        graph: tuple[Tensor, Tensor, Rule] | None = None,
        beside: bool = False,
    ) -> None:
        # graph: queries, keys and rule with their graph, where weights must be differentiable.
        # beside: whether the other library does not compute its output from what it returns as weights either.
        self.map = amap
        self.averaged, self.batched, self.appended, self.unfilled = averaged, batched, appended, unfilled
        self._graph, self.beside = graph, beside

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OF_GRADIENTS:
            return _OF_GRADIENTS[func](*args, **(kwargs or {}))
        function = FUNCTIONS.get(func)
        lazy = [x for x in args[:2] if isinstance(x, AttentionWeights)]
        if function is not None and lazy and all(x.in_parts or (func in _UNREAD and not x.made) for x in lazy):
            try:
                signature(function).bind(*args, **(kwargs or {}))
            except TypeError:  # other arguments of the function
                found = NotImplemented
            else:
                with torch.no_grad():
                    found = function(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def in_parts(self) -> bool:
        """Whether functions may compute it in parts: it is not stored, and autograd does not record."""
        graph = self._graph is not None and torch.is_grad_enabled()
        return not self.made and not graph and not self.unfilled and (self._source is None or not self._source.made)

    def like(self, **changes: Any) -> "AttentionWeights":
        """The same without gradients, with changed arguments, computed on first use."""
        how = {name: getattr(self, name) for name in ("dtype", "averaged", "batched", "appended", "unfilled")}
        return AttentionWeights(self.map, **how | changes)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether gradients flow through it."""
        return self._made.requires_grad if self._made is not None else self._graph is not None

    @property
    def origin(self) -> str:
        return f"{'the mean over heads of ' if self.averaged else ''}{self.map!r}"

    def make(self) -> Tensor:
        if self._source is not None:
            return self._source.dense().detach()
        if self._graph is not None:
            q, k, rule = self._graph
            with torch.enable_grad():
                every = weights_of(Call(q, k, k[..., :0], rule))[0]
                return self._arranged(every.mean(1) if self.averaged else every)
        with torch.inference_mode(False), torch.no_grad():  # tensors of inference mode have no version counter
            return self._arranged(self._read([slice(None)] * 4))

    def __getitem__(self, index: Any) -> Tensor:
        parts = self._tile_of(index)
        if parts is None:
            return self.dense()[index]
        shape = torch.empty(self.shape, device="meta")[index].shape  # raises what a tensor raises
        if 0 in shape:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return self._read(parts).to(self.dtype)

    def _read(self, parts: list[Any]) -> Tensor:
        """A tile of the map, [batch, head, query, key] indices; the mean over heads if averaged."""
        if not self.averaged:
            return self.map[tuple(parts)]
        batch, _, rows, cols = parts
        heads = self.map.shape[1]  # one after the other, so that never all of them are held
        total = self.map[batch, 0, rows, cols]
        for head in range(1, heads):
            total += self.map[batch, head, rows, cols]
        return total / heads

    def _arranged(self, weights: Tensor) -> Tensor:
        """The map's weights in the order, shape and dtype that the caller expects."""
        if self.appended:
            weights = weights.roll(-self.appended, -1)
        if self.unfilled:
            weights = torch.nn.functional.pad(weights, (0, self.unfilled))
        return (weights if self.batched else weights[0]).to(self.dtype)

    def _tile_of(self, index: Any) -> list[Any] | None:
        """The index into the map, [batch, head, query, key], if it is a tile; None if the dense tensor is required."""
        parts = list(index) if isinstance(index, tuple) else [index]
        plain = all(
            type(part) is int or part is ...
            or (isinstance(part, slice) and {type(part.start), type(part.stop), type(part.step)} <= {int, type(None)}
                and (part.step is None or part.step > 0))
            for part in parts
        )  # fmt: skip
        if not self.in_parts or self.appended or not plain or parts.count(...) > 1:
            return None
        if len(parts) - parts.count(...) > self.ndim:
            return None  # the dense tensor raises the error
        if ... not in parts:
            parts.append(...)
        at = parts.index(...)
        parts[at : at + 1] = [slice(None)] * (self.ndim - len(parts) + 1)
        return [*([] if self.batched else [0]), *parts[: len(parts) - 2 - (not self.averaged)],
                *([slice(None)] if self.averaged else [parts[-3]]), *parts[-2:]]  # fmt: skip


def _without_gradient(what: str) -> ConfigError:
    """The error for what needs gradients with respect to weights that nothing was computed from."""
    return ConfigError(
        f"{what} of attention weights from headwise: the model's output is not computed from them, but beside them, so "
        f"that its gradient does not reach them. For that, call model.set_attn_implementation('eager') before the "
        f"forward pass. For gradients of what you compute from the weights, use a copy of them: weights.clone()"
    )


def _refused(what: str, function: Callable[..., Any], weights: AttentionWeights, *given: Any, **named: Any) -> Any:
    """A method that is about gradients with respect to weights."""
    if weights.requires_grad and not weights.beside and not weights.changed:
        raise _without_gradient(what)
    return function(weights.dense(), *given, **named)  # as of any tensor without gradients


def _grad(*args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad`, in which weights are inputs or outputs."""
    given = signature(torch.autograd.grad).bind(*args, **kwargs).arguments
    inputs = [given["inputs"]] if isinstance(given["inputs"], Tensor) else list(given["inputs"])
    lazy = [isinstance(x, AttentionWeights) and x.requires_grad and not x.beside for x in inputs]
    if any(isinstance(x, AttentionWeights) and not x.made for one, x in zip(lazy, inputs, strict=True) if one):
        raise _without_gradient("torch.autograd.grad")
    zeros = given.pop("materialize_grads", False)
    unused = given.pop("allow_unused", None) or zeros
    found = torch.autograd.grad(**tree_map(dense, given | {"inputs": inputs}), allow_unused=True)
    if any(one and gradient is None for one, gradient in zip(lazy, found, strict=True)):
        raise _without_gradient("torch.autograd.grad")
    if not unused and any(gradient is None for gradient in found):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if "
            "this is the desired behavior."
        )
    if not zeros:
        return found
    return tuple(torch.zeros_like(x) if dx is None else dx for x, dx in zip(inputs, found, strict=True))


def _backward(*args: Any, **kwargs: Any) -> None:
    """`torch.autograd.backward`, likewise."""
    given = signature(torch.autograd.backward).bind(*args, **kwargs).arguments
    inputs = given.get("inputs") or ()
    if any(
        isinstance(x, AttentionWeights) and not x.beside for x in ([inputs] if isinstance(inputs, Tensor) else inputs)
    ):
        raise _without_gradient("backward(inputs=…)")
    torch.autograd.backward(**tree_map(dense, given))


# Functions of torch that are about gradients.
_OF_GRADIENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.retain_grad: partial(_refused, "retain_grad()", Tensor.retain_grad),
    Tensor.register_hook: partial(_refused, "register_hook()", Tensor.register_hook),
    torch.autograd.grad: _grad,
    torch.autograd.backward: _backward,
}
