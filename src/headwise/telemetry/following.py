"""Forwards of a model in which attention is recognised, uncompiled, and the calls that are running in all threads."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import RLock, get_ident
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headwise.errors import warn
from headwise.events import in_backward
from headwise.kernels.compiling import eager
from headwise.models.hooks import Hook
from headwise.models.recognise.following import compile_with, compiled_parts, not_in_one_graph, uncompiled
from headwise.models.recognise.frames import is_outermost, runs
from headwise.models.recognise.publisher import Publisher
from headwise.models.recognise.tracked import Tracked
from headwise.telemetry.chosen import Chosen, entrances

turn = RLock()  # held while a forward begins or ends


class Calls:
    """The calls of some modules that are running, by thread."""

    def __init__(self) -> None:
        self._running: dict[int, list[nn.Module]] = {}  # the outermost first

    def begin(self, module: nn.Module) -> bool:
        """In a hook before a call: whether it is not within another one in this thread."""
        mine = self._running.setdefault(get_ident(), [])
        if mine and mine[0] is module and is_outermost(module):
            mine.clear()  # a KeyboardInterrupt ended it, such as that of a notebook, and ran no hooks
        mine.append(module)
        return len(mine) == 1

    def end(self, module: nn.Module) -> bool:
        """In a hook after a call: whether it was not within another one in this thread."""
        mine = self._running.get(get_ident())
        if not mine or mine[-1] is not module:
            return False
        mine.pop()
        if mine:
            return False
        del self._running[get_ident()]
        return True

    def elsewhere(self) -> dict[int, nn.Module]:
        """The other threads in which calls are running, and the outermost. Those that ended without hooks are
        forgotten."""
        others = [one for one in list(self._running) if one != get_ident()]
        for one in others:
            mine = self._running.get(one)
            if mine and not runs(one, mine[0]):
                self._running.pop(one, None)
        return {one: mine[0] for one in others if (mine := self._running.get(one))}

    def clear(self) -> None:
        """Forget all."""
        self._running.clear()


class Follower:
    """Recognises attention in forwards of a model, one at a time, in the thread where a forward began. What the model
    runs there is not compiled.

    Args:
        what: of which the rest is recognised.
        caller: the function that a user called.

    Attributes:
        seen: what was seen in the last forward that was followed; None before the first.
        home: the thread in which a forward is followed; None if none is.
        stays: whether the call that begins is of compiled code, in which layers that headwise computes are seen.
    """

    def __init__(self, model: nn.Module, what: Chosen, caller: str) -> None:
        parts = compiled_parts(model.named_modules())
        self._part, self._name = bool(parts), (parts[0] if parts else "") or type(model).__name__
        self._caller, self._warned = caller, False
        self._known = bool(what.known)
        self._publisher = Publisher({module: name for name, module in model.named_modules()}, what.aside)
        self._forward = ExitStack()
        self._callback: Any = None  # what compiled code in that thread until then
        self.seen: Tracked | None = None
        self.home: int | None = None
        self.stays = False

    def hooks(self, *more: Callable[..., Any]) -> list[RemovableHandle]:
        """Register the hooks with which forwards are seen in all threads. `more`: hooks that call `before`, `after`."""
        mine: tuple[Callable[..., Any], ...] = (Hook.__call__, Follower.before, Follower.after, *more)
        for hook in mine:
            uncompiled(hook)
        return self._publisher.hooks()

    def before(self, begin: Callable[[], Any]) -> None:
        """Before a call: `begin` may call `follow`."""
        not_in_one_graph(self._caller)
        callback = compile_with(None)
        self.stays = bool(callback and self._known)
        if begin():
            self._callback = callback
            self._warn()
        else:
            compile_with(callback)

    def after(self, end: Callable[[], Any]) -> None:
        """After a call: `end` may call `close`."""
        inside, callback = self.home == get_ident(), self._callback
        try:
            end()
        finally:
            if inside and self.home != get_ident():
                compile_with(callback)

    def follow(self) -> None:
        """Follow a forward in this thread from now on."""
        self.close()
        self.home = get_ident()
        self.seen = self._forward.enter_context(self._publisher.forward())

    def close(self) -> None:
        """Follow it no more."""
        self.home = None
        self._forward.close()

    def _warn(self) -> None:
        """Say once that a model that is compiled, or called by compiled code, runs uncompiled."""
        if self._warned or not (self._part or self._callback):
            return
        self._warned = True
        how = "compiled" if self._part else "called by compiled code"
        more = "; watch(every=…) measures fewer" if self._caller == "watch" else ""
        warn(
            f"{self._caller}(model): {self._name} is {how}. Attention is recognised in the code that was compiled, so "
            f"that in measured forwards it runs uncompiled{more}",
        )


@contextmanager
def recognised_forwards(model: nn.Module, what: Chosen, caller: str) -> Iterator[Follower]:
    """Within it, attention of the rest is recognised in forwards of a model with gradients."""
    gates = entrances(model, [*what.known, *what.rest])
    calls, follower = Calls(), Follower(model, what, caller)

    def before(module: nn.Module, args: Any) -> None:
        follower.before(partial(begin, module))

    @eager
    def begin(module: nn.Module) -> bool:
        if follower.stays or module not in gates or in_backward() or not torch.is_grad_enabled():
            return False
        with turn:
            if not calls.begin(module) or follower.home in calls.elsewhere():
                return False
            follower.follow()
            return True

    def after(module: nn.Module, args: Any, result: Any) -> None:
        follower.after(partial(end, module))

    @eager
    def end(module: nn.Module) -> None:
        with turn:
            if module in gates and not in_backward() and calls.end(module) and follower.home == get_ident():
                follower.close()

    with ExitStack() as hooks:
        hooks.callback(follower.close)
        for handle in follower.hooks(before, after):
            hooks.callback(handle.remove)
        for gate in gates:
            for handle in (
                gate.register_forward_pre_hook(Hook(before)),
                gate.register_forward_hook(Hook(after), prepend=True, always_call=True),  # as those of records
            ):  # fmt: skip
                hooks.callback(handle.remove)
        yield follower
