"""Random inputs of exercises, which can be drawn again with smaller sizes and simpler numbers.

>>> draw = Draw(seed=1)
>>> n = draw.size(1, 6)
>>> tuple(Draw(seed=1, sizes=[2]).normal(2).shape), Draw(seed=1, sizes=[2]).size(1, 6)
((2,), 2)
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

MOST = 6  # the largest size by default


class Draw:
    """One draw of inputs.

    Args:
        seed: of sizes and numbers. sizes: the sizes to use instead of random ones; those beyond the end of the list
            are the smallest ones. whole: whether normal numbers are rounded to whole ones, which are easier to read.

    Attributes:
        sizes: what `size` returned, in order. lows: the smallest value that each of them can have.
    """

    def __init__(self, seed: int, sizes: Sequence[int] | None = None, *, whole: bool = False) -> None:
        self.sizes: list[int] = []
        self.lows: list[int] = []
        self._given, self._whole = sizes, whole
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def size(self, low: int = 1, high: int = MOST) -> int:
        """A whole number from low to high."""
        drawn = self._random.randint(low, high)
        if self._given is not None:
            at = len(self.sizes)
            drawn = min(max(self._given[at], low), high) if at < len(self._given) else low
        self.sizes.append(drawn)
        self.lows.append(low)
        return drawn

    def normal(self, *shape: int) -> Tensor:
        """Independent standard normal numbers, float32."""
        numbers = torch.randn(shape, generator=self._generator)
        return (3 * numbers).round() if self._whole else numbers

    def uniform(self, *shape: int) -> Tensor:
        """Independent numbers from 0 to 1, float32."""
        return torch.rand(shape, generator=self._generator)

    def weights(self, *shape: int) -> Tensor:
        """Rows of positive numbers that sum to 1, along the last axis."""
        return self.normal(*shape).softmax(-1)

    def booleans(self, *shape: int) -> Tensor:
        """Independent booleans, true in half of all cases."""
        return self.uniform(*shape) < 0.5

    def whole(self, high: int, *shape: int) -> Tensor:
        """Whole numbers from 0 to high − 1."""
        return torch.randint(high, shape, generator=self._generator)
