"""A corpus in pieces that can be read independently, the texts in a piece, and units of pieces.

A text file is cut at about every `step` bytes, after the next line end (or else space or character), a JSON-lines file
between lines, and a Parquet file between its row groups. The cuts and the units depend on the files and the options
alone, so any process can read any piece without overlap.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headwise.contents import parsed
from headwise.corpus.sources import Source, parquet_rows
from headwise.errors import CheckpointError, TextError
from headwise.lm.text_files import decoded

HALVES = re.compile("[\ud800-\udfff]")  # JSON can contain them
REACH = 1 << 16  # bytes after a cut in which a line end is searched


@dataclass(frozen=True)
class Document:
    """A text and its place: "byte 4,096" of a file, or its line or row."""

    text: str
    where: str


def count(source: Source, step: int) -> int:
    """The number of pieces of a file at `step` bytes a piece."""
    return len(source.groups) if source.kind == "parquet" else -(-source.size // step)


def size(source: Source, piece: int, step: int) -> int:
    """The approximate bytes of a piece."""
    return source.groups[piece] if source.kind == "parquet" else min(step, source.size - piece * step)


def end(source: Source, piece: int, step: int) -> int:
    """The byte after a piece; for Parquet the size of the file."""
    return source.size if source.kind == "parquet" else _cut(source, (piece + 1) * step, step)


def documents(source: Source, piece: int, step: int, field: str) -> Iterator[Document]:
    """The texts of a piece in order, without empty ones.

    Raises:
        TextError: naming the file and the place that cannot be read.
    """
    if source.kind == "parquet":
        for row, text in parquet_rows(source.path, piece, field):
            yield Document(text, f"row {row:,}")
        return
    start, stop = (_cut(source, at, step) for at in (piece * step, (piece + 1) * step))
    if start == stop:
        return
    if source.kind == "jsonl":
        yield from _lines(source, start, stop, field)
        return
    with open(source.path, "rb") as file:
        file.seek(start)
        text = decoded(file.read(stop - start), source.path, start)
    if text:
        yield Document(text, f"byte {start:,}")


def check_lines(source: Source, start: int, stop: int, field: str) -> None:
    """Read the lines of a part of a JSON-lines file, and raise for errors in them."""
    for _ in _lines(source, start, stop, field):
        pass


def _lines(source: Source, start: int, stop: int, field: str) -> Iterator[Document]:
    with open(source.path, "rb") as file:
        file.seek(start)
        while start < stop and (line := file.readline()):
            text = decoded(line, source.path, start)
            where, start = f"byte {start:,}", start + len(line)
            if text.strip():
                found = _text(text, source.path, where, field)
                if found:
                    yield Document(found, where)


def _text(line: str, path: str, where: str, field: str) -> str:
    try:
        entry = parsed(line)
    except CheckpointError as error:
        raise TextError(f"{path!r}, line at {where}: {error}") from None
    if not isinstance(entry, dict):
        raise TextError(
            f"{path!r}, line at {where}: expected a JSON object, got {type(entry).__name__}",
            f"{path!r}，{where} 处的行：应为 JSON 对象，实际是 {type(entry).__name__}",
        )
    if field not in entry:
        known = ", ".join(map(repr, list(entry)[:8])) or "nothing"
        raise TextError(
            f"{path!r}, line at {where}: no field {field!r}; it has {known}: give --field",
            f"{path!r}，{where} 处的行：没有字段 {field!r}；现有 {known}：请给出 --field",
        )
    found = entry[field]
    if found is not None and not isinstance(found, str):
        raise TextError(
            f"{path!r}, line at {where}: field {field!r} is {type(found).__name__}, expected a string",
            f"{path!r}，{where} 处的行：字段 {field!r} 是 {type(found).__name__}，应为字符串",
        )
    if found and HALVES.search(found):
        raise TextError(
            f"{path!r}, line at {where}: field {field!r} contains half of a surrogate pair, which is not valid text"
        )
    return found or ""


def _cut(source: Source, target: int, step: int) -> int:
    """The first byte from `target` at which a piece can begin."""
    if target <= 0 or target >= source.size:
        return max(0, min(target, source.size))
    with open(source.path, "rb") as file:
        file.seek(target - 1)
        if source.kind == "jsonl":
            file.readline()
            return file.tell()
        near = file.read(1 + max(4, min(REACH, step // 4)))  # 4: the longest character
    for sign in (b"\n", b" "):
        at = near.find(sign)
        if at >= 0:
            return target + at
    begun = next((i for i, byte in enumerate(near[1:5]) if byte & 0xC0 != 0x80), len(near[1:5]))
    return target + begun


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
        for piece in range(count(source, step)):
            yield i, piece, size(source, piece, step)
            if limit is not None and (i, piece) == (limit.source, limit.piece):
                return
