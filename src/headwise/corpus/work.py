"""Measuring a unit, and the processes of a sweep: who measures which unit, common progress, failures.

torchrun gives every process the address of a store, which transfers numbers and strings only, and ends all processes
when one of them dies. Measurements are in the files of the units, so no tensors are sent, and processes can compute on
CPUs or GPUs.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from itertools import count, islice
from typing import Any

import numpy as np
import torch

from headwise.corpus.passages import Collected, Collector, Floors, OfBatch, Places
from headwise.corpus.select import Frame, Head, TextWindow, batches, measures_for, stacked, tokens_of, windows
from headwise.corpus.sources import Document, Limit, Source, Stream, Unit, documents, units
from headwise.corpus.tally import Batch, Tally, Trouble, counted, largest_keys, strength_of, strongest
from headwise.errors import ConfigError, HeadwiseError, TextError
from headwise.lm.loading import LoadedModel
from headwise.lm.loading.base import Maps
from headwise.stats import Tokens

ALL = -1  # in place of a file's number: all files
SAVED = 4  # batches after which the sums of a unit are saved,
SECONDS = 10.0  # unless they were less than that ago
Advance = Callable[[float, int], None]  # called with the bytes and tokens done since the last call


@dataclass(frozen=True)
class Options:
    """The arguments of `measure_corpus` that the numbers depend on, as they apply. window, stride: in tokens, stride
    without special ones."""

    measures: list[str]
    window: int
    stride: int
    max_tokens: int | None
    per: str
    field: str
    layers: list[int] | None
    heads: list[int] | None
    dtype: str
    passages: int
    strongest_by: str
    shard: str | None = None  # "2/8": the third of eight

    @property
    def place(self) -> tuple[int, int] | None:
        """The number of the shard and how many there are; None for the whole corpus."""
        if self.shard is None:
            return None
        number, _, of = self.shard.partition("/")
        return int(number), int(of)


@dataclass(frozen=True)
class Measured:
    """The sums of a unit after so many `batches`, by the number of a file or for `ALL`; its passages, without those
    below the floors; what `Collector.places` returns of them; and the SHA-256 of the texts of a whole unit."""

    batches: int
    sums: Mapping[int, Tally]
    passages: Collected
    places: Places
    sha256: str = ""


@dataclass(frozen=True)
class Work:
    """How a corpus is measured, `batch` windows at a time. step: bytes of a piece of a file. stream: the texts, if they
    are in no file."""

    loaded: LoadedModel
    options: Options
    sources: Sequence[Source]
    heads: Sequence[Head]
    frame: Frame
    step: int
    batch: int
    limit: Limit | None = None
    stream: Stream | None = None

    def units(self) -> Iterator[Unit]:
        """The units of this shard, or of the whole corpus, in order."""
        if self.stream is not None:
            return self.stream.units(self.step)
        first, stop = 0, None if self.limit is None else self.limit.unit + 1
        if self.options.place is not None:
            number, of = self.options.place
            every = sum(1 for _ in units(self.sources, self.step))
            first, stop = every * number // of, every * (number + 1) // of
        return islice(units(self.sources, self.step), first, stop)

    def sha256(self, unit: Unit) -> str:
        """SHA-256 of the texts of a unit."""
        digest = hashlib.sha256()
        for document in self._documents(unit):
            digest.update(_bytes_of(document))
        return digest.hexdigest()

    def measure(
        self, unit: Unit, advance: Advance, floors: Floors, before: Measured | None, save: Callable[[Measured], None]
    ) -> Measured:
        """A whole unit, from what an earlier run has saved of it on, `before`. Every `SAVED` batches, but not
        more often than every `SECONDS`, `save` gets what is measured so far, from which sums and passages continue with
        the same bits."""
        found: dict[int, Tally] = {}
        digest = hashlib.sha256()
        collector = Collector(
            floors, lines=lambda source: self.sources[source].kind != "text",
            path=lambda source: self.sources[source].path, piece=cache(lambda token: self.loaded.pieces([token])[0]),
        )  # fmt: skip
        if before is not None:
            found.update(before.sums)
            collector.restore(before.passages, before.places)
        done, number, saved = 0.0, 0, time.monotonic()
        last = first = 0 if before is None else before.batches

        def so_far() -> Measured:
            return Measured(number, dict(sorted(found.items())), collector.collected(), collector.places())

        for number, batch in enumerate(batches(self._windows(unit, digest.update), self.batch)):
            if number - last >= SAVED and time.monotonic() - saved >= SECONDS:
                save(so_far())
                last, saved = number, time.monotonic()
            if number >= first:
                self._run(batch, found, collector)
            share = sum(window.share for window in batch)
            done += share
            advance(share, sum(len(window.ids) for window in batch) if number >= first else 0)
        advance(unit.size - done, 0)  # the bytes around the texts: line ends, other fields
        return replace(so_far(), sha256=digest.hexdigest())

    def nothing(self) -> Tally:
        """Sums of no windows."""
        return Tally.of_nothing(len(self.options.measures), len(self.heads))

    def no_passages(self) -> Collected:
        """Passages of no windows."""
        return Collected.nothing(self.options.passages, len(self.heads))

    def how(self) -> dict[str, Any]:
        """The settings that may differ between units, with the same numbers up to rounding."""
        return {"batch": self.batch, "device": self._device.type, "threads": torch.get_num_threads()}

    @property
    def _device(self) -> torch.device:
        return next(self.loaded.model.parameters()).device

    def _documents(self, unit: Unit) -> Iterator[Document]:
        yield from unit.texts
        for part in unit.parts:
            file = self.sources[part.source]
            for document in documents(file, part.first, part.stop, self.step, self.options.field):
                yield replace(document, source=part.source)

    def texts(
        self, unit: Unit, update: Callable[[bytes], object]
    ) -> Iterator[tuple[Document, torch.Tensor, Sequence[str], Sequence[str]]]:
        """Each text of a unit, its token ids, their pieces and words, without special tokens. update: called with the
        bytes of each."""
        for document in self._documents(unit):
            update(_bytes_of(document))
            try:
                reading = self.loaded.read(document.text)
            except TextError as error:
                if document.text.isspace():  # some tokenizers return no tokens for it
                    continue
                path = self.sources[document.source].path
                raise TextError(f"{path!r}, text at {document.where}: {error}") from None
            ids = self.frame.content(reading.ids)
            start = len(self.frame.head)
            if len(ids):
                own = slice(start, start + len(ids))
                yield document, ids, reading.pieces[own], reading.words[own]

    def _windows(self, unit: Unit, update: Callable[[bytes], object]) -> Iterator[TextWindow]:
        number = count()
        left = self.limit.tokens if self.limit is not None and unit.number == self.limit.unit else None
        for document, ids, pieces, words in self.texts(unit, update):
            here = len(ids) if left is None else min(left, len(ids))
            size = len(document.text.encode())
            for window in windows(
                ids[:here], pieces[:here], self.frame, self.options.window, self.options.stride, document.source,
                document.where, size, words[:here],
            ):  # fmt: skip
                yield replace(window, number=next(number))
            left = None if left is None else left - here

    def _run(self, batch: list[TextWindow], found: dict[int, Tally], collector: Collector) -> None:
        try:
            self._forward(batch, found, collector)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
                raise ConfigError(
                    "batch={batch}: out of memory with windows of {length} tokens; the same command with a smaller "
                    "--batch resumes",
                    batch=self.batch,
                    length=self.options.window,
                ) from None
            raise

    @torch.no_grad()
    def _forward(self, batch: list[TextWindow], found: dict[int, Tally], collector: Collector) -> None:
        ids, mask = stacked(batch)
        ids, mask = ids.to(self._device), None if mask is None else mask.to(self._device)
        tokens = tokens_of(ids, batch)
        measures = measures_for(tokens, self.options.measures)
        sums = Batch(self.loaded.layers, self.heads, measures)
        strength = [strength_of(self.options.strongest_by, tokens, mask)] if self.options.passages else []
        maps = self.loaded.maps(ids, mask, measures=[*measures, *strength])
        for name, amap in maps.items():
            sums.add(name, amap)
        found_of = self._strongest(maps, tokens, mask) if self.options.passages else None
        for i, (window, one) in enumerate(zip(batch, sums.windows(), strict=True)):
            kept, lost = counted(one.numbers, one.rows)
            if found_of is not None:
                found_of.strength[i, one.rows.numpy() > 0] = -np.inf
                collector.add(window, found_of.window(i))
            place = window.source if self.options.per == "file" else ALL
            tally = found.setdefault(place, self.nothing())
            trouble = [] if one.bad is None else [Trouble(self.sources[window.source].path, str(window), *one.bad)]
            tally.add(Tally(kept, lost, 1, window.content, trouble, frozenset(sums.kernels)))

    def _strongest(self, maps: Maps, tokens: Tokens, mask: torch.Tensor | None) -> OfBatch:
        """The strongest query of the selected heads in each window."""
        queries = {name: strongest(maps[name], tokens, mask) for name in self.loaded.layers}
        starts = np.cumsum([0, *self.loaded.heads])
        kept = [int(starts[head.layer]) + head.head for head in self.heads]
        strength, query = (torch.cat(part, 1)[:, kept].cpu().numpy() for part in zip(*queries.values(), strict=True))
        keys = {name: cache(partial(largest_keys, maps[name], query)) for name, (_, query) in queries.items()}
        return OfBatch(strength, query, [(keys[head.name], head.head) for head in self.heads])


def _bytes_of(document: Document) -> bytes:
    return f"{document.source} {document.where}\n{document.text}\n".encode()


JOINING = timedelta(minutes=30)  # for loading the model
PAUSE = 0.05  # seconds between two checks while waiting
LOOK = 0.5  # seconds between two checks whether a process has failed
SPACE = "headwise/measure/"


class Stopped(HeadwiseError):
    """Another process has failed; the message is its error."""


class Deserted(HeadwiseError):
    """Other processes have ended without an error."""


class Ranks:
    """The `world` processes of a sweep, from the view of one; by default it is the only one."""

    def __init__(self, rank: int = 0, world: int = 1, store: Any = None) -> None:
        self.rank, self.world, self._store = rank, world, store
        self._alone: dict[str, float] = {}
        self._looked = -LOOK

    @classmethod
    def joined(cls) -> "Ranks":
        """The processes of torchrun's environment. ConfigError if it is incomplete, or the store does not respond."""
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls()
        store, rank, world, prefixed = _met()
        return cls(rank, world, prefixed(f"{SPACE}{next(_sweeps)}/", store))

    @classmethod
    @contextmanager
    def among(cls, given: "Ranks | None") -> Iterator["Ranks"]:
        """The given processes; or those of `joined`, which learn of an error of the block, and leave at its end."""
        if given is not None:
            yield given
            return
        ranks = cls.joined()
        try:
            yield ranks
        except Exception as error:
            ranks.fail(str(error))
            raise
        finally:
            ranks.leave()

    @property
    def first(self) -> bool:
        """Whether this is the process that plans, merges and prints."""
        return self.rank == 0

    def publish(self, key: str, value: Any) -> None:
        """Set a value for all processes."""
        if self._store is not None:
            self._call("set", key, json.dumps(value))

    def wait_for(self, key: str) -> Any:
        """Wait until a process has published a value, and return it."""
        while not self._call("check", [key]):
            self.check()
            time.sleep(PAUSE)
        return json.loads(self._call("get", key))

    def take(self) -> int:
        """The place, among the unfinished units in order, of the next one that no process has taken."""
        return self.count("taken", 1) - 1

    def count(self, what: str, more: int) -> int:
        """Add to a shared number and return it."""
        if self._store is None:
            self._alone[what] = self._alone.get(what, 0) + more
            return int(self._alone[what])
        return int(self._call("add", what, more))

    def check(self) -> None:
        """Raise Stopped if a process has failed. It can be called often: the store is queried at intervals."""
        if self._store is None or time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        if self._call("check", ["failed"]):
            raise Stopped(json.loads(self._call("get", "failed")))

    def fail(self, message: str) -> None:
        """Publish why this process fails; only the first failure is kept."""
        if self._store is not None:
            with suppress(HeadwiseError):
                if not self._call("check", ["failed"]):
                    self.publish("failed", f"process {self.rank} of {self.world}: {message}")

    def leave(self) -> None:
        """Wait until the first process has printed its results, since a launcher ends all processes as soon as one
        ends."""
        if self._store is not None:
            with suppress(HeadwiseError):
                if self.first:
                    self.publish("printed", True)
                else:
                    while not self._call("check", ["printed"]):
                        time.sleep(PAUSE)

    def _call(self, what: str, *args: Any) -> Any:
        try:
            return getattr(self._store, what)(*args)
        except RuntimeError:
            raise Deserted("the other processes have ended; run the same command to resume") from None


_sweeps = count()  # each has a prefix of its own, in the same order in all processes


@cache
def _met() -> tuple[Any, int, int, Any]:
    """The shared store, the rank, the number of processes, and the class that adds prefixes to a store."""
    import torch.distributed as dist

    if not dist.is_available():
        raise ConfigError("WORLD_SIZE is set, but this PyTorch has no torch.distributed; unset it for one process")
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=JOINING))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"the processes could not connect ({error}); start them with torchrun") from None
    return store, rank, world, dist.PrefixStore
