"""Functions of other packages that compute a whole attention: how they are described, and called wherever they were
imported; and what functions of positions read beside their arguments."""

import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from threading import Lock
from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from headwise.masks import Mask
from headwise.models.recognise.products import Contraction, views, whole
from headwise.models.recognise.tracked import INPUT, Answer, Followed, Product, Softmax, Step, Tracked, Values


@dataclass(frozen=True)
class FusedCall:
    """softmax(scale · q kᵀ + …) v. Letters "n", "m", "d", "e" are queries, keys, sizes of a head; "h" heads, of which k
    and v may have fewer; "1" a broadcast dimension."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    letters: tuple[str, str, str, str]  # of the dimensions of q, k, v and out
    steps: tuple[tuple[Any, ...], ...]  # what is done to the scores, the scale included: kinds and values of a `Step`
    # Whether "h" is known to be the heads. Otherwise that is looked up in the layer that made q or k
    heads: bool = False
    dropout_p: float = 0.0
    plain: Callable[[], Tensor] | None = None  # computes `out` without dropout
    own: str = ""  # why the function has to be called itself, though this is what it computes; "" if there is no reason
    restore: Callable[[Tensor], Tensor] | None = None  # (result of the shape of `out`) → what the function returns
    # What the function returned, if `out` is a rearrangement of it, and the loss does not depend on `out`
    returned: Tensor | None = None
    arrange: Callable[[Tensor], Tensor] | None = None  # (a tensor of its shape) → one of the shape of `out`


@dataclass(frozen=True)
class Library:
    """Functions of a module of Python, and how their arguments are read; `Lost` where there is no call."""

    module: str  # its name
    names: tuple[str, ...]  # of the functions in it
    # (arguments by name, what the function returned, the function, what else is known) → the calls. Raises `Lost` with
    # the reason why there is none
    read: Callable[[dict[str, Any], Any, Callable[..., Any], Tracked], FusedCall]
    # Arguments by name → queries [..., d], keys and values [..., e]; a function returns [..., e] of the queries
    tensors: Callable[[dict[str, Any]], tuple[Tensor, Tensor, Tensor]] = itemgetter("query", "key", "value")

    def output(self, given: dict[str, Any]) -> Tensor:
        """A tensor without numbers of the shape and dtype of what a function returns."""
        q, _, v = self.tensors(given)
        return torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device="meta")

    def own(self, given: dict[str, Any], out: Any) -> str:
        """Why a call returns something else, or does more."""
        if isinstance(out, tuple | list) or any(name.startswith("return_") and given[name] for name in given):
            return "it returns more than its output"
        if given.get("out") is not None:
            return "it writes to a tensor (out)"
        like = self.output(given)
        same = out.shape == like.shape and out.dtype == like.dtype
        return "" if same else "its output is of another shape or dtype than its queries"


def take(seen: Tracked, call: FusedCall, record: Softmax) -> None:
    """Take note of a call, whose softmax is `record`."""
    known_q, known_k = seen.known(call.q), seen.known(call.k)
    call, known_q = _grouped(call, known_q)
    a, b, c, o = call.letters
    scores = "".join(one for one in o if one not in "ne") + "nm"
    pairs = [*zip(b, call.k.shape, strict=True), *zip(a, call.q.shape, strict=True)]
    sizes = {one: size for one, size in pairs if one != "1"} | {"m": call.k.shape[b.index("m")]}
    shape = tuple(sizes[one] for one in scores)
    plain = call.out
    if call.dropout_p and call.plain is not None and not call.out.is_meta:
        with torch.no_grad():
            plain = call.plain()
    returned = call.out if call.returned is None else call.returned
    answer = None if returned is plain else Answer(returned, call.arrange)
    here = whole(shape)
    heads = ("h" + "g" if "g" in scores else "h") if call.heads else None
    product = Product(
        Contraction(call.q, call.k, a, b, scores), shape, call.out.dtype, record.modules, record.line,
        (known_q, known_k), False, heads,
    )  # fmt: skip
    record.keys, record.single = here.dims[-1], shape[-1] == 1
    steps = tuple(Step(kind, value, here, *coef) for kind, value, *coef in call.steps)
    found = INPUT.but(
        stage="weights", layout=here, product=product, steps=steps, softmax=record, dropout_p=call.dropout_p,
        own=call.own, answer=answer,
    )  # fmt: skip
    values = Contraction(_without_numbers(shape), call.v, scores, c, o)
    seen.ready.append(Values(values, found, 0, 1, plain))


@lru_cache(maxsize=64)
def _without_numbers(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, device="meta")


def first_of(out: Any) -> Tensor:
    """The output of a function that may return more."""
    return out[0] if isinstance(out, tuple | list) else out


def capped(scale: float, cap: float | None) -> tuple[tuple[Any, ...], ...]:
    """The steps of a scale and a soft cap, if it is not 0."""
    return (("mul", scale / cap), ("tanh", None), ("mul", cap)) if cap else (("mul", scale),)


def masked(*masks: Mask | None) -> tuple[tuple[Any, ...], ...]:
    """The steps of masks."""
    return tuple(("mask", mask) for mask in masks if mask is not None)


def _split(mask: Tensor, sizes: tuple[int, int]) -> Tensor:
    """A mask [..., h or 1, n, m] with two axes of heads."""
    if mask.ndim < 3:
        return mask
    return mask.unflatten(-3, sizes) if mask.shape[-3] > 1 else mask.unsqueeze(-3)


def _grouped(call: FusedCall, known: Followed | None) -> tuple[FusedCall, Followed | None]:
    """The call with the heads "h" of queries as "gh", where g is a KV head, if there are fewer of those."""
    a, b, c, o = call.letters
    if "h" not in b or call.k.shape[b.index("h")] == call.q.shape[a.index("h")]:
        return call, known
    at, kv = a.index("h"), call.k.shape[b.index("h")]
    sizes = (kv, call.q.shape[at] // kv)
    if known is not None:
        (view,) = views(Tensor.unflatten, call.q, (at, sizes), {})
        layout = None if view is None else known.layout.through(view)
        known = None if layout is None else known.but(layout=layout)
    letters = a.replace("h", "gh"), b.replace("h", "g"), c.replace("h", "g"), o.replace("h", "gh")
    plain, arrange, head = call.plain, call.arrange, o.index("h")

    def split(x: Tensor) -> Tensor:
        return (x if arrange is None else arrange(x)).unflatten(head, sizes)

    steps = tuple(
        (kind, _split(value, sizes) if isinstance(value, Tensor) else value, *coef) for kind, value, *coef in call.steps
    )
    return replace(
        call, steps=steps, q=call.q.unflatten(at, sizes), out=call.out.unflatten(head, sizes), letters=letters,
        plain=None if plain is None else lambda: plain().unflatten(head, sizes),
        returned=call.out if call.returned is None else call.returned, arrange=split,
    ), known  # fmt: skip


_OnCall = Callable[[str, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_lock = Lock()
_originals: dict[str, tuple[Any, types.FunctionType, _OnCall, int]] = {}  # function, as it was, callback, users


def _instead(*args: Any, **kwargs: Any) -> Any:
    from headwise.models.recognise.libraries import called  # its code runs with the names of another module

    return called("KEY", args, kwargs)


def called(key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function of this key, by way of the callback."""
    _, original, on_call, _ = _originals[key]
    module, _, name = key.rpartition(".")
    return on_call(module, name, original, args, kwargs)


