"""An attention matrix with a second factor for each pair, P ∘ F, of which neither is stored.

F is of low rank, F = A Bᵀ − c 1ᵀ, or what a function computes for a tile. With A = dO and B = V it is the gradient of
the weights; with A = [dq, q] and B = [k, dk] the derivative of the scores. Derivatives of attention in forward mode,
second derivatives and gradient × attention are products with such matrices and sums of them.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from headwise.rule import Rule, grouped, grouped_t, raw_scores
from headwise.rule.tiles import Tile, stream

Factor = Callable[[Tile], Tensor]  # of a tile, [b, h, r, c], finite where it is masked


class LowRank(NamedTuple):
    """The factor A Bᵀ − c 1ᵀ on a tile; 0 where it is masked."""

    a: Tensor  # [b, h, n, e]
    b: Tensor  # [b, h or h_kv, m, e]
    c: Tensor | None = None  # [b, h, n]

    def __call__(self, tile: Tile) -> Tensor:
        rows, cols = slice(*tile.rows), slice(*tile.cols)
        a, b = self.a[:, :, rows], self.b[:, :, cols]
        return without_masked(grouped(a, b.mT) if self.c is None else raw_scores(a, b, 1.0, self.c[:, :, rows]), tile)


def without_masked(x: Tensor, tile: Tile) -> Tensor:
    """x [b, h, r, c], in place 0 where the tile is masked: 0 · NaN must not spread."""
    return x if tile.allowed is None else x.masked_fill_(~tile.allowed, 0.0)


class Weighted:
    """P ∘ F of the attention of q [b, h, n, d], k [b, h_kv, m, d], log-sum-exp [b, h, n] and a rule."""

    def __init__(self, q: Tensor, k: Tensor, lse: Tensor, rule: Rule, factor: Factor) -> None:
        self.q, self.k, self.lse, self.rule, self.factor = q, k, lse, rule, factor

    def tiles(self, *, width: int | None = None, multiple: int = 1) -> Iterator[tuple[Tile, Tensor]]:
        """Yield the tiles that are not fully masked, as `headwise.rule.tiles.stream`, and P ∘ F on each."""
        for tile in stream(self.q, self.k, self.lse, self.rule, width=width, multiple=multiple):
            yield tile, self.factor(tile).mul_(tile.weights)

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
