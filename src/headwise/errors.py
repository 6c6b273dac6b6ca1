"""The exceptions of headwise; all are subclasses of `HeadwiseError` with a one-line message."""

import errno
import shlex
import sys
import warnings
from collections.abc import Iterable, Mapping, Set
from contextvars import ContextVar
from difflib import get_close_matches
from operator import index
from typing import Any

from headwise.text import LIST, Bilingual, Message, caller, in_language, joined, tr

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DTypeError",
    "DeviceError",
    "HeadwiseError",
    "KernelError",
    "ShapeError",
    "TextError",
    "unknown_name",
]


class HeadwiseError(ValueError):
    """Base class of errors that a caller can fix; the message names the argument, its value and what was expected.

    Args:
        message: in English, which `str(error)` is. With values, a template as `headwise.wording.tr` takes it; such a
            message, or a text of `tr`, has a Chinese version, `zh`, which the command line prints with `--lang zh`.
        values: what stands in the template.
    """

    def __init__(self, message: str = "", /, **values: Any) -> None:
        self.message = Message(message, values, domain=caller()) if values else message
        super().__init__(self.message)

    @property
    def zh(self) -> str:
        """The message in Chinese; in English if it has none."""
        return in_language(self.message, "zh")


class ShapeError(HeadwiseError):
    """Tensor shapes or sizes that do not match."""


class DTypeError(HeadwiseError):
    """An unsupported dtype, or dtypes that differ."""


class DeviceError(HeadwiseError):
    """Tensors on different devices."""


class ConfigError(HeadwiseError):
    """An option outside its range, or options that exclude each other."""


class KernelError(HeadwiseError):
    """A kernel that does not support the call."""


class TextError(HeadwiseError):
    """A text that cannot be read: empty, or not UTF-8."""


class CheckpointError(HeadwiseError):
    """A file that is missing, damaged, of another type or model, or cannot be written."""


MOST = 2**63 - 1  # the largest whole number of tensors

# What the system says most often.
REASONS = {
    errno.ENOENT: tr("No such file or directory"), errno.EACCES: tr("Permission denied"),
    errno.EPERM: tr("Operation not permitted"), errno.EISDIR: tr("Is a directory"),
    errno.ENOTDIR: tr("Not a directory"), errno.EEXIST: tr("File exists"),
    errno.ENOSPC: tr("No space left on device"), errno.EROFS: tr("Read-only file system"),
    errno.ENAMETOOLONG: tr("File name too long"), errno.EMFILE: tr("Too many open files"),
    errno.EADDRINUSE: tr("Address already in use"), errno.EIO: tr("Input/output error"),
}  # fmt: skip


def reason(error: BaseException) -> str:
    """Why the system refused something, in its words."""
    why: str = getattr(error, "strerror", None) or " ".join(str(error).split())
    known = REASONS.get(getattr(error, "errno", None) or 0)
    return why if known is None else Bilingual(why, known.zh)


_BETWEEN = ("headwise", "torch", "contextlib")
_held: ContextVar[list[str] | None] = ContextVar("held warnings", default=None)


class held_warnings:
    """Within it, `warn` adds messages to the list that it returns instead: where warnings are errors, they would be
    taken for failures of the code here."""

    def __enter__(self) -> list[str]:
        messages: list[str] = []
        self._token = _held.set(messages)
        return messages

    def __exit__(self, *error: object) -> None:
        _held.reset(self._token)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the caller's code: the innermost one outside of headwise and PyTorch."""
    if (held := _held.get()) is not None:
        held.append(message)
        return
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def closest(value: object, known: Iterable[str]) -> list[str]:
    """The known names that look like a value, the most similar first: three at most."""
    return get_close_matches(str(value), list(known), n=3, cutoff=0.5)


