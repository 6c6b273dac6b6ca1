"""Measures of rows, all computed together: one takes a few tensor operations, and dozens of those take longer than
a small call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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


def reduce_together(
    measures: Sequence[Measure], found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule, reduce: Reduce
) -> tuple[list[str], Reduced] | None:
    """The measures that declare their value, by name, in one call of a kernel; None if there are none, or it cannot."""
    names, given = [], []
    for measure in measures:
        if isinstance(measure, RowMeasure) and (value := value_of(measure, rule)) is not None:
            names.append(measure.name)
            x = None if value.statistic is None else found[value.statistic]
            given.append(ToReduce(value, x, measure.reduce == "max"))
    reduced = reduce(lse, given) if given else None
    return None if reduced is None else (names, reduced)


def states_of(names: Sequence[str], reduced: Reduced) -> dict[str, tuple[Callable[[], RowState], Tensor]]:
    """The state, created on request, and the value of each."""
    values = reduced.values.unbind()
    return {name: (StateOf(reduced, i), values[i]) for i, name in enumerate(names)}


@dataclass(frozen=True)
class StateOf:
    """Creates the state of measure `at` of those that were reduced together."""

    reduced: Reduced
    at: int

    def __call__(self) -> RowState:
        return RowState(self.reduced.totals[self.at], self.reduced.counts[self.at])


def take_together(
    measures: Sequence[RowMeasure], found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule, every: bool
) -> dict[str, tuple[Callable[[], RowState], Tensor]]:
    """The state, created on request, and the value of each, as `start`, `take` and `finish` return them one by one.

    Args:
        every: whether no query is fully masked and all scores are finite.
    """
    result: dict[str, tuple[Callable[[], RowState], Tensor]] = {}
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
        total = total.double()
        count: Tensor | None = None
        if counts:
            count = torch.full(total.shape, lse.shape[-1], dtype=torch.float64, device=lse.device)
            for i, number in counts.items():
                count[i] = number
        if largest:
            final = total if count is None else total.masked_fill(count == 0, 0.0)
        else:
            final = total / (lse.shape[-1] if count is None else count.clamp_min(1))
        for i, (measure, value) in enumerate(zip(here, final.float().unbind(), strict=True)):
            result[measure.name] = partial(_state, total, count, i, lse.shape[-1]), value
    return result


def _state(total: Tensor, count: Tensor | None, i: int, rows: int) -> RowState:
    """That of measure i of a stack; `count` is None where all rows count."""
    here = torch.full_like(total[i], rows) if count is None else count[i]
    return RowState(total[i], here)
