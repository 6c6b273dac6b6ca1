"""The exceptions of headwise; all are subclasses of `HeadwiseError` with a one-line message."""

import shlex
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DTypeError",
    "DeviceError",
    "HeadwiseError",
    "KernelError",
    "ShapeError",
    "TextError",
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


def unknown_name(argument: str, value: object, known: Iterable[str]) -> ConfigError:
    """The error for a value that is none of the known names; the message gives the closest ones, if any, and all."""
    names = list(known)
    close = get_close_matches(str(value), names, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    between = " " if argument.startswith("--") else "="
    return ConfigError(f"{argument}{between}{value!r}: {meant}expected one of {', '.join(map(repr, names))}")


def not_installed(what: str, *packages: str) -> ConfigError:
    """The error for a feature that requires packages which are not installed; the message names the first."""
    return ConfigError(f"{what} requires {packages[0]}: pip install {shlex.join(packages)}")


def check_whole(owner: str, name: str, value: object, least: int) -> int:
    """Return `value` if it is a whole number of at least `least`; else raise a ConfigError that names it."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{owner}({name}={value!r}): expected a whole number, {name} >= {least}")
    return value


def check_declared(kind: type, base: type, wanted: Mapping[str, str]) -> None:
    """Raise if a new class does not declare attributes that have no default.

    Args:
        kind: a subclass of `base`; declarations of classes between the two count.
        wanted: name of an attribute or method → its description.
    Raises:
        ConfigError: naming the class and the missing attributes.
    """
    between = kind.__mro__[: kind.__mro__.index(base)]
    declared = {name for one in between for name in (*vars(one), *vars(one).get("__annotations__", ()))}
    if missing := [f"{name} ({what})" for name, what in wanted.items() if name not in declared]:
        raise ConfigError(f"class {kind.__name__}({base.__name__}): declare {', '.join(missing)}")
