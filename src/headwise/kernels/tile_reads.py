"""Reads of a map in plain PyTorch, tile by tile: any device, dtype and rule."""

from torch import Tensor

from headwise import pooling
from headwise.kernels.reads import Matrix, Reads
from headwise.pooling import Squares
from headwise.progress import Progress
from headwise.rule import grouped, grouped_t
from headwise.stats import Statistic
from headwise.tiles import stream, weights_at


class TileReads(Reads):
    """All reads; measures compute statistics from the tiles."""

    def weights(self, of: Matrix, batch: range, heads: range, rows: range, cols: range) -> Tensor:
        return weights_at(*of, batch, heads, rows, cols)

    def tile_inputs(self, of: Matrix) -> Matrix:
        return of

    def statistics(
        self, of: Matrix, wanted: tuple[Statistic, ...], progress: Progress | None = None
    ) -> dict[Statistic, Tensor]:
        return {}

    def times(self, of: Matrix, x: Tensor) -> Tensor:
        out = of.lse.new_zeros(*of.lse.shape, x.shape[-1])
        for tile in stream(*of):
            out[:, :, slice(*tile.rows)] += grouped(tile.weights, x[:, :, slice(*tile.cols)])
        return out

    def transposed_times(self, of: Matrix, y: Tensor) -> Tensor:
        b, h, _, m = of.rule.grid
        out = of.lse.new_zeros(b, h, m, y.shape[-1])
        for tile in stream(*of):
            out[:, :, slice(*tile.cols)] += grouped_t(tile.weights, y[:, :, slice(*tile.rows)], h)
        return out

    def received(self, of: Matrix) -> Tensor:
        return pooling.column_sums(*of)

    def squares(self, of: Matrix, cell: int, progress: Progress | None = None) -> Squares:
        return pooling.squares(*of, cell, progress)

    def diagonals(self, of: Matrix) -> Tensor:
        return pooling.diagonal_mass(*of)

    def top(self, of: Matrix, count: int, progress: Progress | None = None) -> tuple[Tensor, Tensor]:
        return pooling.top_keys(*of, count, progress)
