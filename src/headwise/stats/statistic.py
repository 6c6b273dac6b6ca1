"""What a statistic is: a number of each query, or of each key, that a kernel can compute in its pass over the keys.

Kernels return float32 (natural logarithms, weights before dropout, 0 for a fully masked query). Measures declare which
statistics they can be computed from. A file of `headwise.stats` defines a statistic and the measures computed from it.
Below are values of rows that follow from one statistic (`RowMeasure.row_value`), and counts of keys, O(n) from spans.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from headwise.errors import check_declared
from headwise.masks import Span
from headwise.rule import Rule, sink_weight
from headwise.rule.lowering import lowered


@dataclass(frozen=True, eq=False)
class Compiled:
    """The function of the compiled kernels that computes a statistic, and its arguments.

    Each kernel has a table of the functions that it has, by signature; a kernel without this one leaves the statistic
    out of its result.

    Attributes:
        name: of the function.
        numbers: its integer arguments.
        keys, queries: its arguments with a value for each key [1 or b, m] and each query [1 or b, n], float32 or int32.
        count: the size of the last axis of a result [b, h, n, count]. None: the result is [b, h, n], or [b, h, m] for a
            statistic of keys.
        dtype: of the result.
        per: as of the statistic.
    """

    name: str
    numbers: tuple[int, ...] = ()
    keys: Tensor | None = None
    queries: Tensor | None = None
    count: int | None = None
    dtype: torch.dtype = torch.float32
    per: Literal["query", "key"] = "query"

    @cached_property
    def signature(self) -> str:
        """Such as `"key_weights(float32[m]): float32[b, h, n]"`."""
        arguments = ["int"] * len(self.numbers)
        tensors = (self.keys, "m"), (self.queries, "n")
        arguments += [f"{_name(x.dtype)}[{size}]" for x, size in tensors if x is not None]
        arguments += ["count"] * (self.count is not None)
        shape = ["b", "h", "m" if self.per == "key" else "n", *["count"] * (self.count is not None)]
        return f"{self.name}({', '.join(arguments)}): {_name(self.dtype)}[{', '.join(shape)}]"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Slope(NamedTuple):
    """The derivative of a statistic x of rows by a weight, ∂x_i/∂p_ij, in a form that kernels can add to that of the
    output in their backward pass: the sum of these. It holds that Σ_j p_ij ∂x_i/∂p_ij = x_i + logs · Σ_j p_ij.

    Attributes:
        logs: factor of ln p_ij + 1. distance: factor of |i − j| along the key axis.
        keys: a number of each key, float32 [1 or b, m].
        within: 1 for the keys [start, stop), else 0, as of `RangeMass(start, stop, relative)`.
        largest: x is the largest score, and has a derivative by it alone; equal ones share it.
    """

    logs: float = 0.0
    distance: float = 0.0
    keys: Tensor | None = None
    within: tuple[int, int, bool] | None = None
    largest: bool = False


class Statistic:
    """A number per query, or per key.

    A class declares everything that calls in parts and ring attention need to combine the numbers of many blocks; there
    are no defaults.

    Attributes:
        name: what it is called.
        per: whether it is a number of each "query", [b, h, n, …], or of each "key", added up over the queries,
            [b, h, m].
        joins: how the numbers of two sets of keys are joined; None if the two numbers do not determine it.
        placed: whether it depends on the distance of queries and keys, not only on which keys a query has.
    """

    name: str
    per: Literal["query", "key"]
    joins: "Join | None"
    placed: bool

    @property
    def compiled(self) -> Compiled | None:
        """The function of the compiled kernels that computes it; None if there is none. Kernels read it in every call:
        it is made once."""
        return None

    @property
    def slope(self) -> Slope | None:
        """Its derivative; None if it has no such form: measures then have gradients tile by tile."""
        return None

    def __init_subclass__(cls, *, abstract: bool = False, **options: Any) -> None:
        """`abstract`: the class leaves something for its own subclasses to declare."""
        super().__init_subclass__(**options)
        if not abstract:
            check_declared(cls, Statistic, {
                "per": "whether it is a number of each query or of each key",
                "joins": "how the numbers of two sets of keys are joined, a stats.Join or None",
                "placed": "whether it depends on the distance of queries and keys",
                "at": "the statistic as some of the keys have it",
                "rows": "the statistic as a block of queries has it",
                "only": "the statistic as one batch entry has it",
            })  # fmt: skip

    def at(self, cols: Span) -> "Statistic | None":
        """The statistic as these keys have it, counted from the first of them; None where it is 0 for all of them."""
        raise NotImplementedError

    def rows(self, rows: Span) -> "Statistic":
        """The statistic as a block of queries has it."""
        raise NotImplementedError

    def only(self, batch: int) -> "Statistic":
        """The statistic as one batch entry has it."""
        raise NotImplementedError

    def of_blocks(self, parts: Sequence[Tensor]) -> Tensor:
        """Of the whole matrix, from what blocks of queries, in order, have."""
        return torch.stack(list(parts)).sum(0) if self.per == "key" else torch.cat(list(parts), 2)


class Alike(Statistic, abstract=True):
    """A statistic that some of the keys, of the queries, and of the batch entries have as all of them do."""

    def at(self, cols: Span) -> Statistic | None:
        return self

    def rows(self, rows: Span) -> Statistic:
        return self

    def only(self, batch: int) -> Statistic:
        return self


class Part(NamedTuple):
    """A set of keys of a row, beside the other keys of it.

    Attributes:
        log_share: the log of the share of the row's mass that they have, [b, h, n].
        of: their numbers, [b, h, n] for each statistic.
    """

    log_share: Tensor
    of: Mapping[Statistic, Tensor]


class Join(ABC):
    """How the numbers of two disjoint sets of keys become that of both.

    Attributes:
        empty: the number of no keys.
        beside: other statistics whose numbers are needed too.
    """

    empty: ClassVar[float] = 0.0
    beside: tuple[Statistic, ...] = ()

    @abstractmethod
    def shared(self, x: Tensor, log_share: Tensor) -> Tensor:
        """What a set of keys contributes to a row in which it has that share."""

    def both(self, statistic: Statistic, one: Part, other: Part) -> Tensor:
        """The number of the two sets together; a sum unless overridden."""
        return self.shared(one.of[statistic], one.log_share) + self.shared(other.of[statistic], other.log_share)

    def beside_sink(self, x: Tensor, log_share: Tensor) -> Tensor:
        """The number after a learned sink, which leaves that share to the keys."""
        return self.shared(x, log_share)


class _Mass(Join):
    def shared(self, x: Tensor, log_share: Tensor) -> Tensor:
        return log_share.exp() * x


class _LargestMass(_Mass):
    def both(self, statistic: Statistic, one: Part, other: Part) -> Tensor:
        parts = (self.shared(part.of[statistic], part.log_share) for part in (one, other))
        return torch.maximum(*parts)


MASS = _Mass()  # Σ share · x: a sum of weights, or of weights times something
LARGEST_MASS = _LargestMass()  # the larger share · x


@dataclass(frozen=True)
class OfWeights(Alike):
    """A number per query that the weights of its row determine, whichever keys they are of.

    name, joins, placed, compiled, slope: the attributes of `Statistic`.
    """

    name: str
    joins: Join | None = MASS
    per = "query"
    placed: bool = False
    compiled: Compiled | None = field(default=None, compare=False)
    slope: Slope | None = field(default=None, compare=False)


@dataclass(frozen=True, eq=False)
class Formula:
    """The value of a row as a function of a statistic x [b, h, n] and the log-sum-exp [b, h, n]."""

    name: str
    of: Callable[[Any, Tensor], Tensor]


SAME = Formula("same", lambda x, lse: x)
INVERSE = Formula("inverse", lambda x, lse: x.reciprocal())
SHARE = Formula("share", lambda x, lse: (x - lse).clamp_max(0.0).exp())  # of a logit x
LOGIT = Formula("logit", lambda x, lse: x - lse + lse)  # NaN where a score is
LOG_SUM = Formula("log_sum", lambda x, lse: lse)  # of no statistic


class RowValue(NamedTuple):
    """The value of each row."""

    formula: Formula  # of the statistic, and the log-sum-exp
    statistic: Statistic | None = None  # None if the formula has none
    counted: Tensor | None = None  # which rows, boolean [b or 1, 1, n] on the CPU; None: those not fully masked


class Reduced(NamedTuple):
    """Measures of rows, reduced over the rows of each head."""

    values: Tensor  # float32 [s, b, h]
    sums: Tensor  # of what they are, float64 [2, s, b, h]: the sum or largest of the rows that count, and their number
    nonfinite: Tensor  # int64 [b, h], the rows whose log-sum-exp is NaN or infinite


class ToReduce(NamedTuple):
    """A measure of rows to be reduced: its value, the statistic's numbers [b, h, n] or None, and how."""

    value: RowValue
    x: Tensor | None
    largest: bool


