"""Exercises, and random inputs of them, which can be drawn again with smaller sizes and simpler numbers.

>>> draw = Draw(seed=1)
>>> n = draw.size(1, 6)
>>> tuple(Draw(seed=1, sizes=[2]).normal(2).shape), Draw(seed=1, sizes=[2]).size(1, 6)
((2,), 2)
"""

import inspect
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.wording import Bilingual

MOST = 6  # the largest size by default
TOLERANCE = 1e-4  # of numbers in float32
CLASS = "multi-head-class"  # the exercise whose answer is a module, compared with the definition


class Draw:
    """One draw of inputs.

    seed: of sizes and numbers. sizes: those to use instead of random ones; beyond the end of the list they are the
    smallest ones. whole: whether normal numbers are rounded to whole ones, which are easier to read.
    """

    def __init__(self, seed: int, sizes: Sequence[int] | None = None, *, whole: bool = False) -> None:
        self.sizes: list[int] = []  # what `size` returned, in order
        self.lows: list[int] = []  # the smallest value that each of them can have
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


Inputs = Callable[[Draw], tuple[Any, ...]]


def normal(*shapes: str, **limits: tuple[int, int]) -> Inputs:
    """Tensors of normal numbers. A shape names its sizes, such as "n h*k", which are drawn in this order.

    >>> [tuple(x.shape) for x in normal("n h*k", "h k", n=(5, 5), h=(2, 2), k=(3, 3))(Draw(0))]
    [(5, 6), (2, 3)]
    """

    def inputs(draw: Draw) -> tuple[Tensor, ...]:
        names = dict.fromkeys(re.findall(r"\w+", " ".join(shapes)))
        sizes = {name: draw.size(*limits.get(name, ())) for name in names}
        axes = [[math.prod(sizes[name] for name in axis.split("*")) for axis in shape.split()] for shape in shapes]
        return tuple(draw.normal(*shape) for shape in axes)

    return inputs


@dataclass(frozen=True)
class Exercise:
    """A function that readers write themselves."""

    task: Bilingual  # what it computes
    ours: Callable[..., Any] = field(repr=False)  # our own, whose name and arguments the reader's has
    inputs: Inputs = field(repr=False)
    tolerance: float = TOLERANCE  # relative and absolute

    @property
    def function(self) -> str:
        """The name of the function."""
        return self.ours.__name__

    @property
    def name(self) -> str:
        """The name of the exercise on the command line."""
        return self.function.replace("_", "-")

    @property
    def skeleton(self) -> str:
        """The beginning of a reader's file: what the first line of the function needs, and that line."""
        line = f"def {self.function}{inspect.signature(self.ours)}:".replace("torch.Tensor", "Tensor")
        return ("from torch import Tensor\n\n" if "Tensor" in line else "") + line


SOLUTIONS: dict[str, Callable[[Bilingual], Exercise]] = {}  # by the name of the exercise, from its task


def exercise(inputs: Inputs, *, tolerance: float = TOLERANCE) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate our own solution of an exercise, whose task is in the pages of the guide."""

    def solved(ours: Callable[..., Any]) -> Callable[..., Any]:
        SOLUTIONS[ours.__name__.replace("_", "-")] = lambda task: Exercise(task, ours, inputs, tolerance)
        return ours

    return solved
