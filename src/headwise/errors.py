"""The exceptions of headwise; all are subclasses of `HeadwiseError` with a one-line message."""

import errno
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from operator import index
from typing import Any

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
        message: in English, which `str(error)` is. zh: the same in Chinese, which the command line prints with
            `--lang zh`; default: the English message.
    """

    def __init__(self, message: str = "", zh: str | None = None) -> None:
        super().__init__(message)
        self.zh = message if zh is None else zh


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

# What the system says most often, in Chinese.
REASONS = {
    errno.ENOENT: "没有这个文件或文件夹", errno.EACCES: "没有权限", errno.EPERM: "不允许此操作",
    errno.EISDIR: "是文件夹",
    errno.ENOTDIR: "路径中有一段不是文件夹", errno.EEXIST: "已存在", errno.ENOSPC: "磁盘已满",
    errno.EROFS: "文件系统只读", errno.ENAMETOOLONG: "文件名太长", errno.EMFILE: "打开的文件太多",
    errno.EADDRINUSE: "地址已被占用", errno.EIO: "读写出错",
}  # fmt: skip


def reason(error: BaseException) -> tuple[str, str]:
    """Why the system refused something, in English and in Chinese."""
    number = getattr(error, "errno", None)
    why = getattr(error, "strerror", None) or " ".join(str(error).split())
    return why, REASONS.get(number or 0, getattr(why, "zh", why))


_BETWEEN = ("headwise", "torch", "contextlib")
_held: ContextVar[list[str] | None] = ContextVar("held warnings", default=None)


@contextmanager
def held_warnings() -> Iterator[list[str]]:
    """Within it, `warn` adds messages to this list instead: where warnings are errors, they would be taken for failures
    of the code here."""
    messages: list[str] = []
    token = _held.set(messages)
    try:
        yield messages
    finally:
        _held.reset(token)


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


def unknown_name(argument: str, value: object, known: Iterable[str], *, listed: str = "", zh: str = "") -> ConfigError:
    """The error for a value that is none of the known names; the message gives the closest ones, if any, and all.

    Args:
        argument: its name, or that of an option. value: what came. known: the names that there are.
        listed: where all names are listed, if they are too many for a message: a sentence that replaces them. zh: the
            same in Chinese.
    Returns:
        The error, to be raised.
    """
    names = list(known)
    close, every = list(map(repr, closest(value, names))), list(map(repr, names))
    meant = f"did you mean {' or '.join(close)}? " if close else "unknown; " if listed else ""
    chinese = f"是否要用 {' 或 '.join(close)}？" if close else "没有这个名称；" if listed else ""
    given = f"{argument}{' ' if argument.startswith('--') else '='}{value!r}"
    few = " or ".join(every) if len(every) == 2 else f"one of {', '.join(every)}"
    fitting = zh or listed or f"应为 {'、'.join(every)} 之一"
    return ConfigError(f"{given}: {meant}{listed or f'expected {few}'}", f"{given}：{chinese}{fitting}")


def unknown_option(option: str, value: object, owner: str, known: Iterable[str]) -> ConfigError:
    """The error for an option that its owner, a design for example, does not have; with the closest ones, if any."""
    names = list(known)
    close = closest(option, names)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    chinese = f"是否要用 {' 或 '.join(close)}？" if close else ""
    return ConfigError(
        f"{option}={value!r}: {meant}{owner} supports {', '.join(names)}",
        f"{option}={value!r}：{chinese}{owner} 支持 {'、'.join(names)}",
    )


def check_choice(argument: str, value: object, known: Iterable[str]) -> None:
    """Raise the error of `unknown_name` unless the value is one of the known names."""
    names = list(known)
    if value not in names:
        raise unknown_name(argument, value, names)


def not_installed(what: str, *packages: str, zh: str | None = None) -> ConfigError:
    """The error for a feature, in Chinese `zh`, that requires packages which are not installed; it names the first."""
    install = f"pip install {shlex.join(packages)}"
    return ConfigError(f"{what} requires {packages[0]}: {install}", f"{zh or what} 需要 {packages[0]}：{install}")


def check_whole(owner: str, name: str, value: object, least: int) -> int:
    """Return `value`, a whole number of any library such as NumPy, as one of Python; raises a ConfigError that names it
    if it is none, less than `least` or more than 64 bits hold."""
    number = whole_number(value)
    if number is not None and least <= number <= MOST:
        return number
    given = f"{owner}({name}={value!r})"  # not before: on Python 3.13, torch.compile cannot write a size of the graph
    if number is not None and number > MOST:
        raise ConfigError(f"{given}: expected at most {MOST}", f"{given}：应不大于 {MOST}")
    raise ConfigError(
        f"{given}: expected a whole number, {name} >= {least}", f"{given}：应为整数，且 {name} >= {least}"
    )


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
