"""Statistics and images of a sequence partitioned over ranks, equal on every rank to those of one process."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.arguments import check_measures as check_given
from headwise.errors import ConfigError
from headwise.kernels import read
from headwise.kernels.reads import Matrix
from headwise.map import AttentionMap
from headwise.masks import Span, State
from headwise.parallel.layout import Members, reduce_together
from headwise.parallel.travel import Plan, split, travel
from headwise.pooling import Squares
from headwise.rule import Rule, own_dtypes
from headwise.stats import Measure, Measurements, RowMeasure, Statistic, statistics_for
from headwise.stats.base import RowState
from headwise.tiles import Scratch, Tile


@torch.no_grad()
def squares(
    q: Tensor, k: Tensor, lse: Tensor, rule: Rule, plan: Plan, who: Members, rows: range, cols: range, cell: int,
    kernel: str = "auto",
) -> Squares:  # fmt: skip
    """Pool a rectangle of the whole matrix in squares of `cell` × `cell`, equal on every rank. All ranks must call it.

    The keys are passed around the ring once, Σ_p hops(p) · b · h_kv · |p| · d · e bytes over all ranks, and the squares
    are summed over the ranks: 24 bytes each. A square on several ranks is the mean of all its cells.

    Args:
        q, k, lse: this rank's. rows, cols: as returned by `pooling.side`, the same on every rank.
        kernel: the kernel named by the user.
    """
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
    """Compute measures over the rows of all ranks. All ranks must call it.

    Measures that follow from the statistics in `found` on every rank cost a sum over the ranks of 16 bytes per head.
    For the others the keys are passed around the ring again, Σ_p hops(p) · b · h_kv · |p| · d · e bytes over all ranks,
    and the tiles are recomputed. Weight received by keys is also summed over the ranks, 16 bytes per key and head.

    Args:
        q, k, lse: this rank's. bad_values: [b, h_kv], the number of its entries of v that are not finite.
        keep_rows: whether to keep the values of this rank's rows.
        kernel: the kernel named by the user; it computes the tiles.
    """
    runs = plan.rows(who.rank)
    states = [
        m.start(rule.grid, lse, keep_rows=keep_rows) if isinstance(m, RowMeasure) else m.start(rule.grid, lse)
        for m in wanted
    ]
    lses = lse.split([run.size for run in runs], 2)
    rules = [rule.rows(run) for run in runs]
    missing = torch.tensor([int(not _enough(m, rules, found)) for m in wanted], device=lse.device)
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
    _reduce(states, wanted, (nonfinite, bad_values), who)
    for state in states:
        if isinstance(state, RowState) and state.rows is not None:
            state.rows = torch.cat([state.rows[:, :, run.start : run.stop] for run in runs], 2)
    result = Measurements(wanted, states, nonfinite)
    result.nonfinite_values = bad_values if bool(bad_values.any()) else None
    return result


def _enough(measure: Measure, rules: Sequence[Rule], found: Found) -> bool:
    """Whether the kernels' statistics contain everything that the measure needs for these rows."""
    if not found:
        return False
    for of_run, rule in zip(found, rules, strict=True):
        needed = measure.needs(rule)
        if needed is None or not all(statistic in of_run for statistic in needed):
            return False
    return True


def _by_tiles(
    q: Tensor, k: Tensor, lse: Tensor, rule: Rule, plan: Plan, who: Members,
    wanted: Sequence[tuple[Measure, Any]],
) -> None:  # fmt: skip
    """Another round of the ring, for measures of the weights. The tiles of a row arrive in the order of its keys; the
    state of a row is stored between them."""
    blocks = list(_row_blocks(rule, plan.rows(who.rank)))
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


def _row_blocks(rule: Rule, runs: Sequence[Span]) -> Iterator[tuple[Span, slice]]:
    """Blocks of a rank's rows: their positions in the sequence, and among the rank's own rows."""
    first = 0
    for run in runs:
        for block in rule.rows(run).row_blocks():
            yield Span(run.start + block.start, run.start + block.stop), slice(first + block.start, first + block.stop)
        first += run.size


def _reduce(states: Sequence[Any], wanted: Sequence[Measure], counts: Sequence[Tensor], who: Members) -> None:
    """Reduce over the ranks in place: maxima in one collective, sums and counts in another."""
    largest: list[Tensor] = []
    sums: list[Tensor] = list(counts)
    for measure, state in zip(wanted, states, strict=True):
        for name, how in measure.of_blocks().items():
            (largest if how == "max" else sums).append(getattr(state, name))
    for tensors, operation in ((largest, dist.ReduceOp.MAX), (sums, dist.ReduceOp.SUM)):
        if tensors:
            reduce_together(tensors, who, operation, torch.float64)
