"""Exercises: a reader's function runs apart, with limits, and is compared with ours.

one, two, three  our own solutions                      exercise  an exercise, and random inputs
grade            the process, and where values differ   apart     namespaces of its own, where Linux allows them
child            what runs in the process, and values between the two
classes          a module of a reader against the definition    definition   its steps, and known mistakes in them
inside           what runs in the process beside a reader's module   classroom   a class in one table
"""

from headwise_textbook.exercises import one, three, two
from headwise_textbook.exercises.exercise import CLASS, SOLUTIONS, Draw, Exercise

__all__ = ["CLASS", "SOLUTIONS", "Draw", "Exercise", "one", "three", "two"]
