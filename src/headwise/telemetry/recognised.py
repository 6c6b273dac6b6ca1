"""The record of a model that headwise has no adapter for, or only for some of its modules: the attention of the others
is recognised while they run."""

from functools import partial
from typing import Any, TypeVar

from torch import nn

from headwise.errors import warn
from headwise.models.recognise.publisher import not_followed, nothing
from headwise.models.recognise.tracked import Tracked
from headwise.telemetry.chosen import Chosen, Options
from headwise.telemetry.following import Follower
from headwise.telemetry.record import Record

Self = TypeVar("Self", bound="RecognisedRecord")


class RecognisedRecord(Record):
    """A `Record` whose layers are those that headwise computes, and the modules in which attention was recognised so
    far, in the order of the calls.

    Those modules compute everything as without it. `unwatched` names what came close to attention in the last measured
    forward, with the reason and the line of the code. If headwise computes all that a first measured forward has,
    nothing is followed from then on.
    """

    def __init__(self, model: nn.Module, what: Chosen, how: Options) -> None:
        self._left: dict[str, str] | None = None
        super().__init__(model, [*what.known, *what.rest], what.targets, dict(what.unwatched), how)
        self.layers = tuple(place.name for place in what.known)
        self._what, self._follows = what, True
        self._follower = Follower(model, what, "watch")
        self._measured: Tracked | None = None  # of the last forward that was measured

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
            self._left = {**left, **given, **self._uncomputed}
        return self._left

    @unwatched.setter
    def unwatched(self, left: dict[str, str]) -> None:
        self._left = left

    def modules(self) -> dict[str, nn.Module]:
        """name → attention module of every layer so far."""
        named = super().modules()
        return {name: named[name] for name in self.layers}

    def start(self: Self, step: int | None = None) -> Self:
        """As in `Record`."""
        active = self.active
        super().start(step)
        if not active:
            self._handles += self._follower.hooks(RecognisedRecord._before, RecognisedRecord._after)
        return self

    def _before(self, module: nn.Module, args: Any) -> None:
        self._follower.before(partial(self._enter, module))

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        self._follower.after(partial(self._leave, module, result))

    def _begin_here(self) -> bool:
        if not self._follows or self._follower.stays:
            return False
        self._follower.follow()
        return True

    def _end_forward(self, keep: bool) -> None:
        if keep and self._open and self._follower.seen is not None:
            new = [name for name in self._forward.layers if name not in self.layers]
            if new:
                self.layers = (*self.layers, *new)
            self._left, self._measured = None, self._follower.seen
            if (known := self._what.known) and not (self.unwatched or set(self.layers) - {one.name for one in known}):
                self._follows = False
        super()._end_forward(keep)

    def _end_here(self) -> None:
        super()._end_here()
        self._follower.close()

    def _check(self, module: nn.Module, result: Any) -> None:
        if module is self.model and not self.layers and result is not None:
            seen = self._follower.seen
            assert seen is not None
            if any(one.nonfinite for one in seen.softmaxes):
                return  # `unwatched` lists it, and it may be watched later
            error = nothing(self.model, seen, "watch")
            if self._how.during != "training" or self._how.on_error == "raise":
                raise error
            warn(str(error))
