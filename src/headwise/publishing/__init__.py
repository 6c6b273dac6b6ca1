"""An attention module computed, and its call published to the subscribers of `headwise.kernels.events`.

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

Subscribers receive padded batches so that padded queries are fully masked, and no measure counts them. Models compute
these rows like any others, and outputs must stay the same; but they are no data. In self attention a query at the
position of a hidden key is padding itself, so the mask says which they are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import _StopRecomputationError

from headwise.errors import ConfigError, held_warnings, warn
from headwise.interventions.computing import attend_edited
from headwise.interventions.edits import Placed
from headwise.kernels import events
from headwise.kernels.call import Call
from headwise.kernels.compiling import eager
from headwise.kernels.graph import can_record, in_graph, record
from headwise.kernels.spread import Held, held_as_declared, held_by
from headwise.map import AttentionMap
from headwise.map.arguments import rule_of
from headwise.map.attention import attend_recorded, attend_to
from headwise.masks import Mask, Span, conjuncts, is_causal
from headwise.publishing.tokens import copied, over_tokens, renamed, token_map
from headwise.scores import Score
from headwise.stats import Measure, Measurements, resolve
from headwise.text import tr


@dataclass(frozen=True)
class AttentionCall:
    """One attention call.

    Attributes:
        name: the module's qualified name in the model that is observed; "" if no model was given. It alone says which
            layer it is: `layer_idx` is the same in the encoder, the decoder and cross attention of one model.
        module: the attention module. One that is called several times in a forward pass, because layers share it or
            for one image after the other, is reported as often, under the same name; see `events.call_name`.
        map: the call's weights, [b, h, n, m], before dropout, detached unless the subscriber is `differentiable`; O(n)
            memory, so keep it as long as you like. In self attention, queries that are padding are fully masked in it,
            whatever the model computes for them.
        values: of the call, [b, h_kv, m, d_v], detached; None for headwise's own layers. heads: the output of each head
            before the output projection, [b, h, n, d_v], detached as the map; None for layers that do not concatenate
            heads.
        unplaced: whether nothing shows where the queries of a call are among its keys, such as a block of the queries
            of full attention: measures that depend on positions (`Measure.placed`) mean nothing then.
        unstarted: whether nothing shows which token its first key is, as in a cache that drops tokens: measures of the
            first tokens mean nothing then, and those of given tokens.
        held: the numbers of the map's heads in the layer, and of how many, where the heads are split over ranks; None
            where the call has all.
        failed: name of a measure → why it is not in `measured`; it is raised instead without `on_error`.
        remarks: what is unusual in the numbers, such as logits that float32 does not resolve.
    """

    name: str
    module: nn.Module
    map: AttentionMap
    values: Tensor | None = None
    heads: Tensor | None = None
    unplaced: bool = False
    unstarted: bool = False
    held: Held | None = None
    failed: Mapping[str, Exception] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

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
    differentiable: bool = False,
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
        differentiable: maps and their measures stay in the graph, where one is recorded, as of `attend(…,
            differentiable=True)`; a call whose map is not that of `attend` has a remark.
    Raises:
        ConfigError: if a measure is unknown, or if another observer of the same modules has a different one of that
            name.
    """
    names = modules if model is None else {module: name for name, module in model.named_modules()}
    with events.subscribe(callback, measures=measures, modules=names, on_error=on_error, differentiable=differentiable):
        yield


def attended(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, return_map: bool = False, to_itself: bool,
    at_end: bool | None = None, unplaced: bool = False, unstarted: bool = False, extra: int = 0,
    compute: Callable[..., tuple[Tensor, Any]] = attend_to, **options: Any,
) -> tuple[Tensor, AttentionMap | None]:  # fmt: skip
    """`attend_to` for a module of another library, published. Names of cross attention overrule to_itself, at_end
    (queries are the last keys' tokens; as to_itself if None) and unplaced. extra: first keys that are no tokens."""
    recorded = torch.compiler.is_dynamo_compiling() and events.subscribers and can_publish_recorded()
    exporting = torch.compiler.is_exporting()  # programs are for processes without these subscribers
    if recorded and not exporting and compute is attend_to and not return_map:
        facts = [to_itself, -1 if at_end is None else at_end, unplaced, unstarted, extra]
        if (out := _recorded(module, q, k, v, facts, **options)) is not None:
            return out, None
    compute = partial(compute, q, k, v, **options)
    if extra:
        compute = partial(_beside_extra_keys, extra, compute)
    if (recorded and exporting) or not events.subscribed(module):
        if not in_graph():
            events.unproven.discard(module)
        return compute(return_map=return_map)
    named = any(events.crosses(one.name(module)) for one in events.subscribers_of(module))
    at_end = to_itself if at_end is None else at_end
    out, amap = published(
        module, compute, mask=options.get("mask"), to_itself=to_itself and not named, at_end=at_end and not named,
        return_map=return_map, values=v, unplaced=unplaced and not named, unstarted=unstarted, extra=extra,
        held=partial(held_by, module, q, k, v),
    )  # fmt: skip
    return out, amap


