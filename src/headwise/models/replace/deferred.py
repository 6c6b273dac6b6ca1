"""Scores and weights that are written down, and computed only if something other than attention reads them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from headwise.errors import ConfigError
from headwise.models.adapters.lazy import LazyTensor
from headwise.models.recognise.products import NAMES as PRODUCTS, Layout

_OWN_FLOAT32 = frozenset({"softmax", "log_softmax", "exp", "sum", "logsumexp"})  # under autocast on a GPU


class Deferred(LazyTensor):
    """The result of a function that has not been computed, with the arguments and the settings of the call.

    The first function that reads its values computes it exactly as the code would have, from the same arguments.

    Attributes:
        made_by: name of the function. parents: the arguments that are `Deferred` themselves.
        reduced: for a reduction along dimensions, the layout that was known of its argument, and these dimensions.
        alias: whether it is a view of its argument. viewed: whether a view of it was made.
        graph: whether gradients were recorded when it was called.
    """

    _base = None

    @staticmethod
    def __new__(cls: type["Deferred"], like: Tensor, device: torch.device, *call: Any) -> Any:
        return LazyTensor.empty_shell(cls, tuple(like.shape), like.dtype, device)

    def __init__(
        self, like: Tensor, device: torch.device, name: str, func: Callable[..., Any], args: Any, kwargs: Any, part: Any
    ) -> None:
        self.made_by, self._part = name, part
        self._call: tuple[Callable[..., Any], Any, Any] | None = (func, args, kwargs)
        self.reduced: tuple[Layout, tuple[int, ...]] | None = None
        self.alias = self.viewed = self._changes = False
        self.graph = torch.is_grad_enabled()
        self._settings = _settings(device.type)
        self._versions = [(x, x._version) for x in self.leaves() if not x.is_inference()]
        self._children: WeakSet[Deferred] = WeakSet()
        for parent in self.parents:
            parent._children.add(self)

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Whether it has no numbers, so far."""
        return not self.made

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether gradients flow through it."""
        if self._made is not None:
            return self._made.requires_grad
        return self.graph and any(x.requires_grad for x in (*self.parents, *self.leaves()))

    @property
    def parents(self) -> "list[Deferred]":
        """The arguments that have not been computed either; none once it is computed."""
        return [x for x in self._tensors() if isinstance(x, Deferred)]

    def leaves(self) -> list[Tensor]:
        """The arguments that are tensors with numbers."""
        return [x for x in self._tensors() if not isinstance(x, Deferred)]

    def lineage(self) -> "Iterator[Deferred]":
        """It and all from which it is made, each once."""
        seen: set[int] = set()
        rest = [self]
        while rest:
            one = rest.pop()
            if id(one) not in seen:
                seen.add(id(one))
                yield one
                rest += one.parents

    def make(self) -> Tensor:
        assert self._call is not None
        func, args, kwargs = self._call
        for x, version in self._versions:
            if x._version != version:
                raise ConfigError(
                    f"attach(model): the result of {self.made_by} {list(self.shape)} was not computed, and cannot be "
                    f"any more: one of its arguments was changed in place since. Read it before, or detach the model"
                )
        with _as_then(self._settings):
            args, kwargs = tree_map(_numbers, (args, kwargs))
            if self._changes:  # another function may read what was there before
                args = (args[0].clone(), *args[1:])
            made = func(*args, **kwargs)
        self._call, self._versions = None, []
        found: Tensor = made if self._part is None else made[self._part]
        return found

    def set(self, made: Tensor) -> None:
        """Give it its numbers, computed in another way."""
        self._made, self._call, self._versions = made, None, []

    def rewrite(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> "Deferred":
        """Make it the result of a function that changes it in place. Returns what it was before."""
        assert self._call is not None
        before, given, named = self._call
        old = Deferred(self, self.device, self.made_by, before, given, named, self._part)
        old.reduced, old.graph, old._settings = self.reduced, self.graph, self._settings
        old._versions, old._changes, self._changes = self._versions, self._changes, True
        for child in list(self._children):
            if child._call is not None:
                child._call = tree_map(lambda x: old if x is self else x, child._call)
                old._children.add(child)
        self._children = WeakSet()
        self._part = None
        self._call = (func, (old, *args[1:]), kwargs)
        old._children.add(self)
        self._versions = [(x, x._version) for x in self.leaves() if not x.is_inference()]
        self.graph, self._settings = torch.is_grad_enabled(), _settings(self.device.type)
        self.made_by = getattr(func, "__name__", "a function")
        return old

    def _tensors(self) -> list[Tensor]:
        if self._call is None:
            return []
        return [x for x in tree_flatten(self._call[1:])[0] if isinstance(x, Tensor)]

    @property
    def origin(self) -> str:
        return f"the result of {self.made_by}"


def deferred(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a call, not computed: a `Deferred`, or a tuple of them; None if its shape is not known without
    computing it."""
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    device = next((x.device for x in tensors if x.ndim), tensors[0].device)
    like = _like(name, func, args, kwargs, device.type)
    if like is None:
        return None
    args = tuple(args)
    if isinstance(like, Tensor):
        return Deferred(like, device, name, func, args, kwargs, None)
    parts = [Deferred(one, device, name, func, args, kwargs, i) for i, one in enumerate(like)]
    return type(like)(parts) if type(like).__module__ == "torch.return_types" else tuple(parts)


