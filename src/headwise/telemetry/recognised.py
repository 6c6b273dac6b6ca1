"""The record of a model that headwise has no adapter for: its attention is recognised while it runs."""

from collections.abc import Iterable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from headwise.errors import ConfigError
from headwise.kernels.eager import eager
from headwise.models.adapters.places import Place
from headwise.models.recognise.publisher import recognising
from headwise.models.recognise.recogniser import not_followed, nothing
from headwise.models.recognise.tracked import Tracked
from headwise.telemetry.options import Options
from headwise.telemetry.record import Record


class RecognisedRecord(Record):
    """A `Record` whose layers are the modules in which attention was recognised so far, in the order of the calls.

    Its model computes everything as without it. `unwatched` names what came close to attention in the last measured
    forward, with the reason.
    """

    def __init__(self, model: nn.Module, layers: Iterable[int | str] | None, how: Options) -> None:
        self._modules = {module: name for name, module in model.named_modules()}
        super().__init__(model, _chosen(model, layers), [], {}, how)
        self.layers = ()
        self._recognising = ExitStack()
        self._tracked: Tracked | None = None

    def modules(self) -> dict[str, nn.Module]:
        """name → attention module of every layer so far."""
        named = super().modules()
        return {name: named[name] for name in self.layers}

    def _begin_forward(self) -> None:
        super()._begin_forward()
        self._tracked = self._recognising.enter_context(recognising(self._modules))

    def _end_forward(self, keep: bool) -> None:
        self._recognising.close()
        if keep and self._open:
            self.layers = tuple(dict.fromkeys((*self.layers, *self._forward.layers)))
            if self._tracked is not None:
                self.unwatched = {one.name: one.reason for one in not_followed(self._tracked)}
        super()._end_forward(keep)

    @eager
    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        measured = self._open
        super()._after(module, args, result)
        if measured and not self._open and module is self.model and not self.layers and result is not None:
            assert self._tracked is not None
            raise nothing(self.model, self._tracked, "watch")


def _chosen(model: nn.Module, layers: Iterable[int | str] | None) -> list[Place]:
    """The modules of these names."""
    places = [Place(name, module, "recognised") for name, module in model.named_modules()]
    if layers is None:
        return places
    wanted = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else [layers]
    if not all(isinstance(one, str) for one in wanted):
        raise ConfigError(
            f"layers={layers!r}: the attention of {type(model).__name__} is recognised while it runs, so its layers "
            f"have no indices; give names of modules"
        )
    chosen = [place for place in places if any(fnmatchcase(place.name, str(one)) for one in wanted)]
    if not chosen:
        raise ConfigError(f"layers={layers!r}: {type(model).__name__} has no module of that name")
    return chosen
