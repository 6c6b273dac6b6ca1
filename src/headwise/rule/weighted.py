"""An attention matrix with a second factor for each pair, P ∘ F, of which neither is stored.

F is of low rank, F = A Bᵀ − c 1ᵀ, or what a function computes for a tile. With A = dO and B = V it is the gradient of
the weights; with A = [dq, q] and B = [k, dk] the derivative of the scores. Derivatives of attention in forward mode,
second derivatives and gradient × attention are products with such matrices and sums of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.rule import Rule, grouped, grouped_t, pooling, raw_scores
from headwise.rule.tiles import Tile, scores_at, stream

Factor = Callable[[Tile], Tensor]  # of a tile, [b, h, r, c], finite where it is masked


@dataclass(frozen=True)
class LowRank:
    """The factor A Bᵀ − c 1ᵀ, or its positive part, on a tile; 0 where it is masked."""

    a: Tensor  # [b, h, n, e]
    b: Tensor  # [b, h or h_kv, m, e]
    c: Tensor | None = None  # [b, h, n]
    positive: bool = False

    def __call__(self, tile: Tile) -> Tensor:
        rows, cols = slice(*tile.rows), slice(*tile.cols)
        a, b = self.a[:, :, rows], self.b[:, :, cols]
        found = grouped(a, b.mT) if self.c is None else raw_scores(a, b, 1.0, self.c[:, :, rows])
        return without_masked(found.clamp_min_(0.0) if self.positive else found, tile)

    def at(self, batch: range, heads: range, rows: range, cols: range) -> Tensor:
        """The factor A Bᵀ at these indices, [len(batch), len(heads), len(rows), len(cols)]."""
        group = self.a.shape[1] // self.b.shape[1]
        a = self.a[list(batch)][:, list(heads)][:, :, list(rows)]
        found = a @ self.b[list(batch)][:, [head // group for head in heads]][:, :, list(cols)].mT
        return found.clamp_min_(0.0) if self.positive else found


def without_masked(x: Tensor, tile: Tile) -> Tensor:
    """x [b, h, r, c], in place 0 where the tile is masked: 0 · NaN must not spread."""
    return x if tile.allowed is None else x.masked_fill_(~tile.allowed, 0.0)


class Weighted:
    """P ∘ F of the attention of q [b, h, n, d], k [b, h_kv, m, d], log-sum-exp [b, h, n] and a rule."""

    def __init__(self, q: Tensor, k: Tensor, lse: Tensor, rule: Rule, factor: Factor) -> None:
        self.q, self.k, self.lse, self.rule, self.factor = q, k, lse, rule, factor

    def on(self, tile: Tile) -> Tensor:
        """P ∘ F on a tile, [b, h, r, c]."""
        return self.factor(tile).mul_(tile.weights)

    def tiles(self) -> Iterator[tuple[Tile, Tensor]]:
        """Yield the tiles that are not fully masked, as `headwise.rule.tiles.stream`, and P ∘ F on each."""
        for tile in stream(self.q, self.k, self.lse, self.rule):
            yield tile, self.on(tile)

    def entries(self, batch: range, heads: range, rows: range, cols: range) -> Tensor:
        """P ∘ F at these indices, as `LowRank.at`, of a factor that has it."""
        places = batch, heads, rows, cols
        weights = scores_at(self.q, self.k, self.lse, self.rule, *places, less_lse=True).exp_()
        assert isinstance(self.factor, LowRank)
        return (self.factor.at(*places) * weights).masked_fill_(weights == 0, 0.0)

    def times(self, x: Tensor) -> Tensor:
        """The product with x [b, h or h_kv, m, e], [b, h, n, e]."""
        found = self.lse.new_zeros(*self.lse.shape, x.shape[-1])
        for tile, weighted in self.tiles():
            found[:, :, slice(*tile.rows)] += grouped(weighted, x[:, :, slice(*tile.cols)])
        return found

    def transposed_times(self, y: Tensor) -> Tensor:
        """The product of the transpose with y [b, h, n, e], [b, h, m, e]."""
        b, h, _, m = self.rule.grid
        found = self.lse.new_zeros(b, h, m, y.shape[-1])
        for tile, weighted in self.tiles():
            found[:, :, slice(*tile.cols)] += grouped_t(weighted, y[:, :, slice(*tile.rows)], h)
        return found

    def sums(self) -> tuple[Tensor, Tensor]:
        """Sums over the keys of each query [b, h, n], and over the queries of each key [b, h, m]."""
        b, h, _, m = self.rule.grid
        of_queries, of_keys = torch.zeros_like(self.lse), self.lse.new_zeros(b, h, m)
        for tile, weighted in self.tiles():
            of_queries[:, :, slice(*tile.rows)] += weighted.sum(-1)
            of_keys[:, :, slice(*tile.cols)] += weighted.sum(-2)
        return of_queries, of_keys

    def squares(self, cell: int) -> Tensor:
        """The mean over the unmasked pairs of squares of `cell` × `cell`, [b, h, ⌈n/cell⌉, ⌈m/cell⌉]."""
        return pooling.squares(self.q, self.k, self.lse, self.rule, cell, read=self.on).mean
