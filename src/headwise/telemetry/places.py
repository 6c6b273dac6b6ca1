"""Where the attention of a model can be watched."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from headwise.errors import ConfigError
from headwise.models.adapters.places import Place, find, nothing_found


def asked(
    model: nn.Module,
    layers: Iterable[int | str] | None,
    caller: str,
    silent: Callable[[nn.Module], str] | None = None,
) -> tuple[list[Place], list[nn.Module], dict[str, str]]:
    """What a caller is to watch of a model, in the order of registration; whose attention headwise has to compute for
    that (modules for `take_over`); and what cannot be watched, name → why.

    Args:
        layers: names of attention modules (`*` stands for anything) or their indices; None for all.
        caller: the function that was called, for errors. silent: why it can hear nothing of a module, or "".
    Raises:
        ConfigError: naming the argument, or the modules, if there is nothing that can be watched.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{caller}(model): expected an nn.Module, got {type(model).__name__}")
    places, targets, unwatched = find(model)
    if silent is not None:
        unwatched |= {place.name: why for place in places if (why := silent(place.module))}
    places = [place for place in places if place.name not in unwatched]
    if not places:
        raise nothing_found(model, caller, "watched", unwatched)
    chosen = _select(places, layers)
    modules = {place.module for place in chosen}
    needed = [target for target in targets if any(part in modules for part in target.modules())]
    return chosen, needed, unwatched


def _select(places: list[Place], layers: Iterable[int | str] | None) -> list[Place]:
    """The places of that index or name."""
    if layers is None:
        return places
    wishes: list[Any] = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else [layers]
    if not wishes or any(isinstance(wish, bool) or not isinstance(wish, int | str) for wish in wishes):
        raise ConfigError(f"layers={layers!r}: expected names of attention modules or their indices; None for all")
    chosen: set[str] = set()
    for wanted in wishes:
        found = _matching(places, wanted)
        if not found:
            names = ", ".join(place.name or "(the model)" for place in places[:6]) + ", …" * (len(places) > 6)
            raise ConfigError(f"layers={wanted!r}: no such layer among the {len(places)} that can be watched: {names}")
        chosen |= {place.name for place in found}
    return [place for place in places if place.name in chosen]


def _matching(places: list[Place], wanted: int | str) -> list[Place]:
    from fnmatch import fnmatchcase

    if isinstance(wanted, int):
        return [places[wanted]] if -len(places) <= wanted < len(places) else []
    return [place for place in places if fnmatchcase(place.name, wanted)]


def entrances(model: nn.Module, places: list[Place]) -> dict[nn.Module, None]:
    """Where a forward may begin: the model, its children, and models of transformers within it. Trainers and generation
    call such parts by themselves."""
    watched = {place.module for place in places}
    parts = [*model.children(), *(part for part in model.modules() if hasattr(part, "set_attn_implementation"))]
    return dict.fromkeys([model, *(part for part in parts if not watched.isdisjoint(part.modules()))])
