"""Texts as windows of tokens, and windows as batches.

A window is what the model reads at once: its own special tokens around `content` tokens of a text. Windows begin every
`stride` tokens and never run over the end of a text; the last one may be shorter, and so is padded in a batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.lm.loading import Subject

POOL = 16  # batches whose windows are sorted by length at a time


@dataclass(frozen=True)
class Window:
    """A window of a text.

    Attributes:
        ids: [n] int64 with special tokens. content: tokens of the text in it that no earlier window had.
        source: which file. where: the text's place in it; first: the place of its first token in the text.
        pieces: the text of each token, "" for special ones. special: [n] boolean, which of them are none of the text.
        share: bytes of the corpus that it stands for.
    """

    ids: Tensor
    content: int
    source: int
    where: str
    first: int
    pieces: Sequence[str]
    special: Tensor
    share: float

    def __str__(self) -> str:
        return f"the text at {self.where}, window from its token {self.first:,} on"


@dataclass(frozen=True)
class Frame:
    """The special tokens that a model's tokenizer puts before and behind a text."""

    head: Tensor
    tail: Tensor

    @classmethod
    def of(cls, subject: Subject) -> "Frame":
        """As the tokenizer puts them around a short text."""
        reading = subject.read("a")
        own = [i for i, special in enumerate(reading.special) if not special]
        first, last = (own[0], own[-1]) if own else (len(reading), len(reading) - 1)
        return cls(reading.ids[:first], reading.ids[last + 1 :])

    def __len__(self) -> int:
        return len(self.head) + len(self.tail)

    def content(self, ids: Tensor) -> Tensor:
        """The tokens of a text without those around it."""
        return ids[len(self.head) : len(ids) - len(self.tail)]


def length_of(window: int | None, subject: Subject, frame: Frame) -> int:
    """Tokens of a window, special ones included: as asked for, or what the model was trained on.

    Raises:
        ConfigError: if nobody says, or the model cannot read so many, or there is no room for a token of the text.
    """
    length = window if window is not None else subject.context or subject.limit
    if length is None:
        raise ConfigError(f"window: {subject.name} does not specify its training length; give --window N, in tokens")
    if subject.limit is not None and length > subject.limit:
        raise ConfigError(f"window={length}: {subject.name} supports at most {subject.limit} positions")
    if length <= len(frame):
        raise ConfigError(
            f"window={length}: {len(frame)} special tokens are added to every window; expected a larger window"
        )
    return length


def windows(
    ids: Tensor, pieces: Sequence[str], frame: Frame, length: int, stride: int, source: int, where: str,
    size: int,
) -> Iterator[Window]:  # fmt: skip
    """The windows of a text's tokens [n], without special ones; all its tokens are in one. pieces: the text of each.
    size: bytes of the whole text."""
    content = length - len(frame)
    head, tail = ([""] * len(part) for part in (frame.head, frame.tail))
    done = 0
    for first in range(0, len(ids), stride):
        part = ids[first : first + content]
        stop = first + len(part)
        whole = torch.cat((frame.head, part, frame.tail))
        special = torch.ones(len(whole), dtype=torch.bool)
        special[len(head) : len(whole) - len(tail)] = False
        new = stop - max(done, first)
        here = [*head, *pieces[first:stop], *tail]
        yield Window(whole, new, source, where, first, here, special, size * new / len(ids))
        done = stop
        if stop == len(ids):
            return


def batches(stream: Iterable[Window], size: int) -> Iterator[list[Window]]:
    """Batches of windows. Some batches' windows at a time are sorted by length, longest first, so that little of a
    batch is padding; which ones depends on their order alone."""
    stream = iter(stream)
    while pool := list(islice(stream, size * POOL)):
        pool.sort(key=lambda window: -len(window.ids))
        yield from (pool[i : i + size] for i in range(0, len(pool), size))


def stacked(batch: list[Window]) -> tuple[Tensor, Tensor | None]:
    """ids [b, n], padding behind the tokens, and where tokens stand, [b, n] boolean, or None if there is no padding."""
    longest = max(len(window.ids) for window in batch)
    if all(len(window.ids) == longest for window in batch):
        return torch.stack([window.ids for window in batch]), None
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros(len(batch), longest, dtype=torch.bool)
    for i, window in enumerate(batch):
        ids[i, : len(window.ids)] = window.ids
        mask[i, : len(window.ids)] = True
    return ids, mask
