"""What a rank knows of the attention matrices after Ulysses: its own heads, whole."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.map import AttentionMap
from headwise.parallel.layout import Members
from headwise.parallel.ring_measures import check_measures
from headwise.parallel.spread_map import SpreadMap
from headwise.rule import Rule
from headwise.stats import Measure, Measurements
from headwise.stats.base import RowState
from headwise.stats.pattern import ColumnState
from headwise.stats.registry import resolve


class UlyssesMap(SpreadMap):
    """The heads of one rank, over the whole sequence.

    Attributes:
        own: their `AttentionMap` [b, h_r, n, m]: everything read from it is local and exact.
        heads: which of all h heads they are.
        q, k: this rank's part of the sequence, of all heads, as they were given; lse: [b, h_r, n], of its own heads.
        rule: of the whole matrix and all heads.
        measured: the `Measurements` that `measures=…` asked for, of all heads of all ranks, or None.
    """

    def __init__(
        self, own: AttentionMap, heads: range, q: Tensor, k: Tensor, v: Tensor, rule: Rule, who: Members
    ) -> None:  # fmt: skip
        super().__init__(q, k, v, own.lse, rule, who, own.named)
        self.own, self.heads = own, heads

    def using(self, kernel: str) -> "UlyssesMap":
        same = super().using(kernel)
        same.own = self.own.using(kernel)
        return same

    def measure(self, *wanted: str | Measure) -> Measurements:
        """Per-head statistics of the heads of all ranks, the same on each: name → [b, h]. All ranks call it; nothing
        is sent but the numbers. For rows, ask `own.measure(…, rows=True)`."""
        measures = resolve(wanted)
        check_measures(measures, return_map=True)
        return self.of_all_heads(self.own.measure(*measures), measures)

    @torch.no_grad()
    def of_all_heads(self, found: Measurements, measures: Sequence[Measure]) -> Measurements:
        """What each rank has measured of its own heads, as one."""
        numbers: list[Tensor] = []
        for state in found.states.values():
            if isinstance(state, RowState):
                numbers += [state.total, state.count]
            else:
                assert isinstance(state, ColumnState)  # check_measures let no others in
                numbers.append((state.mass / state.eligible.clamp_min(1)).amax(-1))
        numbers.append(found.nonfinite)
        b, h, _, _ = self.shape
        # Each number comes from one rank, so that the sums are exact.
        everyone = self.lse.new_zeros(len(numbers), b, h, dtype=torch.float64)
        everyone[:, :, self.heads.start : self.heads.stop] = torch.stack([x.double() for x in numbers])
        dist.all_reduce(everyone, group=self._who.group)
        bad_values = self._bad_values.clone()
        dist.all_reduce(bad_values, group=self._who.group)
        at = iter(everyone)
        states: list[RowState | ColumnState] = []
        for state in found.states.values():
            if isinstance(state, RowState):
                states.append(RowState(next(at), next(at)))
            else:
                states.append(ColumnState(state.mass[:0], state.eligible[:0], next(at)))
        result = Measurements(measures, states, next(at).to(found.nonfinite))
        result.nonfinite_values = bad_values if bool(bad_values.any()) else None
        return result

    def __repr__(self) -> str:
        b, h, n, m = self.shape
        return (
            f"UlyssesMap(rank {self._who.rank} of {self._who.ranks}: heads {self.heads.start} to {self.heads.stop - 1} "
            f"of {b} × {h}, {n} queries × {m} keys; own: {self.own!r})"
        )
