"""What a kernel can tell about the rows of an attention matrix beside its output, in the same pass.

A `Statistic` names a number per query; a kernel that can compute it puts [b, h, n] float32 under it (natural
logarithms, weights before dropout, 0 for a query that sees nothing). Measures say which ones they can be made of.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Statistic:
    """A number per query, or per key."""

    name: str


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


class Squares(NamedTuple):
    """An attention matrix, or a rectangle of it, in squares of cell × cell; each [b, h, ⌈n/cell⌉, ⌈m/cell⌉].

    mean: the mean weight of the cells that the mask allows, 0 where it allows none.
    largest: the largest weight.
    allowed: int64, how many cells the mask allows.
    """

    mean: Tensor
    largest: Tensor
    allowed: Tensor
