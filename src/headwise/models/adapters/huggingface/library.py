"""What headwise uses of transformers: its modules, which attention modules call its interface, positions of a call."""

import inspect
import sys
from collections.abc import Collection
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import ConfigError
from headwise.kernels.graph import has_no_numbers, in_graph

OLDEST = "5.18"  # as pyproject.toml has it: older ones have no interface for T5's attention, and other masks


def library(name: str) -> Any:
    """The module `transformers.name`; ConfigError if transformers is not installed, or older than `OLDEST`."""
    if torch.compiler.is_dynamo_compiling():  # it traces no imports, and the model has imported the module
        return sys.modules[f"transformers.{name}"]
    try:
        version = import_module("transformers").__version__
        numbers = [[int(part) for part in one.split(".")[:2]] for one in (version, OLDEST)]
        if numbers[0] < numbers[1]:
            raise ImportError(f"{version} is installed")
        return import_module(f"transformers.{name}")
    except ImportError as error:
        raise ConfigError(
            f"this requires Hugging Face transformers, version {OLDEST} or newer: "
            f"pip install 'transformers>={OLDEST}' ({error})"
        ) from None


def cache_argument(model: nn.Module) -> str:
    """The argument of the model's calls that takes the KV cache: `cache` since transformers 5.24, before that
    `past_key_values`, which then warns."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


_INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def calls_interface(module: nn.Module) -> bool:
    """Whether a module looks up its attention function in transformers' `AttentionInterface`."""
    return _calls_interface(type(module).forward)


@cache
def _calls_interface(forward: Any) -> bool:
    names = getattr(getattr(inspect.unwrap(forward), "__code__", None), "co_names", ())
    # The interface is a mapping: modules that use getattr find no entry of it, and keep their own function.
    return _INTERFACE in names and ("get_interface" in names or "getattr" not in names)


def left_out(model: nn.Module, known: Collection[str]) -> dict[str, str]:
    """Modules that are attention by name, have weights, and neither contain nor belong to known ones: name → class."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = type(module)
        attention = any(part in kind.__name__.lower() for part in ("attention", "attn"))
        if (
            not attention
            or kind.__module__.startswith("headwise.models.adapters.")
            or next(module.parameters(), None) is None
        ):
            continue
        if not any(other == name or _within(name, other) or _within(other, name) for other in (*known, *found)):
            found[name] = kind.__name__
    return found


def _within(name: str, other: str) -> bool:
    return other == "" or name.startswith(f"{other}.")


class Position(NamedTuple):
    """Where the queries and keys of a call are."""

    at_end: bool | None  # whether the queries are the last of the keys' tokens
    keys: int  # how many keys there are; later ones are unfilled entries of a cache of fixed size
    first: int | None = 0  # the token of the first key, as a cache with a window drops tokens; None if it is not known


def position_of(module: nn.Module, allowed: Tensor | None, n: int, m: int, window: int | None, given: Any) -> Position:
    """The position of a call whose mask is not transformers' own, or that has none. allowed: boolean [b or 1, h or 1, n
    or 1, m], None for all. window: of the attention, and so of its cache. given: other arguments of the call."""
    if n >= m or crosses(module) or (allowed is not None and (in_graph() or has_no_numbers(allowed))):
        return Position(None, m)
    if allowed is None:
        at_end, keys = (True if n == 1 and getattr(module, "is_causal", False) else None), m
    else:
        at_end, keys = _placed(allowed, n, m)
    return Position(at_end, keys, 0 if at_end is None else _first(module, n, keys, window, given))


def crosses(module: nn.Module) -> bool:
    """Whether a module attends to another sequence, as far as its class and attributes show."""
    return getattr(module, "is_cross_attention", False) or "cross" in type(module).__name__.lower()


def _placed(allowed: Tensor, n: int, m: int) -> tuple[bool | None, int]:
    """`Position.at_end` and `Position.keys` of queries that each may attend to one key more than the one before."""
    if n > 1 and (allowed.shape[2] == 1 or bool((allowed == allowed[:, :, :1]).all())):
        return None, m  # only padding
    seen = allowed.flatten(0, 1).any(0)
    last = (seen * torch.arange(1, m + 1, device=seen.device)).amax(-1)  # keys up to the last one that is allowed
    stop = int(last[-1])
    if stop < n or not torch.equal(last, torch.arange(stop - n + 1, stop + 1, device=seen.device)):
        return False, m
    return True, stop


def _first(module: nn.Module, n: int, keys: int, window: int | None, given: Any) -> int | None:
    """The token of the first key: a cache keeps at least window − 1 tokens before the queries."""
    window = getattr(getattr(module, "config", None), "attention_chunk_size", None) if window is None else window
    if window is None or keys - n < window - 1:
        return 0
    at = given.get("cache_position")
    return None if at is None else int(at[-1]) + 1 - keys