Reduce = Callable[[Tensor, Sequence[ToReduce]], Reduced | None]  # from the log-sum-exp; None: not possible

DEFINED_WITH = "value", "counted", "from_rows", "row_values", "needs"


@cache
def declares_value(kind: type) -> bool:
    """Whether the class's `row_value` is still that of its other methods, which no subclass overrides alone."""
    order = kind.__mro__

    def place(name: str) -> int:
        return next(i for i, one in enumerate(order) if name in vars(one))

    return place("row_value") <= min(map(place, DEFINED_WITH))


def ranges(rule: Rule) -> Tensor | None:
    """Half-open ranges of keys that each query may see, int32 [b or 1, n, K, 2], or None."""
    found = lowered(rule)
    return None if isinstance(found, str) or found.dense is not None else found.spans


def allowed_keys(rule: Rule, like: Tensor) -> Tensor:
    """How many keys each query may see, [b or 1, 1, n]."""
    spans = _known(rule)
    return (spans[..., 1] - spans[..., 0]).sum(-1)[:, None].to(like)


def sees_offset(rule: Rule, offset: int) -> Tensor:
    """Whether each query may see the key at its position + offset, boolean [b or 1, 1, n]; cached by spans."""
    found = lowered(rule)
    kept: dict[tuple[int, int], Tensor] = found.__dict__.setdefault("_sees_offset", {})
    place = offset, rule.grid.shift
    if place not in kept:
        key = torch.arange(rule.grid.n, device="cpu") + rule.grid.shift + offset
        spans = _known(rule)
        kept[place] = ((key[:, None] >= spans[..., 0]) & (key[:, None] < spans[..., 1])).any(-1)[:, None]
    return kept[place]


