"""What documentation and reports say of a design, in English and in Chinese; and designs under other names."""

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
    """What a design says of itself; every field is given, so that none is forgotten.

    Letters of the formulas: d = d_model, h heads, h_kv key and value heads, d_k and d_v sizes of a key and a value;
    "MHA" is the standard layer with the same sizes.

    summary: what it is, in one line. use: when to use it. source: the paper that it is from.
    parameters: how many, without biases and norms. work: multiply-adds beside MHA's. cache: numbers a token.
    limits: what its constructor or its call refuses besides `takes_none_as`, and why.
    map: what its attention map does not show; None where the weights of the map are all that acts on the values.
    compared: how it is counted beside other designs, where `plan --designs` has to say so; None elsewhere.
    form_of: the design whose function it computes in another form; None where it has a function of its own.
    """

    summary: Words
    use: Words
    source: str
    parameters: str
    work: str
    cache: str
    limits: Mapping[str, str]
    map: Words | None
    compared: str | None
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
    """A design under another name, which stands for some of its options.

    summary: what it is, in one line, with its source. given: options that the name stands for, and instead: what to
    use for other values of them. needs: options that it requires, and what each of them is.
    """

    name: str
    summary: Words
    given: Mapping[str, Any] = field(default_factory=dict)
    instead: str = ""
    needs: Mapping[str, str] = field(default_factory=dict)
