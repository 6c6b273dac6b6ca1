"""What a kernel can tell about the rows of an attention matrix beside its output, in the same pass.

A `Statistic` names a number per query; a kernel that can compute it puts [b, h, n] float32 under it (natural
logarithms, weights before dropout, 0 for a query that sees nothing). Measures say which ones they can be made of.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Statistic:
    """A number per query, or per key.

    adds_up: whether those of two sets of keys can be joined by each one's share of the row's mass.
    """

    name: str
    adds_up: ClassVar[bool] = True


LARGEST = Statistic("largest")  # max_j S_ij; −∞ for a query that sees nothing
ENTROPY = Statistic("entropy")  # −Σ_j p ln p
SQUARES = Statistic("squares")  # Σ_j p²
DISTANCE = Statistic("distance")  # Σ_j p·|i − j|, i being the query's position on the key axis
DISTANCE_VARIANCE = Statistic("variance")  # Σ_j p·(|i − j| − mean)² / Σ_j p
COLUMN_MASS = Statistic("column_mass")  # Σ_i p, what each key receives: [b, h, m]


@dataclass(frozen=True)
class RangeMass(Statistic):
    """Σ p over the keys [start, stop), counted from the query's position if `relative`, else from the first key."""

    start: int
    stop: int
    relative: bool

    def __init__(self, start: int, stop: int, *, relative: bool) -> None:
        for field, value in (("name", "range_mass"), ("start", start), ("stop", stop), ("relative", relative)):
            object.__setattr__(self, field, value)


@dataclass(frozen=True, eq=False)
class KeyWeights(Statistic):
    """Σ_j p_ij·w_j for weights [1 or b, m] of the keys; two of them are the same only if they are one object."""

    weights: Tensor

    def __init__(self, weights: Tensor) -> None:
        object.__setattr__(self, "name", "key_weights")
        object.__setattr__(self, "weights", weights)

    # Not those of Statistic, which compare the name alone.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


@dataclass(frozen=True)
class TopWeights(Statistic):
    """The `count` largest p_ij of a query, largest first: [b, h, n, count], 0 beyond what it may see."""

    count: int
    adds_up: ClassVar[bool] = False

    def __init__(self, count: int) -> None:
        object.__setattr__(self, "name", "top_weights")
        object.__setattr__(self, "count", count)


@dataclass(frozen=True)
class TopKeys(Statistic):
    """The keys of the `count` largest p_ij of a query, int64 [b, h, n, count]: largest first, the lower key first where
    scores are equal, −1 beyond what it may see."""

    count: int
    adds_up: ClassVar[bool] = False

    def __init__(self, count: int) -> None:
        object.__setattr__(self, "name", "top_keys")
        object.__setattr__(self, "count", count)


@dataclass(frozen=True, eq=False)
class SameLabel(Statistic):
    """Σ p_ij over the keys j < position + ahead that have the query's label.

    Labels are int32, of the keys [1 or b, m] and of the queries [1 or b, n]; −1 is the same as none. Two of these are
    the same only if they are one object.
    """

    keys: Tensor
    queries: Tensor
    ahead: int
    adds_up: ClassVar[bool] = False

    def __init__(self, keys: Tensor, queries: Tensor, ahead: int) -> None:
        for field, value in (("name", "same_label"), ("keys", keys), ("queries", queries), ("ahead", ahead)):
            object.__setattr__(self, field, value)

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Squares(NamedTuple):
    """An attention matrix, or a rectangle of it, in squares of cell × cell; each [b, h, ⌈n/cell⌉, ⌈m/cell⌉].

    mean: the mean weight of the cells that the mask allows, 0 where it allows none.
    largest: the largest weight.
    allowed: int64, how many cells the mask allows.
    """

    mean: Tensor
    largest: Tensor
    allowed: Tensor
