"""Measuring a unit: its texts become windows, its windows batches, and each batch runs through the model once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headwise.corpus.pieces import Document, Limit, Unit, documents
from headwise.corpus.selection import Head, Selection
from headwise.corpus.sources import Source
from headwise.corpus.tally import Batch, Tally, Trouble, counted
from headwise.corpus.windows import Frame, TextWindow, batches, stacked, windows
from headwise.errors import ConfigError, TextError
from headwise.lm.loading import LoadedModel

ALL = -1  # in place of a file's number: all files
Advance = Callable[[float, int], None]  # called with the bytes and tokens done since the last call


@dataclass(frozen=True)
class Work:
    """How a corpus is measured: everything that the numbers depend on.

    Attributes:
        step: bytes of a piece. length, stride: of windows, in tokens; stride without special tokens.
        batch: windows at a time. by_file: whether there are numbers for each file.
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
    limit: Limit | None = None

    def measure(self, unit: Unit, advance: Advance) -> dict[int, Tally]:
        """The sums of a unit, for each of its files (by number, in order) or for `ALL`."""
        found: dict[int, Tally] = {}
        done = 0.0
        for batch in batches(self._windows(unit), self.batch):
            self._run(batch, found)
            done += sum(window.share for window in batch)
            advance(sum(window.share for window in batch), sum(len(window.ids) for window in batch))
        advance(unit.size - done, 0)  # the bytes around the texts: line ends, other fields
        return dict(sorted(found.items()))

    def nothing(self) -> Tally:
        """Sums of no windows."""
        return Tally.of_nothing(len(self.selection.names), len(self.heads))

    def how(self) -> dict[str, Any]:
        """The settings that may differ between units, with the same numbers up to rounding."""
        return {"batch": self.batch, "device": self._device.type, "threads": torch.get_num_threads()}

    @property
    def _device(self) -> torch.device:
        return next(self.loaded.model.parameters()).device

    def texts(self, source: int, piece: int) -> Iterator[tuple[Document, torch.Tensor, Sequence[str]]]:
        """Each text in a piece of a file, its token ids and their pieces, without special tokens."""
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
                yield document, ids, reading.pieces[start : start + len(ids)]

    def _windows(self, unit: Unit) -> Iterator[TextWindow]:
        for source, piece in unit.pieces():
            left = None
            if self.limit is not None and (source, piece) == (self.limit.source, self.limit.piece):
                left = self.limit.tokens
            for document, ids, pieces in self.texts(source, piece):
                here = len(ids) if left is None else min(left, len(ids))
                size = len(document.text.encode())
                yield from windows(
                    ids[:here], pieces[:here], self.frame, self.length, self.stride, source, document.where, size
                )
                left = None if left is None else left - here
                if left == 0:
                    break

    def _run(self, batch: list[TextWindow], found: dict[int, Tally]) -> None:
        try:
            self._forward(batch, found)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
                raise ConfigError(
                    f"batch={self.batch}: out of memory with windows of {self.length} tokens; the same "
                    f"command with a smaller --batch resumes",
                    f"batch={self.batch}：{self.length} 个词元的窗口内存不足；用更小的 --batch 运行同一命令即可继续",
                ) from None
            raise

    @torch.no_grad()
    def _forward(self, batch: list[TextWindow], found: dict[int, Tally]) -> None:
        ids, mask = stacked(batch)
        ids, mask = ids.to(self._device), None if mask is None else mask.to(self._device)
        measures = self.selection.measures(ids, batch)
        sums = Batch(self.loaded.layers, self.heads, measures)
        for name, amap in self.loaded.maps(ids, mask, measures=measures).items():
            sums.add(name, amap)
        for window, one in zip(batch, sums.windows(), strict=True):
            kept, lost = counted(one.numbers, one.rows)
            place = window.source if self.by_file else ALL
            tally = found.setdefault(place, self.nothing())
            trouble = [] if one.bad is None else [Trouble(self.sources[window.source].path, str(window), *one.bad)]
            tally.add(Tally(kept, lost, 1, window.content, trouble, frozenset(sums.kernels)))
