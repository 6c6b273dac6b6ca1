"""The files of a corpus, checked before any work, and the pieces that can be read independently.

A corpus in pieces that can be read independently, the texts in a piece, and units of pieces. A text file is cut at
about every `step` bytes, after the next line end (or else space or character), a JSON-lines file between lines, and a
Parquet file between its row groups. The cuts and the units depend on the files and the options alone, so any process
can read any piece without overlap.
"""

import codecs
import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headwise.base.read import one_line, parsed
from headwise.errors import CheckpointError, ConfigError, TextError
from headwise.lm.texts import decoded, not_utf8, nul
from headwise.table.files import arrow
from headwise.wording import LIST, joined, tr

BLOCK = 1 << 22  # bytes read at once
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
TEXTS = (".txt", ".text", ".md")  # a folder is searched for these and the FORMATS
PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar")
Advance = Callable[[int], None]  # called with the bytes read since the last call


@dataclass(frozen=True)
class Source:
    """A file of the corpus: "text", "jsonl" or "parquet", its bytes, and those of each row group of a Parquet file."""

    path: str
    kind: str
    size: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class Print:
    """What identifies a file when a run is resumed: size and time (ns), and if only the time differs, the SHA-256 of
    its first `size` bytes."""

    path: str
    size: int
    mtime: int
    sha256: str


def find_sources(given: Sequence[str | os.PathLike[str]]) -> list[Source]:
    """The given files, each once: files, folders (all texts in them, by name) and patterns such as `news/**/*.txt`."""
    if not given:
        raise ConfigError(tr("files=(): give at least one file, folder or pattern"))
    paths = dict.fromkeys(path for one in given for path in _paths(os.fspath(one)))
    seen: set[str] = set()
    found: list[Source] = []
    for path in paths:
        real = os.path.realpath(path)
        if real not in seen:
            seen.add(real)
            found.append(_source(path))
    if not any(source.size for source in found):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise TextError("the corpus is empty: {path!r}{more} of 0 bytes", path=found[0].path, more=more)
    return found


def check(source: Source, field: str, upto: int, advance: Advance) -> Print:
    """Read a file once up to byte `upto`, and return its print. TextError names the first place that cannot be read."""
    if source.kind == "parquet":
        check_column(source.path, field)
    digest = hashlib.sha256()
    mtime = os.stat(source.path).st_mtime_ns
    decoder = codecs.getincrementaldecoder("utf-8")()
    at = 0
    for block in blocks(source.path, upto):
        digest.update(block)
        if source.kind != "parquet":
            _decode(decoder, block, source.path, at)
        at += len(block)
        advance(len(block))
    if source.kind != "parquet" and at == source.size:
        _decode(decoder, b"", source.path, at, final=True)
    return Print(source.path, source.size, mtime, digest.hexdigest())


def changed(known: Print, upto: int) -> str | None:
    """How a file differs from its print, in words; None if it does not."""
    try:
        now = os.stat(known.path)
    except FileNotFoundError:
        return f"{known.path!r} is gone"
    if now.st_size != known.size:
        return f"{known.path!r} had {known.size:,} bytes and has {now.st_size:,}"
    if now.st_mtime_ns == known.mtime:
        return None
    digest = hashlib.sha256()
    for block in blocks(known.path, upto):
        digest.update(block)
    return None if digest.hexdigest() == known.sha256 else f"{known.path!r} has different content"


def blocks(path: str, upto: int) -> Iterator[bytes]:
    """The first `upto` bytes of a file in blocks."""
    with open(path, "rb") as file:
        while upto > 0 and (block := file.read(min(BLOCK, upto))):
            upto -= len(block)
            yield block


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, path: str, at: int, final: bool = False) -> None:
    waiting = len(decoder.getstate()[0])  # bytes of a character that began in the last block
    try:
        decoder.decode(block, final)
    except UnicodeDecodeError as error:
        raise not_utf8(path, error.object[error.start], at - waiting + error.start) from None
    if 0 in block:
        raise nul(path, at + block.index(0))


def _paths(given: str) -> list[str]:
    if os.path.isdir(given):
        known = (*FORMATS, *TEXTS)
        files = sorted(
            str(path)
            for path in Path(given).rglob("*")
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(given).parts)
        )
        found = [path for path in files if Path(path).suffix.lower() in known]
        if not found:
            raise TextError(
                "{given!r}: the folder contains no text files ({known})", given=given, known=", ".join(known)
            )
        return found
    if os.path.exists(given):
        return [given]
    if any(sign in given for sign in "*?["):
        found = sorted(path for path in glob.glob(given, recursive=True) if os.path.isfile(path))
        if found:
            return found
        raise TextError("{given!r}: no file with this name", given=given)
    raise TextError("{given!r} does not exist", given=given)