def can_publish_recorded() -> bool:
    """Whether all calls that subscribers receive now can be operators of a graph of torch.compile."""
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        return not events.subscribers  # these operators are not those of torch.func
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return not events.subscribers  # which heads these are is read from the modules that are running
    return not events.apart


def _recorded(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, facts: list[int], *, mask: Mask | None = None,
    scale: float | None = None, score: Score | Sequence[Score] = (), dropout_p: float = 0.0,
    gap: Span | None = None,
) -> Tensor | None:  # fmt: skip
    """The output of `attended` as an operator of a graph of torch.compile; None if a graph cannot contain its mask."""
    from headwise.kernels.dynamo import key_of

    rule = rule_of(q, k, v, mask, scale, score, dropout_p, True)
    if not can_record(rule):
        return None
    facts = [*map(int, facts), *((0, 0) if gap is None else gap)]
    out, _ = record(q, k, v, rule, dropout_p, "auto", (key_of(module), facts))
    return out


def _publish_recorded(module: nn.Module, call: Call, kernel: str, facts: Sequence[int]) -> tuple[Tensor, Tensor, str]:
    """Output, log-sum-exp and kernel of a call that `_recorded` has recorded, published when the graph runs."""
    to_itself, at_end, unplaced, unstarted, extra, start, stop = facts
    if start < stop:
        call = replace(call, rule=replace(call.rule, grid=replace(call.rule.grid, gap=Span(start, stop))))
    amap: Any = None

    def compute(*_: Tensor, mask: Mask, return_map: bool = False, measures: Sequence[str | Measure] = ()) -> Any:
        nonlocal amap
        out, amap = attend_recorded(call, kernel, measures)
        return out, amap

    out, _ = attended(
        module, call.q, call.k, call.v, compute=compute, mask=call.rule.mask,
        to_itself=bool(to_itself) or is_causal(call.rule.mask), at_end=None if at_end < 0 else bool(at_end),
        unplaced=bool(unplaced), unstarted=bool(unstarted), extra=extra,
    )  # fmt: skip
    return out, amap.lse, amap.kernel


events.publishers.append(_publish_recorded)


TOLD = "_headwise_told"  # on an attached module: called with the reason where its own code computes a call


def left_to_own_code(
    module: nn.Module, why: str, held: Callable[[], Held | None], out: Tensor, error: Exception | None
) -> None:  # fmt: skip
    """A call of a module that headwise computes otherwise was computed by the module's own code, with output [b, h, n,
    d_v]. error: why it cannot be measured; None if it can."""
    events.unproven.discard(module)
    if TOLD in vars(module):
        vars(module)[TOLD](why)
    if error is not None and (seen_by := events.subscribers_of(module)):
        numbers, _ = _tried(held)
        for one in seen_by:
            one.failed(module, numbers, out, error)


class NotPublished(Exception):
    """Raised by the function that computes a call that must not be published."""


# No failures of a call: gradient checkpointing ends the repetition of one as soon as it has what it needs.
PASSED_ON = (NotPublished, _StopRecomputationError)


