"""The interface through which kernels read maps: weights, statistics, products and pictures; and these in PyTorch.

A map consists of q, k, the log-sum-exp and the rule. A kernel's `reads` is a `Reads`, whose methods raise `Declined`
with the reason for what the kernel does not support. `headwise.kernels.read` chooses the kernel, as `run` does for
calls. `TileReads` supports everything, on any device, tile by tile; it computes large scores in float64.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.base.run import Progress
from headwise.kernels.call import Declined, traced
from headwise.masks import Span
from headwise.rule import Rule, grouped, grouped_t, pooling
from headwise.rule.pooling import Squares
from headwise.rule.tiles import Scratch, Tile, log_sums, scores_at, stream
from headwise.stats import Statistic
from headwise.stats.statistic import Reduced, ToReduce

LARGE = 2.0  # scores; of larger ones the rounding of the log-sum-exp shows in the sums of rows
CANCELLING = 16.0  # terms of a score this many times larger than the scores leave too few of their digits in float32


class Whole:
    """The matrix of a map with all of its keys, and what reads keep of it: its scores' sizes, exact log-sum-exps."""

    def __init__(self, q: Tensor, k: Tensor, lse: Tensor, rule: Rule) -> None:
        self.q, self.k, self.lse, self.rule = q, k, lse, rule
        self._kept: dict[Hashable, tuple[Tensor, Tensor]] = {}

    @cached_property
    def lse_size(self) -> float:
        """The largest finite |log-sum-exp|; 0 if there is none."""
        return _largest(torch.where(self.lse.isfinite(), self.lse.abs(), 0.0))

    @cached_property
    def terms(self) -> list[tuple[float, float]]:
        """Bounds (≥ 0, ≤ 0) of the product of queries and keys and of each added term; NaN of non-finite vectors."""
        norms = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in (self.q, self.k))
        terms, product = self.rule.terms(self.lse[..., :0]), abs(self.rule.scale)
        for norm in norms:
            product *= _largest(norm)
        product = min(terms.soft_cap, product) if terms.soft_cap else product
        added = [x for x in (terms.relative, *terms.biases) if x is not None]
        return [(product, -product), *((max(0.0, _largest(x)), min(0.0, -_largest(-x))) for x in added)]

    @property
    def highest(self) -> float:
        """No score is higher."""
        return sum(high for high, _ in self.terms)

    @property
    def size(self) -> float:
        """The terms of no score are larger together, in magnitude."""
        return sum(max(high, -low) for high, low in self.terms)

    @cached_property
    def cancels(self) -> bool:
        """Whether scores may be sums of terms so much larger that float32 does not resolve them."""
        if not self.rule.scores:  # before the norms are computed
            return False
        size = CANCELLING * max(LARGE, self.lse_size - log(max(1, self.rule.grid.m)))
        sizes = sorted(max(high, -low) for high, low in self.terms)
        return len(sizes) > 1 and self.highest > size and sizes[-2] > size

    @cached_property
    def mean_score(self) -> float:
        """The largest |Σ p·S| of a row: by it, errors of scores show in the row's sum."""
        mean = torch.zeros_like(self.lse)
        for tile in stream(self.q, self.k, self.lse, self.rule):
            mean[:, :, slice(*tile.rows)] += tile.lse * tile.mass - tile.entropy
        return _largest(mean.masked_fill_(~self.lse.isfinite(), 0.0).abs_())

    def kept(self, kernel: Hashable) -> tuple[Tensor, Tensor]:
        """Exact log-sum-exps in float64 and whether each is known, both [b, h, n], to be completed in place."""
        if kernel not in self._kept:
            with torch.inference_mode(False):
                known = torch.zeros_like(self.lse, dtype=torch.bool)
                self._kept[kernel] = torch.zeros_like(self.lse, dtype=torch.float64), known
        return self._kept[kernel]


