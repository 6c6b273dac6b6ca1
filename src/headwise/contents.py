"""Reading of untrusted files: every defect raises one error that names the file and the location.

Files may be damaged, truncated, of another version, or malicious. A reader uses a file in a `reading` block and
accesses JSON values through an `Entry`. Defects of the file then always raise CheckpointError; any other exception is
a bug in the library.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from headwise.errors import CheckpointError, HeadwiseError, reason
from headwise.files import check_regular
from headwise.wording import in_language

LARGEST = (1 << 63) - 1  # the largest whole number of a tensor
LONGEST = 300  # characters of messages of other libraries
Read = TypeVar("Read")


def folder_of(path: str | os.PathLike[str]) -> Path:
    """The folder of a config.json, which may be given for it; any other path as it is."""
    path = Path(path)
    return path.parent if path.name == "config.json" and path.is_file() else path


@contextmanager
def reading(path: str | os.PathLike[str], what: str, *, missing: str = "", way_out: str = "") -> Iterator[None]:
    """Raise a CheckpointError that names the file if it is missing or unreadable, or if its contents are invalid.

    Args:
        what: the kind of file. missing: how to create such a file. way_out: what to do if it cannot be read.
            In Chinese too, where they are `Bilingual`.
    """
    more, chinese = f"; {way_out}" if way_out else "", f"；{in_language(way_out, 'zh')}" if way_out else ""
    name, named = f"{what} {os.fspath(path)!r}", f"{in_language(what, 'zh')} {os.fspath(path)!r}"
    try:
        check_regular(path)
        yield
    except FileNotFoundError:
        more, chinese = (f"; {missing}", f"；{in_language(missing, 'zh')}") if missing else (more, chinese)
        raise CheckpointError(f"{name} does not exist{more}", f"{named} 不存在{chinese}") from None
    except OSError as error:
        why, reasons = reason(error)
        raise CheckpointError(f"{name} cannot be read: {why}{more}", f"{named} 无法读取：{reasons}{chinese}") from None
    except HeadwiseError as error:
        why, reasons = one_line(error), " ".join(error.zh.split())[:LONGEST]
        raise CheckpointError(f"{name} cannot be read: {why}{more}", f"{named} 无法读取：{reasons}{chinese}") from None


@contextmanager
def theirs(folder: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Convert every exception that another library raises in the block, for invalid files, to a CheckpointError. A
    panic of a library in Rust is one too, although it is no Exception."""
    try:
        yield
    except HeadwiseError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{os.fspath(folder)!r}: {what}: {one_line(error)}") from None


def text_of(path: str | os.PathLike[str]) -> str:
    """Read a UTF-8 file; for use in a `reading` block."""
    try:
        return Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"byte {error.start} is not UTF-8", f"第 {error.start} 个字节不是 UTF-8") from None


def parsed(text: str) -> Any:
    """Parse JSON; for use in a `reading` block."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise CheckpointError(f"not JSON: {one_line(error)}", f"不是 JSON：{one_line(error)}") from None


def one_line(error: BaseException) -> str:
    """The message of an error as one line of limited length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"


class Entry:
    """A JSON object in a file. Values that are missing, of another type or out of range raise CheckpointError.

    >>> Entry({"window": 64}).whole("window", least=1)
    64
    >>> Entry({"window": "wide"}).whole("window")
    Traceback (most recent call last):
    headwise.errors.CheckpointError: window: expected a whole number, got 'wide'

    Args:
        value: the parsed object. at: its location in the file, for messages.
    """

    def __init__(self, value: Any, at: str = "") -> None:
        self._at = at
        self._value: dict[str, Any] = _of(dict, "an object", value, at or "the file")

    def __contains__(self, name: str) -> bool:
        return name in self._value

    def __iter__(self) -> Iterator[str]:
        return iter(self._value)

    def raw(self, name: str) -> Any:
        """Any value."""
        if name not in self._value:
            raise CheckpointError(f"{self._path(name)} is missing")
        return self._value[name]

    def plain(self) -> dict[str, Any]:
        """The object as a dict."""
        return dict(self._value)

    def word(self, name: str) -> str:
        """A string."""
        return word(self.raw(name), self._path(name))

    def whole(self, name: str, least: int = -LARGEST, most: int = LARGEST) -> int:
        """A whole number within a range."""
        return whole(self.raw(name), self._path(name), least, most)

    def number(self, name: str, least: float = -math.inf) -> float:
        """A finite number."""
        return number(self.raw(name), self._path(name), least)

    def entry(self, name: str) -> "Entry":
        """An object."""
        return Entry(self.raw(name), self._path(name))

    def entries(self, name: str) -> list["Entry"]:
        """A list of objects."""
        return self.each(name, Entry)

    def named(self, name: str, read: Callable[[Any, str], Read]) -> dict[str, Read]:
        """An object whose values are each passed to `read` with their location."""
        inner = self.entry(name)
        return {key: read(inner.raw(key), inner._path(key)) for key in inner}

    def numbers(self, name: str) -> dict[str, float]:
        """An object of finite numbers."""
        return self.named(name, number)

    def each(self, name: str, read: Callable[[Any, str], Read]) -> list[Read]:
        """A list whose values are each passed to `read` with their location."""
        return each(self.raw(name), self._path(name), read)

    def _path(self, name: str) -> str:
        return f"{self._at}.{name}" if self._at else name


def each(value: Any, at: str, read: Callable[[Any, str], Read]) -> list[Read]:
    """Check a list at the location `at`; each of its values is passed to `read`."""
    return [read(one, f"{at}[{i}]") for i, one in enumerate(_of(list, "a list", value, at))]


def word(value: Any, at: str) -> str:
    """Check a string at the location `at`."""
    found: str = _of(str, "a string", value, at)
    if any(0xD800 <= ord(c) <= 0xDFFF for c in found):
        raise CheckpointError(f"{at}: half of a surrogate pair, which is not valid text")
    return found


def whole(value: Any, at: str, least: int = -LARGEST, most: int = LARGEST) -> int:
    """Check a whole number at the location `at`."""
    found: int = _of(int, "a whole number", value, at)
    if not least <= found <= most:
        raise CheckpointError(f"{at}: expected {least} to {most}, got {_shown(found)}")
    return found


def number(value: Any, at: str, least: float = -math.inf) -> float:
    """Check a finite number at the location `at`."""
    found = _of(int | float, "a number", value, at)
    if abs(found) > LARGEST if isinstance(found, int) else not math.isfinite(found):
        raise CheckpointError(f"{at}: expected a finite number, got {_shown(found)}")
    if found < least:
        raise CheckpointError(f"{at}: expected at least {least}, got {_shown(found)}")
    return float(found)


def _of(kind: Any, expected: str, value: Any, at: str) -> Any:
    # In Python, but not in JSON, true and false are numbers.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CheckpointError(f"{at}: expected {expected}, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number that is too large"
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "…"
