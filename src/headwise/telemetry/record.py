"""The record of a model's attention, head by head."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from threading import Lock, get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headwise.base.files import write_text
from headwise.base.run import held_bytes
from headwise.errors import ConfigError, held_warnings, warn
from headwise.kernels.compiling import eager
from headwise.kernels.events import call_name, here, in_backward
from headwise.kernels.graph import has_derivatives, outside_transforms, plain
from headwise.kernels.spread import Held
from headwise.models.adapters.places import entrances, give_back, proven, take_over
from headwise.models.frames import Calls, turn
from headwise.models.hooks import around
from headwise.models.recognise.publisher import FollowedForward, not_followed, nothing
from headwise.models.recognise.tracked import Tracked
from headwise.publishing import AttentionCall, observe
from headwise.rule import own_dtypes
from headwise.table import HeadTable
from headwise.table.show import Shown
from headwise.telemetry.alarms import Alarm, Alarms, Writer, Writers, spoiled
from headwise.telemetry.chosen import Chosen, Options
from headwise.telemetry.ledger import History, Ledger, Merging, Running, Summary, layer_of, unknown_layer
from headwise.telemetry.lens import Maps, Projections, picture
from headwise.telemetry.ranks import Reduced, gathered
from headwise.telemetry.remarks import Remarks

Self = TypeVar("Self", bound="Record")
_seeing = Lock()  # calls may come from several threads


class Record(Shown):
    """Statistics of every watched head, as returned by `watch`; those of a layer are over all of its calls.

    Attributes:
        model: the watched model. layers: names of the watched layers that headwise computes, in the order of
            registration, then those in which attention was recognised so far, in the order of the calls.
        remarks: name → what is unusual in the calls of a layer and how its statistics are to be read, from the last
            measured forward in which there was something to remark.
        maps: name → `AttentionMap` or `Picture` of the last measured forward, in the order of the calls; repeated calls
            of a layer are named name#2, name#3, … TransformerLens's names, blocks.3.attn.hook_pattern, work as well
            (`headwise.telemetry.lens`).
        ledger: the accumulated numbers.
    """

    def __init__(self, model: nn.Module, what: Chosen, how: Options) -> None:
        self._uncomputed: dict[str, str] = {}  # name → why headwise does not compute a layer that it has an adapter for
        self.model, self._what, self._how = model, what, how
        self.layers = tuple(what.known)
        self._follower: FollowedForward | None = None
        if what.rest:
            self._follower = FollowedForward(
                model, what.aside, "watch", known=bool(what.known), begin=self._enter, end=self._leave
            )
        self._follows = True  # until headwise computes all that a first measured forward has
        self._left: dict[str, str] | None = dict(what.unwatched)
        self._measured: Tracked | None = None  # what was seen in the last forward that was measured
        self.maps: Maps = Maps(how.maps)
        self._projections = Projections()
        self._places = what.known | what.rest
        self._entrances = entrances(model, self._places)
        self._writers, self._alarms = Writers(), Alarms(how.alarms)
        self._strict = how.on_error == "raise"
        self._merging = Merging(how.measures, strict=self._strict)
        # Whether each step is summarised as it ends: somebody reads it, or a measure may fail at that.
        self._at_once = bool(how.alarms or self._merging.others)
        self._handles: list[RemovableHandle] = []
        self._observing = ExitStack()
        self._open, self._calls = False, Calls()
        self._home: int | None = None  # the thread in which a forward is followed
        self._joined: set[int] = set()  # threads in which a call began meanwhile
        self._error: BaseException | None = None
        self._forward, self._seen, self._remarks = Running(), Maps(how.maps), Remarks()
        self._warned: set[tuple[str, str]] = set()  # layers, and what is said of them
        self._later: list[str] = []  # warnings for the end of the forward
        self.clear()

    def clear(self) -> None:
        """Discard all numbers, and count steps from 0 again."""
        self.ledger = Ledger(self._how.names, self._how.heads, self._how.history)
        self.remarks: dict[str, str] = {}

    @property
    def unwatched(self) -> dict[str, str]:
        """name → why a module cannot be watched; where attention is recognised, what came close to it in the last
        measured forward, with the reason and the line of the code."""
        if self._left is None:  # found on request: no forward takes the time
            assert self._measured is not None
            left = {one.name: one.reason_and_line for one in not_followed(self._measured)}
            given = {
                name: why for name, why in self._what.unwatched.items()
                if not any(layer == name or layer.startswith(f"{name}.") for layer in self.layers)
            }  # fmt: skip
            self._left = {**left, **given, **self._uncomputed}
        return self._left

    @property
    def active(self) -> bool:
        """Whether it is watching."""
        return bool(self._handles)

    def start(self: Self, step: int | None = None) -> Self:
        """Watch from now on, in addition to the numbers so far.

        Args:
            step: the number of the next step, such as that of the checkpoint from which a run is resumed; None to count
                on from the last one, or from 0.
        Raises:
            ConfigError: if there were later steps already, or the current step has numbers and another number.
        """
        if step is not None:
            self.ledger.begin_at(step)
        if self.active:
            return self
        take_over(self._what.targets)
        if self._how.values:
            self._handles += self._projections.follow(self.model)
        names = tuple(self._what.known)
        self.layers = (*names, *(name for name in self.layers if name not in names))
        self._left = {name: why for name, why in self.unwatched.items() if name not in self._uncomputed}
        self._warned -= {(name, "unwatched") for name in self._uncomputed}
        self._uncomputed = {}
        self._handles += proven(self._what.known, self._not_computed, lambda: self._open)
        if self._follower is not None:
            self._handles += self._follower.hooks(self._entrances)
        else:
            self._handles += [
                handle for entrance in self._entrances for handle in around(entrance, self._before, self._after)
            ]
        return self

    def stop(self) -> None:
        """Stop watching, end the current step, and restore the model: its own attention, no hooks."""
        if not self.active:
            return
        with turn:
            self._end_here()
            self._end_forward(keep=False)
            self._observing.close()
            self._calls.clear()
            self._joined.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        give_back(self._what.targets)
        if self._how.steps == "manual" and self.ledger.pending:
            self.step()
        self._say()

    def __enter__(self: Self) -> Self:
        return self.start()

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        """The record itself while it is active: its forwards are those of its own model."""
        if self.active:
            return self
        made = memo[id(self)] = object.__new__(type(self))
        vars(made).update(deepcopy(vars(self), memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """ConfigError while it is active."""
        if self.active:
            raise ConfigError("the record is active, and has hooks on its model: stop it before you copy or pickle it")
        return vars(self)

    def step(self) -> Summary | None:
        """End a step: the numbers of its forwards become `latest` and enter totals, history, writers and alarms.

        Call it after the optimiser's step if steps="manual"; otherwise each forward calls it.

        Returns:
            The summary, or None if nothing was measured in the step.
        """
        return self.latest if self._end_step() else None

    def _end_step(self) -> bool:
        """`step`; returns whether anything was measured."""
        ended = summary = None
        with self._guarded(""):
            ended = self.ledger.end_step()
            if ended is not None and self._at_once:
                summary = self.ledger.latest
        for name, layer in ended.layers.items() if ended is not None else ():
            for measure, why in layer.unknown.items():
                if why:
                    self._remark(name, f"{measure} is NaN, as it could not be measured: {why}", measure)
        self.remarks |= self._remarks.found()
        if summary is not None:
            self._writers.write(summary)
            self._alarms.check(summary, self.model)
        return ended is not None

    @property
    def latest(self) -> Summary:
        """The last measured step."""
        return self.ledger.latest

    @property
    def totals(self) -> Summary:
        """All measured steps since the first start or `clear`. If a layer had NaN or infinity among its scores, the
        step is counted and excluded from that layer's numbers."""
        return self.ledger.totals

    @property
    def history(self) -> History:
        """The latest measured steps, oldest first; at most `watch(history=…)`."""
        return self.ledger.history

    @property
    def nbytes(self) -> int:
        """Bytes of memory that all numbers and `maps` hold, each tensor's once; independent of the number of steps."""
        self.ledger.fold()
        return held_bytes([self.ledger, self.maps, self.maps.kept_of])

    def table(self) -> HeadTable:
        """The totals as a table of layer, head and statistics."""
        table = self.totals.table
        return table.titled(f"{table.title}; see record.remarks") if self.remarks else table

    def to_dict(self) -> dict[str, Any]:
        """All numbers for JSON: totals, latest, history, watched and unwatched layers, remarks; None for NaN."""
        return {
            "layers": list(self.layers), "unwatched": dict(self.unwatched), "remarks": dict(self.remarks),
            "measures": list(self._how.names),
            "totals": self.totals.to_dict(), "latest": self.latest.to_dict(), "history": self.history.to_dict(),
        }  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict()` as one JSON file, whole or not at all."""
        write_text(path, json.dumps(self.to_dict(), allow_nan=False))

    def write_to(self: Self, writer: Writer) -> Self:
        """Write every measured step from now on; the first failure of a writer is reported as a warning."""
        self._writers.add(writer)
        self._at_once = True
        return self

    def alarm(self: Self, *alarms: Alarm) -> Self:
        """Add alarms. ConfigError if one needs a measure that the record does not have."""
        for one in alarms:
            if missing := [name for name in one.needs if name not in self._how.names]:
                raise ConfigError(
                    f"alarm({type(one).__name__}) needs {', '.join(missing)}; give watch(alarms=…), which adds what is "
                    f"missing, or watch(measures=…)"
                )
        self._alarms.add(alarms)
        self._at_once = True
        return self

    def reduce(self, group: Any = None) -> Reduced:
        """Merge `latest` and `totals` of all ranks of torch.distributed, sums as sums and maxima as maxima; the result
        is the same on each rank, and has all heads of a layer whose heads are split over ranks (`parallelize_heads`,
        and `parallelize_module` of PyTorch).
        All ranks must call it after the same step; the record itself does not change.

        Args:
            group: of processes; None for all.
        Raises:
            ConfigError: if torch.distributed is not initialised, or the ranks have measured different layers, or heads
                that are split in a way that cannot be read.
        """
        last, total = gathered(self.ledger.states, group, self.modules())
        found = ((last, 1), (total, self.ledger.steps))
        return Reduced(self, *(self.ledger.summarise(x, self.latest.step, steps, total) for x, steps in found))

    def modules(self) -> dict[str, nn.Module]:
        """name → attention module of every watched layer; of those so far, where attention is recognised."""
        return dict(self._places) if self._follower is None else {name: self._places[name] for name in self.layers}

    def __repr__(self) -> str:
        left = f", {len(self.unwatched)} that cannot be watched" if self.unwatched else ""
        measured = f"{self.ledger.steps} of {self.ledger.index} steps measured"
        left += f", {len(self.remarks)} with remarks" if self.remarks else ""
        return f"Record({len(self.layers)} layers{left}; {measured}; {'watching' if self.active else 'not watching'})"

    def _before(self, module: nn.Module, args: Any) -> None:
        self._enter(module)

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        self._leave(module, result)

    @eager
    def _enter(self, module: nn.Module) -> bool:
        """A call of the model or a part of it begins. An outermost one begins a forward, unless one is followed in
        another thread, of which it is a part then. Returns whether the follower follows it."""
        if module not in self._entrances or in_backward() or not self.active:
            return False  # a copy of a watched model has the hooks too, and a call that began before `stop` runs them
        with turn:
            if not self._calls.begin(module):
                return False
            others = self._calls.elsewhere()
            if self._home in others:
                self._joined.add(get_ident())
                return False
            self._joined.discard(get_ident())
            self._end_here()  # if it ended without hooks
            if not _parts(others, module):
                self._end_forward(keep=False)
                if self._counts():
                    self._error = sys.exc_info()[1]
                    # Not at the end of a forward but before the next one: gradient checkpointing repeats calls in
                    # between, which must be computed as they were.
                    self._observing.close()
                    if self._how.differentiable:
                        self.maps = Maps(self._how.maps)  # which hold the graph of the last step
                    if self.ledger.index % self._how.every == 0:
                        self._begin_forward()
            if not self._open:
                return False
            self._home = get_ident()
            if self._follower is None or not self._follows or self._follower.stays:
                return False
            self._follower.follow()
            return True

    @eager
    def _leave(self, module: nn.Module, result: Any) -> None:
        """It ends, or fails."""
        if module not in self._entrances or in_backward():
            return
        with turn:
            if not self._calls.end(module):
                return
            others = self._calls.elsewhere()
            if self._home in others or (get_ident() in self._joined and not self._open):
                return
            self._end_here()
            if _parts(others, module):  # which end it
                return
            failed = sys.exc_info()[1] not in (None, self._error)
            measured = self._open
            with outside_transforms():
                self._end_forward(keep=not failed)
                if measured and not failed and self._alarms.of_results:
                    with self._guarded(""):
                        self.ledger.spoiled |= spoiled(result)
        if self._how.steps == "forward" and not failed and self._counts():
            with outside_transforms():
                self._end_step()
        if measured:
            self._check(module, result)
        if not failed:
            self._say()

    def _counts(self) -> bool:
        """Whether a forward is measured: not one that only shows how the model is written, as `find_heads` runs."""
        during = self._how.during
        return not here().own_code and (during == "always" or self.model.training == (during == "training"))

    def _begin_forward(self) -> None:
        """A measured forward begins."""
        self._forward, self._seen = Running(), Maps(self._how.maps)
        self._remarks = self._remarks.next()
        modules = {module: name for name, module in self._places.items()}
        on_error = None if self._strict else self._failed
        with self._guarded(""):
            seen = observe(
                self._see, measures=self._how.measures, modules=modules, on_error=on_error,
                differentiable=self._how.differentiable,
            )  # fmt: skip
            self._observing.enter_context(seen)
            self._projections.open()
            self._open = True

    def _end_here(self) -> None:
        """It is not followed any more in the thread in which it was."""
        self._home = None
        if self._follower is not None:
            self._follower.close()

    def _check(self, module: nn.Module, result: Any) -> None:
        """After a measured forward of the whole model in which no attention was recognised: raise, or warn."""
        seen = None if self._follower is None else self._follower.seen
        if seen is None or module is not self.model or self.layers or result is None:
            return
        if any(one.nonfinite for one in seen.softmaxes):
            return  # `unwatched` lists it, and it may be watched later
        error = nothing(self.model, seen, "watch")
        if self._how.during != "training" or self._strict:
            raise error
        warn(str(error))

    def _end_forward(self, keep: bool) -> None:
        if not self._open:
            return
        self._open = False
        self._projections.close()
        if keep and self._follower is not None and self._follower.seen is not None:
            self.layers = (*self.layers, *(name for name in self._forward.layers if name not in self.layers))
            self._left, self._measured = None, self._follower.seen
            if (known := self._what.known) and not (self.unwatched or set(self.layers) - {*known}):
                self._follows = False
        if keep:
            self.maps = self._seen
            placed = {measure.name: "" for measure in self._how.measures if measure.placed}
            for name in self._remarks.unplaced():
                self._forward.layers[name].unknown |= placed
            for name, layer in self._forward.layers.items():
                self.ledger.check_heads(name, layer)
                with self._guarded(name):
                    self.ledger.add(name, layer)
            self.remarks |= self._remarks.found()
        self._forward, self._seen = Running(), Maps(self._how.maps)

    @eager
    @torch.no_grad()
    def _see(self, call: AttentionCall) -> None:
        """One attention call."""
        if not self._open:
            return
        with _seeing, own_dtypes(call.map.lse):
            layer, said = layer_of(call, self._merging), list[str]()
            if has_derivatives():  # torch.func's tensors are wrapped, and belong to the function that it runs
                layer = layer.with_tensors(plain)
            with outside_transforms():
                self._forward.add(call.name, layer)
                with self._guarded(call.name):
                    self._remarks.add(call)
            if self._how.maps != "none":
                with self._guarded(call.name), held_warnings() as said:
                    name = call_name(call.name, self._seen)
                    self._seen[name] = call.map if self._how.maps == "lazy" else picture(call.map)
                    if self._how.values:
                        self._seen.kept_of[name] = self._projections.kept(call)
            for remark in (*call.remarks, *said):
                self._remark(call.name, remark, "numbers")

    @eager
    @torch.no_grad()
    def _failed(self, name: str, held: Held | None, out: Tensor, error: Exception) -> None:
        """One attention call that could not be measured."""
        if not self._open:
            return
        with _seeing, outside_transforms():
            layer = unknown_layer(held, out, self._merging)
            self._forward.add(name, layer.with_tensors(plain))
            self._remark(name, f"its statistics are NaN, as a call was not measured: {error}", "calls")

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """What fails within it is a remark on a layer; with on_error="raise", it is raised."""
        try:
            yield
        except Exception as error:
            if self._strict:
                raise
            self._remark(name, f"not recorded: {type(error).__name__}: {error}", "record")

    def _remark(self, name: str, message: str, kind: str) -> None:
        """Remark on a layer in this forward, and warn of the first remark of its kind when the forward has ended."""
        self._remarks.say(name, message)
        self._warn(name, message, kind)

    def _not_computed(self, name: str, why: str) -> None:
        """A module that was called without its attention being computed here."""
        self._uncomputed[name] = why
        self._left = self.unwatched | {name: why}
        self.layers = tuple(layer for layer in self.layers if layer != name)
        self._warn(name, f"not watched: {why}", "unwatched")

    def _warn(self, name: str, message: str, kind: str) -> None:
        if (name, kind) not in self._warned:
            self._warned.add((name, kind))
            self._later.append(f"watch(model): {name or type(self.model).__name__}: {message}")

    def _say(self) -> None:
        """Warn of what is to be said, with all numbers recorded: where warnings are errors, the first one is raised."""
        later, self._later = self._later, []
        for message in later:
            warn(message)


def _parts(others: dict[int, nn.Module], module: nn.Module) -> list[nn.Module]:
    """Parts of the model that a forward of `module` left running in other threads: not other forwards of it."""
    return [one for one in others.values() if one is not module]