@eager
def published(
    module: nn.Module, compute: Callable[..., tuple[Any, ...]], *, mask: Mask | None, to_itself: bool,
    at_end: bool | None = None, return_map: bool = False, measures: Sequence[str | Measure] = (),
    values: Tensor | None = None, unplaced: bool = False, unstarted: bool = False, extra: int = 0,
    held: Callable[[], Held | None] | None = None, undo: Callable[[], Any] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """compute(return_map=…, measures=…) of a module that has subscribers, published. What fails for those with
    `on_error` alone is told to them and changes nothing of the result but dropout's random numbers."""
    events.unproven.discard(module)
    seen_by = events.subscribers_of(module)
    numbers, unread = _tried(partial(held_as_declared, module) if held is None else held)
    if unread is not None and any(one.edits or one.on_error is None for one in seen_by):
        raise unread
    changes: dict[str, Any] = {"module": module}
    if edits := [replace(placed, name=one.name(module)) for one in seen_by for placed in one.edits]:
        name = f"intervene(model): {edits[0].name or type(module).__name__}"
        if numbers is not None:
            raise ConfigError(f"{name}: {numbers}, and heads that are split over ranks cannot be edited")
        if unstarted and any(tokens is not None for one in edits for tokens in one.edit.tokens.values()):
            raise ConfigError(
                f"{name}: its cache drops tokens, and no mask shows which tokens its keys are, so tokens cannot be "
                f"edited; give the model a 2-D attention_mask, or none"
            )
        at_end = to_itself if at_end is None else at_end
        changes["edited"] = partial(attend_edited, edits, at_end, placed=not unplaced, extra=extra)
        compute = partial(_edited, edits, type(module).__name__, compute)
    if receivers := [partial(one.on_delta, one.name(module), numbers) for one in seen_by if one.on_delta is not None]:
        changes["on_delta"] = lambda delta: [receiver(delta) for receiver in receivers]
    calls = [one for one in seen_by if one.on_call is not None and not torch.compiler.is_exporting()]
    with events.within(**changes):
        if not calls or (measures and not return_map):  # the latter raises
            return compute(return_map=return_map, measures=measures)
        asked = _Asked.of(calls, measures, to_itself, mask)
        strict = all(one.on_error is None for one in calls)
        with held_warnings() as remarks:
            found = _computed(compute, asked, return_map, undo, strict=strict, unread=unread)
        if asked.learned and found.error is None and not getattr(found.result[1], "differentiable", False):
            remarks.append(tr("its map has no gradients, as it is not that of one call of attend without edits"))
    # A repeated call is measured like the first one, so that it takes the same kernel, which is what checkpointing
    # holds it to; but it is not published.
    if not events.in_backward():
        given = None if values is None else values.detach()
        facts = partial(
            AttentionCall, module=module, values=given, unplaced=unplaced, unstarted=unstarted, held=numbers
        )
        _publish(calls, module, found, asked, facts, numbers, remarks, apart=return_map)
    for remark in remarks if return_map or strict else ():
        warn(remark)
    return found.result if found.error is not None else asked.returned(found.result, return_map)


def _tried(held: Callable[[], Held | None]) -> tuple[Held | None, Exception | None]:
    """What it finds, or why it finds nothing."""
    try:
        return held(), None
    except Exception as error:
        return None, error


@dataclass(frozen=True)
class _Asked:
    """The measures of a call: of the caller by name and as given, of subscribers, and those as they are computed."""

    own: Mapping[str, Measure]  # name → measure of the caller
    given: Sequence[str | Measure]  # as the caller gave them
    wanted: Sequence[Measure]  # those of subscribers, and over: the same as they are computed
    over: Sequence[Measure]
    apart: bool  # whether these are of another map than the caller's
    learned: bool  # whether a subscriber wants a map with gradients

    @classmethod
    def of(
        cls, calls: Sequence[events.Subscriber], measures: Sequence[str | Measure], to_itself: bool, mask: Mask | None
    ) -> "_Asked":
        """Those of these subscribers, in a call with this mask."""
        own = {measure.name: measure for measure in resolve(measures)} if measures else {}
        wanted = list({name: measure for one in calls for name, measure in one.measures.items()}.values())
        # Over tokens it has another name, so that it is not mistaken for a different measure of the caller's.
        padded = to_itself and mask is not None and any(part.padding for part in conjuncts(mask))
        different = any(m.name in own and not events.same_measure(m, own[m.name]) for m in wanted)
        apart = padded or (to_itself and different)
        learned = torch.is_grad_enabled() and any(one.differentiable for one in calls)
        return cls(own, measures, wanted, [over_tokens(m) for m in wanted] if apart else wanted, apart, learned)

    @property
    def further(self) -> list[Measure]:
        """Those of subscribers that the caller has not requested."""
        return [measure for measure in self.over if measure.name not in self.own]

    def seen(self, amap: Any, failed: Mapping[str, Exception], another: bool) -> Any:
        """The map that subscribers receive, measured without those that failed."""
        if not (self.apart or another or self.own):
            return amap
        pairs = [pair for pair in zip(self.wanted, self.over, strict=True) if pair[1].name not in failed]
        wanted, over = [one for one, _ in pairs], [other for _, other in pairs]
        seen: Any = amap
        if self.apart:
            seen = token_map(amap, wanted, over, learned=self.learned)
        elif another:
            seen = copied(amap, learned=self.learned)
        others = [
            m for m, one in pairs if one.name in self.own and not events.same_measure(m, self.own[one.name])
        ]  # the pass had one measure of that name
        if others:
            found = seen.measured
            states = found.states | seen.measure(*others).states
            seen.measured = renamed(found, wanted, [states[measure.name] for measure in wanted])
        if self.learned and (self.apart or others) and getattr(seen, "differentiable", False):
            seen.measured = seen.measured_by(None, wanted)  # those of the pass are numbers of another map
        return seen

    def failed_of(self, one: events.Subscriber, failed: Mapping[str, Exception]) -> dict[str, Exception]:
        """name → why a measure of a subscriber is not known."""
        names = {m.name: over.name for m, over in zip(self.wanted, self.over, strict=True)} if failed else {}
        return {name: failed[names[name]] for name in one.measures if names.get(name) in failed}

    def returned(self, result: tuple[Any, ...], return_map: bool) -> tuple[Any, ...]:
        """What the caller gets, with its own measures alone."""
        out, amap, *rest = result
        if not return_map:
            return out, None, *rest
        if not self.own:
            amap.measured = None
        elif self.own.keys() != amap.measured.keys():
            amap.measured = amap.measured.only(list(self.own.values()))
        return out, amap, *rest


class _Found(NamedTuple):
    """A computed call: output, map, …; name → why a measure is missing; and why there is nothing for subscribers, the
    result being what the caller gets then."""

    result: tuple[Any, ...]
    failed: Mapping[str, Exception]
    error: Exception | None


def _computed(
    compute: Callable[..., tuple[Any, ...]], asked: _Asked, return_map: bool, undo: Callable[[], Any] | None, *,
    strict: bool, unread: Exception | None,
) -> _Found:  # fmt: skip
    """The call with all measures; else with those that do not fail; else as the caller has it, which raises what is not
    of the subscribers. strict: raise what fails. unread: why it is not for subscribers."""
    own = tuple(asked.own.values())
    if unread is None:
        try:
            more = {"differentiable": True} if asked.learned else {}
            return _Found(compute(return_map=True, measures=(*own, *asked.further), **more), {}, None)
        except Exception as error:
            if strict or isinstance(error, PASSED_ON):
                raise
            unread = error
        if undo is not None:
            undo()
        try:
            result = compute(return_map=True, measures=own)
            return _Found(result, _measured_apart(result[1], own, asked.further), None)
        except PASSED_ON:
            raise
        except Exception:
            if undo is not None:
                undo()
    return _Found(compute(return_map=return_map, measures=asked.given), {}, unread)


def _measured_apart(amap: Any, own: Sequence[Measure], further: Sequence[Measure]) -> dict[str, Exception]:
    """Add further measures to those of a map, one after the other; returns those that fail."""
    found = amap.measured if own else amap.measure()
    states, known, failed = dict(found.states), list(own), dict[str, Exception]()
    for measure in further:
        try:
            states |= amap.measure(measure).states
            known.append(measure)
        except Exception as error:
            failed[measure.name] = error
    amap.measured = renamed(found, known, [states[measure.name] for measure in known])
    return failed


def _publish(
    calls: Sequence[events.Subscriber], module: nn.Module, found: _Found, asked: _Asked,
    facts: Callable[..., AttentionCall], held: Held | None, remarks: list[str], *, apart: bool,
) -> None:  # fmt: skip
    """Give the call to its subscribers, or the reason why not. apart: whether the caller has the map too."""
    out, amap, *rest = found.result
    error, seen, heads = found.error, None, None
    if error is None:
        try:
            with held_warnings() as more:
                seen = asked.seen(amap, found.failed, apart)
                seen.layer = next(filter(None, (one.name(module) for one in calls)), "")
                joined = rest[0] if rest else None  # else heads are not concatenated
                if joined is not None and not joined.shape[-1] % seen.shape[1]:
                    heads = joined.unflatten(-1, (seen.shape[1], -1)).transpose(1, 2)
                elif not rest:
                    heads = out
            remarks += more
        except Exception as reason:
            error = reason
    for one in calls:
        failed = asked.failed_of(one, found.failed)
        why = error or (next(iter(failed.values()), None) if one.on_error is None else None)
        try:
            if why is None and one.on_call is not None:
                given, own = seen, heads
                if not (one.differentiable and asked.learned):
                    given = copied(seen, learned=False) if asked.learned else seen
                    own = None if heads is None else heads.detach()
                one.on_call(facts(name=one.name(module), map=given, heads=own, failed=failed, remarks=tuple(remarks)))
        except Exception as reason:
            why = reason
        if why is not None:
            one.failed(module, held, out, why)


def _beside_extra_keys(
    extra: int, compute: Callable[..., tuple[Tensor, Any]], *, return_map: bool = False,
    measures: Sequence[str | Measure] = (), **more: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """compute(…) with a map in which the first keys are no tokens, and the measures of that map."""
    out, amap = compute(return_map=return_map, **more)
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
