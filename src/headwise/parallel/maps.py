"""The map of one rank: its own rows after ring attention, its own heads after Ulysses attention."""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.errors import check_whole
from headwise.kernels import check_name
from headwise.kernels.graph import in_graph
from headwise.map import AttentionMap
from headwise.map.attention import nonfinite
from headwise.map.unchanged import noted, remark_large
from headwise.parallel.layout import Members, unshard
from headwise.parallel.sequence_call import together
from headwise.parallel.travel import Found, Plan, check_measures, measured, split, squares
from headwise.rule import Rule, pooling
from headwise.rule.pooling import Squares
from headwise.stats import Measure, Measurements, resolve
from headwise.stats.base import tensors_of, with_tensors

Own = TypeVar("Own", bound="SpreadMap")


class SpreadMap:
    """The base of `RingMap` and `UlyssesMap`, from this rank's part of q, k, v and the rule of the whole, without a
    copy: reading it after a change in place raises, on all ranks where all must call it."""

    keep = "map.gather()"  # in the error

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, rule: Rule, who: Members, named: str
    ) -> None:  # fmt: skip
        self._q, self._k, self.lse, self.rule = q.detach(), k.detach(), lse.detach(), rule.kept()
        self._inputs = noted(self._q, self._k, self.rule, whole=False, keep=self.keep)
        self.measured: Measurements | None = None
        self.named = named  # as of an `AttentionMap`
        self._who = who
        self._bad_values = nonfinite(v)

    @property
    def q(self) -> Tensor:
        """This rank's queries, as passed in."""
        self._check()
        return self._q

    @property
    def k(self) -> Tensor:
        """This rank's keys, as passed in."""
        self._check()
        return self._k

    def _check(self) -> None:
        """Raise ConfigError if an input of this rank has changed."""
        if self._inputs is not None:
            self._inputs.check(lambda: False)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, h, n, m) of the whole matrix, all heads."""
        b, h, n, m = self.rule.grid
        return b, h, n, m

    def using(self: Own, kernel: str) -> Own:
        """Return the same map, read by this kernel, as `AttentionMap.using`."""
        check_name(kernel)
        same = copy(self)
        same.named = kernel
        return same

    @property
    def nonfinite_values(self) -> Tensor | None:
        """NaN and infinite entries of v on all ranks, [b, h_kv]; None if there are none, or nothing was measured."""
        return None if self.measured is None else self.measured.nonfinite_values

    def _bad_of_all(self) -> Tensor | None:
        """The same, counted anew. All ranks must call it."""
        found = self._bad_values.clone()
        dist.all_reduce(found, group=self._who.group)
        return found if bool(found.any()) else None


class RingMap(SpreadMap):
    """The rows of one rank: its queries, its keys, and each query's log-sum-exp over the keys of *all* ranks.

    Its contents are local. `measure`, `pool`, `pooled`, `maps` and `gather` need the keys of other ranks, so all ranks
    must call them.

    Attributes:
        q, k: this rank's inputs; lse: [b, h, n_r].
        rows: positions of its queries in the whole sequence, one range per chunk, in the order of `lse`.
        rule: of the whole matrix. kernels: those that computed this rank's blocks. refusals: why faster ones did not.
        measured: the `Measurements` of the argument `measures`, over all rows of all ranks, or None.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, rule: Rule, plan: Plan, who: Members, *,
        kernels: Sequence[str], named: str, refusals: Mapping[str, str],
    ) -> None:  # fmt: skip
        super().__init__(q, k, v, lse, rule, who, named)
        self.rows = plan.queries.pieces(who.rank)
        self.kernels, self.refusals = tuple(kernels), dict(refusals)
        self._plan = plan

    def measure(self, *wanted: str | Measure, rows: bool = False) -> Measurements:
        """Compute per-head statistics over the rows of all ranks, equal on each: name → [b, h]. All ranks must call it.

        Keys are passed around the ring once. With `rows`, `.rows[name]` [b, h, n_r] has the values of this rank's
        queries.
        """
        measures = resolve(wanted)
        check_measures(measures, return_map=True)
        self._check_all("measure")
        return self.measured_by((), measures, rows=rows)

    def measured_by(self, found: Found, wanted: Sequence[Measure], *, rows: bool = False) -> Measurements:
        """As `measure`, with statistics of this rank's rows that kernels have already computed."""
        self._remark()
        return measured(
            self._q, self._k, self.lse, self.rule, self._plan, self._who, wanted, bad_values=self._bad_values,
            found=found, keep_rows=rows, kernel=self.named,
        )  # fmt: skip

    def pool(self, size: int, reduce: str = "mean") -> Tensor:
        """The whole matrix pooled as by `AttentionMap.pool`, equal on every rank: [b, h, ⌈n/cell⌉, ⌈m/cell⌉] with
        cell = ⌈max(n, m)/size⌉. All ranks must call it; keys are passed around the ring once."""
        cell = pooling.cell_for(size, reduce, *self.shape[2:])
        found = self.pooled(slice(None), slice(None), cell)
        return found.mean if reduce == "mean" else found.largest

    def pooled(self, rows: range | slice, cols: range | slice, cell: int) -> Squares:
        """A rectangle of the whole matrix pooled in squares as by `AttentionMap.pooled`, equal on every rank. All ranks
        must call it with the same arguments; keys are passed around the ring once, and each rank stores only its own
        rows and one piece of keys."""
        n, m = self.shape[2:]
        cell = check_whole("pooled", "cell", cell, 1)
        self._check_all("pooled")
        self._remark()
        sides = pooling.side("rows", rows, n), pooling.side("cols", cols, m)
        return squares(self._q, self._k, self.lse, self.rule, self._plan, self._who, *sides, cell, self.named)

    def maps(self) -> tuple[AttentionMap, ...]:
        """This rank's rows over all keys, one `AttentionMap` per chunk, which are read locally. All ranks must call it,
        as it gathers the keys: O(m) memory on each."""
        self._check_all("maps")
        whole = self._plan.keys
        keys = self._whole(self._k, whole.kind)
        spans = self._plan.rows(self._who.rank)
        parts, bad = zip(split(self._q, spans), split(self.lse, spans), spans, strict=True), self._bad_of_all()
        return tuple(self._map(q, keys, lse, self.rule.rows(rows), bad) for q, lse, rows in parts)

    def gather(self) -> AttentionMap:
        """Gather the map of the whole sequence on every rank, O(n) memory on each. All ranks must call it."""
        self._check_all("gather")
        q, k, lse = (self._whole(x, self._plan.keys.kind) for x in (self._q, self._k, self.lse[..., None]))
        return self._map(q, k, lse[..., 0], self.rule, self._bad_of_all())

    def _remark(self) -> None:
        """Say that weights by the float32 log-sum-exp of large logits are rough; those of `maps` are not."""
        if not in_graph():
            remark_large(self.lse, "its weights are off by as much; read those of gather() or maps() instead")

    def _check_all(self, name: str) -> None:
        """Raise on every rank if an input of any has changed."""
        together(self._who, f"RingMap.{name}", self.lse.device, self._check)

    def _whole(self, x: Tensor, layout: str) -> Tensor:
        return unshard(x, layout, dim=2, group=self._who.group)

    def _map(self, q: Tensor, k: Tensor, lse: Tensor, rule: Rule, bad_values: Tensor | None) -> AttentionMap:
        return AttentionMap(
            q, k, lse, rule, kernel=" and ".join(self.kernels), named=self.named, refusals=self.refusals,
            nonfinite_values=bad_values,
        )  # fmt: skip

    def __repr__(self) -> str:
        b, h, n, m = self.shape
        scores = "".join(f", {score!r}" for score in self.rule.scores)
        here = " and ".join(f"{rows.start} to {rows.stop - 1}" for rows in self.rows if rows) or "none"
        return (
            f"RingMap(rank {self._who.rank} of {self._who.ranks}: queries {here} of {b} × {h} heads, {n} queries × {m} "
            f"keys, {self.rule.mask!r}{scores}, kernels {' and '.join(self.kernels) or 'none'})"
        )


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
