"""The keys and values of a ring: how far each piece is passed, and measures and images over what ranks have.

The plan of a ring: keys and values are passed from each rank to the next, each piece only as far as it is needed. With
hops(p) for the number of hops of a piece p, one call sends, in bytes over all ranks,

    forward:   Σ_p hops(p) · b · h_kv · |p| · (d + d_v) · e
    backward:  Σ_p hops(p) · b · h_kv · |p| · (d + d_v) · (e + 4)

with e bytes per element: in the backward pass keys and values again, and their gradients in float32 (e + 8 in float64),
which the last rank that adds to them returns to the owner. Without a mask hops(p) = R − 1: a rank sends
(R − 1) · b · h_kv · n/R · (d + d_v) · e forward. With a causal mask in the zigzag layout, all but the last chunk make
R − 1 hops; in the contiguous layout, the keys of rank s are needed only by later ranks, R − 1 − s hops, half of the
total. With a window shorter than a rank's part, it is one hop in the contiguous layout for any R. (In the zigzag layout
a window saves little: neighbours in the sequence may be R − 1 hops apart.)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.errors import ConfigError
from headwise.kernels import read
from headwise.kernels.reads import Matrix
from headwise.map import AttentionMap
from headwise.map.arguments import check_measures as check_given
from headwise.masks import Span, State
from headwise.parallel.layout import Layout, Members, Way, reduce_together
from headwise.rule import Rule, own_dtypes
from headwise.rule.pooling import Squares
from headwise.rule.tiles import Scratch, Tile
from headwise.stats import Measure, Measurements, RowMeasure, Statistic, statistics_for
from headwise.stats.base import RowState


@dataclass(frozen=True)
class Plan:
    """Which rank holds which piece of these layouts of queries and keys, and how far each is sent."""

    queries: Layout
    keys: Layout
    hops: tuple[tuple[int, ...], ...]  # for each rank, the number of hops of each of its pieces of keys

    def rows(self, rank: int) -> tuple[Span, ...]:
        """The runs of queries that a rank holds."""
        return _spans(self.queries, rank)

    def cols(self, rank: int) -> tuple[Span, ...]:
        """The pieces of keys that a rank holds at first."""
        return _spans(self.keys, rank)

    def arriving(self, rank: int, hop: int) -> tuple[Span, ...]:
        """The pieces on a rank after a number of hops; they belong to rank − hop."""
        source = (rank - hop) % self.keys.ranks
        return tuple(cols for cols, far in zip(self.cols(source), self.hops[source], strict=True) if far >= hop)

    def ending(self, rank: int, hop: int) -> tuple[Span, ...]:
        """Those of `arriving` that are not passed on."""
        source = (rank - hop) % self.keys.ranks
        return tuple(cols for cols, far in zip(self.cols(source), self.hops[source], strict=True) if far == hop)


def plan(queries: Layout, keys: Layout, way: Way) -> Plan:
    """Make the plan from the mask alone, equal on every rank; nothing is sent."""
    ranks = keys.ranks
    rows = [_spans(queries, rank) for rank in range(ranks)]

    def far(source: int, cols: Span) -> int:
        """The number of hops to the last rank that needs the piece."""
        for hop in range(ranks - 1, 0, -1):
            if any(way.allows(here, cols) for here in rows[(source + hop) % ranks]):
                return hop
        return 0

    hops = tuple(tuple(far(source, cols) for cols in _spans(keys, source)) for source in range(ranks))
    return Plan(queries, keys, hops)


def _spans(layout: Layout, rank: int) -> tuple[Span, ...]:
    """The pieces of a rank."""
    return tuple(Span(piece.start, piece.stop) for piece in layout.pieces(rank))


Held = Mapping[Span, tuple[Tensor, ...]]  # the tensors of each piece of keys, each [b, h_kv, c, …]


def split(x: Tensor, spans: Sequence[Span]) -> list[Tensor]:
    """Split a rank's tensor, [b, h, n_r, …] or [b, h, n_r], into its pieces."""
    return list(x.split([span.size for span in spans], 2))


