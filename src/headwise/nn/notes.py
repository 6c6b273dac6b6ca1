"""Descriptions of designs for documentation and reports, in English and Chinese; and presets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headwise.errors import ConfigError


class Words(NamedTuple):
    """One sentence in both languages."""

    en: str
    zh: str


@dataclass(frozen=True, kw_only=True)
class Notes:
    """The description of a design. Every field is required.

    Letters in formulas: d = d_model, h heads, h_kv KV heads, d_k and d_v sizes of a key and a value; "MHA" is the
    standard layer with the same sizes.

    summary: what it is, in one line. use: when to use it. source: the paper.
    parameters: their number, without biases and norms. work: multiply-adds compared with MHA. cache: numbers per token.
    limits: what it does not support besides `takes_none_as`, and why.
    map: what its attention map does not show; None if only the weights of the map act on the values.
    compared: how `headwise plan designs` counts it, if that needs a remark; else None.
    form_of: the design that computes the same function, if it is another form of one; else None.
    """

    summary: Words
    use: Words
    source: str
    parameters: str
    work: str
    cache: str
    limits: Mapping[str, str]
    map: Words | None
    compared: Words | None
    form_of: str | None

    def __post_init__(self) -> None:
        """ConfigError for a field that is empty or of another type."""
        for name, (kind, expected) in _REQUIRED.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (kind is not Mapping and not (value and all(value))):
                raise ConfigError(f"Notes: {name}={value!r}: expected {expected}")


_REQUIRED: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("summary", "use"), (Words, "Words(en, zh), one sentence in both languages")),
    **dict.fromkeys(("source", "parameters", "work", "cache"), (str, "a few words")),
    "limits": (Mapping, "a mapping, {} where there are none"),
}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Another name of a design, with values of some of its options.

    summary: what it is, in one line, with its source. given: the values of options. instead: the name to use for other
    values of these options. needs: options that it requires, each with its meaning.
    """

    name: str
    summary: Words
    given: Mapping[str, Any] = field(default_factory=dict)
    instead: str = ""
    needs: Mapping[str, str] = field(default_factory=dict)
