"""Sites and heads of a model as people name them: by name, or by their number in `find_heads`."""

import operator
from collections.abc import Mapping, Sequence
from typing import TypeVar

from headwise.errors import ConfigError
from headwise.models import HeadSite

Value = TypeVar("Value")


def place(site: HeadSite) -> str:
    """What a site is called in a message or a table."""
    return site.name or type(site.module).__name__


def whole(value: object) -> int | None:
    """A whole number of whatever kind (NumPy's, torch's), as int; None for what is none, and for true and false."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def by_site(argument: str, sites: Sequence[HeadSite], given: Mapping[str | int, Value]) -> dict[int, Value]:
    """The values by the number of their site; ConfigError for a site that is not there, or is given twice."""
    names = [site.name for site in sites]
    found: dict[int, Value] = {}
    for key, value in given.items():
        number = whole(key)
        if isinstance(key, str) and key in names:
            i = names.index(key)
        elif number is not None and 0 <= number < len(sites):
            i = number
        else:
            some = ", ".join(map(repr, names[:3])) + (" …" if len(names) > 3 else "")
            raise ConfigError(f"{argument}: no site {key!r}; expected 0 to {len(sites) - 1}, or a name of {some}")
        if i in found:
            raise ConfigError(f"{argument}: {names[i]!r} is given twice, by its name and by its number {i}")
        found[i] = value
    return found
