"""Measures of rows, all taken at once: each by itself is a few tensor operations, and a small call takes less time than
some dozens of those."""

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from headwise.measures.base import Measure, RowMeasure, RowState
from headwise.rule import Rule
from headwise.statistics import Statistic


def goes_together(measure: Measure) -> TypeGuard[RowMeasure]:
    """Whether it is begun, taken and finished as measures of rows are, so that others can be with it."""
    kind = type(measure)
    return (
        isinstance(measure, RowMeasure)
        and kind.start is RowMeasure.start
        and kind.take is RowMeasure.take
        and kind.finish is RowMeasure.finish
    )


def take_together(
    measures: Sequence[RowMeasure], found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule, every: bool
) -> dict[str, tuple[RowState, Tensor]]:
    """State and value of each, as `start`, `take` and `finish` give them one after the other.

    Args:
        every: whether each row is known to see something, and all scores to be finite.
    """
    result: dict[str, tuple[RowState, Tensor]] = {}
    seen = None if every else lse != -torch.inf
    for largest in (False, True):
        here = [measure for measure in measures if (measure.reduce == "max") is largest]
        if not here:
            continue
        total = lse.new_empty(len(here), *lse.shape[:-1])
        count = torch.full(total.shape, lse.shape[-1], dtype=torch.float64, device=lse.device)
        for i, measure in enumerate(here):
            value, which = measure.told(found, lse, rule)
            value = value if value.shape == lse.shape else value.expand(lse.shape)
            which = seen if which is None else which
            # A look costs less than a mask, but for a device that would have to be waited for.
            if which is not None and not (which.device.type == "cpu" and bool(which.all())):
                if not (every and measure.blank):
                    value = torch.where(which, value, -torch.inf if largest else 0.0)
                count[i] = which.sum(-1)
            # Apart, since together they would need memory that has to be asked for anew; a sum of float32 is cascaded.
            total[i] = value.amax(-1) if largest else value.sum(-1)
        sums = total.double()
        final = sums.masked_fill(count == 0, 0.0) if largest else sums / count.clamp_min(1)
        parts = zip(here, sums.unbind(), count.unbind(), final.float().unbind(), strict=True)
        result |= {measure.name: (RowState(sum_, rows), number) for measure, sum_, rows, number in parts}
    return result
