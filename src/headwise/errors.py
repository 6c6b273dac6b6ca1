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


def closest(value: object, known: Iterable[str]) -> list[str]:
    """The known names that look like a value, the most similar first: three at most."""
    return get_close_matches(str(value), list(known), n=3, cutoff=0.5)


def unknown_name(argument: str, value: object, known: Iterable[str], *, listed: str = "") -> ConfigError:
    """The error for a value that is none of the known names; the message gives the closest ones, if any, and all.

    Args:
        listed: where all names are listed, if they are too many for a message: a sentence that replaces them.
    """
    names = list(known)
    close = closest(value, names)
    meant = f"did you mean {' or '.join(map(repr, close))}? " if close else "unknown; " if listed else ""
    between = " " if argument.startswith("--") else "="
    few = " or ".join(map(repr, names)) if len(names) == 2 else f"one of {', '.join(map(repr, names))}"
    return ConfigError(f"{argument}{between}{value!r}: {meant}{listed or f'expected {few}'}")


def unknown_option(option: str, value: object, owner: str, known: Iterable[str]) -> ConfigError:
    """The error for an option that its owner, a design for example, does not have; with the closest ones, if any."""
    names = list(known)
    close = closest(option, names)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    return ConfigError(f"{option}={value!r}: {meant}{owner} supports {', '.join(names)}")


def check_choice(argument: str, value: object, known: Iterable[str]) -> None:
    """Raise the error of `unknown_name` unless the value is one of the known names."""
    names = list(known)
    if value not in names:
        raise unknown_name(argument, value, names)


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
