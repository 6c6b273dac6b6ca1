"""The progress of long calls: every `progress=` argument takes one callback of this type.

>>> from headwise.progress import Progress, part
>>> def show(what: str, done: int, of: int) -> None: ...        # such as updating a bar; raising ends the call
>>> second: Progress | None = part(show, "scoring", 1, 3)       # the second of three equal parts of a longer work
"""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""`progress(what, done, of)`: what is being done, such as "computing rows", how much of it is done, and of how much.

It is called in the thread of the call. An exception that it raises ends the call and reaches the caller.
"""


def part(progress: Progress | None, what: str, index: int = 0, count: int = 1) -> Progress | None:
    """The callback for part `index` of `count` equally long ones, all reported as `what`; None for None."""
    if progress is None:
        return None
    return lambda _, done, of: progress(what, index * of + done, count * of)


def ignored(what: str, done: int, of: int) -> None:
    """The callback that does nothing."""
