"""What is known of a tensor on its way through an attention: what it was made from, and what was done to it since."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.models.recognise.layout import Layout
from headwise.models.recognise.products import Contraction
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
    """Such an error as a reason."""
    if isinstance(error, HeadwiseError):
        return str(error)
    return f"it cannot be analysed ({type(error).__name__}: {(str(error) or '-').splitlines()[0]})"


class Origin(NamedTuple):
    """The tensor that a view is traced back to.

    Attributes:
        shape: its sizes. features: its dimensions that a layer's weight made; heads are parts of these.
        made_by: the function that returned it. source: a weak reference to that function's input.
    """

    shape: tuple[int, ...]
    features: tuple[int, ...]
    made_by: str
    source: Callable[[], Tensor | None]


class Product(NamedTuple):
    """A product of two tensors that may be queries and keys.

    Attributes:
        modules: the modules that were running, the innermost first. line: `file:line` of the user's code.
        inputs: what is known of the two operands.
        learned: whether one of them is a parameter.
        heads: the letters of its dimensions that are heads, if the function defines them; None if they have to be
            traced back to a layer.
    """

    of: Contraction
    shape: tuple[int, ...]
    dtype: Any
    modules: list[nn.Module]
    line: str
    inputs: tuple["Followed | None", "Followed | None"]
    learned: bool
    heads: str | None = None


class Step(NamedTuple):
    """One change of the scores between the product and the softmax.

    Attributes:
        kind: "mul" (by a number), "times" (a tensor), "add" (coef · value), "fill" (coef where value is True), "tanh",
            "mask" (a headwise mask) or "score" (a headwise score).
        layout: of the scores at that time, to which `value` broadcasts.
    """

    kind: str
    value: Any
    layout: Layout
    coef: float = 1.0


@dataclass(eq=False)
class Softmax:
    """A softmax that was seen; it is reported if no attention comes of it.

    Attributes:
        dtype: of its result. keys: the factors of its dimension. single: whether that has size 1.
        kept: what was computed of masks in this forward. reason: why it is no attention, as far as known. done: whether
            it is part of a call that was reported. nonfinite: whether it may be attention, but has NaN or infinity on
            one side of the comparison. function: the name of the function of another package that computes
            the whole attention; "" if none does.
    """

    modules: list[nn.Module]
    line: str
    dtype: torch.dtype
    kept: dict[Any, Any]
    keys: tuple[tuple[int, int], ...] = ()
    single: bool = False
    reason: str = "its result is not multiplied by values, as in a classifier"
    done: bool = False
    nonfinite: bool = False
    function: str = ""


class Answer(NamedTuple):
    """What a function that computes a whole attention returned, and what takes tensors of its shape to the shape of the
    result that is compared; None for one that changes nothing."""

    returned: Tensor
    arrange: Callable[[Tensor], Tensor] | None


@dataclass(frozen=True)
class Followed:
    """What is known of one tensor.

    Attributes:
        stage: "input": nothing but its origin; "scores"; "exp" and "total" (the sum of exp), "lse" (its logarithm): of
            a softmax that is written out; "log": of log_softmax; "weights"; "other": another function than softmax of
            scores, named by `note`.
        layout: where its numbers lie in the origin, or in the product.
        factor: number by which an input was multiplied since its origin.
        sink: (logits, layout before) where a column was joined to the scores, or numbers were added to the sum of
            the exponentials. extended: where the column is, if it is still there.
        outer: (one, other) if it is the product, number by number, of two tensors of different shapes.
        note: what else was done to weights. lost: why it is not followed any more; "" if it is.
        own: why the function that computes the whole attention has to be called itself; "" if there is no reason.
        answer: what that function returned, if it is another tensor than the one that is compared: it had dropout, or
            another shape.
    """

    stage: Stage
    layout: Layout
    origin: Origin | None = None
    product: Product | None = None
    steps: tuple[Step, ...] = ()
    softmax: Softmax | None = None
    factor: float = 1.0
    dropout_p: float = 0.0
    sink: tuple[Tensor, Layout] | None = None
    extended: Literal["", "first", "last"] = ""
    outer: tuple[Tensor, Tensor] | None = None
    note: str = ""
    lost: str = ""
    own: str = ""
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
    return _is_parameter(x) or _is_parameter(x._base)


def _is_parameter(x: Tensor | None) -> bool:
    return x is not None and type(x) is not Tensor and isinstance(x, nn.Parameter)
