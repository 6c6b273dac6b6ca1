"""Values of rows that follow from one statistic by one of a few functions, which kernels have too.

A measure that declares its value so (`RowMeasure.row_value`) can be reduced over the rows by compiled code, together
with others: in small calls, tensor operations for each measure take longer than the attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from headwise.stats.statistic import Statistic


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
    """The value of each row.

    Attributes:
        formula: of the statistic, and the log-sum-exp.
        statistic: None if the formula has none.
        counted: which rows count, boolean [b or 1, 1, n] on the CPU; None: those that are not fully masked.
    """

    formula: Formula
    statistic: Statistic | None = None
    counted: Tensor | None = None


class Reduced(NamedTuple):
    """Measures of rows, reduced over the rows of each head.

    Attributes:
        values: float32 [s, b, h]. sums: what they are of, float64 [2, s, b, h]: the sum or the largest of the rows that
            count, and their number.
        nonfinite: int64 [b, h], the rows whose log-sum-exp is NaN or infinite.
    """

    values: Tensor
    sums: Tensor
    nonfinite: Tensor


class ToReduce(NamedTuple):
    """A measure of rows to be reduced: its value, the statistic's numbers [b, h, n] or None, and how."""

    value: RowValue
    x: Tensor | None
    largest: bool


Reduce = Callable[[Tensor, Sequence[ToReduce]], Reduced | None]  # from the log-sum-exp; None: not possible

DEFINED_WITH = "value", "counted", "from_rows", "row_values", "needs"


@cache
def declares_value(kind: type) -> bool:
    """Whether the class's `row_value` is still that of its other methods: False if a subclass overrides one of those
    alone."""
    order = kind.__mro__

    def place(name: str) -> int:
        return next(i for i, one in enumerate(order) if name in vars(one))

    return place("row_value") <= min(map(place, DEFINED_WITH))
