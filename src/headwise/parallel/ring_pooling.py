"""Pooling of a sequence partitioned over ranks: each rank pools its own rows, and the squares are summed."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.map import AttentionMap
from headwise.masks import Span, State
from headwise.parallel.layout import Members, reduce_together
from headwise.parallel.ring_plan import Plan
from headwise.parallel.ring_travel import split, travel
from headwise.pooling import Squares
from headwise.rule import Rule


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
