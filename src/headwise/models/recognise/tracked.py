"""The tensors of a forward pass that are followed: what each was made from, and what was done to it since."""

import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.models.frames import modules_in_call, user_line
from headwise.models.recognise.products import Contraction, Layout, whole
from headwise.publishing import NotPublished

Stage = Literal["input", "scores", "exp", "total", "lse", "log", "weights", "other"]


class Lost(NotPublished):
    """Why a call is not followed, in words for the user."""


class NotFinite(Lost):
    """Why two results cannot be called equal: one of them is NaN or infinite, or both are everywhere."""

    def __init__(self, reason: str, both: bool) -> None:
        super().__init__(reason)
        self.both = both


# What analysing a tensor of an unexpected kind may raise, such as a nested one. It must not disturb the model.
UNEXPECTED = (ArithmeticError, AssertionError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


def unexpected(error: Exception) -> str:
    """Such an error, or why a call is lost, as a reason."""
    if isinstance(error, HeadwiseError | Lost):
        return str(error)
    return f"it cannot be analysed ({type(error).__name__}: {(str(error) or '-').splitlines()[0]})"


class Origin(NamedTuple):
    """The tensor that a view is traced back to."""

    shape: tuple[int, ...]  # its sizes
    features: tuple[int, ...]  # its dimensions that a layer's weight made; heads are parts of these
    made_by: str  # the function that returned it
    source: Callable[[], Tensor | None]  # a weak reference to that function's input


class Product(NamedTuple):
    """A product of two tensors that may be queries and keys, and the line, `file:line`, of the user's code."""

    of: Contraction
    shape: tuple[int, ...]
    dtype: Any
    modules: list[nn.Module]  # the modules that were running, the innermost first
    line: str  # `file:line` of the user's code
    inputs: tuple["Followed | None", "Followed | None"]  # what is known of the two operands
    learned: bool  # whether one of them is a parameter
    heads: str | None = None  # the letters of its dimensions that are heads, if the function defines them


class Step(NamedTuple):
    """One change of the scores before the softmax: "mul" (by a number), "times" (a tensor), "add" (coef · value),
    "fill" (coef where value is True), "tanh", "mask" (a headwise mask) or "score" (a headwise score)."""

    kind: str
    value: Any
    layout: Layout  # of the scores at that time, to which `value` broadcasts
    coef: float = 1.0


@dataclass(eq=False)
class Softmax:
    """A softmax that was seen; it is reported if no attention comes of it."""

    modules: list[nn.Module]
    line: str
    dtype: torch.dtype  # of its result
    kept: dict[Any, Any]  # what was computed of masks in this forward
    keys: tuple[tuple[int, int], ...] = ()  # the factors of its dimension
    single: bool = False  # whether that has size 1
    # Why it is no attention, as far as known
    reason: str = "its result is not multiplied by values, as in a classifier"
    done: bool = False  # whether it is part of a call that was reported
    nonfinite: bool = False  # whether it may be attention, but has NaN or infinity on one side of the comparison
    function: str = ""  # the name of the function of another package that computes the whole attention; "" if none does


class Answer(NamedTuple):
    """What a function that computes a whole attention returned, and what takes tensors of its shape to the shape of the
    result that is compared; None for one that changes nothing."""

    returned: Tensor
    arrange: Callable[[Tensor], Tensor] | None


@dataclass(frozen=True)
class Followed:
    """What is known of one tensor, at a stage: "input": nothing but its origin; "exp", "total" (its sum), "lse": of a
    softmax that is written out; "log": of log_softmax; "other": another function of scores, named by `note`."""

    stage: Stage
    layout: Layout  # where its numbers lie in the origin, or in the product
    origin: Origin | None = None
    product: Product | None = None
    steps: tuple[Step, ...] = ()
    softmax: Softmax | None = None
    factor: float = 1.0  # number by which an input was multiplied since its origin
    dropout_p: float = 0.0
    # (logits, layout before) where a column was joined to the scores, or numbers were added to the sum of the
    # exponentials
    sink: tuple[Tensor, Layout] | None = None
    extended: Literal["", "first", "last"] = ""  # where the column is, if it is still there
    # (one, other) if it is the product, number by number, of two tensors of different shapes
    outer: tuple[Tensor, Tensor] | None = None
    note: str = ""  # what else was done to weights
    lost: str = ""  # why it is not followed any more; "" if it is
    own: str = ""  # why the function that computes the whole attention has to be called itself
    # What that function returned, if it is another tensor than the one that is compared: it had dropout, or another
    # shape
    answer: Answer | None = None

    def but(self, **changes: Any) -> "Followed":
        """The same with these changes."""
        new = object.__new__(Followed)  # dataclasses.replace takes ten times as long, and this is done for every call
        new.__dict__.update(self.__dict__, **changes)
        return new


INPUT = object.__new__(Followed)  # to be changed by `but`, which copies only what is not as in the class
INPUT.__dict__.update(stage="input", layout=Layout(()))


def learned(x: Tensor) -> bool:
    """Whether it is a parameter, or a view of one, such as its transpose."""
    return any(type(one) is not Tensor and isinstance(one, nn.Parameter) for one in (x, x._base))


VIEWS = frozenset({
    "view", "reshape", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "adjoint",
    "unsqueeze", "squeeze", "expand", "expand_as", "view_as", "reshape_as", "flatten", "unflatten", "unbind", "chunk",
    "split", "split_with_sizes", "tensor_split", "select", "narrow", "__getitem__", "broadcast_to", "T", "mT", "H",
    "mH", "slice", "_unsafe_view",
})  # fmt: skip
REPEATS = frozenset({"repeat_interleave", "repeat", "tile"})
SAME = frozenset({
    "contiguous", "clone", "detach", "float", "double", "half", "bfloat16", "to", "type", "type_as", "cpu", "cuda",
    "data", "requires_grad_", "alias", "_to_copy",
})  # fmt: skip
DERIVED = VIEWS | SAME | {"layer_norm", "rms_norm", "dropout"}  # of the same tokens
REARRANGED = frozenset({"roll", "flip", "gather", "take_along_dim", "index_select", "sort", "fliplr", "flipud"})
OTHERS = frozenset({"sigmoid", "relu", "softplus", "elu", "gelu", "silu", "square", "pow", "gumbel_softmax"})
ARITHMETIC = {
    "mul": "mul", "multiply": "mul", "__mul__": "mul", "__rmul__": "mul", "div": "div", "divide": "div",
    "true_divide": "div", "__truediv__": "div", "add": "add", "__add__": "add", "__radd__": "add", "sub": "sub",
    "subtract": "sub", "__sub__": "sub", "__rsub__": "rsub", "rsub": "rsub", "neg": "neg",
}  # fmt: skip
LAYERS = {"linear": -1, "conv1d": 1, "conv2d": 1, "conv3d": 1}
SOFTMAX = frozenset({
    "softmax", "log_softmax", "special_softmax", "special_log_softmax", "_softmax", "_log_softmax",
})  # fmt: skip
RETURN_OTHERS = VIEWS | {"topk", "sort", "kthvalue", "__setitem__"}  # something else than one tensor
OPAQUE = frozenset({"_native_multi_head_attention", "_transformer_encoder_layer_fwd"})  # PyTorch's
IGNORED = frozenset({
    "dim", "size", "numel", "is_floating_point", "stride", "__set__", "__len__", "zeros_like", "ones_like",
    "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full", "new_empty",
})  # fmt: skip
REDUCTIONS = frozenset({"sum", "mean", "max", "min", "amax", "amin", "std", "var", "norm", "any", "all", "argmax"})


class Values(NamedTuple):
    """A product of weights and values."""

    of: Contraction
    x: Followed  # what is known of the weights
    at: int  # which operand they are
    side: int  # the operand of the first product that holds the keys
    out: Tensor

    @property
    def product(self) -> Product:
        """The first product."""
        assert self.x.product is not None
        return self.x.product

    @property
    def record(self) -> Softmax:
        """The softmax."""
        assert self.x.softmax is not None
        return self.x.softmax


OnValues = Callable[[Values], None]


class _Held(weakref.ref):
    """A tensor of which so much is known that this is forgotten as soon as it is freed, and its id."""

    __slots__ = ("key",)
    key: int


Source = Callable[[], Tensor | None]
_Layer = tuple[str, Source, tuple[int, ...]]  # its function, its input, the shape of its output
_Known = tuple[Source, Followed | _Layer]  # a tensor, and what is known of it


class Tracked:
    """What is known of tensors, as long as they live."""

    def __init__(self, modules: Mapping[nn.Module, str], on_values: OnValues, aside: Container[nn.Module] = ()) -> None:
        self.modules, self.on_values, self.aside = modules, on_values, aside
        self.softmaxes: list[Softmax] = []  # those seen
        self.near: list[Softmax] = []  # other things that are close to attention
        self.products = 0  # of two tensors that the model computed, counted
        self.ready: list[Values] = []  # arguments of the next calls of on_values
        self.kept: dict[Any, Any] = {}  # what was computed of a mask, for the layers that share it
        # Called with a product of weights and something that is not followed, or is no attention; None
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

    def place(self, product: Product) -> tuple[nn.Module, str] | None:
        """The innermost module that both computed a product and is running now, and its name."""
        now = modules_in_call(self.modules, product.modules)
        return next(((one, self.modules[one]) for one in now if one in product.modules), None)

    def remember(self, x: Tensor, what: Followed) -> None:
        """Keep what is known of a tensor, until it is freed."""
        held = _Held(x, self._freed)
        held.key = id(x)
        self._known[held.key] = held, what

    def remember_layer(self, name: str, source: Any, out: Tensor) -> None:
        """Keep that a tensor is the output of a layer, of which heads are parts; most are not used further."""
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

    def record(
        self, out: Any, reason: str = "", like: list[nn.Module] | None = None, *, near: bool = False
    ) -> Softmax:  # fmt: skip
        """A softmax, or something `near` to attention, whose result is `out`, and why it is none, if that is known.
        like: the modules of its product."""
        running = modules_in_call(self.modules, like)
        record = Softmax(running, user_line(), getattr(out, "dtype", torch.float32), self.kept)
        if reason:
            record.reason = reason
        (self.near if near else self.softmaxes).append(record)
        return record


def weak(x: Any) -> Callable[[], Tensor | None]:
    """A reference that keeps no memory."""
    return weakref.ref(x) if isinstance(x, Tensor) else lambda: None
