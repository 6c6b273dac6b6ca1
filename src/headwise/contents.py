"""What a file holds, read with care: what is wrong with it is one error that names the file and the place.

Files are damaged, cut off, of another version, or of somebody who means no good. A reader puts all that it does with
a file into a `reading` block, and takes JSON values through an `Entry`: no damage then ends in an error of another
kind, and an error of another kind is a mistake in the library.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from headwise.errors import CheckpointError, HeadwiseError

LARGEST = (1 << 63) - 1  # the largest whole number that a tensor can hold
LONGEST = 300  # characters of a message of other libraries
Read = TypeVar("Read")


@contextmanager
def reading(path: str | os.PathLike[str], what: str, *, missing: str = "", way_out: str = "") -> Iterator[None]:
    """A block that reads `path` and builds what it describes: a file that is missing or cannot be read, and every
    error about its contents, is a CheckpointError that names it. Errors of other kinds are the library's own.

    Args:
        what: the kind of file. missing: what makes such a file. way_out: what to do where it cannot be read.
    """
    more = f"; {way_out}" if way_out else ""
    name = f"{what} {os.fspath(path)!r}"
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{name} does not exist" + (f"; {missing}" if missing else more)) from None
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror or one_line(error)}{more}") from None
    except HeadwiseError as error:
        raise CheckpointError(f"{name} cannot be read: {one_line(error)}{more}") from None


def text_of(path: str | os.PathLike[str]) -> str:
    """The contents of a UTF-8 file, in a `reading` block."""
    try:
        return Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"byte {error.start} is not UTF-8") from None


def parsed(text: str) -> Any:
    """The value of a JSON text, in a `reading` block."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested deeper than any file of ours
        raise CheckpointError(f"not JSON: {one_line(error)}") from None


def one_line(error: BaseException) -> str:
    """The message of an error as one line that is not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"


class Entry:
    """A JSON object of a file. What is missing, of another kind or out of range is a CheckpointError that names it.

    >>> Entry({"window": 64}).whole("window", least=1)
    64
    >>> Entry({"window": "wide"}).whole("window")
    Traceback (most recent call last):
    headwise.errors.CheckpointError: window: expected a whole number, got 'wide'

    Args:
        value: as JSON gave it. at: where it stands in the file, for messages.
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
        """All of it."""
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
        """An object of values alike, each given to `read` with its place."""
        inner = self.entry(name)
        return {key: read(inner.raw(key), inner._path(key)) for key in inner}

    def numbers(self, name: str) -> dict[str, float]:
        """An object of finite numbers."""
        return self.named(name, number)

    def each(self, name: str, read: Callable[[Any, str], Read]) -> list[Read]:
        """A list, each of its values given to `read` with its place."""
        return each(self.raw(name), self._path(name), read)

    def _path(self, name: str) -> str:
        return f"{self._at}.{name}" if self._at else name


def each(value: Any, at: str, read: Callable[[Any, str], Read]) -> list[Read]:
    """A list that stands at `at`, each of its values given to `read`."""
    return [read(one, f"{at}[{i}]") for i, one in enumerate(_of(list, "a list", value, at))]


def word(value: Any, at: str) -> str:
    """A string that stands at `at`."""
    found: str = _of(str, "a string", value, at)
    if any(0xD800 <= ord(c) <= 0xDFFF for c in found):
        raise CheckpointError(f"{at}: half of a surrogate pair, which is not valid text")
    return found


def whole(value: Any, at: str, least: int = -LARGEST, most: int = LARGEST) -> int:
    """A whole number that stands at `at`."""
    found: int = _of(int, "a whole number", value, at)
    if not least <= found <= most:
        raise CheckpointError(f"{at}: expected {least} to {most}, got {_shown(found)}")
    return found


def number(value: Any, at: str, least: float = -math.inf) -> float:
    """A finite number that stands at `at`."""
    found = _of(int | float, "a number", value, at)
    if abs(found) > LARGEST if isinstance(found, int) else not math.isfinite(found):
        raise CheckpointError(f"{at}: expected a finite number, got {_shown(found)}")
    if found < least:
        raise CheckpointError(f"{at}: expected at least {least}, got {_shown(found)}")
    return float(found)


def _of(kind: Any, expected: str, value: Any, at: str) -> Any:
    # JSON's true and false are no numbers, though Python's are.
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