@contextmanager
def intercepted(names: list[tuple[str, str]], on_call: _OnCall) -> Iterator[None]:
    """Within it, a call of one of these functions (module, name), in any thread, is on_call(module, name, function as
    it was, args, kwargs); what is not imported, or no function of Python, is left out."""
    entered: list[str] = []
    try:
        with _lock:
            for module, name in names:
                function = getattr(sys.modules.get(module), name, None)
                key = f"{module}.{name}"
                elsewhere = any(at is function and one != key for one, (at, *_) in _originals.items())
                if isinstance(function, types.FunctionType) and not elsewhere:
                    _enter(key, function, on_call)
                    entered.append(key)
        yield
    finally:
        with _lock:
            for key in entered:
                function, original, callback, users = _originals[key]
                if users > 1:
                    _originals[key] = function, original, callback, users - 1
                else:
                    function.__code__ = original.__code__
                    del _originals[key]


def arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _enter(key: str, function: types.FunctionType, on_call: _OnCall) -> None:
    if key in _originals:
        at, original, callback, users = _originals[key]
        _originals[key] = at, original, callback, users + 1
        return
    code = function.__code__
    original = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__, original.__dict__ = function.__kwdefaults__, function.__dict__
    _originals[key] = function, original, on_call, 1
    constants = tuple(key if one == "KEY" else one for one in _instead.__code__.co_consts)
    function.__code__ = _instead.__code__.replace(co_consts=constants, co_freevars=code.co_freevars)


Made = TypeVar("Made")
_PLAIN = (int, float, str, bool, type(None), types.BuiltinFunctionType)
_FIXED = "torch", "math", "operator", "builtins"  # packages whose names nobody changes, unlike a user's module
State = tuple[Any, ...]


class Kept:
    """Results by the functions that they were computed from, which are freed with them."""

    def __init__(self) -> None:
        self._results: WeakKeyDictionary[Callable[..., Any], dict[Any, tuple[State, Any]]] = WeakKeyDictionary()

    def made(
        self, functions: Sequence[Callable[..., Any] | None], tensors: Sequence[Tensor | None], key: Any,
        make: Callable[[], Made],
    ) -> Made:  # fmt: skip
        """make(), or its result for the same key, which must not refer to the functions, if these tensors are unchanged
        and these functions have read the same since: numbers, tensors, and other plain functions."""
        given = [one for one in functions if one is not None]
        states = [*(state_of(one) for one in given), *(_state(one, 1) for one in tensors)]
        if not given or any(state is None for state in states):
            return make()
        state: State = (*(one and ref(one) for one in functions), *states)
        results = self._results.setdefault(given[0], {})
        if key in results and results[key][0] == state:
            found: Made = results[key][1]
            return found
        found = make()
        results[key] = state, found
        return found


def state_of(function: Any, depth: int = 8) -> State | None:
    """What a function reads beside its arguments; None if that is not known."""
    if not isinstance(function, types.FunctionType) or not depth:
        return None
    values: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    try:
        values += [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that is empty so far
        return None
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        values += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    found = tuple(_state(value, depth - 1) for value in values)
    return None if any(one is None for one in found) else found


def _state(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        return None if value.is_inference() else (_Same(value), value._version)
    package = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    fixed = isinstance(value, types.ModuleType | type) and str(package).partition(".")[0] in _FIXED
    if fixed or isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, tuple | list):
        parts = tuple(_state(one, depth) for one in value)
        return None if any(one is None for one in parts) else (type(value), parts)
    return state_of(value, depth)


class _Same:
    """Equal for one and the same tensor only, which it does not keep."""

    def __init__(self, x: Tensor) -> None:
        self._of: ReferenceType[Tensor] = ref(x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._of() is not None and self._of() is other._of()

    def __hash__(self) -> int:
        return 0
