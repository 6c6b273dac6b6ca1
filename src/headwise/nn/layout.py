"""What a design says of its heads: where their numbers lie, whether they depend on each other, what can be resized."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from headwise.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """Where heads lie in one parameter: head i is `width` entries of the axis, from `start + i · width` on.

    Attributes:
        letter: "q", "k", "v" or "o" for the matrices and their biases; another for what else belongs to a head.
        owner, name: the module that holds the parameter, and its name there. An `nn.ParameterList` has one entry a
            head, and axis, width and start 0, 1 and 0.
        heads: "query" or "key": of which heads there is one piece each.
    """

    letter: str
    owner: nn.Module
    name: str
    axis: int
    heads: str
    width: int
    start: int = 0

    @property
    def tensor(self) -> Tensor | nn.ParameterList:
        """The parameter as it is now."""
        found: Tensor | nn.ParameterList = getattr(self.owner, self.name)
        return found

    def entries(self, head: int) -> slice:
        """The entries of this head on the axis."""
        first = self.start + head * self.width
        return slice(first, first + self.width)


@dataclass(frozen=True)
class Coupling:
    """Whether the heads of a design depend on each other.

    Attributes:
        at: the first step in which a head depends on the others: "scores"; "heads", the outputs that are concatenated;
            "output", what is made of the concatenation. "" if they are independent: then y is a sum over heads, and
            without a head it is what it was with this head's output at 0.
        why: the reason in one sentence, for all who refuse such a design.
    """

    at: Literal["", "scores", "heads", "output"] = ""
    why: str = ""


INDEPENDENT = Coupling()


@dataclass(frozen=True)
class Resizing:
    """Which numbers of heads of a module can change once it is made.

    Attributes:
        fixed: why its number of heads cannot change, in one sentence; "" if it can.
        merges: whether it can have fewer key and value heads for the same query heads. q, k, v and o are then linear
            maps, and their parts are rows of W_Q, W_K, W_V and columns of W_O.
        unknown_rotary: why it is not known which channels of queries and keys rotary positions turn together, in one
            sentence; "" if it is the pairs (t, t + d/2), or if there are no such positions.
    """

    fixed: str = ""
    merges: bool = False
    unknown_rotary: str = ""


@dataclass(frozen=True)
class Layout:
    """Where each head's numbers lie in the parameters of a module.

    Attributes:
        parts: one for each axis of a parameter that is laid out by heads. What is in no part is common to all heads.
        output: the module that is called with Concat(head_1 … head_h) [..., n, h·d_v]; None if there is none.
        norms: norms of each query and key head between W_Q, W_K and the product, the same for all heads.
        rotary: whether queries and keys have rotary positions.
        shared_key: the last so many channels of every query and key, beside `head_dim` of the layer, whose key is one
            for all heads.
        missing: why the heads have no matrices of their own, in one sentence; "" if they have.
    """

    parts: tuple[Part, ...] = ()
    output: nn.Module | None = None
    norms: tuple[nn.Module, ...] = ()
    rotary: bool = False
    shared_key: int = 0
    missing: str = ""

    def more(self, parts: Iterable[Part]) -> "Layout":
        """The same with further parts."""
        return replace(self, parts=(*self.parts, *parts))

    def into(self, linear: nn.Module, value_dim: int, *, called: bool = True) -> "Layout":
        """The same with W_O, whose inputs are the heads.

        Args:
            linear: the linear map. called: whether it is called with the concatenation, and so is `output`.
        """
        joined = self.more(linear_parts("o", linear, 1, "query", value_dim))
        return replace(joined, output=linear) if called else joined


def linear_parts(letter: str, owner: nn.Module, axis: int, heads: str, width: int, start: int = 0) -> list[Part]:
    """Weight and bias of a linear map whose inputs (axis 1) or outputs (axis 0) are the heads, in `nn.Linear`'s layout
    [out, in]. The bias of a map that the heads go into belongs to no head."""
    parts = [Part(letter, owner, "weight", axis, heads, width, start)]
    if axis == 0 and getattr(owner, "bias", None) is not None:
        parts.append(Part(letter, owner, "bias", 0, heads, width, start))
    return parts


def no_layout(what: str, why: str) -> ConfigError:
    """For parts and matrices that there are none of."""
    return ConfigError(f"{what}: its heads have no matrices of their own to be read or cut: {why}")