def travel(own: Held, plan: Plan, who: Members) -> Iterator[tuple[int, Held]]:
    """Yield (hops, pieces on this rank) for 0, 1 … R − 1 hops; the next pieces are sent while the caller uses these."""
    held: Held = own
    for hop in range(who.ranks):
        here = plan.arriving(who.rank, hop)
        held = {cols: held[cols] for cols in here}
        flight = None
        if hop + 1 < who.ranks:
            going = plan.arriving((who.rank + 1) % who.ranks, hop + 1)
            expected, like = plan.arriving(who.rank, hop + 1), next(iter(own.values()))
            flight = _Flight(who, {cols: held[cols] for cols in going}, who.rank + 1, expected, who.rank - 1, like)
        yield hop, held
        if flight is not None:
            held = flight.land()


class Gradients:
    """Sums of all ranks' gradients of each piece, in the accumulating dtype; they follow the piece around the ring. A
    rank calls `add` once per hop, in the order of hops, and `home` at the end."""

    def __init__(self, own: Held, plan: Plan, who: Members) -> None:
        self.own = own  # sums of this rank's own pieces
        self._plan, self._who = plan, who
        self._like = next(iter(own.values()))
        self._coming: _Flight | None = None
        self._returning: list[_Flight] = []

    def add(self, hop: int, parts: Held) -> None:
        """Add this rank's gradients of the pieces of `hop` hops, and send the sums on."""
        if hop == 0:
            for cols, part in parts.items():
                _add(self.own[cols], part)
        else:
            if self._coming is not None:
                for cols, so_far in self._coming.land().items():
                    _add(parts[cols], so_far)
            plan, who = self._plan, self._who
            ending = set(plan.ending(who.rank, hop))  # the others are passed on to the next rank, these to their owner
            onward = {cols: part for cols, part in parts.items() if cols not in ending}
            expected = plan.arriving(who.rank, hop + 1) if hop + 1 < who.ranks else ()
            self._coming = _Flight(who, onward, who.rank + 1, expected, who.rank - 1, self._like)
            homeward = {cols: parts[cols] for cols in parts if cols in ending}
            back = plan.ending((who.rank + hop) % who.ranks, hop)
            self._returning.append(_Flight(who, homeward, who.rank - hop, back, who.rank + hop, self._like))

    def home(self) -> Held:
        """The final sums of this rank's own pieces."""
        for flight in self._returning:
            for cols, total in flight.land().items():
                _add(self.own[cols], total)
        return self.own


