"""Measures of rows, all computed together: one takes a few tensor operations, and dozens of those take longer than
a small call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from headwise.rule import Rule
from headwise.stats.base import Measure, RowMeasure, RowState
from headwise.stats.statistic import Statistic
from headwise.stats.values import Reduce, Reduced, RowValue, ToReduce, declares_value


def goes_together(measure: Measure) -> TypeGuard[RowMeasure]:
    """Whether it has the `start`, `take` and `finish` of `RowMeasure`, so that it can be computed with others."""
    kind = type(measure)
    return (
        isinstance(measure, RowMeasure)
        and kind.start is RowMeasure.start
        and kind.take is RowMeasure.take
        and kind.finish is RowMeasure.finish
    )


def value_of(measure: Measure, rule: Rule) -> RowValue | None:
    """The declared value of a measure's rows, if it is all that the measure consists of."""
    return measure.row_value(rule) if goes_together(measure) and declares_value(type(measure)) else None


@dataclass(frozen=True)
class Together:
    """Measures that were reduced together, each made from `reduced` when it is requested.

    places: name → where the measure is in it.
    """

    places: Mapping[str, int]
    reduced: Reduced

    def value(self, name: str) -> Tensor:
        """The measure [b, h]."""
        return self.reduced.values[self.places[name]]

    def state(self, name: str) -> RowState:
        """What was added up for it."""
        totals, counts = self.reduced.sums[:, self.places[name]]
        return RowState(totals, counts)


def places_of(measures: Sequence[Measure]) -> dict[str, int]:
    """The place of each measure in a stack of all."""
    return {measure.name: i for i, measure in enumerate(measures)}


def reduce_together(
    measures: Sequence[RowMeasure], found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule, reduce: Reduce
) -> Together | None:
    """The measures that declare their value, in one call of a kernel; None if there are none, or it cannot."""
    declared = [(measure, value) for measure in measures if (value := value_of(measure, rule)) is not None]
    given = [
        ToReduce(value, None if value.statistic is None else found[value.statistic], measure.reduce == "max")
        for measure, value in declared
    ]
    reduced = reduce(lse, given) if given else None
    return None if reduced is None else Together(places_of([measure for measure, _ in declared]), reduced)


def take_together(
    measures: Sequence[RowMeasure], found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule, every: bool,
    nonfinite: Tensor,
) -> list[Together]:  # fmt: skip
    """The state and the value of each, as `start`, `take` and `finish` return them one by one.

    Args:
        every: whether no query is fully masked and all scores are finite.
    """
    result = []
    seen = None if every else lse != -torch.inf
    for largest in (False, True):
        here = [measure for measure in measures if (measure.reduce == "max") is largest]
        if not here:
            continue
        values, counts = [], {}
        for i, measure in enumerate(here):
            value, which = measure.row_values(found, lse, rule)
            which = seen if which is None else which
            # A check costs less than a mask, except on a device that has to be synchronised.
            if which is not None and not (which.device.type == "cpu" and bool(which.all())):
                if not (every and measure.blank):
                    value = torch.where(which, value, -torch.inf if largest else 0.0)
                counts[i] = which.sum(-1)
            values.append(value if value.shape == lse.shape else value.expand(lse.shape))
        rows = torch.stack(values)  # [s, b, h, n]
        total = rows.amax(-1) if largest else rows.sum(-1)  # float32 sums are cascaded
        sums = total.new_full((2, *total.shape), lse.shape[-1], dtype=torch.float64)
        sums[0] = total
        for i, number in counts.items():
            sums[1, i] = number
        if not largest:
            final = sums[0] / (sums[1].clamp_min(1) if counts else lse.shape[-1])
        else:
            final = sums[0].masked_fill(sums[1] == 0, 0.0) if counts else sums[0]
        result.append(Together(places_of(here), Reduced(final.float(), sums, nonfinite)))
    return result