def queries_of_keys(rule: Rule, like: Tensor) -> Tensor:
    """How many queries may see each key, [b, h, m] in float64."""
    b, h, _, m = rule.grid
    spans = _known(rule).long()
    change = torch.zeros(len(spans), m + 1, dtype=torch.float64, device="cpu")
    one = torch.ones((), dtype=torch.float64, device="cpu")
    change.scatter_add_(1, spans[..., 0].flatten(1), one.expand(len(spans), spans[..., 0][0].numel()))
    change.scatter_add_(1, spans[..., 1].flatten(1), -one.expand(len(spans), spans[..., 1][0].numel()))
    return change.cumsum(1)[:, None, :m].to(like.device).expand(b, h, m)


def same_label(rule: Rule, keys: Tensor, queries: Tensor, ahead: int, like: Tensor) -> Tensor:
    """How many allowed keys j < position + ahead have the label of each query, [b or 1, 1, n]; −1 is no label."""
    spans = _known(rule).long()
    b, m = max(len(spans), len(keys)), rule.grid.m
    stop = torch.minimum(spans[..., 1], (rule.grid.positions() + ahead)[:, None])
    # A label and a place as one number: those of a label lie together, in the order of their places.
    places = (keys.long() * (m + 1) + torch.arange(m, device="cpu")).sort(-1).values.expand(b, -1).contiguous()
    labels = queries.long()[..., None] * (m + 1)
    first, last = (
        torch.searchsorted(places, (labels + ends).expand(b, -1, -1).flatten(1).contiguous())
        for ends in (spans[..., 0], torch.maximum(stop, spans[..., 0]))
    )
    count = (last - first).view(b, *spans.shape[1:3]).sum(-1) * (queries >= 0)
    return count[:, None].to(like)


def row_mass(rule: Rule, lse: Tensor) -> Tensor:
    """Σ_j p_ij, [b, h, n]: 1, or what a learned sink leaves; 0 for a fully masked query."""
    sees = (lse != -torch.inf).to(lse.dtype)
    return sees * (1.0 - learned_sink(rule, lse)).clamp_min(0.0)


def learned_sink(rule: Rule, lse: Tensor) -> Tensor:
    """What a learned sink takes of each row, [b, h, n]; 0 without one."""
    sinks = rule.terms(lse[..., :0]).sinks
    return torch.zeros_like(lse) if sinks is None else sink_weight(sinks, lse)


def _known(rule: Rule) -> Tensor:
    spans = ranges(rule)
    assert spans is not None  # callers check `ranges` first
    return spans
