"""The record of a model that headwise has no adapter for, or only for some of its modules: the attention of the others
is recognised while they run."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import nn

from headwise.errors import ConfigError, warn
from headwise.events import in_backward
from headwise.kernels.eager import eager
from headwise.models.adapters.places import Place, find
from headwise.models.adapters.selecting import select
from headwise.models.recognise.compiled import compile_with, compiled_parts, not_in_one_graph, uncompiled
from headwise.models.recognise.publisher import Publisher
from headwise.models.recognise.recogniser import not_followed, nothing
from headwise.models.recognise.tracked import Tracked
from headwise.telemetry.calls import Calls, turn
from headwise.telemetry.options import Options
from headwise.telemetry.places import entrances
from headwise.telemetry.record import Record

Self = TypeVar("Self", bound="RecognisedRecord")
Layers = Iterable[int | str] | int | str | None
_WRITTEN_ELSEWHERE = ("torch", "headwise", "transformers")  # packages whose attention is found without running it


@dataclass(frozen=True)
class Chosen:
    """What of a model is watched.

    Attributes:
        known: the modules whose attention headwise computes. targets, unwatched: as `select` returns them.
        rest: modules in which attention is recognised. aside: those in which it is not, because headwise computes it.
    """

    known: list[Place]
    targets: list[nn.Module]
    unwatched: dict[str, str]
    rest: list[Place]
    aside: frozenset[nn.Module]


def chosen(model: nn.Module, layers: Layers, caller: str, unsupported: Any = None) -> Chosen:
    """The modules of these names or indices, which count those that headwise has an adapter for; None for all.

    Raises:
        ConfigError: naming the argument.
    """
    wanted = _listed(layers)
    if not isinstance(model, nn.Module) or any(isinstance(x, bool) or not isinstance(x, int | str) for x in wanted):
        return Chosen(*select(model, layers, caller, unsupported), [], frozenset())  # which raises
    places, _, unwatched = find(model)
    aside = frozenset(part for place in places for part in place.module.modules())
    named = [(name, module) for name, module in model.named_modules() if module not in aside]
    others = [Place(name, module, "recognised") for name, module in named]
    if not places:
        return Chosen([], [], {}, _named(model, others, layers), aside)
    more = others if may_have_more(others, unwatched) else []
    if layers is None or not more:
        return Chosen(*select(model, layers, caller, unsupported), more, aside)
    of_known = [one for one in wanted if isinstance(one, int) or _matching(places, [one])]
    of_others = [one for one in wanted if isinstance(one, str) and _matching(others, [one])]
    if missing := set(wanted) - {*of_known, *of_others}:
        select(model, [one for one in wanted if one in missing], caller, unsupported)  # which raises
    known, targets, unwatched = select(model, of_known, caller, unsupported) if of_known else ([], [], unwatched)
    return Chosen(known, targets, unwatched, _matching(others, of_others), aside)


class RecognisedRecord(Record):
    """A `Record` whose layers are those that headwise computes, and the modules in which attention was recognised so
    far, in the order of the calls.

    Those modules compute everything as without it. `unwatched` names what came close to attention in the last measured
    forward, with the reason and the line of the code. If headwise computes all that a first measured forward has,
    nothing is followed from then on.
    """

    def __init__(self, model: nn.Module, what: Chosen, how: Options) -> None:
        self._left: dict[str, str] | None = None
        self._modules = {module: name for name, module in model.named_modules()}
        super().__init__(model, [*what.known, *what.rest], what.targets, dict(what.unwatched), how)
        self.layers = tuple(place.name for place in what.known)
        self._what, self._follows = what, True
        self._following = ExitStack()
        self._tracked: Tracked | None = None  # of the last forward, and of the last one that was measured
        self._measured: Tracked | None = None
        self._publisher = Publisher(self._modules, what.aside)
        self._compiled = _Compiled(model, "watch")
        self._callbacks: list[Any] = []  # what compiled code until the forward that is followed
        self._stays = False  # in compiled code, where known layers are seen

    @property
    def unwatched(self) -> dict[str, str]:
        """name → why it was not watched in the last measured forward."""
        if self._left is None:  # found on request: no forward takes the time
            assert self._measured is not None
            left = {one.name: one.reason_and_line for one in not_followed(self._measured)}
            given = {
                name: why for name, why in self._what.unwatched.items()
                if not any(layer == name or layer.startswith(f"{name}.") for layer in self.layers)
            }  # fmt: skip
            self._left = {**left, **given}
        return self._left

    @unwatched.setter
    def unwatched(self, left: dict[str, str]) -> None:
        self._left = left

    def modules(self) -> dict[str, nn.Module]:
        """name → attention module of every layer so far."""
        named = super().modules()
        return {name: named[name] for name in self.layers}

    def start(self: Self) -> Self:
        """Watch from now on, in addition to the numbers so far."""
        if not self.active:
            for hook in (RecognisedRecord._before, RecognisedRecord._after):
                uncompiled(hook)
            super().start()
            self._handles += self._publisher.hooks()
        return self

    def _before(self, module: nn.Module, args: Any) -> None:
        not_in_one_graph("watch")
        callback = compile_with(None)
        self._stays = bool(callback and self._what.known)
        if self._enter(module):
            self._callbacks[:] = [callback]
            self._compiled.warn(callback)
        else:
            compile_with(callback)

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        inside = self._home == get_ident()
        try:
            self._leave(module, result)
        finally:
            if inside and self._home != get_ident() and self._callbacks:
                compile_with(self._callbacks.pop())

    def _begin_here(self) -> bool:
        if not self._follows or self._stays:
            return False
        self._tracked = self._following.enter_context(self._publisher.forward())
        return True

    def _end_forward(self, keep: bool) -> None:
        if keep and self._open and self._tracked is not None:
            new = [name for name in self._forward.layers if name not in self.layers]
            if new:
                self.layers = (*self.layers, *new)
            self._left, self._measured = None, self._tracked
            if (known := self._what.known) and not (self.unwatched or set(self.layers) - {one.name for one in known}):
                self._follows = False
        super()._end_forward(keep)

    def _end_here(self) -> None:
        super()._end_here()
        self._following.close()

    def _check(self, module: nn.Module, result: Any) -> None:
        if module is self.model and not self.layers and result is not None:
            assert self._tracked is not None
            raise nothing(self.model, self._tracked, "watch")


@contextmanager
def recognised_forwards(model: nn.Module, what: Chosen, caller: str) -> Iterator[list[Tracked]]:
    """Within it, attention of the rest is recognised in forwards of a model with gradients.

    Returns:
        A list that holds what was seen in the last forward.
    """
    modules = {module: name for name, module in model.named_modules()}
    gates = entrances(model, [*what.known, *what.rest])
    calls = Calls()
    home: list[int] = []  # the thread in which a forward is followed
    callbacks: list[Any] = []  # what compiled code until the forward that is followed
    seen: list[Tracked] = []
    publisher, following = Publisher(modules, what.aside), ExitStack()
    compiled = _Compiled(model, caller)

    def before(module: nn.Module, args: Any) -> None:
        not_in_one_graph(caller)
        callback = compile_with(None)
        if begin(module, stays=bool(callback and what.known)):  # in compiled code, where known layers are seen
            callbacks[:] = [callback]
            compiled.warn(callback)
        else:
            compile_with(callback)

    @eager
    def begin(module: nn.Module, stays: bool) -> bool:
        if stays or module not in gates or in_backward() or not torch.is_grad_enabled():
            return False
        with turn:
            if not calls.begin(module):
                return False
            if home and home[0] in calls.elsewhere():
                return False
            following.close()  # of a forward that ended without hooks
            home[:] = [get_ident()]
            seen[:] = [following.enter_context(publisher.forward())]
            return True

    def after(module: nn.Module, args: Any, result: Any) -> None:
        if end(module):
            compile_with(callbacks.pop())

    @eager
    def end(module: nn.Module) -> bool:
        with turn:
            if module not in gates or in_backward() or not calls.end(module) or home != [get_ident()]:
                return False
            following.close()
            home.clear()
            return True

    for hook in (before, after):
        uncompiled(hook)
    with ExitStack() as hooks:
        hooks.callback(following.close)
        for handle in publisher.hooks():
            hooks.callback(handle.remove)
        for gate in gates:
            for handle in (
                gate.register_forward_pre_hook(before), gate.register_forward_hook(after, always_call=True),
            ):  # fmt: skip
                hooks.callback(handle.remove)
        yield seen


class _Compiled:
    """Says once that a model that is compiled, or called by compiled code, runs uncompiled."""

    def __init__(self, model: nn.Module, caller: str) -> None:
        parts = compiled_parts(model.named_modules())
        self._name = (parts[0] if parts else "") or type(model).__name__
        self._part, self._caller, self._said = bool(parts), caller, False

    def warn(self, callback: Any) -> None:
        """A forward is followed. `callback` compiled the code until then; None if there is none."""
        if self._said or not (self._part or callback):
            return
        self._said = True
        how = "compiled" if self._part else "called by compiled code"
        more = "; watch(every=…) measures fewer" if self._caller == "watch" else ""
        warn(
            f"{self._caller}(model): {self._name} is {how}. Attention is recognised in the code that was compiled, so "
            f"that in measured forwards it runs uncompiled{more}",
        )


def may_have_more(others: list[Place], unwatched: dict[str, str]) -> bool:
    """Whether modules beside the known ones may compute attention of their own: some that are not of a package whose
    attention is known. Models of which a part is compiled are left to the compiler."""
    if compiled_parts((place.name, place.module) for place in others):
        return False
    kinds = {type(place.module).__module__.partition(".")[0] for place in others}
    return bool(unwatched) or not kinds <= set(_WRITTEN_ELSEWHERE)


def _listed(layers: Layers) -> list[Any]:
    if layers is None:
        return []
    return list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else [layers]


def _matching(places: list[Place], names: list[str]) -> list[Place]:
    return [place for place in places if any(fnmatchcase(place.name, name) for name in names)]


def _named(model: nn.Module, places: list[Place], layers: Layers) -> list[Place]:
    """The modules of these names, in a model without any that headwise has an adapter for."""
    if layers is None:
        return places
    wanted = _listed(layers)
    if not all(isinstance(one, str) for one in wanted):
        raise ConfigError(
            f"layers={layers!r}: the attention of {type(model).__name__} is recognised while it runs, so its layers "
            f"have no indices; give names of modules"
        )
    found = _matching(places, wanted)
    if not found:
        raise ConfigError(f"layers={layers!r}: {type(model).__name__} has no module of that name")
    return found
