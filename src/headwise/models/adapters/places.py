"""The attention modules of a model that headwise can compute, selecting and converting them."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.utils.hooks import RemovableHandle

from headwise.errors import ConfigError
from headwise.kernels.events import here, in_backward, unproven
from headwise.kernels.graph import in_graph
from headwise.models.adapters import huggingface, torch
from headwise.models.adapters.huggingface.library import calls_interface, left_out
from headwise.models.adapters.torch import MultiheadAttention
from headwise.models.hooks import Hook
from headwise.nn.base import AttentionLayer

KNOWN = "headwise's own layers, nn.MultiheadAttention, and models of transformers"


Named = dict[str, nn.Module]  # attention modules by qualified name, in the order of registration
Layers = Iterable[int | str] | int | str | None


def find(model: nn.Module) -> tuple[Named, list[nn.Module], dict[str, str]]:
    """The attention modules that headwise computes or can compute; the modules to convert for that (for `take_over`);
    and name → why a module cannot be computed."""
    targets: list[nn.Module] = []  # at first the outermost models of transformers that headwise can compute
    unwatched: dict[str, str] = {}
    below: set[nn.Module] = set()
    for name, module in model.named_modules():
        if of_transformers(module) and module not in below:
            below |= set(module.modules())
            if not any(map(calls_interface, module.modules())) and not huggingface.left(module):
                continue  # there is no attention in it
            if not _ours(module) and (why := huggingface.refusal(module)):
                unwatched[name] = why
            else:
                targets.append(module)
    places: Named = {}
    inside = {module for root in targets for module in root.modules()}
    for name, module in model.named_modules():
        if type(module) is nn.MultiheadAttention or isinstance(module, MultiheadAttention):
            places[name] = module
            targets.append(module)
        elif isinstance(module, AttentionLayer) or (module in inside and calls_interface(module)):
            places[name] = module
        elif isinstance(module, nn.MultiheadAttention):
            unwatched[name] = f"{type(module).__name__} does more than nn.MultiheadAttention, whose place it takes"
    for name, class_name in left_out(model, [*places, *unwatched]).items():
        unwatched[name] = f"{class_name} computes its attention by itself"
    return places, targets, unwatched


# The number of handles and records that need a module converted, and the modules converted for them.
_users: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()
_converted: "WeakSet[nn.Module]" = WeakSet()


def take_over(targets: Sequence[nn.Module], *, adopt: bool = False) -> None:
    """Convert modules to headwise until as many calls of `give_back`. adopt: treat copies of converted modules as
    converted now, so that `give_back` restores what computed the originals."""
    for i, target in enumerate(targets):
        family = _family(target)
        if not _users.get(target):
            if not _ours(target):
                try:
                    family.convert(target)
                except BaseException:
                    give_back(targets[:i])
                    raise
                _converted.add(target)
            elif adopt and family.was_converted(target):
                _converted.add(target)
        _users[target] = _users.get(target, 0) + 1


def give_back(targets: Sequence[nn.Module]) -> None:
    """Restore modules that no other handle or record needs, unless the user converted them."""
    for target in targets:
        _users[target] -= 1
        if not _users[target]:
            del _users[target]
            if target in _converted:
                _converted.discard(target)
                _family(target).restore(target)


def proven(
    places: Named, failed: Callable[[str, str], Any], when: Callable[[], bool] = lambda: True
) -> list[RemovableHandle]:
    """Compare the first call of each module with what was said of it: failed(name, why) unless headwise computes its
    attention there. Calls that are compiled, and those where `when()` is false, are not compared."""
    handles: dict[str, list[RemovableHandle]] = {}

    def compared() -> bool:
        return not (in_graph() or in_backward() or here().own_code) and when()

    def begin(module: nn.Module, args: Any) -> None:
        if compared():
            unproven.add(module)

    def end(name: str, module: nn.Module, args: Any, result: Any) -> None:
        if not compared():
            return
        for handle in handles[name]:
            handle.remove()
        if module in unproven:  # it stays there for other handles and records, until a call is computed
            changed = (
                "its forward was replaced on the instance" if "forward" in vars(module) else "its class computes it"
            )
            failed(name, f"{type(module).__name__} was called, and headwise did not compute its attention: {changed}")

    for name, module in places.items():
        handles[name] = [
            module.register_forward_pre_hook(Hook(begin)),
            module.register_forward_hook(Hook(partial(end, name)), prepend=True),
        ]
    return [handle for pair in handles.values() for handle in pair]


def computed(module: nn.Module) -> bool:
    """Whether headwise computes the attention of a module: its own layers, and converted modules."""
    if isinstance(module, AttentionLayer | MultiheadAttention):
        return True
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return implementation == huggingface.NAME and calls_interface(module)


def _family(target: nn.Module) -> Any:
    return torch if isinstance(target, nn.MultiheadAttention) else huggingface


def taken_anew(target: nn.Module) -> bool:
    """Whether `take_over(adopt=True)` would change or adopt it."""
    return not _ours(target) or _family(target).was_converted(target)


def _ours(target: Any) -> bool:
    if isinstance(target, nn.MultiheadAttention):
        return isinstance(target, MultiheadAttention)
    return bool(target.config._attn_implementation == "headwise")


def of_transformers(module: nn.Module) -> bool:
    """Whether a module is a model of transformers."""
    return "transformers" in sys.modules and isinstance(module, sys.modules["transformers"].PreTrainedModel)


def nothing_found(model: nn.Module, caller: str, done: str, refused: Mapping[str, str], way_out: str) -> ConfigError:
    """The error of `caller` for a model without a module that can be `done`. refused: name → why a module cannot be.
    way_out: what to write for attention of other kinds."""
    why = "".join(f"; {name or 'the model'}: {reason}" for name, reason in islice(refused.items(), 4))
    more = f"; and {len(refused) - 4} more" if len(refused) > 4 else ""
    out = f". Attention that is written by hand is recognised on a batch: {way_out}" if way_out else ""
    return ConfigError(
        f"{caller}(model): {type(model).__name__} has no attention that can be {done} ({KNOWN}){why}{more}{out}"
    )


def select(
    model: nn.Module,
    layers: Layers,
    caller: str,  # the function that was called, for errors
    unsupported: Callable[[nn.Module], str] | None = None,  # why it does not support a module, or ""
    *,
    done: str = "watched",  # what it does to modules, for errors
    way_out: str = "",  # as `nothing_found` takes it
) -> tuple[Named, list[nn.Module], dict[str, str]]:
    """The modules with these names or indices (None: all), what to `take_over` for them, and name → why a module is not
    supported; ConfigError naming the argument, or the modules, if there is none."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{caller}(model): expected an nn.Module, got {type(model).__name__}")
    places, targets, unwatched = find(model)
    if unsupported is not None:
        unwatched |= {name: why for name, module in places.items() if (why := unsupported(module))}
    places = {name: module for name, module in places.items() if name not in unwatched}
    if not places:
        raise nothing_found(model, caller, done, unwatched, way_out)
    chosen = named(places, layers)
    modules = {*chosen.values()}
    needed = [target for target in targets if any(part in modules for part in target.modules())]
    return chosen, needed, unwatched


