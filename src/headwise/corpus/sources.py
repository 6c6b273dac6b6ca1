"""The files of a corpus, the units that can be read independently, and the texts in a unit.

A file is read in pieces of about `step` bytes: a text is cut after the next line end (or else space or character), a
JSON-lines file between lines, and a row group of a Parquet file belongs to the piece in which it begins. A compressed
file is one piece. Units are pieces in order; they depend on the sizes of the files alone, so that any process can read
any unit, and knows its own without reading the others. Texts of an iterable are units in the order they come.

Files are opened by fsspec, which knows addresses such as s3:// and hf://, and compression.
"""

import glob
import io
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from fsspec.compression import compr
from fsspec.core import url_to_fs

from headwise.base.read import one_line, parsed
from headwise.errors import CheckpointError, ConfigError, HeadwiseError, TextError, not_installed
from headwise.lm.texts import decoded
from headwise.table.files import arrow
from headwise.wording import LIST, joined, tr

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
TEXTS = (".txt", ".text", ".md")  # a folder is searched for these and the FORMATS, compressed or not
PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
ARCHIVES = (".zip", ".tar", ".tgz", ".7z")
STREAM = "iterable"  # the kind of texts that are in no file
ENDS = 1 << 16  # bytes at the beginning and at the end of a file that tell its versions apart


@dataclass(frozen=True)
class Source:
    """A file of the corpus: "text", "jsonl" or "parquet", its bytes, its compression, a stamp that changes with its
    content: the time of a local file, or what the file system knows of another one; and the SHA-256 of its ENDS."""

    path: str
    kind: str
    size: int
    packed: str = ""
    stamp: str = ""
    ends: str = ""


def find_sources(given: Sequence[str | os.PathLike[str]]) -> list[Source]:
    """The given files, each once: files, folders (all texts in them, by name) and patterns such as `news/**/*.txt`,
    on this machine or at an address such as s3://."""
    if not given:
        raise ConfigError(tr("files=(): give at least one file, folder or pattern"))
    forget_listings(os.fspath(one) for one in given)
    files: dict[str, str] = {}  # of two names of a file, the first
    for path in (path for one in given for path in _paths(os.fspath(one))):
        files.setdefault(path if _remote(path) else os.path.realpath(path), path)
    found = [source_of(path) for path in files.values()]
    if not any(source.size for source in found):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise TextError("the corpus is empty: {path!r}{more} of 0 bytes", path=found[0].path, more=more)
    return found


def forget_listings(paths: Iterable[str]) -> None:
    """Have file systems at addresses ask their servers again; the answers of earlier calls are kept in the process."""
    for path in filter(_remote, paths):
        with reading(path):
            url_to_fs(path)[0].invalidate_cache()


