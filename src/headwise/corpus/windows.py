"""Texts as windows of tokens, and windows as batches.

A window is one input of the model: its special tokens around tokens of one text. Windows begin every `stride` tokens;
the last one of a text may be shorter and is padded in a batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.lm.loading import LoadedModel
from headwise.lm.loading.positions import check_window
from headwise.wording import in_language

POOL = 16  # batches whose windows are sorted by length together


@dataclass(frozen=True)
class TextWindow:
    """A window of a text.

    Attributes:
        ids: [n] int64 with special tokens. content: the number of its tokens that are in no earlier window.
        source: the number of the file. where: the place of the text in it; first: its first token in the text.
        pieces: the text of each token, "" for special ones. words: the same, with the blanks between tokens.
        special: [n] boolean, the tokens outside the text.
        share: bytes of the corpus in it. room: tokens of the text in a full window. number: in the order of a unit.
    """

    ids: Tensor
    content: int
    source: int
    where: str
    first: int
    pieces: Sequence[str]
    words: Sequence[str]
    special: Tensor
    share: float
    room: int
    number: int = 0

    def __str__(self) -> str:
        return f"the text at {self.where}, window from token {self.first:,}"


@dataclass(frozen=True)
class Frame:
    """The special tokens that a model's tokenizer adds before and after a text."""

    head: Tensor
    tail: Tensor

    @classmethod
    def of(cls, loaded: LoadedModel) -> "Frame":
        """The special tokens around a short text."""
        reading = loaded.read("a")
        own = [i for i, special in enumerate(reading.special) if not special]
        first, last = (own[0], own[-1]) if own else (len(reading), len(reading) - 1)
        return cls(reading.ids[:first], reading.ids[last + 1 :])

    def __len__(self) -> int:
        return len(self.head) + len(self.tail)

    def content(self, ids: Tensor) -> Tensor:
        """The tokens of a text without the special tokens around it."""
        return ids[len(self.head) : len(ids) - len(self.tail)]


def length_of(window: int | None, loaded: LoadedModel, frame: Frame) -> int:
    """Tokens of a window including special ones: `window`, or the training length of the model.

    Raises:
        ConfigError: if neither is known, the model does not support the length, or no token of the text fits.
    """
    length = window if window is not None else loaded.context or loaded.limit
    if length is None:
        raise ConfigError(
            f"window: {loaded.name} does not specify its training length; give --window N, in tokens",
            f"window：{in_language(loaded.name, 'zh')} 未给出训练长度；请用 --window N 指定词元数",
        )
    check_window(length, loaded.limit, loaded.name)
    if length <= len(frame):
        raise ConfigError(
            f"window={length}: {len(frame)} special tokens are added to every window; expected a larger window",
            f"window={length}：每个窗口都要加上 {len(frame)} 个特殊词元；窗口应更大",
        )
    return length


def windows(
    ids: Tensor, pieces: Sequence[str], frame: Frame, length: int, stride: int, source: int, where: str,
    size: int, words: Sequence[str] | None = None,
) -> Iterator[TextWindow]:  # fmt: skip
    """The windows of the tokens [n] of a text, given without special tokens. pieces: the text of each token. size:
    bytes of the whole text. words: as of `TextWindow`; pieces by default."""
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
        here, shown = ([*head, *texts[first:stop], *tail] for texts in (pieces, words or pieces))
        yield TextWindow(whole, new, source, where, first, here, shown, special, size * new / len(ids), content)
        done = stop
        if stop == len(ids):
            return


def batches(stream: Iterable[TextWindow], size: int) -> Iterator[list[TextWindow]]:
    """Batches of windows. The windows of several batches are sorted by length, longest first, to reduce padding; the
    result depends on their order alone."""
    stream = iter(stream)
    while pool := list(islice(stream, size * POOL)):
        pool.sort(key=lambda window: -len(window.ids))
        yield from (pool[i : i + size] for i in range(0, len(pool), size))


def stacked(batch: list[TextWindow]) -> tuple[Tensor, Tensor | None]:
    """The ids [b, n] padded at the end, and the mask of tokens, [b, n] boolean, or None without padding."""
    longest = max(len(window.ids) for window in batch)
    if all(len(window.ids) == longest for window in batch):
        return torch.stack([window.ids for window in batch]), None
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros(len(batch), longest, dtype=torch.bool)
    for i, window in enumerate(batch):
        ids[i, : len(window.ids)] = window.ids
        mask[i, : len(window.ids)] = True
    return ids, mask
