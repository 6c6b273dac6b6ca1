"""What a record keeps of attention maps: all of them, as they are known, or small pictures."""

from dataclasses import dataclass

from torch import Tensor

from headwise.map import AttentionMap

SIZE = 64


@dataclass(frozen=True, eq=False)
class Picture:
    """A map made small, at most 64 wide and high: each cell stands for a square of weights.

    Attributes:
        mean, largest: [b, h, rows, columns]; a mean hides peaks, so there are both.
        shape: (b, h, n, m) of the map.
    """

    mean: Tensor
    largest: Tensor
    shape: tuple[int, int, int, int]

    def __repr__(self) -> str:
        b, h, n, m = self.shape
        return f"Picture({b} × {h} heads, {n} queries × {m} keys as {self.mean.shape[2]} × {self.mean.shape[3]})"


def picture(amap: AttentionMap) -> Picture:
    """The map made small."""
    return Picture(amap.pool(SIZE), amap.pool(SIZE, "max"), amap.shape)
