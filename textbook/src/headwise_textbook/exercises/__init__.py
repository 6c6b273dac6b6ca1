"""Exercises: a reader's function runs apart, with limits, and is compared with ours.

one, two, three  our own solutions                      exercise  an exercise, and random inputs
grade            the process, and where values differ   apart     namespaces of its own, where Linux allows them
child            what runs in the process, and values between the two
"""

from headwise_textbook.exercises import one, three, two
from headwise_textbook.exercises.exercise import SOLUTIONS, Draw, Exercise

__all__ = ["SOLUTIONS", "Draw", "Exercise", "one", "three", "two"]
