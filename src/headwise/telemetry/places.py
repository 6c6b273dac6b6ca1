"""Where the attention of a model can be watched, and who computes it while it is."""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from headwise.errors import ConfigError
from headwise.models.adapters.huggingface import restore
from headwise.models.adapters.huggingface.interface import calls_interface, left_out
from headwise.models.adapters.huggingface.switching import turn, unswitched
from headwise.models.adapters.torch import MultiheadAttention, swap, swap_back
from headwise.nn.base import AttentionLayer

_KNOWN = "headwise's own layers, nn.MultiheadAttention, and models of transformers"


@dataclass(frozen=True)
class Place:
    """An attention module that can be watched.

    Attributes:
        name: its qualified name.
        kind: "headwise", "torch" or "transformers".
    """

    name: str
    module: nn.Module
    kind: str


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
    places, targets, unwatched = _find(model)
    if silent is not None:
        unwatched |= {place.name: why for place in places if (why := silent(place.module))}
    places = [place for place in places if place.name not in unwatched]
    if not places:
        raise _nothing_found(model, caller, unwatched)
    chosen = _select(places, layers)
    modules = {place.module for place in chosen}
    needed = [target for target in targets if any(part in modules for part in target.modules())]
    return chosen, needed, unwatched


def _find(model: nn.Module) -> tuple[list[Place], list[nn.Module], dict[str, str]]:
    """All that can be watched, and the rest as in `asked`."""
    roots, refused = _transformers_models(model)
    places: list[Place] = []
    unwatched = dict(refused)
    inside = {module: root for root in roots for module in root.modules()}
    for name, module in model.named_modules():
        kind = _kind(module, inside)
        if kind is not None:
            places.append(Place(name, module, kind))
        elif isinstance(module, nn.MultiheadAttention):
            unwatched[name] = f"{type(module).__name__} does more than nn.MultiheadAttention, whose place it takes"
    for name, class_name in left_out(model, [*(place.name for place in places), *unwatched]).items():
        unwatched[name] = f"{class_name} computes its attention by itself; known are {_KNOWN}"
    targets = [*roots, *(place.module for place in places if place.kind == "torch")]
    return places, targets, unwatched


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


# How many records need headwise to compute a module, and the modules that the first of them had to turn over.
_users: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()
_turned: "WeakKeyDictionary[nn.Module, bool]" = WeakKeyDictionary()


def take_over(targets: list[nn.Module]) -> None:
    """Let headwise compute these until as many calls of `give_back`."""
    for target in targets:
        if not _users.get(target) and not _ours(target):
            (swap if isinstance(target, nn.MultiheadAttention) else turn)(target)
            _turned[target] = True
        _users[target] = _users.get(target, 0) + 1


def give_back(targets: list[nn.Module]) -> None:
    """Put back what computed them before, unless another record still needs it, or the user had them so."""
    for target in targets:
        _users[target] -= 1
        if not _users[target]:
            del _users[target]
            if _turned.pop(target, False):
                (swap_back if isinstance(target, nn.MultiheadAttention) else restore)(target)


def _ours(target: Any) -> bool:
    if isinstance(target, nn.MultiheadAttention):
        return isinstance(target, MultiheadAttention)
    return bool(target.config._attn_implementation == "headwise")


def _kind(module: nn.Module, inside: dict[nn.Module, nn.Module]) -> str | None:
    if isinstance(module, AttentionLayer):
        return "headwise"
    if type(module) is nn.MultiheadAttention or isinstance(module, MultiheadAttention):
        return "torch"
    return "transformers" if module in inside and calls_interface(module) else None


def _transformers_models(model: nn.Module) -> tuple[list[nn.Module], dict[str, str]]:
    """The outermost models of transformers that headwise can compute, and why not the others."""
    if "transformers" not in sys.modules:
        return [], {}  # then the model is none of its
    from transformers import PreTrainedModel

    roots: list[nn.Module] = []
    refused: dict[str, str] = {}
    below: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module not in below:
            below |= set(module.modules())
            if not any(map(calls_interface, module.modules())) and not unswitched(module):
                continue  # there is no attention in it
            try:
                if not _ours(module):
                    restore(turn(module))
                roots.append(module)
            except ConfigError as error:
                refused[name] = str(error)
    return roots, refused


def _nothing_found(model: nn.Module, caller: str, unwatched: dict[str, str]) -> ConfigError:
    """For a model of which nothing can be watched."""
    why = "".join(f"; {name or 'the model'}: {reason}" for name, reason in _first(unwatched.items()))
    return ConfigError(f"{caller}(model): {type(model).__name__} has no attention that can be watched ({_KNOWN}){why}")


def _first(items: Iterable[Any]) -> Iterator[Any]:
    yield from list(items)[:4]
