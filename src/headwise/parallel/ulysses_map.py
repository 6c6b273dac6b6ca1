"""The map of one rank after Ulysses attention: its own heads over the whole sequence."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.map import AttentionMap
from headwise.parallel.layout import Members
from headwise.parallel.ring_measures import check_measures
from headwise.parallel.sequence_call import together
from headwise.parallel.spread_map import SpreadMap
from headwise.rule import Rule
from headwise.stats import Measure, Measurements, resolve
from headwise.stats.base import tensors_of, with_tensors


class UlyssesMap(SpreadMap):
    """The heads of one rank, over the whole sequence.

    Attributes:
        own: their `AttentionMap` [b, h_r, n, m], which is read locally.
        heads: their indices among all h heads.
        q, k: this rank's part of the sequence, of all heads, as passed in; `own` has copies. lse: [b, h_r, n], of its
            own heads.
        rule: of the whole matrix and all heads.
        measured: the `Measurements` of the argument `measures`, of all heads of all ranks, or None.
    """

    keep = "map.own.clone()"

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
        """Compute per-head statistics of the heads of all ranks, equal on each: name → [b, h]. All ranks must call it;
        only the results are sent. For rows, use `own.measure(…, rows=True)`."""
        measures = resolve(wanted)
        check_measures(measures, return_map=True)
        found = together(self._who, "UlyssesMap.measure", self.lse.device, lambda: self.own.measure(*measures))
        return self.of_all_heads(found, measures)

    @torch.no_grad()
    def of_all_heads(self, found: Measurements, measures: Sequence[Measure]) -> Measurements:
        """Combine the measurements of each rank's own heads."""
        b, h, _, _ = self.shape
        closed = [measure.closed(state) for measure, state in zip(measures, found.states.values(), strict=True)]
        own = (b, len(self.heads))
        numbers = [*(x for x in tensors_of(closed) if x.shape[:2] == own), found.nonfinite]
        columns = [x.double().reshape(*own, -1) for x in numbers]
        # Each number is nonzero on one rank only, so the sums are exact.
        everyone = self.lse.new_zeros(b, h, sum(x.shape[-1] for x in columns), dtype=torch.float64)
        everyone[:, self.heads.start : self.heads.stop] = torch.cat(columns, -1)
        dist.all_reduce(everyone, group=self._who.group)
        parts = everyone.split([x.shape[-1] for x in columns], -1)
        at = (part.reshape(b, h, *x.shape[2:]) for part, x in zip(parts, numbers, strict=True))
        states = with_tensors(closed, lambda x: next(at) if x.shape[:2] == own else x)
        result = Measurements(measures, states, next(at).to(found.nonfinite))
        result.nonfinite_values = self._bad_of_all()
        return result

    def __repr__(self) -> str:
        b, h, n, m = self.shape
        return (
            f"UlyssesMap(rank {self._who.rank} of {self._who.ranks}: heads {self.heads.start} to {self.heads.stop - 1} "
            f"of {b} × {h}, {n} queries × {m} keys; own: {self.own!r})"
        )
