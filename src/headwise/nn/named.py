"""Head designs as people name them, with options that may come from a file or a command line.

>>> build("gqa", 64, 8, {"num_kv_heads": 2}).num_kv_heads
2
"""

import inspect
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from headwise.errors import ConfigError
from headwise.nn.base import AttentionLayer
from headwise.nn.checks import check_option, parameters_of
from headwise.nn.latent import LatentAttention
from headwise.nn.registry import DESIGNS

# Names that stand for a design with a certain number of key and value heads (None: one that must be given).
GROUPED: dict[str, tuple[str, int | None]] = {"mqa": ("multi_head", 1), "gqa": ("multi_head", None)}
NAMES = (*DESIGNS, *GROUPED)
_UNWRITTEN = frozenset({"offsets", "padding"})  # what no file and no command line can write
EXPECTED = {
    int: "a whole number", int | None: "a whole number", float: "a number", bool: "true or false", str: "a word",
}  # fmt: skip
# Options that a design inherits and refuses, as it has its own way.
_REFUSED: dict[type[AttentionLayer], frozenset[str]] = {LatentAttention: frozenset({"num_kv_heads", "rotary"})}


def design_of(name: str) -> type[AttentionLayer]:
    """The design of that name; ConfigError with the nearest names if there is none."""
    if name not in NAMES:
        close = get_close_matches(name, NAMES, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(NAMES)}"
        raise ConfigError(f"design={name!r}: unknown; {hint}")
    return DESIGNS[GROUPED[name][0] if name in GROUPED else name]


def options_of(name: str) -> dict[str, Any]:
    """The options of a design and their defaults, without `d_model` and `num_heads`."""
    return {option: parameter.default for option, parameter in _parameters(design_of(name)).items()}


def build(name: str, d_model: int, num_heads: int, options: Mapping[str, Any] | None = None) -> AttentionLayer:
    """A design by name; ConfigError for an option that it does not take."""
    design, given = design_of(name), dict(options or {})
    known = _parameters(design)
    for option, value in given.items():
        check_option(name, option, value, known)
        _check_type(option, value, known[option].annotation)
    if name in GROUPED:
        _group(name, given)
    return design.build(d_model, num_heads, **given)


def _group(name: str, given: dict[str, Any]) -> None:
    """Put the number of key and value heads that the name stands for into the options."""
    heads, asked = GROUPED[name][1], given.get("num_kv_heads")
    if heads is None and asked is None:
        raise ConfigError(f"num_kv_heads: {name} needs it, a divisor of num_heads")
    if heads is not None and asked not in (None, heads):
        raise ConfigError(f"num_kv_heads={asked}: {name} has {heads}; see gqa for more")
    given["num_kv_heads"] = heads if asked is None else asked


def _parameters(design: type[AttentionLayer]) -> dict[str, inspect.Parameter]:
    """Those of a design's options that it takes from a file or a command line."""
    apart = _UNWRITTEN | _REFUSED.get(design, frozenset())
    return {option: p for option, p in parameters_of(design).items() if option not in apart}


def _check_type(option: str, value: Any, kind: Any) -> None:
    """Raise for a word where a number should be, and the like."""
    wanted = kind if kind is not float else float | int
    is_flag = isinstance(value, bool) and kind is not bool  # Python's own booleans are numbers too
    if is_flag or not isinstance(value, wanted):
        raise ConfigError(f"{option}={value!r}: expected {EXPECTED[kind]}")


def read_options(assigned: Iterable[str]) -> dict[str, Any]:
    """Options written as NAME=VALUE, as on a command line; values are numbers, true, false, none, or words.

    >>> read_options(["top-k=2", "per=token", "renormalise=true"])
    {'top_k': 2, 'per': 'token', 'renormalise': True}
    """
    found: dict[str, Any] = {}
    for text in assigned:
        name, sign, value = (part.strip() for part in text.partition("="))
        if not (sign and name and value):
            raise ConfigError(f"--set {text!r}: expected NAME=VALUE, for example latent_dim=512")
        found[name.replace("-", "_")] = _value(value)
    return found


def _value(text: str) -> Any:
    words: dict[str, Any] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
