"""What is watched, and how: the options of `watch`; modules that headwise computes, and those that are recognised."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from headwise.errors import ConfigError, check_choice
from headwise.models.adapters.places import Layers, Named, find, listed, matching, select
from headwise.models.recognise.following import compiled_parts
from headwise.stats import Measure, resolve, shown_in
from headwise.telemetry.alarms import Alarm

_CHOICES = {
    "maps": ("none", "lazy", "pooled"),
    "steps": ("forward", "manual"),
    "during": ("always", "training", "evaluation"),
    "on_error": ("warn", "raise"),
}


@dataclass(frozen=True)
class Options:
    """The arguments of `watch`, except for the model and its layers."""

    names: tuple[str, ...]  # of the measures, in the order of `measures`
    measures: tuple[Measure, ...]
    every: int
    heads: tuple[int, ...] | None
    maps: str
    values: bool
    history: int
    steps: str
    during: str
    alarms: tuple[Alarm, ...]
    on_error: str
    differentiable: bool


def options(
    *, measures: Sequence[str | Measure] | None, every: int, heads: Sequence[int] | None, maps: str, values: bool,
    history: int, steps: str, during: str, alarms: Sequence[Alarm], on_error: str, differentiable: bool,
) -> Options:  # fmt: skip
    """The validated options; raises a ConfigError that names the invalid one."""
    for name, value in (("maps", maps), ("steps", steps), ("during", during), ("on_error", on_error)):
        check_choice(name, value, _CHOICES[name])
    for name, number in (("every", every), ("history", history)):
        if type(number) is not int or number < 1:
            raise ConfigError(f"{name}={number!r}: expected an integer of at least 1")
    if type(differentiable) is not bool or (differentiable and maps == "pooled"):
        raise ConfigError(
            f"differentiable={differentiable!r} with maps={maps!r}: expected True or False; pictures have no gradients"
        )
    maps = "lazy" if differentiable else maps
    if type(values) is not bool or (values and maps != "lazy"):
        raise ConfigError(
            f"values={values!r} with maps={maps!r}: expected True or False; values=True needs maps='lazy'"
        )
    chosen = None if heads is None else tuple(heads)
    if chosen is not None and (
        not chosen or len(set(chosen)) < len(chosen) or any(type(head) is not int or head < 0 for head in chosen)
    ):
        raise ConfigError(f"heads={heads!r}: expected head numbers from 0 on, each once; None for all")
    for alarm in alarms:
        if not isinstance(alarm, Alarm):
            raise ConfigError(f"alarms: expected alarms such as MaxLogitAlarm(100.0), got {type(alarm).__name__}")
    if measures is None:
        measures = shown_in("watch")
    asked = [measures] if isinstance(measures, str | Measure) else list(measures)
    known = [one.name if isinstance(one, Measure) else one for one in asked]
    asked += [name for name in dict.fromkeys(name for alarm in alarms for name in alarm.needs) if name not in known]
    if not asked:
        raise ConfigError("measures=(): give at least one; `headwise measures` lists them")
    found = tuple(resolve(asked))
    names = tuple(measure.name for measure in found)
    return Options(
        names, found, every, chosen, maps, values, history, steps, during, tuple(alarms), on_error, differentiable
    )


_WRITTEN_ELSEWHERE = ("torch", "headwise", "transformers")  # packages whose attention is found without running it


@dataclass(frozen=True)
class Chosen:
    """What of a model is watched."""

    known: Named  # modules whose attention headwise computes
    targets: list[nn.Module]  # as `select` returns them
    unwatched: dict[str, str]  # as `select` returns it
    rest: Named  # modules in which attention is recognised
    aside: frozenset[nn.Module]  # those in which it is not, as headwise computes it


def chosen(model: nn.Module, layers: Layers, caller: str, unsupported: Any = None) -> Chosen:
    """The modules of these names or indices, which count those with an adapter (ConfigError); None for all."""
    wanted = [] if layers is None else listed(layers)
    if not isinstance(model, nn.Module) or any(isinstance(x, bool) or not isinstance(x, int | str) for x in wanted):
        return Chosen(*select(model, layers, caller, unsupported), {}, frozenset())  # which raises
    places, _, unwatched = find(model)
    aside = frozenset(part for module in places.values() for part in module.modules())
    others = {name: module for name, module in model.named_modules() if module not in aside}
    if not places:
        return Chosen({}, [], {}, _named(model, others, layers), aside)
    more = others if may_have_more(others, unwatched) else {}
    reasons = {name: why for name, one in places.items() if unsupported is not None and (why := unsupported(one))}
    none = len(reasons) == len(places)  # select raises if headwise computes nothing that is supported
    if layers is None and more and none:
        return Chosen({}, [], unwatched | reasons, more, aside)
    if layers is None or not more:
        return Chosen(*select(model, layers, caller, unsupported), more, aside)
    of_known = [one for one in wanted if isinstance(one, int) or matching(places, [one])]
    of_others = [one for one in wanted if isinstance(one, str) and matching(others, [one])]
    if missing := set(wanted) - {*of_known, *of_others}:
        select(model, [one for one in wanted if one in missing], caller, unsupported)  # which raises
    rest = matching(others, of_others)
    if not of_known or (none and set(of_known) <= set(of_others)):
        return Chosen({}, [], unwatched | reasons, rest, aside)
    return Chosen(*select(model, of_known, caller, unsupported), rest, aside)


def may_have_more(others: Named, unwatched: dict[str, str]) -> bool:
    """Whether modules beside the known ones may compute attention: some of no known package, in no compiled model."""
    if compiled_parts(others.items()):
        return False
    kinds = {type(module).__module__.partition(".")[0] for module in others.values()}
    return bool(unwatched) or not kinds <= set(_WRITTEN_ELSEWHERE)


def _named(model: nn.Module, places: Named, layers: Layers) -> Named:
    """The modules of these names, in a model without any that headwise has an adapter for."""
    if layers is None:
        return places
    wanted = listed(layers)
    if not all(isinstance(one, str) for one in wanted):
        raise ConfigError(
            f"layers={layers!r}: the attention of {type(model).__name__} is recognised while it runs, so its layers "
            f"have no indices; give names of modules"
        )
    found = matching(places, wanted)
    if not found:
        raise ConfigError(f"layers={layers!r}: {type(model).__name__} has no module of that name")
    return found