class Matrix(NamedTuple):
    """The attention matrices of all heads, or a rectangle of them."""

    q: Tensor  # [b, h, n, d]
    k: Tensor  # [b, h_kv, m, d]
    lse: Tensor  # [b, h, n], the log-sum-exp over whole rows
    rule: Rule
    whole: Whole | None = None  # the matrix with all keys of the log-sum-exp; None if it is not known
    rows: Span = Span(0, 0)  # of the whole
    only: tuple[int, int | None] | None = None  # the batch entry, and head if one, of the whole that it is of

    @classmethod
    def of_all_keys(cls, q: Tensor, k: Tensor, lse: Tensor, rule: Rule) -> "Matrix":
        """A matrix whose log-sum-exp is over its keys, and no others."""
        return cls(q, k, lse, rule, Whole(q, k, lse, rule), Span(0, rule.grid.n))

    def part(self, rows: range, cols: range) -> "Matrix":
        """The rectangle of these rows and columns; both ranges have step 1."""
        i, j = Span(rows.start, rows.stop), Span(cols.start, cols.stop)
        q, k, lse = self.q[:, :, slice(*i)], self.k[:, :, slice(*j)], self.lse[:, :, slice(*i)]
        at = Span(self.rows.start + i.start, self.rows.start + i.stop)
        return Matrix(q, k, lse, self.rule.part(i, j), self.whole, at, self.only)

    def head(self, batch: int, head: int | None = None) -> "Matrix":
        """The matrix of one batch entry, and of one head or all."""
        only = (batch, head) if self.only is None else self.only
        at, kv = _places((batch, head), self.q, self.k)
        return Matrix(self.q[at], self.k[kv], self.lse[at], self.rule.only(batch, head), self.whole, self.rows, only)

    def with_keys_of(self, x: Tensor) -> "Matrix":
        """The matrix in the dtype of x [b, h_kv or h, m, e], its KV heads repeated to match those of x."""
        return self._replace(q=self.q.to(x.dtype), k=_repeated(self.k, x.shape[1]).to(x.dtype))

    @property
    def has_exact_rows(self) -> bool:
        """Whether `exact_lse` can be more exact than the log-sum-exp, which is rounded to float32."""
        return self.whole is not None and self.lse.dtype != torch.float64 and not self.lse.is_mps and self._has_numbers

    @property
    def has_large_scores(self) -> bool:
        """Whether rounding the log-sum-exp to float32 could change the sum of a row by 1e-6: scores beyond `LARGE`."""
        whole = self.whole
        return whole is not None and self.has_exact_rows and whole.lse_size > LARGE + log(max(1, whole.rule.grid.m))

    @property
    def cancels(self) -> bool:
        """Whether scores may be sums of terms so much larger that float32 does not resolve them."""
        return self.whole is not None and self.has_exact_rows and self.whole.cancels

    def exact_lse(self, kernel: Hashable, compute: Callable[["Matrix"], Tensor]) -> Tensor:
        """The log-sum-exp of its rows in float64, of `compute` on whole rows; each is computed once for a `kernel`."""
        assert self.whole is not None
        if not self._has_numbers:
            return compute(self._whole_rows(self.rows))
        at, _ = _places(self.only, self.whole.q, self.whole.k)
        found, known = (x[at] for x in self.whole.kept(kernel))
        missing = known[:, :, slice(*self.rows)].logical_not().flatten(0, 1).any(0).nonzero().flatten()
        if len(missing):
            rows = Span(self.rows.start + int(missing[0]), self.rows.start + int(missing[-1]) + 1)
            found[:, :, slice(*rows)] = compute(self._whole_rows(rows))
            known[:, :, slice(*rows)] = True
        return found[:, :, slice(*self.rows)]

    @property
    def _has_numbers(self) -> bool:
        """Whether the tensors are neither recorded in a graph nor wrapped by a transform."""
        if torch.compiler.is_compiling() or traced():
            return False
        return not torch._C._functorch.is_functorch_wrapped_tensor(self.lse)

    def _whole_rows(self, rows: Span) -> "Matrix":
        """Some of the rows of the matrix with all keys, in the dtype of this one and with its KV heads."""
        assert self.whole is not None
        whole, rule = self.whole, self.whole.rule.rows(rows)
        at, kv = _places(self.only, whole.q, whole.k)
        q, lse = (x[at][:, :, slice(*rows)] for x in (whole.q, whole.lse))
        k = _repeated(whole.k[kv], self.k.shape[1])
        return Matrix(q.to(self.q.dtype), k.to(self.q.dtype), lse, rule if self.only is None else rule.only(*self.only))


