"""Every attention call of a model, seen as it happens: the hook that `headwise.models.adapters.torch`, the Hugging Face
adapter and what watches models (telemetry) share.

    >>> import torch, headwise as hw
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32), 2, enable_nested_tensor=False)
    >>> handle = hw.attach(model)
    >>> seen = []
    >>> with hw.observe(seen.append, model=model, measures=["entropy"]):
    ...     y = model(torch.randn(7, 1, 16))
    >>> [(call.name, tuple(call.map.shape), tuple(call.measured["entropy"].shape)) for call in seen]
    [('layers.0.self_attn', (1, 4, 7, 7), (1, 4)), ('layers.1.self_attn', (1, 4, 7, 7), (1, 4))]

The measures are computed in the same pass as the output where the kernel can, in training too. Nothing is paid while
nobody observes: one look at an empty tuple a call.
"""

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention import attend
from headwise.errors import ConfigError
from headwise.map import AttentionMap
from headwise.masks import Grid
from headwise.models.adapters.tokens import over_tokens, token_map, token_queries
from headwise.stats import Measure, Measurements, resolve


@dataclass(frozen=True)
class Observation:
    """One attention call.

    Attributes:
        name: the module's qualified name in the model that is observed; "" if no model was given. It alone says which
            layer it is: `layer_idx` is the same in the encoder, the decoder and cross attention of one model.
        module: the attention module. One that is called several times in a forward pass, because layers share it or
            for one image after the other, is reported as often, under the same name; see `call_name`.
        map: the call's weights, [b, h, n, m], detached, before dropout; O(n) memory, so keep it as long as you like.
            In self attention, queries that are padding see nothing in it, whatever the model computes for them.
    """

    name: str
    module: nn.Module
    map: AttentionMap

    @property
    def measured(self) -> Measurements | None:
        """The measures that were asked for, name → [b, h]; those of other observers of the same call may be among
        them. None if none was asked for."""
        return self.map.measured


@dataclass(frozen=True, eq=False)
class _Observer:
    callback: Callable[[Observation], Any]
    measures: Mapping[str, Measure]
    names: Mapping[nn.Module, str] | None  # None: every module there is

    def sees(self, module: nn.Module) -> bool:
        return self.names is None or module in self.names


# Attributes by which models call the attention to another sequence.
_CROSS = frozenset({"encoder_attn", "multihead_attn", "encoder_decoder_attention", "encdecattention"})
_active: tuple[_Observer, ...] = ()
_lock = Lock()


@contextmanager
def observe(
    callback: Callable[[Observation], Any],
    *,
    measures: Sequence[str | Measure] = (),
    model: nn.Module | None = None,
    modules: Mapping[nn.Module, str] | None = None,
) -> Iterator[None]:
    """Within it, every attention call that an adapter of headwise computes is told to `callback`.

    Args:
        callback: called with an `Observation` after each call, in the thread of the call. What it raises is raised
            through the model. Calls that gradient checkpointing repeats in the backward pass are not told again.
        measures: names or `Measure`s to reduce in the same pass; they lie in `observation.measured`.
        model: only the modules of this model, and by their qualified names; None for any module in the process.
        modules: instead of model, the modules themselves and what to call them.
    Raises:
        ConfigError: if a measure is unknown, or if another observer of the same modules has a different one of that
            name.
    """
    global _active
    wanted = {measure.name: measure for measure in resolve(measures)} if measures else {}
    names = modules if model is None else {module: name for name, module in model.named_modules()}
    observer = _Observer(callback, wanted, names)
    with _lock:
        for other in _active:
            _agree(observer, other)
        _active = (*_active, observer)
    try:
        yield
    finally:
        with _lock:
            _active = tuple(one for one in _active if one is not observer)


def attended(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, want_map: bool = False, to_itself: bool, **options: Any
) -> tuple[Tensor, AttentionMap | None]:
    """`attend(q, k, v, **options)` for a module of another library, told to whoever observes it; the map if somebody
    wants it, with the rows of padding that the other library has.

    Args:
        to_itself: whether queries and keys are one sequence, so that a query on a hidden key is padding.
    """
    observers = [one for one in _active if one.sees(module)] if _active else []
    if not observers and not want_map:
        return attend(q, k, v, **options), None
    to_itself = to_itself and not any(crosses(one.names[module]) for one in observers if one.names is not None)
    measures = tuple({name: measure for one in observers for name, measure in one.measures.items()}.values())
    mask, grid = options.get("mask"), Grid(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    padded = to_itself and observers and mask is not None and token_queries(mask, grid) is not None
    asked = tuple(over_tokens(one) for one in measures) if padded else measures
    out, amap = attend(q, k, v, return_map=True, measures=asked, **options)
    # A repeated call is measured like the first one, so that it takes the same kernel, which is what checkpointing
    # holds it to; but it is not told.
    if observers and not in_backward():
        told = token_map(amap, measures) if padded else amap
        for one in observers:
            one.callback(Observation("" if one.names is None else one.names[module], module, told))
    if padded:
        amap.measured = None  # those are numbers of the map that observers have
    return out, amap


def call_name(name: str, calls: Container[str]) -> str:
    """What to call a call of a module, beside those of the same forward pass: its name, and from the second call on
    name#2, name#3, …"""
    called, times = name, 1
    while called in calls:
        times += 1
        called = f"{name}#{times}"
    return called


def module_name(call: str) -> str:
    """The module that `call_name` called so."""
    return re.sub(r"#\d+$", "", call)


def crosses(name: str) -> bool:
    """Whether a module is called what models call the attention to another sequence."""
    parts = name.lower().split(".")
    return parts[-1] in _CROSS or any("cross" in part for part in parts[-2:])


def _agree(one: _Observer, other: _Observer) -> None:
    """Raise if one call would have to give two measures under one name."""
    if one.names is not None and other.names is not None and one.names.keys().isdisjoint(other.names.keys()):
        return
    for name in one.measures.keys() & other.measures.keys():
        if not _same(one.measures[name], other.measures[name]):
            raise ConfigError(
                f"observe(measures=…): another observer of the same modules has a different measure {name!r}; give "
                f"one of them another name"
            )


def _same(one: Measure, other: Measure) -> bool:
    mine, theirs = vars(one), vars(other)
    return one is other or (
        type(one) is type(other)
        and mine.keys() == theirs.keys()
        and all(
            mine[key] is theirs[key] or (not isinstance(mine[key], Tensor) and mine[key] == theirs[key]) for key in mine
        )
    )


def in_backward() -> bool:
    """Whether autograd is running backwards in this thread, as when gradient checkpointing computes a call again."""
    return torch._C._current_graph_task_id() != -1
