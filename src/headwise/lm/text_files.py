"""Texts from UTF-8 files, with \\n line ends."""

import os
from pathlib import Path

from headwise.errors import TextError
from headwise.files import check_regular

MARK = b"\xef\xbb\xbf"  # a byte order mark, which some editors write


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a whole file. TextError if it is empty, not UTF-8, or binary, naming the byte; or no regular file."""
    check_regular(path)
    data = Path(path).read_bytes()
    text = decoded(data, path)
    if not text:
        raise TextError(f"{os.fspath(path)!r} is empty", f"{os.fspath(path)!r} 是空文件")
    return text


def decoded(data: bytes, path: str | os.PathLike[str], first: int = 0) -> str:
    """Decode the contents of a file from byte `first` on. TextError naming a byte that is not UTF-8, or NUL, and its
    offset."""
    if first == 0 and data.startswith(MARK):
        data, first = data[len(MARK) :], len(MARK)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(path, data[error.start], first + error.start) from None
    if "\0" in text:
        raise nul(path, first + data.index(0))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def not_utf8(path: str | os.PathLike[str], byte: int, offset: int) -> TextError:
    """The error for a byte that is not UTF-8, at an offset of the file."""
    encoding = "UTF-16" if offset == 0 and byte in (0xFE, 0xFF) else "GB18030"  # these begin a byte order mark
    return TextError(
        f"{os.fspath(path)!r} is not UTF-8: byte 0x{byte:02x} at offset {offset}; convert it, for example with "
        f"iconv -f {encoding} -t UTF-8",
        f"{os.fspath(path)!r} 不是 UTF-8：偏移 {offset} 处的字节是 0x{byte:02x}；请先转换，例如用 iconv -f "
        f"{encoding} -t UTF-8",
    )


def nul(path: str | os.PathLike[str], offset: int) -> TextError:
    """The error for a NUL byte, which UTF-16 and binary files contain, at an offset of the file."""
    return TextError(
        f"{os.fspath(path)!r} is not text: NUL byte at offset {offset}; expected UTF-8",
        f"{os.fspath(path)!r} 不是文本：偏移 {offset} 处有空字节（NUL）；应为 UTF-8 文本",
    )


def not_text(text: str, error: UnicodeEncodeError) -> TextError:
    """The error for half of a surrogate pair, which cannot be encoded."""
    return TextError(
        f"text: character {error.start} is half of a surrogate pair (U+{ord(text[error.start]):04X}), which is not "
        f"valid text",
        f"text：第 {error.start} 个字符是半个代理对（U+{ord(text[error.start]):04X}），不是有效文本",
    )
