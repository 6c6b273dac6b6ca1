"""What headwise raises when it is asked for something that cannot be: one family, one clear line each."""


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
