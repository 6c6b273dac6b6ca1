"""Our own solutions of the exercises, in three parts, as the guide has them."""

from headwise_textbook.guide.exercises import one, three, two
from headwise_textbook.guide.exercises.exercise import SOLUTIONS, Exercise

__all__ = ["SOLUTIONS", "Exercise", "one", "three", "two"]
