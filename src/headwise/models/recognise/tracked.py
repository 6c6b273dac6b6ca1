"""The tensors of a forward pass that are followed, and what was seen on the way."""

import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.models.recognise.followed import INPUT, Followed, Origin, Softmax
from headwise.models.recognise.frames import modules_in_call, user_line
from headwise.models.recognise.functions import LAYERS
from headwise.models.recognise.layout import whole
from headwise.models.recognise.products import Contraction

# Called with a product of weights and values: the product, what is known of the weights, which operand they are, the
# operand of the first product that holds the keys, and the result.
OnValues = Callable[[Contraction, Followed, int, int, Tensor], None]


class _Held(weakref.ref):
    """A tensor of which so much is known that this is forgotten as soon as it is freed, and its id."""

    __slots__ = ("key",)
    key: int


Source = Callable[[], Tensor | None]
_Layer = tuple[str, Source, tuple[int, ...]]  # its function, its input, the shape of its output
_Known = tuple[Source, Followed | _Layer]  # a tensor, and what is known of it


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
        self._roots: dict[int, tuple[Source, Source]] = {}
        self._together: dict[tuple[int, ...], tuple[Source, list[Source]]] = {}  # with what they refer to, kept alive

    def known(self, x: Any) -> Followed | None:
        """What is known of a tensor."""
        entry = self._known.get(id(x))
        if entry is None or entry[0]() is not x:
            return None
        what = entry[1]
        if isinstance(what, tuple):
            name, source, shape = what
            origin = Origin(shape, (LAYERS[name] % len(shape),), name, source)
            what = INPUT.but(layout=whole(shape), origin=origin)
            self._known[id(x)] = entry[0], what
        return what

    def remember(self, x: Tensor, what: Followed) -> None:
        """Keep what is known of a tensor, until it is freed."""
        held = _Held(x, self._freed)
        held.key = id(x)
        self._known[held.key] = held, what

    def remember_layer(self, name: str, source: Any, out: Tensor) -> None:
        """Keep that a tensor is the output of a layer, of which heads are parts; most are not used further.

        Args:
            name: of its function, one of `LAYERS`. source: its input.
        """
        self._known[id(out)] = weakref.ref(out), (name, self.root(source), out.shape)

    def root(self, x: Any) -> Source:
        """A reference to the tensor that x was made from by what `derive` was called for, x itself if by nothing."""
        entry = self._roots.get(id(x))
        return weak(x) if entry is None or entry[0]() is not x else entry[1]

    def together(self, sources: Sequence[Source]) -> Source:
        """One reference for several, the same object for the same ones."""
        return self._together.setdefault(tuple(map(id, sources)), (lambda: None, list(sources)))[0]

    def derive(self, x: Any, out: Any) -> None:
        """Keep that `out` has the numbers of x, or each token of it normalised, and is the same tokens."""
        if isinstance(x, Tensor) and isinstance(out, Tensor) and out is not x and out.numel() == x.numel():
            self._roots[id(out)] = weakref.ref(out), self.root(x)

    def passed_on(self, x: Any, out: Any) -> bool:
        """Whether x is the output of a layer of which nothing was asked yet; then as much is known of `out`, a function
        of each of its numbers, if it has the same shape."""
        entry = self._known.get(id(x))
        if entry is None or not isinstance(entry[1], tuple) or entry[0]() is not x:
            return False
        if isinstance(out, Tensor) and out.shape == entry[1][2]:
            self._known[id(out)] = weakref.ref(out), entry[1]
        return True

    def _freed(self, held: _Held) -> None:
        entry = self._known.get(held.key)
        if entry is not None and entry[0] is held:
            del self._known[held.key]

    def forget(self) -> None:
        """Forget all tensors."""
        self._known.clear()
        self._roots.clear()
        self._together.clear()
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

    def record(self, out: Tensor, reason: str = "", like: list[nn.Module] | None = None) -> Softmax:
        """A softmax whose result is `out`, and why it is no attention, if that is known.

        Args:
            like: the modules of its product, as in `modules_in_call`.
        """
        running = modules_in_call(self.modules, like)
        record = Softmax(running, user_line(), getattr(out, "dtype", torch.float32), self.kept)
        if reason:
            record.reason = reason
        self.softmaxes.append(record)
        return record


def weak(x: Any) -> Callable[[], Tensor | None]:
    """A reference that keeps no memory."""
    return weakref.ref(x) if isinstance(x, Tensor) else lambda: None
