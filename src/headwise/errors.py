"""What headwise raises when it is asked for something that cannot be: one family, one clear line each."""

import shlex
from collections.abc import Mapping


class HeadwiseError(ValueError):
    """Base of all errors that a caller can mend; the message names the argument, what came and what fits."""


class ShapeError(HeadwiseError):
    """Sizes that do not fit together."""


class DTypeError(HeadwiseError):
    """A dtype that is not supported, or two that differ."""


class DeviceError(HeadwiseError):
    """Tensors on different devices."""


class ConfigError(HeadwiseError):
    """An option outside its range, or options that exclude each other."""


class KernelError(HeadwiseError):
    """A kernel was named that cannot do this call."""


class TextError(HeadwiseError):
    """A text that cannot be read: empty, or not UTF-8."""


class CheckpointError(HeadwiseError):
    """A file that is missing, damaged, of another kind or model, or cannot be written."""


def not_installed(what: str, *packages: str) -> ConfigError:
    """The error for a feature that requires packages which are not installed; the message names the first."""
    return ConfigError(f"{what} requires {packages[0]}: pip install {shlex.join(packages)}")


def check_whole(owner: str, name: str, value: object, least: int) -> int:
    """A whole number of at least `least`, or a ConfigError that names it."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{owner}({name}={value!r}): expected a whole number, {name} >= {least}")
    return value


def check_declared(kind: type, base: type, wanted: Mapping[str, str]) -> None:
    """Raise if a new class leaves out what no default could be right for.

    Args:
        kind: the class, below `base`; what a class between the two declares counts.
        wanted: name of an attribute or method → what it says.
    Raises:
        ConfigError: naming the class and what it does not declare.
    """
    between = kind.__mro__[: kind.__mro__.index(base)]
    declared = {name for one in between for name in (*vars(one), *vars(one).get("__annotations__", ()))}
    if missing := [f"{name} ({says})" for name, says in wanted.items() if name not in declared]:
        raise ConfigError(f"class {kind.__name__}({base.__name__}): declare {', '.join(missing)}")
