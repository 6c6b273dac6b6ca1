"""Importing transformers when it is needed, since that takes seconds and it may not be installed."""

from importlib import import_module
from inspect import signature
from typing import Any

from torch import nn

from headwise.errors import ConfigError


def library(name: str) -> Any:
    """The module `transformers.name`.

    Raises:
        ConfigError: if transformers is not installed, or too old for an attention interface.
    """
    try:
        return import_module(f"transformers.{name}")
    except ImportError as error:
        raise ConfigError(
            f"this requires Hugging Face transformers, version 5 or newer: pip install 'transformers>=5' ({error})"
        ) from None


def cache_argument(model: nn.Module) -> str:
    """The argument of the model's calls that takes the KV cache: `cache` since transformers 5.24, before that
    `past_key_values`, which then warns."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
