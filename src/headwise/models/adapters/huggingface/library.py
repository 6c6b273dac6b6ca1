"""Where transformers is imported: only when it is needed, since it takes seconds, and may not be there."""

from importlib import import_module
from typing import Any

from headwise.errors import ConfigError


def library(name: str) -> Any:
    """The module `transformers.name`.

    Raises:
        ConfigError: if transformers is not installed, or too old to take attention from outside.
    """
    try:
        return import_module(f"transformers.{name}")
    except ImportError as error:
        raise ConfigError(
            f"this requires Hugging Face transformers, version 5 or newer: pip install 'transformers>=5' ({error})"
        ) from None
