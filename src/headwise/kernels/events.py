"""The stream of attention calls: who receives them, and what holds while one of them is computed.

Every attention module, of headwise or of another library, is computed by `headwise.publishing`, which publishes one
`AttentionCall` to the subscribers of that module; its backward pass publishes δ to those that want it. Subscribers are
those of the process, so a call is seen whatever thread makes it. The kernel in force, the progress callback, the
module that is computed and the receiver of δ belong to a thread, or to an asynchronous task: `here()`.

Nothing is paid while nobody subscribes: a module looks at `subscribers`, an empty tuple.
"""

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn

from headwise.base.run import Progress
from headwise.errors import ConfigError
from headwise.stats import Measure, resolve

OnDelta = Callable[[Tensor], Any]
OnError = Callable[[str, Any, Tensor, Exception], Any]  # (name, held heads, output, error)


class Here(NamedTuple):
    """What holds in this thread."""

    kernel: str | None = None  # of calls with kernel="auto" (`use_kernel`)
    progress: Progress | None = None  # called by long calls without gradients after each block of rows
    on_delta: OnDelta | None = None  # called with δ [b, h, n] in the backward pass of calls made here
    module: nn.Module | None = None  # the attention module that is computed for subscribers
    edited: Callable[..., Any] | None = None  # computes the `attend` calls of that module with edits
    own_code: bool = False  # whether models compute their attention by their own code, although they are attached


_here: ContextVar[Here] = ContextVar("headwise", default=Here())  # noqa: B039  (it is immutable)
here = _here.get
listening = 0  # open `listen` contexts of all threads: torch.compile can read a number, but no context variable
editing = 0  # subscribers with edits
apart = 0  # subscribers whose calls are outside of the graphs of torch.compile: with edits, gradients or δ
own_code = 0  # open contexts of all threads with `Here.own_code`, a number for the same reason


@contextmanager
def within(**changes: Any) -> Iterator[None]:
    """Change fields of `here()` for a block of code."""
    global own_code
    own = bool(changes.get("own_code"))
    token = _here.set(_here.get()._replace(**changes))
    own_code += own
    try:
        yield
    finally:
        own_code -= own
        _here.reset(token)


@contextmanager
def listen(on_delta: OnDelta) -> Iterator[None]:
    """Within it, the backward pass of each `attend` call of this thread calls `on_delta` with δ [b, h, n]."""
    global listening
    listening += 1
    try:
        with within(on_delta=on_delta):
            yield
    finally:
        listening -= 1


@dataclass(frozen=True, eq=False)
class Subscriber:
    """Who receives the calls of some modules. on_delta and on_error get a module's name first, then the `Held` of its
    heads, if they are split over ranks, or None."""

    on_call: Callable[[Any], Any] | None  # called with each `AttentionCall`
    on_delta: Callable[[str, Any, Tensor], Any] | None  # called with δ [b, h, n] of one call
    measures: Mapping[str, Measure]  # by name, to be reduced in the same pass
    modules: Mapping[nn.Module, str] | None  # and what to call them; None for every one in the process, all called ""
    edits: Sequence[Any] = ()  # changes of the calls, the first applied first
    # Called with the output [b, h, n, d_v] and what kept a call from being measured; the module computes it without
    # measures. None: the error is raised through the model.
    on_error: OnError | None = None
    differentiable: bool = False  # whether it receives maps with gradients

    def sees(self, module: nn.Module) -> bool:
        """Whether it receives the calls of this module, or of a replica of it. A copy of a module is another module."""
        return self.modules is None or original(module, self.modules) in self.modules

    def name(self, module: nn.Module) -> str:
        """What it calls a module that it sees."""
        return "" if self.modules is None else self.modules[original(module, self.modules)]

    def failed(self, module: nn.Module, held: Any, out: Tensor, error: Exception) -> None:
        """A call of a module that it sees cannot be measured: it is told, or the error is raised; by `OnError`."""
        if self.on_error is None:
            raise error
        self.on_error(self.name(module), held, out, error)


_originals: "WeakKeyDictionary[nn.Module, nn.Module]" = WeakKeyDictionary()


