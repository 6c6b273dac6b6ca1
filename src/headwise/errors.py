"""What headwise raises when it is asked for something that cannot be: one family, one clear line each."""

import shlex


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
    """A checkpoint that is missing, truncated, or of another model."""


def not_installed(what: str, *packages: str) -> ConfigError:
    """The error for a feature that requires packages which are not installed; the message names the first."""
    return ConfigError(f"{what} requires {packages[0]}: pip install {shlex.join(packages)}")