def _like(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], kind: str) -> Any:
    """Tensors without numbers of the shape and dtype of the result; None if they are not known."""
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    leaves, spec = tree_flatten((tuple(args), kwargs))
    if any(isinstance(x, torch.device) and x.type != kind for x in leaves):
        return None
    shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else _frozen(x) for x in leaves)
    try:
        return _probed(name, func, shapes, spec, autocast, kind)
    except TypeError:  # arguments that cannot be hashed
        return None


@lru_cache(maxsize=4096)
def _probed(name: str, func: Callable[..., Any], leaves: Any, spec: Any, autocast: Any, kind: str) -> Any:
    args, kwargs = spec.unflatten([_thawed(x) for x in leaves])
    with torch.inference_mode(False), torch.no_grad():
        try:
            found = func(*args, **kwargs)
        except (RuntimeError, TypeError, IndexError, NotImplementedError):
            return None
    if isinstance(found, list):
        found = tuple(found)
    if not all(isinstance(x, Tensor) for x in (found if isinstance(found, tuple) else (found,))):
        return None
    if autocast is not None and isinstance(found, Tensor) and found.dtype in _NARROWED:
        if name in PRODUCTS or name == "scaled_dot_product_attention":
            return found.to(autocast)
        if name in _OWN_FLOAT32 and kind == "cuda":
            return found.float()
    return found


_NARROWED = (torch.float32, torch.bfloat16, torch.float16)


def _frozen(x: Any) -> Any:
    if isinstance(x, slice):
        return ("slice", x.start, x.stop, x.step)
    hash(x)
    return (type(x), x)  # 1, 1.0 and True are equal, and mean different things


def _thawed(x: Any) -> Any:
    if x[0] == "slice":
        return slice(*x[1:])
    if x[0] is torch.device:
        return torch.device("meta")
    if isinstance(x[0], tuple):
        return torch.empty(x[0], dtype=x[1], device="meta")
    return x[1]


def _numbers(x: Any) -> Any:
    return x.dense() if isinstance(x, LazyTensor) else x


def _settings(kind: str) -> tuple[Any, ...]:
    enabled = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if enabled else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), kind, enabled, dtype


@contextmanager
def _as_then(settings: tuple[Any, ...]) -> Iterator[None]:
    """Within it, gradients and autocast are as they were when a function was called."""
    graph, inference, kind, enabled, dtype = settings
    with ExitStack() as stack:
        if inference != torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(graph and not inference))
        if enabled != torch.is_autocast_enabled(kind) or enabled:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        yield
