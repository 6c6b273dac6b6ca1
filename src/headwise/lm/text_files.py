"""Texts from files: UTF-8 and nothing else, with \\n line ends."""

import os
from pathlib import Path

from headwise.errors import TextError

MARK = b"\xef\xbb\xbf"  # some editors put it before UTF-8


def read_text(path: str | os.PathLike[str]) -> str:
    """A whole file. TextError if it is empty, naming the byte if there is one that is not UTF-8."""
    text = decoded(Path(path).read_bytes(), path)
    if not text:
        raise TextError(f"{os.fspath(path)!r} is empty")
    return text


def decoded(data: bytes, path: str | os.PathLike[str], first: int = 0) -> str:
    """What a file holds from its byte `first` on. TextError naming the byte that is not UTF-8, and its place in the
    file."""
    if first == 0 and data.startswith(MARK):
        data, first = data[len(MARK) :], len(MARK)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(path, data[error.start], first + error.start) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def not_utf8(path: str | os.PathLike[str], byte: int, offset: int) -> TextError:
    """The error for a byte that is not UTF-8, at an offset in its file."""
    return TextError(
        f"{os.fspath(path)!r} is not UTF-8: byte 0x{byte:02x} at offset {offset}; convert it, for example with "
        f"iconv -f GB18030 -t UTF-8"
    )