def _source(path: str) -> Source:
    if not os.path.isfile(path):
        raise TextError("{path!r} is a pipe or a device; give a file: a corpus is read with random access", path=path)
    suffix = Path(path).suffix.lower()
    if suffix in PACKED:
        raise TextError("{path!r} is compressed; decompress it first: a corpus is read with random access", path=path)
    if suffix == ".json":
        raise TextError("{path!r}: expected JSON lines (.jsonl), one object per line, or a text", path=path)
    kind = FORMATS.get(suffix, "text")
    if kind == "parquet":
        return Source(path, kind, os.path.getsize(path), row_groups(path))
    return Source(path, kind, os.path.getsize(path))


ROWS = 256  # read at once


def row_groups(path: str) -> tuple[int, ...]:
    """Bytes of each row group, the parts of a file that can be read independently."""
    with _reading(path):
        meta = arrow().parquet.ParquetFile(path).metadata
        return tuple(max(1, meta.row_group(i).total_byte_size) for i in range(meta.num_row_groups))


def check_column(path: str, field: str) -> None:
    """Raise TextError unless the file has a column of strings with that name."""
    pyarrow = arrow()
    with _reading(path):
        schema = pyarrow.parquet.ParquetFile(path).schema_arrow
    if field not in schema.names:
        raise TextError(
            "{path!r} has no column {field!r}; it has {names}: give --field",
            path=path,
            field=field,
            names=joined(schema.names, LIST),
        )
    kind = schema.field(field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise TextError(
            "{path!r}: column {field!r} contains {kind}, expected strings", path=path, field=field, kind=kind
        )


def parquet_rows(path: str, group: int, field: str) -> Iterator[tuple[int, str]]:
    """(row in the file, text) of a row group; empty ones and null are left out."""
    with _reading(path):
        file = arrow().parquet.ParquetFile(path)
        row = sum(file.metadata.row_group(i).num_rows for i in range(group))
        batches = file.iter_batches(batch_size=ROWS, row_groups=[group], columns=[field])
    while True:
        with _reading(path):
            batch = next(batches, None)
            texts = [] if batch is None else batch.column(0).to_pylist()
        if batch is None:
            return
        for text in texts:
            if text:
                yield row, text
            row += 1


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Context that raises TextError for all errors of pyarrow on a damaged file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (arrow().ArrowException, OSError, ValueError, OverflowError) as error:
        raise TextError("{path!r} is not a valid Parquet file: {error}", path=path, error=one_line(error)) from None


HALVES = re.compile("[\ud800-\udfff]")  # JSON can contain them
REACH = 1 << 16  # bytes after a cut in which a line end is searched


@dataclass(frozen=True)
class Document:
    """A text and its place: "byte 4,096" of a file, or its line or row."""

    text: str
    where: str


def piece_count(source: Source, step: int) -> int:
    """The number of pieces of a file at `step` bytes a piece."""
    return len(source.groups) if source.kind == "parquet" else -(-source.size // step)


def piece_end(source: Source, piece: int, step: int) -> int:
    """The byte after a piece; for Parquet the size of the file."""
    return source.size if source.kind == "parquet" else _cut(source, (piece + 1) * step, step)


def documents(source: Source, piece: int, step: int, field: str) -> Iterator[Document]:
    """The texts of a piece in order, without empty ones."""
    if source.kind == "parquet":
        for row, text in parquet_rows(source.path, piece, field):
            yield Document(text, f"row {row:,}")
        return
    start, stop = (_cut(source, at, step) for at in (piece * step, (piece + 1) * step))
    if start == stop:
        return
    if source.kind == "jsonl":
        yield from lines(source, start, stop, field)
        return
    with open(source.path, "rb") as file:
        file.seek(start)
        text = decoded(file.read(stop - start), source.path, start)
    if text:
        yield Document(text, f"byte {start:,}")


def lines(source: Source, start: int, stop: int, field: str) -> Iterator[Document]:
    """The texts of the lines in a part of a JSON-lines file."""
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
            "{path!r}, line at {where}: expected a JSON object, got {kind}",
            path=path,
            where=where,
            kind=type(entry).__name__,
        )
    if field not in entry:
        known = ", ".join(map(repr, list(entry)[:8])) or "nothing"
        raise TextError(
            "{path!r}, line at {where}: no field {field!r}; it has {known}: give --field",
            path=path,
            where=where,
            field=field,
            known=known,
        )
    found = entry[field]
    if found is not None and not isinstance(found, str):
        raise TextError(
            "{path!r}, line at {where}: field {field!r} is {kind}, expected a string",
            path=path,
            where=where,
            field=field,
            kind=type(found).__name__,
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
UNITS = 4096  # at most, for a corpus of any size: bounds the files of an unfinished sweep


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
    every = [
        (i, piece, source.groups[piece] if source.groups else min(step, source.size - piece * step))
        for i, source in enumerate(sources) for piece in range(piece_count(source, step))
        if limit is None or (i, piece) <= (limit.source, limit.piece)
    ]  # fmt: skip
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
