"""Sites and heads of a model, by name or by number in `find_heads`."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from headwise.errors import ConfigError, whole_number
from headwise.models import HeadSite

Value = TypeVar("Value")


def by_site(argument: str, sites: Sequence[HeadSite], given: Mapping[str | int, Value]) -> dict[int, Value]:
    """Return the values by the number of their site; ConfigError for a site that does not exist or is given twice."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{argument}: expected a mapping from sites, by name or by number, got {given!r}")
    names = [site.name for site in sites]
    found: dict[int, Value] = {}
    for key, value in given.items():
        number = whole_number(key)
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