def _places(
    only: tuple[int, int | None] | None, q: Tensor, k: Tensor
) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Batch entries and heads of q, and of k."""
    every = slice(None)
    if only is None:
        return (every, every), (every, every)
    batch, head = slice(only[0], only[0] + 1), only[1]
    if head is None:
        return (batch, every), (batch, every)
    kv = head // (q.shape[1] // k.shape[1])
    return (batch, slice(head, head + 1)), (batch, slice(kv, kv + 1))


def _repeated(k: Tensor, heads: int) -> Tensor:
    """k [b, h_kv, m, d] with each KV head repeated, so that there are `heads`."""
    group = heads // max(1, k.shape[1])
    return k if group == 1 else k.repeat_interleave(group, 1)


def _largest(x: Tensor) -> float:
    return float(x.detach().max()) if x.numel() else 0.0


class Reads:
    """The reads of a `Matrix` that a kernel supports; detached, in the dtype of the log-sum-exp. None in this class."""

    def weights(self, of: Matrix, batch: range, heads: range, rows: range, cols: range) -> Tensor:
        """The weights at these indices, [len(batch), len(heads), len(rows), len(cols)]."""
        raise Declined("it does not compute weights")

    def suited(self, of: Matrix) -> "Reads":
        """The reads of the kernel for this matrix: others than these if they would not be exact."""
        return self

    def exact(self, of: Matrix) -> Matrix:
        """The matrix with a log-sum-exp in float64 that is exact for the logits of this kernel's reads, if scores are
        large: so weights are exact up to the rounding of the logits, and those of a row sum to 1."""
        return of

    def tile_inputs(self, of: Matrix) -> Matrix:
        """The matrix from which its `headwise.rule.tiles.Tile`s are computed, in the dtype in which it computes."""
        raise Declined("it does not compute tiles, which measures require")

    def tiles(self, of: Matrix, progress: Progress | None = None) -> Iterator[Tile]:
        """Yield the matrix tile by tile, as `headwise.rule.tiles.stream` does."""
        return stream(*self.tile_inputs(of)[:4], progress=progress)

    def statistics(
        self, of: Matrix, wanted: tuple[Statistic, ...], progress: Progress | None = None
    ) -> dict[Statistic, Tensor]:
        """The wanted statistics that the kernel supports; measures compute the others from its tiles."""
        raise Declined("it does not compute statistics of a map")

    def reduced(self, lse: Tensor, measures: Sequence[ToReduce]) -> Reduced | None:
        """Measures of rows, reduced over the rows of each head; None if tensor operations do that."""
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


# Scores in float32: rows sum to 1 if all terms of a score are at most SMALL together; and if no row has a mean score
# beyond RESOLVED, and no score a term above BOUNDED.
SMALL, RESOLVED, BOUNDED = 4.0, 6.0, 32.0


class TileReads(Reads):
    """All reads; measures compute statistics from the tiles."""

    def weights(self, of: Matrix, batch: range, heads: range, rows: range, cols: range) -> Tensor:
        if not rows:
            return scores_at(*of[:4], batch, heads, rows, cols, less_lse=True).exp_()
        if len(batch) == len(heads) == 1 and of.only is None:
            of, batch, heads = of.head(batch[0], heads[0]), range(1), range(1)
        first = min(rows)
        some = of.part(range(first, max(rows) + 1), range(of.rule.grid.m))
        there = range(rows.start - first, rows.stop - first, rows.step)
        return scores_at(*self.exact(some)[:4], batch, heads, there, cols, less_lse=True).exp_().to(of.lse.dtype)

    def exact(self, of: Matrix) -> Matrix:
        """In float64, where the rounding of scores in float32 could show in the sums of rows."""
        whole = of.whole
        if whole is None or not of.has_exact_rows or whole.size <= SMALL:
            return of
        # Bounds of all scores usually overestimate them, so that a read of the whole matrix looks at them.
        within = of.lse.shape == whole.lse.shape and whole.highest <= BOUNDED
        within = within and whole.lse_size <= RESOLVED + log(max(1, whole.rule.grid.m))
        return of if within and whole.mean_score <= RESOLVED else in_float64(of)

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