def listed(layers: Layers) -> list[Any]:
    """What is given as `layers`."""
    return list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else [layers]


def matching(places: Named, patterns: Iterable[str]) -> Named:
    """Those of which one of these patterns matches the name."""
    return {name: module for name, module in places.items() if any(fnmatchcase(name, one) for one in patterns)}


def named(places: Named, layers: Layers) -> Named:
    """Those with these indices or names."""
    if layers is None:
        return places
    wanted, names = listed(layers), list(places)
    if not wanted or any(isinstance(one, bool) or not isinstance(one, int | str) for one in wanted):
        raise ConfigError(f"layers={layers!r}: expected names of attention modules or their indices; None for all")
    chosen: set[str] = set()
    for one in wanted:
        if isinstance(one, int):
            found = {names[one]} if -len(places) <= one < len(places) else set()
        else:
            found = {*matching(places, [one])}
        if not found:
            first = ", ".join(name or "(the model)" for name in names[:6]) + ", …" * (len(places) > 6)
            raise ConfigError(f"layers={one!r}: no such layer among the {len(places)} that can be watched: {first}")
        chosen |= found
    return {name: module for name, module in places.items() if name in chosen}


def entrances(model: nn.Module, places: Named) -> dict[nn.Module, None]:
    """Where a forward may begin: the model, its children and models of transformers in it, as trainers call parts."""
    watched = {*places.values()}
    parts = [*model.children(), *(part for part in model.modules() if hasattr(part, "set_attn_implementation"))]
    return dict.fromkeys([model, *(part for part in parts if not watched.isdisjoint(part.modules()))])
