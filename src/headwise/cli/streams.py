"""Standard input and output of the commands: UTF-8 in every locale, `-` as a file name, and pipes that close early.

with standard_streams():
    text = stdin_text("--file")            # headwise see -
    with written(out) as path:             # headwise see --out -
        write_report(report, path)
"""

import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headwise.errors import TextError

STREAM = "-"  # the name of standard input and standard output


@contextmanager
def standard_streams() -> Iterator[None]:
    """Within the block, standard output and standard error are UTF-8 in every locale, unless PYTHONIOENCODING names
    another encoding. What that cannot represent is escaped. When the reader of a pipe is gone, or a stream is closed,
    its output is discarded and the command completes: its files are written."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_utf8, before)
    try:
        yield
    finally:
        for stream, given in zip((sys.stdout, sys.stderr), before, strict=True):
            with suppress(OSError, ValueError):
                stream.flush() if given is not None else stream.close()
        sys.stdout, sys.stderr = before


def is_read() -> bool:
    """Whether standard output still has a reader, as far as earlier writes have shown."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return not (isinstance(raw, _Pipe) and raw.closed_by_reader)


def is_stream(path: str | os.PathLike[str] | None) -> bool:
    """Whether a path is `-`, standard input or output."""
    return path is not None and os.fspath(path) == STREAM


def stdin_bytes(option: str) -> bytes:
    """All of standard input. TextError naming the option if it is closed or empty."""
    if sys.stdin is None or sys.stdin.closed:
        raise TextError(
            f"{option} '-': standard input is closed; give a file name, or pipe a text into the command",
            f"{option} '-'：标准输入已关闭；请给出文件名，或用管道传入文本",
        )
    buffer = getattr(sys.stdin, "buffer", None)
    data: bytes = sys.stdin.read().encode() if buffer is None else buffer.read()
    if not data:
        raise TextError(f"{option} '-': standard input is empty", f"{option} '-'：标准输入为空")
    return data


def stdin_text(option: str) -> str:
    """The text on standard input, in UTF-8. TextError as `stdin_bytes`, and for other encodings."""
    from headwise.lm.texts import decoded

    return decoded(stdin_bytes(option), "standard input")


@contextmanager
def read_from(path: Path, option: str) -> Iterator[Path]:
    """The path; for `-`, a temporary file with what standard input contains."""
    if not is_stream(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="headwise-") as folder:
        copy = Path(folder) / "stdin"
        copy.write_bytes(stdin_bytes(option))
        yield copy


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """The path to write to; for `-`, a temporary file whose content is then written to standard output."""
    if not is_stream(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="headwise-") as folder:
        copy = Path(folder) / "stdout"
        yield copy
        sys.stdout.flush()
        with open(copy, "rb") as source:
            shutil.copyfileobj(source, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def typed(argument: str, option: str) -> str:
    """A text from the command line, which Python decodes by the locale, decoded as UTF-8 if it is UTF-8.

    TextError naming the option and a byte that neither of them has.
    """
    from headwise.lm.texts import not_utf8

    if os.name != "posix":
        return argument
    try:
        data = os.fsencode(argument)
        return data.decode()
    except UnicodeDecodeError as error:
        if any("\udc80" <= character <= "\udcff" for character in argument):  # Python's form of such a byte
            raise not_utf8(option, data[error.start], error.start) from None
        return argument
    except UnicodeEncodeError:
        return argument


class _Pipe(io.FileIO):
    """A file descriptor that discards output after the reader has closed the pipe."""

    closed_by_reader = False

    def write(self, data: Any) -> int:
        """Write, or discard."""
        if not self.closed_by_reader:
            try:
                return super().write(data)
            except BrokenPipeError:
                self.closed_by_reader = True
        return memoryview(data).nbytes


def _utf8(stream: Any) -> Any:
    """The stream as described in `standard_streams`; the stream itself if it is not a file of the system."""
    if stream is None:  # closed, as by `>&-`, or a program without a console
        return open(os.devnull, "w", encoding="utf-8")
    try:
        handle = stream.fileno()
    except (AttributeError, OSError, ValueError):  # a stream in memory
        return stream
    stream.flush()
    encoding = stream.encoding if os.environ.get("PYTHONIOENCODING") else "utf-8"
    buffer = io.BufferedWriter(_Pipe(handle, "w", closefd=False))
    return io.TextIOWrapper(buffer, encoding, errors="backslashreplace", line_buffering=stream.line_buffering)
