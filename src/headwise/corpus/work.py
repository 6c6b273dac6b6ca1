"""Measuring a unit: its texts become windows, its windows batches, and each batch runs through the model once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from headwise.corpus.collecting import Collector, Floors, OfWindow
from headwise.corpus.passages import Collected
from headwise.corpus.pieces import Document, Limit, Unit, documents
from headwise.corpus.selection import Head, Selection
from headwise.corpus.sources import Source
from headwise.corpus.strength import WEIGHT, largest_keys, strongest
from headwise.corpus.tally import Batch, Tally, Trouble, counted
from headwise.corpus.windows import Frame, TextWindow, batches, stacked, windows
from headwise.errors import ConfigError, TextError
from headwise.lm.loading import LoadedModel
from headwise.lm.loading.base import Maps
from headwise.stats import Tokens

ALL = -1  # in place of a file's number: all files
Advance = Callable[[float, int], None]  # called with the bytes and tokens done since the last call


@dataclass(frozen=True)
class Work:
    """How a corpus is measured: everything that the numbers depend on.

    Attributes:
        step: bytes of a piece. length, stride: of windows, in tokens; stride without special tokens.
        batch: windows at a time. by_file: whether there are numbers for each file.
        passages: how many of each head are kept. by: what makes a passage strong, as in `strength.strengths()`.
    """

    loaded: LoadedModel
    sources: Sequence[Source]
    selection: Selection
    heads: Sequence[Head]
    frame: Frame
    step: int
    length: int
    stride: int
    batch: int
    field: str
    by_file: bool
    passages: int = 0
    by: str = WEIGHT
    limit: Limit | None = None

    def measure(self, unit: Unit, advance: Advance, floors: Floors) -> tuple[dict[int, Tally], Collected]:
        """The sums of a unit, for each of its files (by number, in order) or for `ALL`, and its passages, without those
        below the floors."""
        found: dict[int, Tally] = {}
        collector = Collector(
            floors, lines=lambda source: self.sources[source].kind != "text",
            path=lambda source: self.sources[source].path, piece=lambda token: self.loaded.pieces([token])[0],
        )  # fmt: skip
        done = 0.0
        for batch in batches(self._windows(unit), self.batch):
            self._run(batch, found, collector)
            done += sum(window.share for window in batch)
            advance(sum(window.share for window in batch), sum(len(window.ids) for window in batch))
        advance(unit.size - done, 0)  # the bytes around the texts: line ends, other fields
        return dict(sorted(found.items())), collector.collected()

    def nothing(self) -> Tally:
        """Sums of no windows."""
        return Tally.of_nothing(len(self.selection.names), len(self.heads))

    def no_passages(self) -> Collected:
        """Passages of no windows."""
        return Collected.nothing(self.passages, len(self.heads))

    def how(self) -> dict[str, Any]:
        """The settings that may differ between units, with the same numbers up to rounding."""
        return {"batch": self.batch, "device": self._device.type, "threads": torch.get_num_threads()}

    @property
    def _device(self) -> torch.device:
        return next(self.loaded.model.parameters()).device

    def texts(self, source: int, piece: int) -> Iterator[tuple[Document, torch.Tensor, Sequence[str], Sequence[str]]]:
        """Each text in a piece of a file, its token ids, their pieces and words, without special
        tokens."""
        file = self.sources[source]
        for document in documents(file, piece, self.step, self.field):
            try:
                reading = self.loaded.read(document.text)
            except TextError as error:
                if document.text.isspace():  # some tokenizers return no tokens for it
                    continue
                raise TextError(f"{file.path!r}, text at {document.where}: {error}") from None
            ids = self.frame.content(reading.ids)
            start = len(self.frame.head)
            if len(ids):
                own = slice(start, start + len(ids))
                yield document, ids, reading.pieces[own], reading.words[own]

    def _windows(self, unit: Unit) -> Iterator[TextWindow]:
        for number, window in enumerate(self._unnumbered(unit)):
            yield replace(window, number=number)

    def _unnumbered(self, unit: Unit) -> Iterator[TextWindow]:
        for source, piece in unit.pieces():
            left = None
            if self.limit is not None and (source, piece) == (self.limit.source, self.limit.piece):
                left = self.limit.tokens
            for document, ids, pieces, words in self.texts(source, piece):
                here = len(ids) if left is None else min(left, len(ids))
                size = len(document.text.encode())
                yield from windows(
                    ids[:here], pieces[:here], self.frame, self.length, self.stride, source, document.where, size,
                    words[:here],
                )  # fmt: skip
                left = None if left is None else left - here
                if left == 0:
                    break

    def _run(self, batch: list[TextWindow], found: dict[int, Tally], collector: Collector) -> None:
        try:
            self._forward(batch, found, collector)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
                raise ConfigError(
                    f"batch={self.batch}: out of memory with windows of {self.length} tokens; the same "
                    f"command with a smaller --batch resumes",
                    f"batch={self.batch}：{self.length} 个词元的窗口内存不足；用更小的 --batch 运行同一命令即可继续",
                ) from None
            raise

    @torch.no_grad()
    def _forward(self, batch: list[TextWindow], found: dict[int, Tally], collector: Collector) -> None:
        ids, mask = stacked(batch)
        ids, mask = ids.to(self._device), None if mask is None else mask.to(self._device)
        tokens, measures = self.selection.measures(ids, batch)
        sums = Batch(self.loaded.layers, self.heads, measures)
        maps = self.loaded.maps(ids, mask, measures=measures)
        for name, amap in maps.items():
            sums.add(name, amap)
        strongest_of = self._strongest(maps, tokens, mask) if self.passages else None
        for i, (window, one) in enumerate(zip(batch, sums.windows(), strict=True)):
            kept, lost = counted(one.numbers, one.rows)
            if strongest_of is not None:
                strength, query = (x[i] for x in strongest_of)
                strength[one.rows.numpy() > 0] = -np.inf
                collector.add(window, OfWindow(strength, query, cache(partial(self._keys, maps, i, query))))
            place = window.source if self.by_file else ALL
            tally = found.setdefault(place, self.nothing())
            trouble = [] if one.bad is None else [Trouble(self.sources[window.source].path, str(window), *one.bad)]
            tally.add(Tally(kept, lost, 1, window.content, trouble, frozenset(sums.kernels)))

    def _strongest(self, maps: Maps, tokens: Tokens, mask: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray]:
        """Strength and position of the strongest query of the selected heads in each window, [b, heads]."""
        found = [strongest(maps[name], self.by, tokens, mask) for name in self.loaded.layers]
        starts = np.cumsum([0, *self.loaded.heads])
        kept = [int(starts[head.layer]) + head.head for head in self.heads]
        strength, query = (torch.cat(part, 1)[:, kept].cpu().numpy() for part in zip(*found, strict=True))
        return strength, query

    def _keys(self, maps: Maps, entry: int, query: np.ndarray, at: int) -> tuple[np.ndarray, np.ndarray]:
        """The keys with the largest weights of the strongest query of the selected head `at`, and these weights."""
        head = self.heads[at]
        return largest_keys(maps[head.name][entry, head.head, int(query[at])])
