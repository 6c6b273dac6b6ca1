"""The files of a corpus: found, checked before any work, and recognised when a run is resumed."""

import codecs
import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise.contents import one_line
from headwise.errors import ConfigError, TextError
from headwise.lm.text_files import not_utf8, nul
from headwise.table.files import arrow

BLOCK = 1 << 22  # bytes read at once
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
TEXTS = (".txt", ".text", ".md")  # a folder is searched for these and the FORMATS
PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar")
Advance = Callable[[int], None]  # called with the bytes read since the last call


@dataclass(frozen=True)
class Source:
    """A file of the corpus.

    Attributes:
        path: as found. kind: "text", "jsonl" or "parquet". size: bytes.
        groups: bytes of each row group of a Parquet file; () for others.
    """

    path: str
    kind: str
    size: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class Print:
    """What identifies a file when a run is resumed: size and time, and if only the time differs, the content.

    Attributes:
        mtime: in nanoseconds. sha256: of its first `size` bytes.
    """

    path: str
    size: int
    mtime: int
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def find_sources(given: Sequence[str | os.PathLike[str]]) -> list[Source]:
    """The given files, each once: files, folders (all texts in them, by name) and patterns such as `news/**/*.txt`.

    Raises:
        TextError: naming what is missing, has no texts, or is compressed; or if all are empty.
    """
    if not given:
        raise ConfigError(
            "files=(): give at least one file, folder or pattern", "files=()：至少给出一个文件、文件夹或通配模式"
        )
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
        raise TextError(
            f"the corpus is empty: {found[0].path!r}{more} of 0 bytes",
            f"语料是空的：{found[0].path!r}{more}，共 0 字节",
        )
    return found


def check(source: Source, field: str, upto: int, advance: Advance) -> Print:
    """Read a file once up to byte `upto`, and return its print.

    Raises:
        TextError: naming the file and the first byte that is not UTF-8, or NUL, the first line that is not JSON or has
            no such field, or the column that a Parquet file lacks.
    """
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
        files = sorted(str(path) for path in Path(given).rglob("*") if _shown(path, given) and path.is_file())
        found = [path for path in files if Path(path).suffix.lower() in known]
        if not found:
            raise TextError(
                f"{given!r}: the folder contains no text files ({', '.join(known)})",
                f"{given!r}：文件夹中没有文本文件（{', '.join(known)}）",
            )
        return found
    if os.path.exists(given):
        return [given]
    if any(sign in given for sign in "*?["):
        found = sorted(path for path in glob.glob(given, recursive=True) if os.path.isfile(path))
        if found:
            return found
        raise TextError(f"{given!r}: no file with this name", f"{given!r}：没有匹配的文件")
    raise TextError(f"{given!r} does not exist", f"{given!r} 不存在")


def _shown(path: Path, folder: str) -> bool:
    return not any(part.startswith(".") for part in path.relative_to(folder).parts)


def _source(path: str) -> Source:
    if not os.path.isfile(path):
        raise TextError(
            f"{path!r} is a pipe or a device; give a file: a corpus is read with random access",
            f"{path!r} 是管道或设备；应为文件：语料需要随机读取",
        )
    suffix = Path(path).suffix.lower()
    if suffix in PACKED:
        raise TextError(
            f"{path!r} is compressed; decompress it first: a corpus is read with random access",
            f"{path!r} 是压缩文件；请先解压：语料需要随机读取",
        )
    if suffix == ".json":
        raise TextError(
            f"{path!r}: expected JSON lines (.jsonl), one object per line, or a text",
            f"{path!r}：应为 JSON Lines（.jsonl，每行一个对象）或文本",
        )
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
            f"{path!r} has no column {field!r}; it has {', '.join(schema.names)}: give --field",
            f"{path!r} 没有列 {field!r}；现有 {'、'.join(schema.names)}：请给出 --field",
        )
    kind = schema.field(field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise TextError(
            f"{path!r}: column {field!r} contains {kind}, expected strings",
            f"{path!r}：列 {field!r} 的类型是 {kind}，应为字符串",
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
        raise TextError(
            f"{path!r} is not a valid Parquet file: {one_line(error)}",
            f"{path!r} 不是有效的 Parquet 文件：{one_line(error)}",
        ) from None
