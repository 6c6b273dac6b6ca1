"""Exercises: functions that readers write themselves, and our own solutions of them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headwise.wording import Bilingual
from headwise_textbook.guide.grading.draw import Draw

TOLERANCE = 1e-4  # of numbers in float32
Inputs = Callable[[Draw], tuple[Any, ...]]


@dataclass(frozen=True)
class Exercise:
    """A function that readers write themselves.

    Attributes:
        task: what the function computes. ours: our own function, whose name and arguments the reader's has.
        inputs: random arguments. tolerance: relative and absolute.
    """

    task: Bilingual
    ours: Callable[..., Any] = field(repr=False)
    inputs: Inputs = field(repr=False)
    tolerance: float = TOLERANCE

    @property
    def function(self) -> str:
        """The name of the function."""
        return self.ours.__name__

    @property
    def name(self) -> str:
        """The name of the exercise on the command line."""
        return self.function.replace("_", "-")

    @property
    def signature(self) -> str:
        """The first line of the function, such as "def split_heads(x: Tensor, num_heads: int) -> Tensor:"."""
        written = inspect.signature(self.ours)
        return f"def {self.function}{written}:".replace("torch.Tensor", "Tensor")

    @property
    def skeleton(self) -> str:
        """The beginning of a reader's file: what the first line of the function needs, and that line."""
        return ("from torch import Tensor\n\n" if "Tensor" in self.signature else "") + self.signature


SOLUTIONS: dict[str, Callable[[Bilingual], Exercise]] = {}  # by the name of the exercise, from its task


def exercise(inputs: Inputs, *, tolerance: float = TOLERANCE) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate our own solution of an exercise, whose task is in the pages of the guide.

    Args:
        inputs: random arguments, from a `Draw`.
    """

    def solved(ours: Callable[..., Any]) -> Callable[..., Any]:
        SOLUTIONS[ours.__name__.replace("_", "-")] = lambda task: Exercise(task, ours, inputs, tolerance)
        return ours

    return solved