def unknown_name(argument: str, value: object, known: Iterable[str], *, listed: str = "") -> ConfigError:
    """The error for a value that is none of the known names; the message gives the closest ones, if any, and all.

    Args:
        argument: its name, or that of an option. value: what came. known: the names that there are.
        listed: where all names are listed, if they are too many for a message: a sentence that replaces them.
    Returns:
        The error, to be raised.
    """
    names = list(known)
    close, every = closest(value, names), list(map(repr, names))
    meant = _meant(map(repr, close)) if close else tr("unknown; ") if listed else ""
    given = f"{argument}{' ' if argument.startswith('--') else '='}{value!r}"
    few = tr("{one} or {other}", one=every[0], other=every[1]) if len(every) == 2 else _one_of(every)
    fitting = listed or tr("expected {names}", names=few)
    return ConfigError("{given}: {meant}{fitting}", given=given, meant=meant, fitting=fitting)


def _meant(close: Iterable[str]) -> str:
    return tr("did you mean {names}? ", names=joined(close, tr(" or ")))


def _one_of(names: Iterable[str]) -> str:
    return tr("one of {names}", names=joined(names, LIST))


def unknown_option(option: str, value: object, owner: str, known: Iterable[str]) -> ConfigError:
    """The error for an option that its owner, a design for example, does not have; with the closest ones, if any."""
    names = list(known)
    close = closest(option, names)
    return ConfigError(
        "{option}={value!r}: {meant}{owner} supports {names}",
        option=option,
        value=value,
        meant=_meant(close) if close else "",
        owner=owner,
        names=joined(names, LIST),
    )


def check_choice(argument: str, value: object, known: Iterable[str]) -> None:
    """Raise the error of `unknown_name` unless the value is one of the known names."""
    names = list(known)
    if value not in names:
        raise unknown_name(argument, value, names)


def not_installed(what: str, *packages: str) -> ConfigError:
    """The error for a feature that requires packages which are not installed; it names the first."""
    install = f"pip install {shlex.join(packages)}"
    return ConfigError("{what} requires {package}: {install}", what=what, package=packages[0], install=install)


def check_whole(owner: str, name: str, value: object, least: int) -> int:
    """Return `value`, a whole number of any library such as NumPy, as one of Python; raises a ConfigError that names it
    if it is none, less than `least` or more than 64 bits hold."""
    number = whole_number(value)
    if number is not None and least <= number <= MOST:
        return number
    given = f"{owner}({name}={value!r})"  # not before: on Python 3.13, torch.compile cannot write a size of the graph
    if number is not None and number > MOST:
        raise ConfigError("{given}: expected at most {most}", given=given, most=MOST)
    raise ConfigError("{given}: expected a whole number, {name} >= {least}", given=given, name=name, least=least)


def check_sequence(owner: str, name: str, value: Any, expected: str) -> list[Any]:
    """Return the entries of any sequence, such as a NumPy array or a tensor; raises a ConfigError that names it if it
    has no order or no entries."""
    try:
        entries = [] if isinstance(value, str | bytes | Set | Mapping) else list(value)
    except TypeError:
        entries = []
    if not entries:
        raise ConfigError(f"{owner}({name}={value!r}): expected {expected}")
    return entries


def whole_number(value: Any) -> int | None:
    """A whole number of any library, such as NumPy's, as one of Python; None for anything else, which booleans are."""
    if isinstance(value, int):
        return None if isinstance(value, bool) else value
    if getattr(value, "ndim", 0) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        return None
    try:
        return index(value)
    except TypeError:
        return None


def check_declared(kind: type, base: type, wanted: Mapping[str, str]) -> None:
    """Raise ConfigError if a new subclass `kind` of `base`, with the classes between, does not declare one of the
    attributes `wanted` (name → description), which have no default."""
    between = kind.__mro__[: kind.__mro__.index(base)]
    declared = {name for one in between for name in (*vars(one), *vars(one).get("__annotations__", ()))}
    if missing := [f"{name} ({what})" for name, what in wanted.items() if name not in declared]:
        raise ConfigError(f"class {kind.__name__}({base.__name__}): declare {', '.join(missing)}")
