"""A corpus as numbered units of work, each measured at once and written to the journal.

The units depend on the files and the options alone, not on the number of processes or on finished units.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headwise.corpus import pieces
from headwise.corpus.sources import Source

LEAST = 1 << 16  # bytes of a piece
LONGEST = 32  # windows that fit a piece at least, at four bytes a token
UNITS = 4096  # at most, for a corpus of any size: bounds the files of the journal


@dataclass(frozen=True)
class Limit:
    """The end of a corpus that is measured in part: `tokens` of this piece of this file are the last ones."""

    source: int
    piece: int
    tokens: int


@dataclass(frozen=True)
class Part:
    """Pieces `first` to `stop` - 1 of a file."""

    source: int
    first: int
    stop: int


@dataclass(frozen=True)
class Unit:
    """Consecutive pieces of the corpus. size: approximate bytes."""

    parts: tuple[Part, ...]
    size: int

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(file, piece) of each."""
        for part in self.parts:
            for piece in range(part.first, part.stop):
                yield part.source, piece


def step_for(window: int) -> int:
    """Bytes of a piece for windows of `window` tokens: many windows, so that few are cut short at its end."""
    return max(LEAST, LONGEST * 4 * window)


def units(sources: Sequence[Source], step: int, limit: Limit | None = None) -> list[Unit]:
    """The units of a corpus in order."""
    every = list(_pieces(sources, step, limit))
    total = sum(size for _, _, size in every)
    target = max(step, -(-total // UNITS))
    found: list[Unit] = []
    parts: list[Part] = []
    size = 0
    for source, piece, more in every:
        if parts and parts[-1].source == source:
            parts[-1] = Part(source, parts[-1].first, piece + 1)
        else:
            parts.append(Part(source, piece, piece + 1))
        size += more
        if size >= target:
            found.append(Unit(tuple(parts), size))
            parts, size = [], 0
    return [*found, Unit(tuple(parts), size)] if parts else found


def _pieces(sources: Sequence[Source], step: int, limit: Limit | None) -> Iterator[tuple[int, int, int]]:
    """(file, piece, bytes) up to the limit."""
    for i, source in enumerate(sources):
        for piece in range(pieces.count(source, step)):
            yield i, piece, pieces.size(source, piece, step)
            if limit is not None and (i, piece) == (limit.source, limit.piece):
                return
