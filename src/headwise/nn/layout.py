"""The heads of a design: their slices of each parameter, their coupling, and whether they can be resized."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from headwise.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """The slices of one parameter by head: head i has `width` entries of the axis, from `start + i · width` on.

    Attributes:
        letter: "q", "k", "v" or "o" for the matrices and their biases; another name for other parameters by head.
        owner, name: the module that holds the parameter, and its attribute name. An `nn.ParameterList` has one entry
            per head, with axis 0, width 1 and start 0.
        heads: "query" or "key", the kind of heads it is sliced by.
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
        """The current parameter."""
        found: Tensor | nn.ParameterList = getattr(self.owner, self.name)
        return found

    def entries(self, head: int) -> slice:
        """Return the slice of one head along the axis."""
        first = self.start + head * self.width
        return slice(first, first + self.width)


@dataclass(frozen=True)
class Coupling:
    """Whether the heads of a design depend on each other.

    Attributes:
        at: the first step in which a head depends on the others: "scores"; "heads", the outputs that are concatenated;
            "output", the map after the concatenation. "" if they are independent: y is then a sum over heads, and
            removing a head equals setting its output to 0.
        why: the reason in one sentence, for error messages.
    """

    at: Literal["", "scores", "heads", "output"] = ""
    why: str = ""

    @property
    def of_heads(self) -> str:
        """Why the concatenated heads are not the outputs of one `attend` call, each of its own head; "" if they are."""
        return self.why if self.at in ("scores", "heads") else ""


INDEPENDENT = Coupling()


@dataclass(frozen=True)
class Resizing:
    """Which numbers of heads of an existing module can change.

    Attributes:
        fixed: why its number of heads cannot change, in one sentence; "" if it can.
        merges: whether KV heads can be merged while the query heads stay. q, k, v and o are then linear maps, and
            their parts are rows of W_Q, W_K, W_V and columns of W_O.
        unknown_rotary: why it is not known which channel pairs of queries and keys rotary positions rotate, in one
            sentence; "" if they are the pairs (t, t + d/2), or if there are no rotary positions.
    """

    fixed: str = ""
    merges: bool = False
    unknown_rotary: str = ""


@dataclass(frozen=True)
class Layout:
    """Which slices of the parameters of a module belong to which head.

    Attributes:
        parts: one for each parameter axis that is sliced by heads. Parameters in no part are shared by all heads.
        output: the module that is called with Concat(head_1 … head_h) [..., n, h·d_v], or None.
        norms: norms of queries and keys per head, with weights shared by all heads.
        rotary: whether queries and keys have rotary positions.
        shared_key: number of trailing channels of every query and key, beyond the layer's `head_dim`, whose key is
            shared by all heads.
        missing: why the heads have no matrices of their own, in one sentence; "" if they do.
    """

    parts: tuple[Part, ...] = ()
    output: nn.Module | None = None
    norms: tuple[nn.Module, ...] = ()
    rotary: bool = False
    shared_key: int = 0
    missing: str = ""

    def more(self, parts: Iterable[Part]) -> "Layout":
        """Return the layout with further parts."""
        return replace(self, parts=(*self.parts, *parts))

    def into(self, linear: nn.Module, value_dim: int, *, called: bool = True) -> "Layout":
        """Return the layout with W_O, whose inputs are the heads.

        Args:
            linear: W_O. called: whether the module is called with the concatenation, which makes it `output`.
        """
        joined = self.more(linear_parts("o", linear, 1, "query", value_dim))
        return replace(joined, output=linear) if called else joined


def linear_parts(letter: str, owner: nn.Module, axis: int, heads: str, width: int, start: int = 0) -> list[Part]:
    """Return the parts of a linear map whose inputs (axis 1) or outputs (axis 0) are the heads, in the layout [out, in]
    of `nn.Linear`. The bias of a map with heads as inputs belongs to no head."""
    parts = [Part(letter, owner, "weight", axis, heads, width, start)]
    if axis == 0 and getattr(owner, "bias", None) is not None:
        parts.append(Part(letter, owner, "bias", 0, heads, width, start))
    return parts


def no_layout(what: str, why: str) -> ConfigError:
    """Return the error for heads without matrices of their own."""
    return ConfigError(f"{what}: its heads have no matrices of their own: {why}")
