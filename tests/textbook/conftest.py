"""The command line in this process, for the tests of the textbook."""

from commands import headwise  # noqa: F401
