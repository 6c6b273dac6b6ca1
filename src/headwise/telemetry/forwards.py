"""Forwards of a model in training, in which attention is recognised."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn

from headwise.events import in_backward
from headwise.kernels.eager import eager
from headwise.models.hooks import Hook
from headwise.telemetry.calls import Calls, turn
from headwise.telemetry.chosen import Chosen
from headwise.telemetry.follower import Follower
from headwise.telemetry.places import entrances


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
