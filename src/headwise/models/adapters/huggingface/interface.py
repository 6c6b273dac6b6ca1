"""Which modules of a transformers model use its attention interface, and which compute attention themselves."""

import inspect
from collections.abc import Collection

from torch import nn

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def calls_interface(module: nn.Module) -> bool:
    """Whether a module looks up its attention function in transformers' `AttentionInterface`."""
    names = getattr(getattr(inspect.unwrap(type(module).forward), "__code__", None), "co_names", ())
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
