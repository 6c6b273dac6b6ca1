"""The interface through which kernels read maps: weights, statistics, products and pictures.

A map consists of q, k, the log-sum-exp and the rule. A kernel's `reads` is a `Reads`, whose methods raise `Declined`
with the reason for what the kernel does not support. `headwise.kernels.read` chooses the kernel, as `run` does for
calls.
"""

from collections.abc import Iterator, Sequence
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.base.run import Progress
from headwise.kernels.call import Declined
from headwise.kernels.tracing import traced
from headwise.masks import Span
from headwise.pooling import Squares
from headwise.rule import Rule
from headwise.stats import Statistic
from headwise.stats.rows import Reduced, ToReduce
from headwise.tiles import Tile, stream

LARGE = 2.0  # scores; of larger ones the rounding of the log-sum-exp shows in the sums of rows


class Matrix(NamedTuple):
    """The attention matrices of all heads, or a rectangle of them: q [b, h, n, d], k [b, h_kv, m, d], the log-sum-exp
    [b, h, n] over whole rows, and the rule.

    whole: the matrix with all keys of the log-sum-exp, of which it has `rows`; None if it is not known.
    """

    q: Tensor
    k: Tensor
    lse: Tensor
    rule: Rule
    whole: "Matrix | None" = None
    rows: Span = Span(0, 0)

    @classmethod
    def of_all_keys(cls, q: Tensor, k: Tensor, lse: Tensor, rule: Rule) -> "Matrix":
        """A matrix whose log-sum-exp is over its keys, and no others."""
        return cls(q, k, lse, rule, cls(q, k, lse, rule), Span(0, rule.grid.n))

    def part(self, rows: range, cols: range) -> "Matrix":
        """The rectangle of these rows and columns; both ranges have step 1."""
        i, j = Span(rows.start, rows.stop), Span(cols.start, cols.stop)
        q, k, lse = self.q[:, :, slice(*i)], self.k[:, :, slice(*j)], self.lse[:, :, slice(*i)]
        at = Span(self.rows.start + i.start, self.rows.start + i.stop)
        return Matrix(q, k, lse, self.rule.part(i, j), self.whole, at)

    def whole_rows(self) -> "Matrix":
        """Its rows over all keys, which are known."""
        assert self.whole is not None
        q, k, lse, rule, *_ = self.whole
        at = slice(*self.rows)
        return Matrix.of_all_keys(q[:, :, at], k, lse[:, :, at], rule.rows(self.rows))

    def head(self, batch: int, head: int) -> "Matrix":
        """The matrix of one batch entry and head."""
        kv = head // (self.q.shape[1] // self.k.shape[1])
        q, k, lse = self.q[batch, head], self.k[batch, kv], self.lse[batch, head]
        whole = self.whole and self.whole.head(batch, head)
        return Matrix(q[None, None], k[None, None], lse[None, None], self.rule.only(batch, head), whole, self.rows)

    def with_keys_of(self, x: Tensor) -> "Matrix":
        """The matrix in the dtype of x [b, h_kv or h, m, e], its KV heads repeated to match those of x."""
        group = x.shape[1] // max(1, self.k.shape[1])
        k = self.k if group == 1 else self.k.repeat_interleave(group, 1)
        return self._replace(q=self.q.to(x.dtype), k=k.to(x.dtype), whole=self.whole and self.whole.with_keys_of(x))

    @property
    def has_large_scores(self) -> bool:
        """Whether scores are so large that rounding the log-sum-exp to float32 could change the sum of a row by 1e-6:
        larger than `LARGE`, as the log-sum-exp of scores up to s is at most s + ln m."""
        if self.whole is None or self.lse.dtype == torch.float64 or self.lse.is_mps:  # which has no float64
            return False
        if torch.compiler.is_compiling() or traced() or torch._C._functorch.is_functorch_wrapped_tensor(self.lse):
            return False
        limit = LARGE + log(max(1, self.whole.rule.grid.m))
        return bool((self.lse.abs() > limit).logical_and_(self.lse.isfinite()).any())


class Reads:
    """The reads of a `Matrix` that a kernel supports; none in this base class. Results are detached, in the dtype of
    the log-sum-exp."""

    def weights(self, of: Matrix, batch: range, heads: range, rows: range, cols: range) -> Tensor:
        """The weights at these indices, [len(batch), len(heads), len(rows), len(cols)]."""
        raise Declined("it does not compute weights")

    def exact(self, of: Matrix) -> Matrix:
        """The matrix with a log-sum-exp in float64 that is exact for the logits of this kernel's reads, if scores are
        large: so weights are exact up to the rounding of the logits, and those of a row sum to 1."""
        return of

    def tile_inputs(self, of: Matrix) -> Matrix:
        """The matrix from which its `headwise.tiles.Tile`s are computed, in the dtype in which it computes."""
        raise Declined("it does not compute tiles, which measures require")

    def tiles(self, of: Matrix, progress: Progress | None = None) -> Iterator[Tile]:
        """Yield the matrix tile by tile, as `headwise.tiles.stream` does."""
        return stream(*self.tile_inputs(of)[:4], progress=progress)

    def statistics(
        self, of: Matrix, wanted: tuple[Statistic, ...], progress: Progress | None = None
    ) -> dict[Statistic, Tensor]:
        """The wanted statistics that the kernel supports; measures compute the others from its tiles."""
        raise Declined("it does not compute statistics of a map")

    def reduced(self, lse: Tensor, measures: Sequence[ToReduce]) -> Reduced | None:
        """Measures of rows, reduced over the rows of each head, given the log-sum-exp and their statistics; None if
        tensor operations do that."""
        return None

    def times(self, of: Matrix, x: Tensor) -> Tensor:
        """Weights @ x for x [b, h_kv or h, m, e] in the log-sum-exp's dtype: [b, h, n, e]."""
        raise Declined("it does not multiply by a map")

    def transposed_times(self, of: Matrix, y: Tensor) -> Tensor:
        """Weightsᵀ @ y for y [b, h, n, e] in the log-sum-exp's dtype: [b, h, m, e]."""
        raise Declined("it does not multiply by a transposed map")

    def received(self, of: Matrix) -> Tensor:
        """The weight that each key receives, Σ_i p_ij: [b, h, m]."""
        raise Declined("it does not compute column sums")

    def squares(self, of: Matrix, cell: int, progress: Progress | None = None) -> Squares:
        """The weights pooled over squares of `cell` × `cell`."""
        raise Declined("it does not pool weights for pictures")

    def diagonals(self, of: Matrix) -> Tensor:
        """Sums of the weights along diagonals, [b, h, n + m − 1]; the first is that of the last query and first key."""
        raise Declined("it does not compute sums along diagonals")

    def top(self, of: Matrix, count: int, progress: Progress | None = None) -> tuple[Tensor, Tensor]:
        """The `count` largest weights of each row and their keys, as `AttentionMap.topk`."""
        raise Declined("it does not compute the largest weights of a row")
