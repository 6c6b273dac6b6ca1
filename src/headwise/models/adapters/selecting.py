"""The places of a model that a caller names."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from headwise.errors import ConfigError
from headwise.models.adapters.places import Place, find, nothing_found


def select(
    model: nn.Module,
    layers: Iterable[int | str] | int | str | None,
    caller: str,
    unsupported: Callable[[nn.Module], str] | None = None,
    *,
    done: str = "watched",
    way_out: str = "",
) -> tuple[list[Place], list[nn.Module], dict[str, str]]:
    """The modules of a model that are named, in the order of registration; the modules whose attention
    headwise must compute for that (for `take_over`); and name → why a module is not supported.

    Args:
        layers: names of attention modules (`*` matches anything) or their indices; None for all.
        caller: the function that was called, for errors. unsupported: why it does not support a module, or "".
        done: what it does to modules, for errors. way_out: as `nothing_found` takes it.
    Raises:
        ConfigError: naming the argument, or the modules, if none can be watched.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{caller}(model): expected an nn.Module, got {type(model).__name__}")
    places, targets, unwatched = find(model)
    if unsupported is not None:
        unwatched |= {place.name: why for place in places if (why := unsupported(place.module))}
    places = [place for place in places if place.name not in unwatched]
    if not places:
        raise nothing_found(model, caller, done, unwatched, way_out)
    chosen = named(places, layers)
    modules = {place.module for place in chosen}
    needed = [target for target in targets if any(part in modules for part in target.modules())]
    return chosen, needed, unwatched


def named(places: list[Place], layers: Iterable[int | str] | int | str | None) -> list[Place]:
    """The places with these indices or names."""
    if layers is None:
        return places
    wanted: list[Any] = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else [layers]
    if not wanted or any(isinstance(one, bool) or not isinstance(one, int | str) for one in wanted):
        raise ConfigError(f"layers={layers!r}: expected names of attention modules or their indices; None for all")
    chosen: set[str] = set()
    for one in wanted:
        found = _found(places, one)
        if not found:
            names = ", ".join(place.name or "(the model)" for place in places[:6]) + ", …" * (len(places) > 6)
            raise ConfigError(f"layers={one!r}: no such layer among the {len(places)} that can be watched: {names}")
        chosen |= {place.name for place in found}
    return [place for place in places if place.name in chosen]


def _found(places: list[Place], wanted: int | str) -> list[Place]:
    if isinstance(wanted, int):
        return [places[wanted]] if -len(places) <= wanted < len(places) else []
    return [place for place in places if fnmatchcase(place.name, wanted)]
