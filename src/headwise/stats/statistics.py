"""What a kernel can tell about the rows of an attention matrix beside its output, in the same pass.

A `Statistic` names a number per query; a kernel that can compute it puts [b, h, n] float32 under it (natural
logarithms, weights before dropout, 0 for a query that sees nothing). Measures say which ones they can be made of.
"""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from headwise.errors import check_declared
from headwise.masks import Span


class Join(enum.Enum):
    """How the numbers of two disjoint sets of keys become that of both: each set has a share of the row's mass, x is
    its number, and the sums are over the two."""

    MASS = "Σ share · x: a sum of weights, or of weights times something"
    LARGEST = "max x"
    ENTROPY = "Σ share · (x − ln share)"
    SQUARES = "Σ share² · x"
    CONCENTRATION = "Σ share² · x, the shares being those of the keys alone; a sink changes nothing"
    VARIANCE = "Σ share · (x + (mean − mean of both)²) of the distance, among the keys alone"
    NEVER = "the two numbers do not determine it"


class Statistic:
    """A number per query, or per key.

    A class of its own declares what ring attention needs to put the numbers of many blocks together; nothing is
    assumed.

    Attributes:
        name: what it is called.
        joins: how the numbers of two sets of keys are joined.
        placed: whether it depends on the distance of queries and keys, not only on which keys a query has.
    """

    name: str
    joins: Join
    placed: bool

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_declared(cls, Statistic, {
            "joins": "how the numbers of two sets of keys are joined, a statistics.Join",
            "placed": "whether it depends on the distance of queries and keys",
            "at": "the statistic as some of the keys have it",
        })  # fmt: skip

    def at(self, cols: Span) -> "Statistic | None":
        """The statistic as these keys have it, counted from the first of them; None where it is 0 for all of them."""
        raise NotImplementedError


@dataclass(frozen=True)
class _OfWeights(Statistic):
    """A number that the weights of a row determine, by name."""

    name: str
    joins: Join = Join.MASS
    placed: bool = False

    def at(self, cols: Span) -> Statistic:
        return self


LARGEST = _OfWeights("largest", Join.LARGEST)  # max_j S_ij; −∞ for a query that sees nothing
ENTROPY = _OfWeights("entropy", Join.ENTROPY)  # −Σ_j p ln p
SQUARES = _OfWeights("squares", Join.SQUARES)  # Σ_j p²
CONCENTRATION = _OfWeights("concentration", Join.CONCENTRATION)  # Σ_j p² / (Σ_j p)², which no sink changes
DISTANCE = _OfWeights("distance", placed=True)  # Σ_j p·|i − j|, i being the query's position on the key axis
DISTANCE_VARIANCE = _OfWeights("variance", Join.VARIANCE, placed=True)  # Σ_j p·(|i − j| − mean)² / Σ_j p
COLUMN_MASS = _OfWeights("column_mass", Join.NEVER)  # Σ_i p, what each key receives: [b, h, m]


@dataclass(frozen=True)
class RangeMass(Statistic):
    """Σ p over the keys [start, stop), counted from the query's position if `relative`, else from the first key."""

    start: int
    stop: int
    relative: bool
    name: str = field(default="range_mass", init=False)
    joins: Join = field(default=Join.MASS, init=False)
    placed: bool = field(init=False)

    def __init__(self, start: int, stop: int, *, relative: bool) -> None:
        for attribute, value in (("start", start), ("stop", stop), ("relative", relative), ("placed", relative)):
            object.__setattr__(self, attribute, value)

    def at(self, cols: Span) -> Statistic | None:
        if self.relative:
            return self
        size = cols.stop - cols.start
        start, stop = (min(max(end - cols.start, 0), size) for end in (self.start, self.stop))
        return RangeMass(start, stop, relative=False) if start < stop else None


@dataclass(frozen=True, eq=False)
class KeyWeights(Statistic):
    """Σ_j p_ij·w_j for weights [1 or b, m] of the keys; two of them are the same only if they are one object."""

    weights: Tensor
    name: str = field(default="key_weights", init=False)
    joins: Join = field(default=Join.MASS, init=False)
    placed: bool = field(default=False, init=False)

    def at(self, cols: Span) -> Statistic:
        return KeyWeights(self.weights[:, cols.start : cols.stop])


@dataclass(frozen=True)
class TopWeights(Statistic):
    """The `count` largest p_ij of a query, largest first: [b, h, n, count], 0 beyond what it may see."""

    count: int
    name: str = field(default="top_weights", init=False)
    joins: Join = field(default=Join.NEVER, init=False)
    placed: bool = field(default=False, init=False)

    def at(self, cols: Span) -> Statistic:
        return self


@dataclass(frozen=True)
class TopKeys(Statistic):
    """The keys of the `count` largest p_ij of a query, int64 [b, h, n, count]: largest first, the lower key first where
    scores are equal, −1 beyond what it may see."""

    count: int
    name: str = field(default="top_keys", init=False)
    joins: Join = field(default=Join.NEVER, init=False)
    placed: bool = field(default=False, init=False)

    def at(self, cols: Span) -> Statistic:
        return self


@dataclass(frozen=True, eq=False)
class SameLabel(Statistic):
    """Σ p_ij over the keys j < position + ahead that have the query's label.

    Labels are int32, of the keys [1 or b, m] and of the queries [1 or b, n]; −1 is the same as none. Two of these are
    the same only if they are one object.
    """

    keys: Tensor
    queries: Tensor
    ahead: int
    name: str = field(default="same_label", init=False)
    joins: Join = field(default=Join.NEVER, init=False)  # labels are of all queries, and a block has some of them
    placed: bool = field(default=True, init=False)

    def at(self, cols: Span) -> Statistic:
        return SameLabel(self.keys[:, cols.start : cols.stop], self.queries, self.ahead)


class Squares(NamedTuple):
    """An attention matrix, or a rectangle of it, in squares of cell × cell; each [b, h, ⌈n/cell⌉, ⌈m/cell⌉].

    mean: the mean weight of the cells that the mask allows, 0 where it allows none.
    largest: the largest weight.
    allowed: int64, how many cells the mask allows.
    """

    mean: Tensor
    largest: Tensor
    allowed: Tensor
