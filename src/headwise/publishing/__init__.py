"""An attention module computed, and its call published to the subscribers of `headwise.events`.

    >>> import torch, headwise as hw
    >>> layer = hw.MultiHeadAttention(16, 4)
    >>> seen = []
    >>> with hw.models.observe(seen.append, model=layer, measures=["entropy"]):
    ...     y = layer(torch.randn(1, 7, 16))
    >>> [(call.module is layer, tuple(call.map.shape), tuple(call.measured["entropy"].shape)) for call in seen]
    [(True, (1, 4, 7, 7), (1, 4))]

headwise's layers (`AttentionLayer.forward`) and the adapters of other libraries (`attended`) come through here, and
there is no other way to capture attention. The measures are computed in the same pass as the output where the kernel
can, in training too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from headwise import events
from headwise.attention import attend_to
from headwise.errors import ConfigError
from headwise.interventions.computing import attend_edited
from headwise.interventions.edit import Placed
from headwise.kernels.eager import eager
from headwise.kernels.graph import in_graph
from headwise.map import AttentionMap
from headwise.masks import Mask, conjuncts
from headwise.publishing.tokens import over_tokens, renamed, token_map
from headwise.spread import Held, held_as_declared, held_by
from headwise.stats import Measure, Measurements, resolve


@dataclass(frozen=True)
class AttentionCall:
    """One attention call.

    Attributes:
        name: the module's qualified name in the model that is observed; "" if no model was given. It alone says which
            layer it is: `layer_idx` is the same in the encoder, the decoder and cross attention of one model.
        module: the attention module. One that is called several times in a forward pass, because layers share it or
            for one image after the other, is reported as often, under the same name; see `events.call_name`.
        map: the call's weights, [b, h, n, m], detached, before dropout; O(n) memory, so keep it as long as you like.
            In self attention, queries that are padding are fully masked in it, whatever the model computes for them.
        values: of the call, [b, h_kv, m, d_v], detached; None for headwise's own layers. heads: the output of each head
            before the output projection, [b, h, n, d_v], detached; None for layers that do not concatenate heads.
        unplaced: whether nothing shows where the queries of a call are among its keys, such as a block of the queries
            of full attention: measures that depend on positions (`Measure.placed`) mean nothing then.
        unstarted: whether nothing shows which token its first key is, as in a cache that drops tokens: measures of the
            first tokens mean nothing then, and those of given tokens.
        held: the numbers of the map's heads in the layer, and of how many, where the heads are split over ranks; None
            where the call has all.
    """

    name: str
    module: nn.Module
    map: AttentionMap
    values: Tensor | None = None
    heads: Tensor | None = None
    unplaced: bool = False
    unstarted: bool = False
    held: Held | None = None

    @property
    def measured(self) -> Measurements | None:
        """The subscriber's measures, name → [b, h]; those of other subscribers to the same call may be among them.
        None if there are none."""
        return self.map.measured


@contextmanager
def observe(
    callback: Callable[[AttentionCall], Any],
    *,
    measures: Sequence[str | Measure] = (),
    model: nn.Module | None = None,
    modules: Mapping[nn.Module, str] | None = None,
    on_error: events.OnError | None = None,
) -> Iterator[None]:
    """Within it, `callback` receives every attention call of headwise's layers and of attached modules.

    Args:
        callback: called with an `AttentionCall` after each call, in the thread of the call. Calls that gradient
            checkpointing repeats in the backward pass are not reported again.
        measures: names or `Measure`s to reduce in the same pass; they are in `call.measured`.
        model: only the modules of this model, and by their qualified names; None for any module in the process.
        modules: instead of model, the modules themselves and what to call them.
        on_error: called with the name of the module, as `held` of an `AttentionCall`, its output [b, h, n, d_v] and the
            exception, if a call cannot be measured or the callback fails; the module's output is as without observers.
            None: raised through the model.
    Raises:
        ConfigError: if a measure is unknown, or if another observer of the same modules has a different one of that
            name.
    """
    names = modules if model is None else {module: name for name, module in model.named_modules()}
    with events.subscribe(callback, measures=measures, modules=names, on_error=on_error):
        yield


def attended(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, return_map: bool = False, to_itself: bool,
    at_end: bool | None = None, unplaced: bool = False, unstarted: bool = False, extra: int = 0,
    compute: Callable[..., tuple[Tensor, Any]] = attend_to, **options: Any,
) -> tuple[Tensor, AttentionMap | None]:  # fmt: skip
    """`attend_to` for a module of another library, published.

    Args:
        to_itself: whether queries and keys are one sequence, so that a query on a hidden key is padding. A name of
            cross attention overrules it. at_end: whether the queries are the last of the keys' tokens, for edits;
            likewise, and as `to_itself` if None. unplaced: as in `AttentionCall`, likewise, and
            unstarted. extra: the number of first keys that are no tokens, of which positions are not counted.
        compute: `attend_to`, or a function that calls it and raises if the call must not be published.
    """
    if not in_graph():
        events.unproven.discard(module)
    compute = partial(compute, q, k, v, **options)
    if extra:
        compute = partial(_beside_extra_keys, extra, compute)
    if not events.subscribed(module):
        return compute(return_map=return_map)
    named = any(events.crosses(one.name(module)) for one in events.subscribers_of(module))
    at_end = to_itself if at_end is None else at_end
    out, amap = published(
        module, compute, mask=options.get("mask"), to_itself=to_itself and not named, at_end=at_end and not named,
        return_map=return_map, values=v, unplaced=unplaced and not named, unstarted=unstarted, extra=extra,
        held=held_by(module, q, k, v),
    )  # fmt: skip
    return out, amap


TOLD = "_headwise_told"  # on an attached module: called with the reason where its own code computes a call


def left_to_own_code(
    module: nn.Module, why: str, held: Held | None, out: Tensor, error: Exception | None
) -> None:  # fmt: skip
    """A call of a module that headwise computes otherwise was computed by the module's own code.

    Args:
        held: as in `AttentionCall`. out: its output, [b, h, n, d_v]. error: why it cannot be measured; None if it can.
    """
    events.unproven.discard(module)
    if TOLD in vars(module):
        vars(module)[TOLD](why)
    if error is None:
        return
    for one in events.subscribers_of(module):
        if one.on_error is None:
            raise error
        one.on_error(one.name(module), held, out, error)


@eager
def published(
    module: nn.Module, compute: Callable[..., tuple[Any, ...]], *, mask: Mask | None, to_itself: bool,
    at_end: bool | None = None, return_map: bool = False, measures: Sequence[str | Measure] = (),
    values: Tensor | None = None, unplaced: bool = False, unstarted: bool = False, extra: int = 0,
    held: Held | None = None, undo: Callable[[], Any] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """compute(return_map=…, measures=…) of a module that has subscribers, published.

    Args:
        compute: returns (output of each head, map or None), or (output, map or None, concatenated heads or None).
        to_itself: whether it is self attention. at_end: as in `attended`. values: of the call, if they are known.
            unplaced, unstarted, held: as in `AttentionCall`. extra: as in `attended`. undo: undoes what a failed
            `compute` has changed, such as a cache.
        return_map, measures: what the caller of the module requested, and gets as without subscribers.
    """
    events.unproven.discard(module)
    seen_by = [(one, one.name(module)) for one in events.subscribers_of(module)]
    receivers = [partial(one.on_delta, name, held) for one, name in seen_by if one.on_delta is not None]
    calls = [(one.on_call, one.on_error, name) for one, name in seen_by if one.on_call is not None]
    changes: dict[str, Any] = {"module": module}
    held = held_as_declared(module) if held is None else held
    if edits := [replace(placed, name=name) for one, name in seen_by for placed in one.edits]:
        if held is not None:
            name = edits[0].name or type(module).__name__
            raise ConfigError(f"intervene(model): {name}: {held}, and heads that are split over ranks cannot be edited")
        at_end = to_itself if at_end is None else at_end
        changes["edited"] = partial(attend_edited, edits, at_end, placed=not unplaced, extra=extra)
        compute = partial(_edited, edits, type(module).__name__, compute)
    if receivers:
        changes["on_delta"] = lambda delta: [receiver(delta) for receiver in receivers]
    if not calls or (measures and not return_map):  # the latter raises
        with events.within(**changes):
            return compute(return_map=return_map, measures=measures)
    own = {measure.name: measure for measure in resolve(measures)} if measures else {}
    wanted = list({name: measure for one, _ in seen_by for name, measure in one.measures.items()}.values())
    shared = {m.name for m in wanted if m.name in own and events.same_measure(m, own[m.name])}
    # Over tokens it has another name, so that it is not mistaken for a different measure of the caller's.
    padded = to_itself and mask is not None and any(part.padding for part in conjuncts(mask))
    apart = padded or (to_itself and any(m.name in own and m.name not in shared for m in wanted))
    asked = [over_tokens(measure) for measure in wanted] if apart else wanted
    with events.within(**changes):
        together = (*own.values(), *(measure for measure in asked if measure.name not in own))
        try:
            out, amap, *rest = compute(return_map=True, measures=together)
        except Exception as error:
            receivers_of_errors = [(tell, name) for _, tell, name in calls if tell is not None]
            if len(receivers_of_errors) < len(calls):
                raise
            if undo is not None:
                undo()
            out, *rest = compute(return_map=return_map, measures=measures)  # which raises what is not of the measures
            for tell, name in receivers_of_errors:
                tell(name, held, out, error)
            return out, *rest
    # A repeated call is measured like the first one, so that it takes the same kernel, which is what checkpointing
    # holds it to; but it is not published.
    if not events.in_backward():
        seen = token_map(amap, wanted, asked) if apart else copy(amap) if return_map else amap
        if others := [m for m, one in zip(wanted, asked, strict=True) if one.name in own and m.name not in shared]:
            found = seen.measured  # the pass had one measure of that name
            assert found is not None
            states = found.states | seen.measure(*others).states
            seen.measured = renamed(found, wanted, [states[measure.name] for measure in wanted])
        given = None if values is None else values.detach()
        heads = _heads(out, seen.shape[1], *rest)
        for on_call, on_error, name in calls:
            try:
                on_call(AttentionCall(name, module, seen, given, heads, unplaced, unstarted, held))
            except Exception as error:
                if on_error is None:
                    raise
                on_error(name, held, out, error)
    if not return_map:
        return out, None, *rest
    if own and own.keys() != {measure.name for measure in together}:
        amap.measured = renamed(amap.measured, list(own.values()), [amap.measured.states[name] for name in own])
    elif not own:
        amap.measured = None
    return out, amap, *rest


def _beside_extra_keys(
    extra: int, compute: Callable[..., tuple[Tensor, Any]], *, return_map: bool = False,
    measures: Sequence[str | Measure] = (),
) -> tuple[Tensor, Any]:  # fmt: skip
    """compute(…) with a map in which the first keys are no tokens, and the measures of that map."""
    out, amap = compute(return_map=return_map)
    if amap is not None:
        amap.rule = replace(amap.rule, grid=replace(amap.rule.grid, extra=extra))
        if measures:
            amap.measured = amap.measured_by(None, resolve(measures))
    return out, amap


def _edited(edits: Sequence[Placed], kind: str, compute: Callable[..., tuple[Any, ...]], **options: Any) -> Any:
    """compute(…) of a module with edits, which `attend` must have applied."""
    before = len(edits[0].applied)
    result = compute(**options)
    if len(edits[0].applied) == before:
        raise ConfigError(
            f"intervene(model): {edits[0].name or 'the model'} ({kind}) did not call attend, so it cannot be edited"
        )
    return result


def _heads(out: Tensor, num_heads: int, *concat: Tensor | None) -> Tensor | None:
    """The output of each head, [b, h, n, d_v], or None."""
    if not concat:
        return out.detach()
    (joined,) = concat
    if joined is None or joined.shape[-1] % num_heads:
        return None
    return joined.detach().unflatten(-1, (num_heads, -1)).transpose(1, 2)
