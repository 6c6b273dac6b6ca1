"""Forwards of a model in which attention is recognised, uncompiled."""

from collections.abc import Callable
from contextlib import ExitStack
from threading import get_ident
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from headwise.errors import warn
from headwise.models.hooks import Hook
from headwise.models.recognise.compiled import compile_with, compiled_parts, not_in_one_graph, uncompiled
from headwise.models.recognise.publisher import Publisher
from headwise.models.recognise.tracked import Tracked
from headwise.telemetry.chosen import Chosen


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