def source_of(path: str) -> Source:
    """The file at a path, as far as its file system knows. TextError for one that cannot be read as a text."""
    name = path.partition("?")[0] if _remote(path) else path  # without the query of an address
    inner, last = os.path.splitext((name if os.path.splitext(name)[1] else path).lower())
    packed = PACKED.get(last, "")
    suffix = os.path.splitext(inner)[1] if packed else last
    kind = FORMATS.get(suffix, "text")
    if suffix == ".json":
        raise TextError("{path!r}: expected JSON lines (.jsonl), one object per line, or a text", path=path)
    if suffix in ARCHIVES or (packed and (kind == "parquet" or suffix == ".tar")):
        raise TextError("{path!r} is an archive, or a compressed table; decompress it first", path=path)
    with reading(path):
        if _remote(path):
            files, inner = url_to_fs(path)
            size, stamp = files.info(inner)["size"], files.ukey(inner)
            if size is None:
                raise TextError("{path!r}: its server does not say its size; download it first", path=path)
        else:
            if not os.path.isfile(path):
                raise TextError("{path!r} is a pipe or a device; give a file: a corpus is read in pieces", path=path)
            size, stamp = os.path.getsize(path), str(os.stat(path).st_mtime_ns)
        with _bytes_of(path, ENDS) as file:
            ends = sha256(file.read(ENDS))
            with suppress(ValueError):  # a server that sends a file from its beginning only
                file.seek(max(0, size - ENDS))
                ends.update(file.read(ENDS))
    return Source(path, kind, size, packed, stamp, ends.hexdigest())


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Context that raises TextError for all errors of file systems, compression and pyarrow, in a line."""
    try:
        yield
    except HeadwiseError:
        raise
    except Exception as error:  # each file system has its own, such as of missing credentials
        raise TextError("{path!r} cannot be read: {error}", path=path, error=one_line(error)) from None


@contextmanager
def opened(source: Source) -> Iterator[Any]:
    """A file for reading bytes, decompressed."""
    if source.packed and source.packed not in compr:
        raise not_installed(source.path, "zstandard")
    with reading(source.path), _bytes_of(source.path) as raw:
        if not source.packed:
            yield raw
            return
        with io.BufferedReader(compr[source.packed](raw, mode="rb")) as file:
            yield file


def _bytes_of(path: str, block: int | None = None) -> Any:
    """A file for reading bytes as they are; from a server in blocks of this size."""
    if not _remote(path):
        return open(path, "rb")
    files, inner = url_to_fs(path)
    return io.BufferedReader(files.open(inner, "rb", block_size=block))


def _remote(path: str) -> bool:
    return "://" in path


def _paths(given: str) -> list[str]:
    """The files of a file, folder or pattern; a name that exists is no pattern."""
    is_pattern = any(sign in given for sign in "*?[")
    if _remote(given):
        with reading(given):
            files, inner = url_to_fs(given)
            is_pattern = is_pattern and not files.exists(inner)
            is_folder = not is_pattern and files.isdir(inner)
            if not (is_pattern or is_folder):
                files.info(inner)  # raises if it does not exist
                return [given]
            found = [path for path in files.glob(inner) if not files.isdir(path)] if is_pattern else files.find(inner)
            found, folder = sorted(map(files.unstrip_protocol, found)), files.unstrip_protocol(inner)
    else:
        is_folder, folder = os.path.isdir(given), given
        if os.path.exists(given) and not is_folder:
            return [given]
        if not (is_pattern or is_folder):
            raise TextError("{given!r} does not exist", given=given)
        every = map(str, Path(given).rglob("*")) if is_folder else glob.glob(given, recursive=True)
        found = sorted(path for path in every if os.path.isfile(path))
    if is_folder:
        known = tuple(f"{suffix}{packed}" for suffix in (*FORMATS, *TEXTS) for packed in ("", *PACKED))
        found = [
            path
            for path in found
            if path.lower().endswith(known) and not re.search(r"(^|[/\\])\.", os.path.relpath(path, folder))
        ]
    if found:
        return found
    if is_folder:
        names = ", ".join((*FORMATS, *TEXTS))
        raise TextError("{given!r}: the folder contains no text files ({known})", given=given, known=names)
    raise TextError("{given!r}: no file with this name", given=given)


HALVES = re.compile("[\ud800-\udfff]")  # JSON can contain them
REACH = 1 << 16  # bytes after a cut in which a line end is searched
ROWS = 256  # read at once


@dataclass(frozen=True)
class Document:
    """A text and its place: "byte 4,096" of a file, its row, or its number. source: the number of its file."""

    text: str
    where: str
    source: int = 0


def documents(source: Source, first: int, stop: int, step: int, field: str) -> Iterator[Document]:
    """The texts of the pieces `first` to `stop` - 1 of a file, without empty ones; of a compressed file all."""
    start, end = first * step, math.inf if source.packed else stop * step
    with opened(source) as file:
        if source.kind == "text":
            for at, data in _parts(file, start, end, step):
                if text := decoded(data, source.path, at):
                    yield Document(text, f"byte {at:,}")
        elif source.kind == "jsonl":
            for at, data in _lines(file, start, end):
                where = f"byte {at:,}"
                line = decoded(data, source.path, at)
                if line.strip():
                    yield from _short(_of_line(line, source.path, where, field), where, step)
        else:
            for row, text in _rows(file, source, start, end, field):
                yield from _short(text, f"row {row:,}", step)


def _parts(file: Any, start: int, end: float, step: int) -> Iterator[tuple[int, bytes]]:
    """The parts of a text that begin from `start` to before `end`, and where they begin."""
    reach = max(4, min(REACH, step // 4))  # 4: the longest character
    at = start
    if start:
        file.seek(start - 1)
        at += _cut(file.read(1 + reach))
        file.seek(at)
    rest = b""
    while at < end:
        size = (at // step + 1) * step - at
        rest += file.read(size + reach - len(rest))
        if not rest:
            return
        if len(rest) > size:
            size += _cut(rest[size - 1 : size + reach])
        yield at, rest[:size]
        at, rest = at + min(size, len(rest)), rest[size:]


def _cut(near: bytes) -> int:
    """How many bytes after the first of these a text can begin: after a line end, a space, or a character."""
    for sign in (b"\n", b" "):
        if (at := near.find(sign)) >= 0:
            return at
    return next((i for i, byte in enumerate(near[1:5]) if byte & 0xC0 != 0x80), len(near[1:5]))


def _lines(file: Any, start: int, end: float) -> Iterator[tuple[int, bytes]]:
    """The lines that begin from `start` to before `end`, and where they begin."""
    at = start
    if start:
        file.seek(start - 1)
        at += len(file.readline()) - 1
    while at < end and (line := file.readline()):
        yield at, line
        at += len(line)


def _rows(file: Any, source: Source, start: int, end: float, field: str) -> Iterator[tuple[int, str]]:
    """(row, text) of the row groups that begin from byte `start` to before `end`."""
    pyarrow = arrow()
    table = pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20)
    if field not in (names := table.schema_arrow.names):
        raise TextError(
            "{path!r} has no column {field!r}; it has {names}: give --field", path=source.path, field=field,
            names=joined(names, LIST),
        )  # fmt: skip
    kind = table.schema_arrow.field(field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise TextError(
            "{path!r}: column {field!r} contains {kind}, expected strings", path=source.path, field=field, kind=kind
        )
    row = 0
    for group in range(table.metadata.num_row_groups):
        about = table.metadata.row_group(group)
        column = about.column(0)
        begins = column.dictionary_page_offset or column.data_page_offset
        if start <= min(max(0, begins), source.size - 1) < end:
            at = row
            for batch in table.iter_batches(batch_size=ROWS, row_groups=[group], columns=[field]):
                for text in batch.column(0).to_pylist():
                    if text:
                        yield at, text
                    at += 1
        row += about.num_rows


def _short(text: str, where: str, step: int) -> Iterator[Document]:
    """A text in parts of about `step` characters at most, so that memory has a bound; nothing for an empty one."""
    at = 0
    while at < len(text):
        end = at + step
        near = text[end - 1 : end + step // 4]
        end += max(0, near.find("\n") if "\n" in near else near.find(" "))
        yield Document(text[at:end], f"{where}, character {at:,}" if at else where)
        at = end


def _of_line(line: str, path: str, where: str, field: str) -> str:
    try:
        entry = parsed(line)
    except CheckpointError as error:
        raise TextError(f"{path!r}, line at {where}: {error}") from None
    if not isinstance(entry, dict):
        raise TextError(
            "{path!r}, line at {where}: expected a JSON object, got {kind}", path=path, where=where,
            kind=type(entry).__name__,
        )  # fmt: skip
    return _of_entry(entry, repr(path), f"line at {where}", field)


def _of_entry(entry: Mapping[str, Any], path: str, where: str, field: str) -> str:
    """The text of a line or of an item; "" for none."""
    if field not in entry:
        known = ", ".join(map(repr, list(entry)[:8])) or "nothing"
        raise TextError(
            "{path}, {where}: no field {field!r}; it has {known}: give --field", path=path, where=where, field=field,
            known=known,
        )  # fmt: skip
    found = entry[field]
    if found is not None and not isinstance(found, str):
        raise TextError(
            "{path}, {where}: field {field!r} is {kind}, expected a string",
            path=path,
            where=where,
            field=field,
            kind=type(found).__name__,
        )
    if found and HALVES.search(found):
        raise TextError(f"{path}, {where}: field {field!r} contains half of a surrogate pair, which is not valid text")
    return found or ""


LEAST = 1 << 16  # bytes of a piece
LONGEST = 32  # windows that fit a piece at least, at four bytes a token
SHARE = 4096  # a unit is this part of a corpus, but at least a piece,
MOST = 1 << 24  # and at most about this many bytes, so that what a killed process loses is small
OF_STREAM = 1 << 20  # bytes of a unit of an iterable, whose size is not known


@dataclass(frozen=True)
class Limit:
    """The end of a corpus that is measured in part: `tokens` of this unit are the last ones, in this file."""

    unit: int
    tokens: int
    source: int


@dataclass(frozen=True)
class Part:
    """Pieces `first` to `stop` - 1 of a file."""

    source: int
    first: int
    stop: int


@dataclass(frozen=True)
class Unit:
    """Consecutive pieces of the corpus, or consecutive texts of an iterable. size: approximate bytes."""

    number: int
    parts: tuple[Part, ...]
    size: int
    texts: tuple[Document, ...] = ()


def step_for(window: int) -> int:
    """Bytes of a piece for windows of `window` tokens: many windows, so that few are cut short at its end."""
    return max(LEAST, LONGEST * 4 * window)


def units(sources: Sequence[Source], step: int) -> Iterator[Unit]:
    """The units of a corpus in order."""
    target = max(step, min(MOST, sum(source.size for source in sources) // SHARE))
    parts: list[Part] = []
    number = size = 0
    for i, source in enumerate(sources):
        first, count = 0, min(1, source.size) if source.packed else -(-source.size // step)
        while first < count:
            stop = min(count, first + max(1, -(-(target - size) // step)))
            parts.append(Part(i, first, stop))
            size += source.size if source.packed else min(source.size, stop * step) - first * step
            first = stop
            if size >= target:
                yield Unit(number, tuple(parts), size)
                parts, size, number = [], 0, number + 1
    if parts:
        yield Unit(number, tuple(parts), size)


@dataclass(frozen=True)
class Stream:
    """Texts of an iterable, read once and in order: strings, or mappings with a field."""

    texts: Iterable[Any]
    field: str
    shard: tuple[int, int] | None

    @property
    def name(self) -> str:
        """In place of a path."""
        return f"<{type(self.texts).__name__}>"

    def units(self, step: int) -> Iterator[Unit]:
        """The units of this shard: of a dataset with enough shards its own, else every N-th text."""
        number, size, found = 0, 0, []
        first, of = self.shard or (0, 1)
        for i, item in enumerate(self._items()):
            where = f"text {i * of + first:,}"  # no other shard has one of this number
            for document in _short(self._text(item, where), where, step):
                found.append(document)
                size += len(document.text.encode())
            if size >= max(step, OF_STREAM):
                yield Unit(number, (), size, tuple(found))
                number, size, found = number + 1, 0, []
        if found:
            yield Unit(number, (), size, tuple(found))

    def _items(self) -> Iterator[Any]:
        with reading(self.name):
            if self.shard is None:
                yield from self.texts
                return
            index, of = self.shard
            texts: Any = self.texts
            if getattr(texts, "num_shards", 0) >= of:
                yield from texts.shard(num_shards=of, index=index)
            else:
                yield from islice(texts, index, None, of)

    def _text(self, item: Any, where: str) -> str:
        if not isinstance(item, str | Mapping):
            raise TextError(
                "{name}, {where}: expected a string, or a mapping with {field!r}, got {kind}; give files as a list",
                name=self.name, where=where, field=self.field, kind=type(item).__name__,
            )  # fmt: skip
        entry = item if isinstance(item, Mapping) else {self.field: item}
        return _of_entry(entry, self.name, where, self.field)
