"""What several measures of rows have added up, in one tensor, so that merging them takes a few tensor operations."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.stats.base import Measure, RowMeasure
from headwise.stats.engine import Measurements, goes_together


@dataclass(frozen=True)
class Pooled:
    """The states of measures, over all entries of batches."""

    totals: Tensor  # [measures, h] in float64
    counts: Tensor  # [measures, h] in float64
    largest: Tensor  # [measures, 1], where a total is a maximum, not a sum

    def merged(self, other: "Pooled") -> "Pooled":
        """Merge two."""
        totals = torch.where(self.largest, torch.maximum(self.totals, other.totals), self.totals + other.totals)
        return Pooled(totals, self.counts + other.counts, self.largest)

    def empty(self) -> "Pooled":
        """The same measures of no rows."""
        totals = torch.where(self.largest, -torch.inf, torch.zeros_like(self.totals))
        return Pooled(totals, torch.zeros_like(self.counts), self.largest)

    def beside(self, *others: "Pooled") -> "Pooled":
        """Those of more heads, one after the other."""
        every = (self, *others)
        return Pooled(torch.cat([x.totals for x in every], 1), torch.cat([x.counts for x in every], 1), self.largest)

    def finished(self) -> Tensor:
        """The value of each, [measures, h] float32."""
        divided = self.totals / torch.where(self.largest, 1.0, self.counts).clamp_min(1)
        return divided.masked_fill(self.largest & (self.counts == 0), 0.0).float()


class Pooling:
    """Measures, and those that are pooled `together`: with the states of `RowMeasure`, merged as it does."""

    def __init__(self, measures: Sequence[Measure]) -> None:
        self.measures = tuple(measures)  # all
        self.together = [m for m in measures if goes_together(m) and type(m).merge is RowMeasure.merge]
        self.others = [m for m in measures if m not in self.together]  # those that are merged one by one
        self.names = [measure.name for measure in self.together]  # of `together`
        self._largest = torch.tensor([[m.reduce == "max"] for m in self.together], dtype=torch.bool)

    def pooled(self, measured: Measurements) -> Pooled | None:
        """The states of `together`; None if there are none."""
        if not self.together:
            return None
        totals, counts = measured.stacked(self.names)
        largest = self._largest.to(totals.device)
        if totals.shape[1] == 1:
            return Pooled(totals[:, 0], counts[:, 0], largest)
        most = totals.amax(1) if totals.shape[1] else totals.new_full((len(totals), totals.shape[2]), -torch.inf)
        return Pooled(torch.where(largest, most, totals.sum(1)), counts.sum(1), largest)
