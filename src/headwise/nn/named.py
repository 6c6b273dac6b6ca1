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
from headwise.nn.notes import Preset
from headwise.nn.registry import DESIGNS

# What a file and a command line can write; options of other types are for Python alone.
EXPECTED = {
    int: "a whole number", int | None: "a whole number", float: "a number", bool: "true or false", str: "a word",
}  # fmt: skip


def names() -> tuple[str, ...]:
    """All names: each design, and after it those that stand for it with some options given."""
    return tuple(_named())


def design_of(name: str) -> type[AttentionLayer]:
    """The design of that name; ConfigError with the nearest names if there is none."""
    return _found(name)[0]


def preset_of(name: str) -> Preset | None:
    """The options that a name stands for, None for the name of a design itself; ConfigError as `design_of`."""
    return _found(name)[1]


def _found(name: str) -> tuple[type[AttentionLayer], Preset | None]:
    known = _named()
    if name not in known:
        close = get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(known)}"
        raise ConfigError(f"design={name!r}: unknown; {hint}")
    return known[name]


def _named() -> dict[str, tuple[type[AttentionLayer], Preset | None]]:
    found: dict[str, tuple[type[AttentionLayer], Preset | None]] = {}
    for name, design in DESIGNS.items():
        presets: tuple[Preset, ...] = vars(design).get("presets", ())  # those that it inherits are another design's
        found |= {name: (design, None), **{preset.name: (design, preset) for preset in presets}}
    return found


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
    preset = preset_of(name)
    if preset is not None:
        given = _filled(preset, given)
    return design.build(d_model, num_heads, **given)


def _filled(preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options, and those that the name stands for."""
    for option, what in preset.needs.items():
        if given.get(option) is None:
            raise ConfigError(f"{option}: {preset.name} needs it, {what}")
    for option, value in preset.given.items():
        if given.get(option) not in (None, value):
            raise ConfigError(f"{option}={given[option]}: {preset.name} has {value}; see {preset.instead} for more")
    return {**given, **preset.given}


def _parameters(design: type[AttentionLayer]) -> dict[str, inspect.Parameter]:
    """Those of a design's options that it takes from a file or a command line."""
    known = parameters_of(design)
    return {name: p for name, p in known.items() if p.annotation in EXPECTED and name not in design.refused_options}


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