def original(module: nn.Module, modules: Mapping[nn.Module, str]) -> nn.Module:
    """The one of these modules that a replica of `nn.DataParallel` was made of; the module itself if it is none."""
    if "_is_replica" not in module.__dict__ or module in modules:
        return module
    found = _originals.get(module)
    if found is None or found not in modules:
        hooks = module._forward_hooks  # which a replica shares with its original
        found = next((one for one in modules if one._forward_hooks is hooks), module)
        _originals[module] = found
    return found


subscribers: tuple[Subscriber, ...] = ()
_lock = Lock()


@contextmanager
def subscribe(
    on_call: Callable[[Any], Any] | None = None,
    *,
    on_delta: Callable[[str, Any, Tensor], Any] | None = None,
    measures: Sequence[str | Measure] = (),
    modules: Mapping[nn.Module, str] | None = None,
    edits: Sequence[Any] = (),
    on_error: OnError | None = None,
    differentiable: bool = False,
) -> Iterator[None]:
    """Within it, attention calls of these modules, in any thread, are published and computed with the edits.
    ConfigError if a measure is unknown, or another subscriber to these modules has a different one of that name."""
    global subscribers, editing, apart
    wanted = {measure.name: measure for measure in resolve(measures)} if measures else {}
    new = Subscriber(on_call, on_delta, wanted, modules, tuple(edits), on_error, differentiable)
    with _lock:
        for other in subscribers:
            if modules is not None and other.modules is not None and modules.keys().isdisjoint(other.modules.keys()):
                continue
            for name in wanted.keys() & other.measures.keys():
                if not same_measure(wanted[name], other.measures[name]):
                    raise ConfigError(
                        f"observe(measures=…): another observer of the same modules has a different measure {name!r}; "
                        f"give one of them another name"
                    )
        subscribers = (*subscribers, new)
        editing += bool(new.edits)
        apart += (outside := bool(new.edits or differentiable or on_delta is not None))
    try:
        yield
    finally:
        with _lock:
            subscribers = tuple(one for one in subscribers if one is not new)
            editing -= bool(new.edits)
            apart -= outside


def subscribed(module: nn.Module) -> bool:
    """Whether anyone receives the calls of this module."""
    return bool(subscribers) and any(one.sees(module) for one in subscribers)


def subscribers_of(module: nn.Module) -> list[Subscriber]:
    """Those who receive the calls of this module."""
    return [one for one in subscribers if one.sees(module)]


# The modules that operators of a graph name, by their `id`, and what publishes their calls.
recorded: "WeakValueDictionary[int, nn.Module]" = WeakValueDictionary()
publishers: list[Callable[..., Any]] = []
# Modules whose call has begun, until their attention is computed here (`headwise.models.adapters.places.proven`).
unproven: "WeakSet[nn.Module]" = WeakSet()


def in_backward() -> bool:
    """Whether autograd runs backward in this thread, as when gradient checkpointing computes a call again."""
    return torch._C._current_graph_task_id() != -1


def call_name(name: str, calls: Container[str]) -> str:
    """The name of a call in a forward pass: the module's name, from the second call on name#2, name#3, …"""
    called, times = name, 1
    while called in calls:
        times += 1
        called = f"{name}#{times}"
    return called


def module_name(call: str) -> str:
    """The module of a `call_name`."""
    return re.sub(r"#\d+$", "", call)


# Attributes by which models call the attention to another sequence.
_CROSS = frozenset({"encoder_attn", "multihead_attn", "encoder_decoder_attention", "encdecattention"})


def crosses(name: str) -> bool:
    """Whether a module has a name that models give to cross attention."""
    parts = name.lower().split(".")
    return parts[-1] in _CROSS or any("cross" in part for part in parts[-2:])


def same_measure(one: Measure, other: Measure) -> bool:
    """Whether two measures compute the same."""
    first, second = vars(one), vars(other)
    return one is other or (
        type(one) is type(other)
        and first.keys() == second.keys()
        and all(
            first[key] is second[key] or (not isinstance(first[key], Tensor) and first[key] == second[key])
            for key in first
        )
    )