class _Flight:
    """One message to a rank and one from a rank; either may be empty."""

    def __init__(
        self, who: Members, sent: Held, to: int, expected: Sequence[Span], source: int, like: tuple[Tensor, ...]
    ) -> None:
        self._expected, self._like, self._who, self._source = expected, like, who, source % who.ranks
        self._out = torch.cat([x.reshape(-1) for parts in sent.values() for x in parts]) if sent else None
        count = sum(cols.size for cols in expected) * sum(map(_each, like))
        self._into = like[0].new_empty(count) if count else None
        operations = []
        if self._out is not None and self._out.numel():
            operations.append(dist.P2POp(dist.isend, self._out, who.peer(to), who.group))
        if self._into is not None:
            operations.append(dist.P2POp(dist.irecv, self._into, who.peer(source), who.group))
        self._works: list[Any] = dist.batch_isend_irecv(operations) if operations else []

    def land(self) -> Held:
        """Wait for both messages and return the received pieces."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._who.rank} of {self._who.ranks} did not receive keys or gradients from rank "
                f"{self._source}; see the first error there: {error}"
            ) from error
        found: dict[Span, tuple[Tensor, ...]] = {}
        at = 0
        for cols in self._expected:
            parts = []
            for x in self._like:
                b, h = x.shape[:2]
                size = cols.size * _each(x)
                assert self._into is not None or size == 0
                piece = x.new_empty(0) if self._into is None else self._into[at : at + size]
                parts.append(piece.view(b, h, cols.size, *x.shape[3:]))
                at += size
            found[cols] = tuple(parts)
        return found


def _each(x: Tensor) -> int:
    """Number of elements per token in x [b, h_kv, c, …]."""
    return x[:, :, :1].numel() if x.shape[2] else x.shape[0] * x.shape[1] * x.shape[3:].numel()


def _add(total: tuple[Tensor, ...], part: tuple[Tensor, ...]) -> None:
    for into, x in zip(total, part, strict=True):
        into += x


@torch.no_grad()
def squares(
    q: Tensor, k: Tensor, lse: Tensor, rule: Rule, plan: Plan, who: Members, rows: range, cols: range, cell: int,
    kernel: str = "auto",
) -> Squares:  # fmt: skip
    """Pool the whole matrix in squares of `cell` × `cell`; all ranks must call it. The keys pass around the ring once,
    Σ_p hops(p) · b · h_kv · |p| · d · e bytes over all ranks, and 24 bytes per square are summed."""
    b, h, _, _ = rule.grid
    size = b, h, -(-len(rows) // cell), -(-len(cols) // cell)
    total, allowed, largest = (torch.zeros(size, dtype=torch.float64, device=lse.device) for _ in range(3))
    own = plan.rows(who.rank)
    held = list(zip(own, split(q, own), split(lse, own), strict=True))
    keys = plan.cols(who.rank)
    for _, here in travel(dict(zip(keys, ((part,) for part in split(k, keys)), strict=True)), plan, who):
        for piece, (k_piece,) in here.items():
            for run, q_run, lse_run in held:
                for i in _along(run, rows, cell):
                    for j in _along(piece, cols, cell):
                        if rule.mask.state(i, j, rule.grid) is State.EMPTY:
                            continue
                        at = slice(i.start - run.start, i.stop - run.start)
                        part = AttentionMap(
                            q_run[:, :, at], k_piece[:, :, j.start - piece.start : j.stop - piece.start],
                            lse_run[:, :, at], rule.part(i, j), named=kernel, whole=False,
                        ).pooled(slice(None), slice(None), cell)  # fmt: skip
                        down, across = (i.start - rows.start) // cell, (j.start - cols.start) // cell
                        into = ..., slice(down, down + part.mean.shape[2]), slice(across, across + part.mean.shape[3])
                        total[into] += part.mean.double() * part.allowed
                        allowed[into] += part.allowed
                        largest[into] = torch.maximum(largest[into], part.largest.double())
    reduce_together([total, allowed], who, dist.ReduceOp.SUM, torch.float64)
    reduce_together([largest], who, dist.ReduceOp.MAX, torch.float64)
    largest.masked_fill_(total.isnan(), torch.nan)  # the maximum over the ranks ignores NaN
    return Squares((total / allowed.clamp_min(1.0)).to(lse.dtype), largest.to(lse.dtype), allowed.long())


def _along(piece: Span, side: range, cell: int) -> Iterator[Span]:
    """The part of a piece in one side of the rectangle, divided where the first whole square begins."""
    start, stop = max(piece.start, side.start), min(piece.stop, side.stop)
    if start >= stop:
        return
    begins = min(stop, side.start + -(-(start - side.start) // cell) * cell)
    for part in (Span(start, begins), Span(begins, stop)):
        if part.start < part.stop:
            yield part


Found = Sequence[Mapping[Statistic, Tensor]]  # of each run of rows


def check_measures(wanted: Sequence[Measure], return_map: bool) -> None:
    """Raise ConfigError for measures that cannot be combined from the rows of several ranks."""
    check_given(wanted, return_map)
    for measure in wanted:
        if not measure.of_blocks():
            raise ConfigError(
                f"measures: {measure.name!r} is not a RowMeasure, and its of_blocks() does not define how parts of "
                f"different ranks are combined; make it a RowMeasure, or compute it on the result's gather()"
            )


def wanted_of_kernels(measures: Sequence[Measure], rule: Rule) -> tuple[Statistic, ...]:
    """The statistics that kernels compute for each block: those that can be combined between blocks."""
    return tuple(statistic for statistic in statistics_for(measures, rule) if statistic.joins is not None)


@torch.no_grad()
def measured(
    q: Tensor, k: Tensor, lse: Tensor, rule: Rule, plan: Plan, who: Members, wanted: Sequence[Measure], *,
    bad_values: Tensor, found: Found = (), keep_rows: bool = False, kernel: str = "auto",
) -> Measurements:  # fmt: skip
    """Measures over the rows of all ranks, which all must call it. From statistics in `found`: 16 bytes per head; else
    the keys pass around the ring again, Σ_p hops(p) · b · h_kv · |p| · d · e bytes over all ranks."""
    runs = plan.rows(who.rank)
    states = [
        m.start(rule.grid, lse, keep_rows=keep_rows) if isinstance(m, RowMeasure) else m.start(rule.grid, lse)
        for m in wanted
    ]
    lses = lse.split([run.size for run in runs], 2)
    rules = [rule.rows(run) for run in runs]
    # Measures that need more than the statistics of the kernels.
    needs = [[m.needs(rule) for rule in rules] for m in wanted]
    lacking = [
        not found or any(need is None or not {*need} <= there.keys() for need, there in zip(each, found, strict=True))
        for each in needs
    ]
    missing = torch.tensor(lacking, dtype=torch.int64, device=lse.device)
    dist.all_reduce(missing, dist.ReduceOp.MAX, group=who.group)
    by_tiles = []
    for m, state, absent in zip(wanted, states, missing.tolist(), strict=True):
        if absent:
            by_tiles.append((m, state))
            continue
        for of_run, row_lse, run_rule in zip(found, lses, rules, strict=True):
            if row_lse.shape[-1]:
                m.take(state, {s: x.to(lse.dtype) for s, x in of_run.items()}, row_lse, run_rule)
    if by_tiles:
        with own_dtypes(q):
            inputs: Matrix = read("tile_inputs", Matrix(q, k, lse, rule), kernel=kernel)[0]
            _by_tiles(*inputs[:4], plan, who, by_tiles)
    nonfinite = (torch.isnan(lse) | (lse == torch.inf)).sum(-1)
    bad_values = bad_values.clone()
    # Maxima in one collective, sums and counts in another.
    largest: list[Tensor] = []
    sums: list[Tensor] = [nonfinite, bad_values]
    for measure, state in zip(wanted, states, strict=True):
        for name, how in measure.of_blocks().items():
            (largest if how == "max" else sums).append(getattr(state, name))
    for tensors, operation in ((largest, dist.ReduceOp.MAX), (sums, dist.ReduceOp.SUM)):
        if tensors:
            reduce_together(tensors, who, operation, torch.float64)
    for state in states:
        if isinstance(state, RowState) and state.rows is not None:
            state.rows = torch.cat([state.rows[:, :, run.start : run.stop] for run in runs], 2)
    result = Measurements(wanted, states, nonfinite)
    result.nonfinite_values = bad_values if bool(bad_values.any()) else None
    return result


def _by_tiles(
    q: Tensor, k: Tensor, lse: Tensor, rule: Rule, plan: Plan, who: Members,
    wanted: Sequence[tuple[Measure, Any]],
) -> None:  # fmt: skip
    """Another round of the ring, for measures of the weights: the tiles of a row arrive in the order of its keys."""
    blocks, first = [], 0  # of a rank's rows: their positions in the sequence, and among the rank's own rows
    for run in plan.rows(who.rank):
        for block in rule.rows(run).row_blocks():
            here = slice(first + block.start, first + block.stop)
            blocks.append((Span(run.start + block.start, run.start + block.stop), here))
        first += run.size
    order = [cols for hop in range(who.ranks) for cols in plan.arriving(who.rank, hop)]
    left = {rows: sum(len(list(rule.tiles(rows, within=cols))) for cols in order) for rows, _ in blocks}
    waiting: dict[tuple[int, Span], Tensor | None] = {}
    scratch, terms, own = Scratch(), rule.terms(lse), plan.cols(who.rank)
    parts = dict(zip(own, ((part,) for part in split(k, own)), strict=True))
    for _, held in travel(parts, plan, who):
        for cols, (keys,) in held.items():
            for rows, here in blocks:
                queries, row_lse = q[:, :, here], lse[:, :, here]
                for at, state_of in rule.tiles(rows, within=cols):
                    tile_keys = keys[:, :, at.start - cols.start : at.stop - cols.start]
                    tile = Tile(queries, tile_keys, row_lse, rule, terms, rows, at, state_of, scratch)
                    left[rows] -= 1
                    tile.last = left[rows] == 0
                    for index, (measure, state) in enumerate(wanted):
                        if isinstance(state, RowState):
                            state.current = waiting.pop((index, rows), None)
                        measure.update(state, tile)
                        if isinstance(state, RowState):
                            waiting[index, rows] = state.current
