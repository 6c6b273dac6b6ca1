"""Head designs by name, with options from a file or a command line.

>>> build("gqa", 64, 8, {"num_kv_heads": 2}).num_kv_heads
2
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from headwise.errors import ConfigError, unknown_name
from headwise.nn.base import AttentionLayer
from headwise.nn.checks import check_option, parameters_of
from headwise.nn.notes import Preset
from headwise.nn.registry import DESIGNS
from headwise.wording import Bilingual

# Types of options that a file or a command line can give; others are available in Python only.
EXPECTED = {
    int: Bilingual("a whole number", "整数"), int | None: Bilingual("a whole number", "整数"),
    float: Bilingual("a number", "数"), float | None: Bilingual("a number", "数"),
    bool: Bilingual("true or false", "true 或 false"), str: Bilingual("a word", "一个词"),
}  # fmt: skip


def names() -> tuple[str, ...]:
    """Return all names: each design, followed by its presets."""
    return tuple(_named())


def design_of(name: str) -> type[AttentionLayer]:
    """Return the design of this name; ConfigError with the closest names if it is unknown."""
    return _found(name)[0]


def preset_of(name: str) -> Preset | None:
    """Return the preset of this name, or None for the name of a design itself; ConfigError as in `design_of`."""
    return _found(name)[1]


def _found(name: str) -> tuple[type[AttentionLayer], Preset | None]:
    known = _named()
    if name not in known:
        raise unknown_name("design", name, known)
    return known[name]


def _named() -> dict[str, tuple[type[AttentionLayer], Preset | None]]:
    found: dict[str, tuple[type[AttentionLayer], Preset | None]] = {}
    for name, design in DESIGNS.items():
        presets: tuple[Preset, ...] = vars(design).get("presets", ())  # inherited presets belong to another design
        found |= {name: (design, None), **{preset.name: (design, preset) for preset in presets}}
    return found


def options_of(name: str) -> dict[str, Any]:
    """Return the options of a design and their defaults, without `d_model` and `num_heads`."""
    return {option: parameter.default for option, parameter in _parameters(design_of(name)).items()}


def build(name: str, d_model: int, num_heads: int, options: Mapping[str, Any] | None = None) -> AttentionLayer:
    """Build a design by name.

    Args:
        name: of a design or a preset. d_model, num_heads: its sizes. options: its own options, by name.
    Returns:
        The layer.
    Raises:
        ConfigError: for an unknown name, and for an option that the design does not support.
    """
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
    """Return the options with those of the preset."""
    for option, what in preset.needs.items():
        if given.get(option) is None:
            raise ConfigError(
                f"{option}: {preset.name} requires it, {what}", f"{option}：{preset.name} 需要此选项，{what}"
            )
    for option, value in preset.given.items():
        if given.get(option) not in (None, value):
            raise ConfigError(
                f"{option}={given[option]}: {preset.name} has {value}; see {preset.instead} for other values",
                f"{option}={given[option]}：{preset.name} 的值是 {value}；其他值请用 {preset.instead}",
            )
    return {**given, **preset.given}


def _parameters(design: type[AttentionLayer]) -> dict[str, inspect.Parameter]:
    """Return the options that a file or a command line can give."""
    known = parameters_of(design)
    return {name: p for name, p in known.items() if p.annotation in EXPECTED and name not in design.refused_options}


def _check_type(option: str, value: Any, kind: Any) -> None:
    """Raise ConfigError for a value of the wrong type."""
    accepted = kind | int if kind in (float, float | None) else kind
    is_flag = isinstance(value, bool) and kind is not bool  # Python's own booleans are numbers too
    if is_flag or not isinstance(value, accepted):
        raise ConfigError(
            f"{option}={value!r}: expected {EXPECTED[kind]}", f"{option}={value!r}：应为{EXPECTED[kind].zh}"
        )


def read_options(assigned: Iterable[str]) -> dict[str, Any]:
    """Parse options written as NAME=VALUE: numbers, true, false, none, or words. ConfigError for other forms.

    >>> read_options(["top-k=2", "per=token", "renormalise=true"])
    {'top_k': 2, 'per': 'token', 'renormalise': True}
    """
    found: dict[str, Any] = {}
    for text in assigned:
        name, sign, value = (part.strip() for part in text.partition("="))
        if not (sign and name and value):
            raise ConfigError(
                f"--set {text!r}: expected NAME=VALUE, for example latent_dim=512",
                f"--set {text!r}：应为 名称=值，例如 latent_dim=512",
            )
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
