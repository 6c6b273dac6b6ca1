"""The tensors of a forward pass that are followed, and what was seen on the way."""

import weakref
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.models.recognise.followed import Followed, Softmax
from headwise.models.recognise.frames import modules_in_call, user_line
from headwise.models.recognise.products import Contraction

# Called with a product of weights and values: the product, what is known of the weights, which operand they are, the
# operand of the first product that holds the keys, and the result.
OnValues = Callable[[Contraction, Followed, int, int, Tensor], None]


class _Known(weakref.ref):
    """A tensor that is followed, its id, and what is known of it."""

    __slots__ = ("key", "what")
    key: int
    what: Followed


class Tracked:
    """What is known of tensors, as long as they live.

    Args:
        modules: whose calls are followed, and their names. on_values: as above.
        aside: those of them in which headwise computes the attention.
    Attributes:
        softmaxes: those seen. near: other things that are close to attention. products: of two tensors that the model
            computed, counted. ready: arguments of the next calls of on_values.
        kept: what was computed of a mask, for the layers that share it.
        on_refused: called with a product of weights and something that is not followed, or is no attention; None.
    """

    def __init__(self, modules: Mapping[nn.Module, str], on_values: OnValues, aside: Container[nn.Module] = ()) -> None:
        self.modules, self.on_values, self.aside = modules, on_values, aside
        self.softmaxes: list[Softmax] = []
        self.near: list[Softmax] = []
        self.products = 0
        self.ready: list[tuple[Contraction, Followed, int, int, Tensor]] = []
        self.kept: dict[Any, Any] = {}
        self.on_refused: Callable[[Contraction, Followed, int, Tensor], None] | None = None
        self._known: dict[int, _Known] = {}

    def known(self, x: Any) -> Followed | None:
        """What is known of a tensor."""
        entry = self._known.get(id(x))
        return entry.what if entry is not None and entry() is x else None

    def remember(self, x: Tensor, what: Followed) -> None:
        """Keep what is known of a tensor, until it is freed."""
        entry = _Known(x, self._freed)
        entry.key, entry.what = id(x), what
        self._known[entry.key] = entry

    def _freed(self, entry: "_Known") -> None:
        if self._known.get(entry.key) is entry:
            del self._known[entry.key]

    def forget(self) -> None:
        """Forget all tensors."""
        self._known.clear()
        self.kept.clear()

    def join(self, other: "Tracked") -> None:
        """Include what was seen in another thread."""
        self.softmaxes += other.softmaxes
        self.near += other.near
        self.products += other.products

    def lose(self, x: Followed, reason: str, out: Tensor | None = None) -> None:
        """What is made of x, such as `out`, is not followed any more."""
        if x.softmax is not None and not x.softmax.done:
            x.softmax.reason = reason
        if out is not None:
            self.remember(out, x.but(lost=x.lost or reason))

    def record(self, out: Tensor, reason: str = "") -> Softmax:
        """A softmax whose result is `out`, and why it is no attention, if that is known."""
        record = Softmax(modules_in_call(self.modules), user_line(), getattr(out, "dtype", torch.float32), self.kept)
        if reason:
            record.reason = reason
        self.softmaxes.append(record)
        return record


def weak(x: Any) -> Callable[[], Tensor | None]:
    """A reference that keeps no memory."""
    return weakref.ref(x) if isinstance(x, Tensor) else lambda: None
