"""A call of a function that computes a whole attention, as the chain of operations that it computes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from headwise.masks import Mask
from headwise.models.recognise.followed import INPUT, Answer, Followed, Product, Softmax, Step
from headwise.models.recognise.layout import views, whole
from headwise.models.recognise.products import Contraction
from headwise.models.recognise.tracked import Tracked


@dataclass(frozen=True)
class FusedCall:
    """softmax(scale · q kᵀ + …) v.

    Attributes:
        letters: of the dimensions of q, k, v and out; "n", "m", "d" and "e" are queries, keys, and the sizes of a head;
            "h" heads, which k and v may have fewer of; "1" where k or v is broadcast.
        heads: whether "h" is known to be the heads. Otherwise that is looked up in the layer that made q or k.
        steps: what is done to the scores, the scale included: kinds and values of a `Step`.
        plain: computes `out` without dropout.
        own: why the function has to be called itself, though this is what it computes; "" if there is no reason.
        restore: (result of the shape of `out`) → what the function returns.
        returned: what the function returned, if `out` is a rearrangement of it, and the loss does not depend on `out`.
        arrange: (a tensor of its shape) → one of the shape of `out`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    letters: tuple[str, str, str, str]
    steps: tuple[tuple[Any, ...], ...]
    heads: bool = False
    dropout_p: float = 0.0
    plain: Callable[[], Tensor] | None = None
    own: str = ""
    restore: Callable[[Tensor], Tensor] | None = None
    returned: Tensor | None = None
    arrange: Callable[[Tensor], Tensor] | None = None


def named_tensors(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments query, key and value."""
    return given["query"], given["key"], given["value"]


@dataclass(frozen=True)
class Library:
    """Functions of a module of Python.

    Attributes:
        module: its name. names: of the functions in it.
        read: (arguments by name, what the function returned, the function, what else is known) → the calls. Raises
            `Lost` with the reason why there is none.
        tensors: arguments by name → queries [..., d], keys and values [..., e]; a function returns [..., e] of the
            queries.
    """

    module: str
    names: tuple[str, ...]
    read: Callable[[dict[str, Any], Any, Callable[..., Any], Tracked], FusedCall]
    tensors: Callable[[dict[str, Any]], tuple[Tensor, Tensor, Tensor]] = named_tensors

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
    sizes = {**_sizes(b, call.k), **_sizes(a, call.q), "m": call.k.shape[b.index("m")]}
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
    seen.ready.append((values, found, 0, 1, plain))


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


def _sizes(letters: str, x: Tensor) -> dict[str, int]:
    return {one: size for one, size in zip(letters, x.shape, strict=True) if one != "1"}


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
