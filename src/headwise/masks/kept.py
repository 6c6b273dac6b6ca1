"""Data derived from a mask, cached on it."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Kept(NamedTuple):
    """Data derived from a mask for one size, cached on the mask."""

    size: object
    made: Any


def kept(name: str, make: Callable[[], Any], mask: object, size: object) -> Any:
    """Return `make()`, cached on the mask until it is needed for another size."""
    found = mask.__dict__.get(name)
    if not isinstance(found, Kept) or found.size != size:
        found = Kept(size, make())
        object.__setattr__(mask, name, found)
    return found.made
