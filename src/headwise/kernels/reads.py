"""What is read from a map: a kernel's other side, beside the call that it computes.

A map is q, k, the log-sum-exp and the rule. A kernel's `reads` is a `Reads`: it has a method for each thing that may be
read, and declines what it cannot do with the reason. `headwise.kernels.read` chooses whose method runs, as `run` does
for calls.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from headwise.kernels.call import Declined
from headwise.masks import Span
from headwise.pooling import Squares
from headwise.progress import Progress
from headwise.rule import Rule
from headwise.stats import Statistic
from headwise.tiles import Tile, stream


class Matrix(NamedTuple):
    """The attention matrices of all heads, or a rectangle of them: q [b, h, n, d], k [b, h_kv, m, d], the log-sum-exp
    [b, h, n] of whole rows, and the rule."""

    q: Tensor
    k: Tensor
    lse: Tensor
    rule: Rule

    def part(self, rows: range, cols: range) -> "Matrix":
        """The rectangle of these rows and columns, both with step 1."""
        i, j = Span(rows.start, rows.stop), Span(cols.start, cols.stop)
        q, k, lse = self.q[:, :, slice(*i)], self.k[:, :, slice(*j)], self.lse[:, :, slice(*i)]
        return Matrix(q, k, lse, self.rule.part(i, j))

    def head(self, batch: int, head: int) -> "Matrix":
        """One batch entry and head alone."""
        kv = head // (self.q.shape[1] // self.k.shape[1])
        q, k, lse = self.q[batch, head], self.k[batch, kv], self.lse[batch, head]
        return Matrix(q[None, None], k[None, None], lse[None, None], self.rule.only(batch, head))

    def with_keys_of(self, x: Tensor) -> "Matrix":
        """In the dtype of x [b, h_kv or h, m, e], and with as many heads of keys."""
        group = x.shape[1] // max(1, self.k.shape[1])
        k = self.k if group == 1 else self.k.repeat_interleave(group, 1)
        return self._replace(q=self.q.to(x.dtype), k=k.to(x.dtype))


class Reads:
    """What a kernel can read of a `Matrix`; here, nothing. Results are detached, in the dtype of the log-sum-exp."""

    def weights(self, of: Matrix, batch: range, heads: range, rows: range, cols: range) -> Tensor:
        """The weights at these indices, [len(batch), len(heads), len(rows), len(cols)]."""
        raise Declined("it gives no weights")

    def tile_inputs(self, of: Matrix) -> Matrix:
        """What its tiles are made of, by `headwise.tiles.Tile`: the matrix in the dtype in which it computes."""
        raise Declined("it gives no tiles, which measures are made of")

    def tiles(self, of: Matrix, progress: Progress | None = None) -> Iterator[Tile]:
        """The matrix a tile at a time, as `headwise.tiles.stream`."""
        return stream(*self.tile_inputs(of), progress=progress)

    def statistics(
        self, of: Matrix, wanted: tuple[Statistic, ...], progress: Progress | None = None
    ) -> dict[Statistic, Tensor]:
        """Those of the statistics that it gives; measures are made of its tiles for want of them."""
        raise Declined("it gives no statistics of a map")

    def times(self, of: Matrix, x: Tensor) -> Tensor:
        """Weights @ x for x [b, h_kv or h, m, e] in the log-sum-exp's dtype: [b, h, n, e]."""
        raise Declined("it multiplies with no map")

    def transposed_times(self, of: Matrix, y: Tensor) -> Tensor:
        """Weightsᵀ @ y for y [b, h, n, e] in the log-sum-exp's dtype: [b, h, m, e]."""
        raise Declined("it multiplies with no transposed map")

    def received(self, of: Matrix) -> Tensor:
        """What each key receives, Σ_i p_ij: [b, h, m]."""
        raise Declined("it adds up no columns")

    def squares(self, of: Matrix, cell: int, progress: Progress | None = None) -> Squares:
        """The weights in squares of `cell` × `cell`."""
        raise Declined("it gives no pictures")

    def diagonals(self, of: Matrix) -> Tensor:
        """Weights added up along the diagonals, [b, h, n + m − 1], from that of the last query and the first key on."""
        raise Declined("it adds up no diagonals")

    def top(self, of: Matrix, count: int, progress: Progress | None = None) -> tuple[Tensor, Tensor]:
        """The `count` largest weights of each row and their keys, as `AttentionMap.topk`."""
        raise Declined("it seeks no largest weights")
