"""Downsampled attention maps."""

from dataclasses import dataclass

from torch import Tensor

from headwise.map import AttentionMap
from headwise.masks import Span
from headwise.masks.grid import NO_GAP

SIZE = 64


@dataclass(frozen=True, eq=False)
class Picture:
    """A map downsampled to at most 64 × 64 cells, each a square of weights.

    Attributes:
        mean, largest: of each square, [b, h, rows, columns].
        shape: (b, h, n, m) of the map. gap: the tokens that are not among its keys, as of `Grid`.
    """

    mean: Tensor
    largest: Tensor
    shape: tuple[int, int, int, int]
    gap: Span = NO_GAP

    def __repr__(self) -> str:
        b, h, n, m = self.shape
        return f"Picture({b} × {h} heads, {n} queries × {m} keys as {self.mean.shape[2]} × {self.mean.shape[3]})"


def picture(amap: AttentionMap) -> Picture:
    """Downsample a map."""
    return Picture(amap.pool(SIZE), amap.pool(SIZE, "max"), amap.shape, amap.rule.grid.gap)
