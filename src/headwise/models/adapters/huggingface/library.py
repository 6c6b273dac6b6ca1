"""Importing transformers when it is needed, since that takes seconds and it may not be installed."""

from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

from torch import nn

from headwise.errors import ConfigError

OLDEST = "5.18"  # as pyproject.toml has it: older ones have no interface for T5's attention, and other masks


def library(name: str) -> Any:
    """The module `transformers.name`.

    Raises:
        ConfigError: if transformers is not installed, or older than `OLDEST`.
    """
    try:
        _check(import_module("transformers").__version__)
        return import_module(f"transformers.{name}")
    except ImportError as error:
        raise ConfigError(_needed(str(error))) from None


@cache
def _check(version: str) -> None:
    numbers = [[int(part) for part in one.split(".")[:2]] for one in (version, OLDEST)]
    if numbers[0] < numbers[1]:
        raise ConfigError(_needed(f"{version} is installed"))


def _needed(found: str) -> str:
    return (
        f"this requires Hugging Face transformers, version {OLDEST} or newer: "
        f"pip install 'transformers>={OLDEST}' ({found})"
    )


def cache_argument(model: nn.Module) -> str:
    """The argument of the model's calls that takes the KV cache: `cache` since transformers 5.24, before that
    `past_key_values`, which then warns."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
