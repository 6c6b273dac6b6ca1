"""Tensors without numbers in the place of products of queries and keys, and the mode that makes them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from headwise.errors import ConfigError
from headwise.models.adapters.weights import LazyTensor, dense
from headwise.models.frames import modules_in_call, user_line
from headwise.models.recognise.following import Following, name_of
from headwise.models.recognise.libraries import FusedCall, Library
from headwise.models.recognise.products import NAMES as PRODUCTS, Layout, merged
from headwise.models.recognise.tracked import ARITHMETIC, SAME, SOFTMAX, VIEWS, Followed, Tracked

_OWN_FLOAT32 = frozenset({"softmax", "log_softmax", "exp", "sum", "logsumexp"})  # under autocast on a GPU


class Deferred(LazyTensor):
    """The result of a function that has not been computed. The first function that reads its values computes it exactly
    as the code would have, from the same arguments and settings."""

    _base = None

    @staticmethod
    def __new__(cls: type["Deferred"], like: Tensor, device: torch.device, *call: Any) -> Any:
        return LazyTensor.empty_shell(cls, tuple(like.shape), like.dtype, device)

    def __init__(
        self, like: Tensor, device: torch.device, name: str, func: Callable[..., Any], args: Any, kwargs: Any, part: Any
    ) -> None:
        self.made_by, self._part = name, part
        self._call: tuple[Callable[..., Any], Any, Any] | None = (func, args, kwargs)
        # For a reduction along dimensions, the layout that was known of its argument, and these dimensions.
        self.reduced: tuple[Layout, tuple[int, ...]] | None = None
        self.alias = self.viewed = self._changes = False  # a view of its argument; of which a view was made
        self.graph = torch.is_grad_enabled()  # whether gradients were recorded when it was called
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
            args, kwargs = tree_map(dense, (args, kwargs))
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
    """The result of a call, not computed: one or several `Deferred`; None if its shape is not known beforehand."""
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


Place = tuple[nn.Module | None, str]  # the innermost module that computes a product, and the line of the user's code
FUSED = "scaled_dot_product_attention"
_KINDS = ARITHMETIC.keys() | VIEWS | SAME | SOFTMAX | {
    "masked_fill", "where", "tanh", "exp", "dropout", "cat", "concat", "nan_to_num",
}  # fmt: skip
_REDUCTIONS = frozenset({"max", "amax", "sum", "logsumexp"})
_LIKE = frozenset({"type_as", "view_as", "expand_as", "reshape_as", "to"})  # read no numbers of the second argument
_NEVER = frozenset({"data", "requires_grad_", "cpu", "cuda", "set_"})


class Deferring(Following):
    """Follows tensors. Products at certified places, and what is made of them, are `Deferred` until they are multiplied
    by values."""

    certified: frozenset[Place] = frozenset()  # the places

    def __init__(self, seen: Tracked) -> None:
        super().__init__(seen)
        self.live: WeakSet[Deferred] = WeakSet()
        self.deferred: set[Place] = set()  # those of them where a product was deferred
        self.dropout_p = 0.0  # of the fused function that is being computed
        self.resolved: Tensor | None = None
        # The result of the function that is being called, computed with edits after it was compared; None
        self.edited: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = name_of(func)
        if name == FUSED and self.certified and place_here(self.seen) in self.certified:
            found = self._fused(func, types, args, kwargs)
            if found is not None:
                return found
        out = self._with_edits(super().__torch_function__(func, types, args, kwargs))
        if isinstance(out, Deferred) and (out.made or (out.made_by in PRODUCTS and out.parents)):
            return out.dense()  # computed by attend, or a product that turned out to be something else
        return out

    def call(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not self.certified:
            return func(*args, **kwargs)
        if name == FUSED and self.resolved is not None:
            return self.resolved
        lazy = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Deferred) and not x.made]
        if changes_in_place(name, args, kwargs):
            return self._in_place(func, args, kwargs, bool(lazy))
        if not lazy:
            if name in PRODUCTS and (place := place_here(self.seen)) in self.certified:
                self.deferred.add(place)
                return self._deferred(name, func, args, kwargs)
            return func(*args, **kwargs)
        if name == "_assert_tensor_metadata":  # of exported graphs; shape and dtype are what they were
            return None
        if name in _LIKE and lazy[0] is not args[0]:
            return func(*tree_map(_form, tuple(args)), **tree_map(_form, kwargs))
        first = self.seen.known(lazy[0])
        reduces = name in _REDUCTIONS and first is not None and first.stage in ("scores", "exp")
        if name in _NEVER or not (name in PRODUCTS or name in _KINDS or reduces):
            return func(*args, **kwargs)
        for other in lazy[1:]:
            known = self.seen.known(other)
            if other is lazy[0] or other.reduced is not None or name in _LIKE:
                continue
            if known is None or known.stage not in ("total", "lse"):
                made = other.dense()
                args, kwargs = tree_map(lambda x, old=other, new=made: new if x is old else x, (tuple(args), kwargs))
        return self._deferred(name, func, args, kwargs, lazy[0])

    def instead(self, library: Library, name: str, function: Callable[..., Any], given: dict[str, Any]) -> Any:
        """The result of a function of another package as `attend` computes it, or None."""
        if not self.certified or place_here(self.seen) not in self.certified:
            return None
        self.resolved = library.output(given)
        try:
            call = self.note(library, name, function, given, self.resolved)
            made = self.resolved
        finally:
            self.resolved = None
        if call is None or made.is_meta:
            return None
        made = made.reshape(call.out.shape)
        return made if call.restore is None else call.restore(made)

    def after(self, call: FusedCall | None, out: Any) -> Any:
        """What a function of another package returned, or its result with edits."""
        if call is None or call.restore is None:
            return self._with_edits(out)
        restored = None if self.edited is None else call.restore(self.edited.reshape(call.out.shape))
        self.edited = None
        return out if restored is None else restored

    def _with_edits(self, out: Any) -> Any:
        made, self.edited = self.edited, None
        return out if made is None else made.reshape(out.shape)

    def _deferred(
        self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any],
        of: Deferred | None = None,
    ) -> Any:  # fmt: skip
        found = deferred(name, func, args, kwargs)
        if found is None:
            return func(*args, **kwargs)
        known = self.seen.known(of)
        for x in found if isinstance(found, tuple) else (found,):
            self.live.add(x)
            if of is None:
                continue
            if name in VIEWS or name in SAME:
                x.alias = of.viewed = name != "clone"
                x.reduced = of.reduced if name in SAME else None
            elif name in _REDUCTIONS and known is not None:
                x.reduced = known.layout, _dims(args, kwargs, of.ndim)
        return found

    def _in_place(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], lazy: bool) -> Any:
        """A function that changes its first argument, or `out`."""
        target: Any = kwargs.get("out", args[0] if args else None)
        name = name_of(func).strip("_")
        simple = name in _KINDS or "__" + name.removeprefix("i") + "__" in _KINDS
        own = isinstance(target, Deferred) and not (target.made or target.alias or target.viewed)
        if own and simple and target is args[0] and not kwargs.get("inplace"):
            for other in args[1:]:
                if isinstance(other, Deferred) and other.reduced is None:
                    other.dense()
            self.live.add(target.rewrite(func, args, kwargs))
            return target
        numbers = isinstance(target, Tensor) and not isinstance(target, Deferred)
        storage = target.untyped_storage()._cdata if numbers else None
        for x in list(self.live):
            if not x.made and (lazy or storage in (leaf.untyped_storage()._cdata for leaf in x.leaves())):
                x.dense()
        return func(*args, **kwargs)

    def _fused(self, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
        """The result of the fused function as `attend` computes it, or None."""
        args, kwargs = tree_map(dense, (tuple(args), kwargs))
        found = deferred(FUSED, func, args, kwargs)
        if not isinstance(found, Deferred):
            return None
        args, self.dropout_p = list(args), float(kwargs.pop("dropout_p", 0.0) or 0.0)
        if len(args) > 4:
            args[4], self.dropout_p = 0.0, float(args[4] or 0.0)
        shape = tuple(found.shape)
        self.resolved = torch.empty(shape, dtype=found.dtype, device="meta")
        try:
            super().__torch_function__(func, types, args, kwargs)
            made = self.resolved
        finally:
            self.dropout_p, self.resolved = 0.0, None
        return None if made.is_meta else made.reshape(shape)


def place_here(seen: Tracked) -> Place:
    """The module and line that call a function now."""
    running = modules_in_call(seen.modules)
    return (running[0] if running else None), user_line()


def without_shifts(x: Followed) -> Followed | None:
    """The same without deferred numbers that are added to all keys of a query; None if they differ between keys."""
    steps = []
    assert x.softmax is not None
    for step in x.steps:
        value = step.value
        if not isinstance(value, Deferred) or value.made:
            steps.append(step._replace(value=value.dense()) if isinstance(value, Deferred) else step)
            continue
        if step.kind != "add" or value.reduced is None:
            return None
        layout, dims = value.reduced
        over = merged(sorted((factor for i in dims for factor in layout.dims[i]), key=lambda factor: -factor[1]))
        if value.numel() > 1 and over != x.softmax.keys:
            return None
    return x.but(steps=tuple(steps))


def changes_in_place(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function changes one of its arguments."""
    if "out" in kwargs or kwargs.get("inplace") or name == "__setitem__":
        return True
    if name in ("dropout", "relu", "threshold", "leaky_relu", "elu", "silu") and len(args) > 3 and args[3] is True:
        return True
    if name.startswith("__"):
        return name.startswith("__i") and "__" + name[3:] in ARITHMETIC
    return name.endswith("_") and name != "requires_grad_"


def _dims(args: Sequence[Any], kwargs: dict[str, Any], ndim: int) -> tuple[int, ...]:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    dims = range(ndim) if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
    return tuple(one % ndim for one in dims)


def _form(x: Any) -> Any:
    """Of what is not computed, a tensor of the same shape, dtype and device, without memory for its numbers."""
    if not isinstance(x, Deferred) or x.made:
        return x
    return torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)
