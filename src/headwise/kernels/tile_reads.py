"""Reads of a map in plain PyTorch, tile by tile: any device, dtype and rule. Large scores are computed in float64."""

from collections.abc import Iterator
from math import log

from torch import Tensor

from headwise import pooling
from headwise.base.run import Progress
from headwise.kernels.reads import Matrix, Reads
from headwise.pooling import Squares
from headwise.rule import grouped, grouped_t
from headwise.stats import Statistic
from headwise.tiles import Scratch, Tile, log_sums, stream, weights_at

# Scores in float32: rows sum to 1 if all terms of a score are at most SMALL together; and if no row has a mean score
# beyond RESOLVED, and no score a term above BOUNDED.
SMALL, RESOLVED, BOUNDED = 4.0, 6.0, 32.0


class TileReads(Reads):
    """All reads; measures compute statistics from the tiles."""

    def weights(self, of: Matrix, batch: range, heads: range, rows: range, cols: range) -> Tensor:
        if not rows:
            return weights_at(*of[:4], batch, heads, rows, cols)
        if len(batch) == len(heads) == 1 and of.only is None:
            of, batch, heads = of.head(batch[0], heads[0]), range(1), range(1)
        first = min(rows)
        some = of.part(range(first, max(rows) + 1), range(of.rule.grid.m))
        there = range(rows.start - first, rows.stop - first, rows.step)
        return weights_at(*self.exact(some)[:4], batch, heads, there, cols).to(of.lse.dtype)

    def exact(self, of: Matrix) -> Matrix:
        """In float64."""
        return in_float64(of) if _needs_float64(of) else of

    def tile_inputs(self, of: Matrix) -> Matrix:
        return of

    def tiles(self, of: Matrix, progress: Progress | None = None) -> Iterator[Tile]:
        exact, scratch = self.exact(of), Scratch()
        for tile in stream(*exact[:4], progress=progress):
            yield tile if exact is of else tile.rounded(of.lse[:, :, slice(*tile.rows)], scratch)

    def statistics(
        self, of: Matrix, wanted: tuple[Statistic, ...], progress: Progress | None = None
    ) -> dict[Statistic, Tensor]:
        return {}

    def times(self, of: Matrix, x: Tensor) -> Tensor:
        q, k, lse, rule, *_ = self.exact(of)
        out = of.lse.new_zeros(*of.lse.shape, x.shape[-1])
        for tile in stream(q, k, lse, rule):
            out[:, :, slice(*tile.rows)] += grouped(tile.weights, x[:, :, slice(*tile.cols)].to(lse.dtype))
        return out

    def transposed_times(self, of: Matrix, y: Tensor) -> Tensor:
        q, k, lse, rule, *_ = self.exact(of)
        b, h, _, m = rule.grid
        out = of.lse.new_zeros(b, h, m, y.shape[-1])
        for tile in stream(q, k, lse, rule):
            out[:, :, slice(*tile.cols)] += grouped_t(tile.weights, y[:, :, slice(*tile.rows)].to(lse.dtype), h)
        return out

    def received(self, of: Matrix) -> Tensor:
        return pooling.column_sums(*self.exact(of)[:4]).to(of.lse.dtype)

    def squares(self, of: Matrix, cell: int, progress: Progress | None = None) -> Squares:
        mean, largest, allowed = pooling.squares(*self.exact(of)[:4], cell, progress)
        return Squares(mean.to(of.lse.dtype), largest.to(of.lse.dtype), allowed)

    def diagonals(self, of: Matrix) -> Tensor:
        return pooling.diagonal_mass(*self.exact(of)[:4]).to(of.lse.dtype)

    def top(self, of: Matrix, count: int, progress: Progress | None = None) -> tuple[Tensor, Tensor]:
        weights, keys = pooling.top_keys(*self.exact(of)[:4], count, progress)
        return weights.to(of.lse.dtype), keys


def in_float64(of: Matrix) -> Matrix:
    """The matrix in float64, with a log-sum-exp that is computed in it if all keys are known."""
    lse = of.lse.double() if of.whole is None else of.exact_lse("float64", _log_sums)
    return Matrix(of.q.double(), of.k.double(), lse, of.rule)


def _log_sums(of: Matrix) -> Tensor:
    return log_sums(of.q.double(), of.k.double(), of.lse.double(), of.rule)


def _needs_float64(of: Matrix) -> bool:
    """Whether the rounding of scores in float32 could show in the sums of rows.

    What bounds all scores usually overestimates them, so that a read of the whole matrix looks at them.
    """
    whole = of.whole
    if whole is None or not of.has_exact_rows or whole.size <= SMALL:
        return False
    if of.lse.shape != whole.lse.shape or not whole.highest <= BOUNDED:
        return True
    if whole.lse_size > RESOLVED + log(max(1, whole.rule.grid.m)):
        return True
    return not whole.mean_score <= RESOLVED
