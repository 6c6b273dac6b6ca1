"""The attention function that transformers calls for attn_implementation="headwise"; and calls of which the model's
own attention computes the weights, which are measured."""

import dis
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from headwise.cache import remembered
from headwise.cache.base import gap_of
from headwise.cache.generation import Kept
from headwise.errors import ConfigError, DTypeError, HeadwiseError, ShapeError
from headwise.kernels import events
from headwise.kernels.graph import recording
from headwise.kernels.spread import check_local, held_by
from headwise.map import AttentionMap
from headwise.map.arguments import of_additive, of_boolean
from headwise.map.attention import attend_to
from headwise.masks import (
    Causal,
    Documents,
    Everything,
    Grid,
    Mask,
    Span,
    Window,
    conjuncts,
    is_causal as mask_is_causal,
)
from headwise.masks.given import both
from headwise.models.adapters.huggingface.library import Position, crosses, library, position_of
from headwise.models.adapters.huggingface.masks import own_mask
from headwise.models.adapters.weights import AttentionWeights
from headwise.nn.layout import attend_in_parts, over_cache, runs_of
from headwise.publishing import attended, can_publish_recorded, left_to_own_code
from headwise.publishing.tokens import renamed
from headwise.rule import Rule
from headwise.scores import Bias, Score, SinkLogits, SoftCap
from headwise.stats import LearnedSinkMass, Measure, Measurements, Statistic
from headwise.stats.base import with_tensors

Map = TypeVar("Map", bound=AttentionMap)
# On an attention module: the implementation that headwise takes the place of; none if it was loaded with headwise's
FORMER = "_headwise_former"


def own_function(module: nn.Module) -> Callable[..., Any] | None:
    """The eager attention function that the code of a module refers to; None if there is none."""
    forward = inspect.unwrap(type(module).forward)
    return _named_in(forward) if hasattr(forward, "__code__") else None


@cache
def _named_in(forward: Any) -> Callable[..., Any] | None:
    named = (forward.__globals__.get(name) for name in forward.__code__.co_names if name.endswith("attention_forward"))
    return next((one for one in named if callable(one)), None)


@cache
def uses(function: Callable[..., Any], name: str) -> bool:
    """Whether a function may use a keyword argument: it names it, or its code reads its **kwargs."""
    function = inspect.unwrap(function)
    parameters = inspect.signature(function).parameters
    rest = [one.name for one in parameters.values() if one.kind is one.VAR_KEYWORD]
    code = getattr(function, "__code__", None)
    if name in parameters or not rest or code is None:
        return True
    read = [one.argval if isinstance(one.argval, tuple) else (one.argval,) for one in dis.get_instructions(code)]
    return any(rest[0] in names for names in read)


def passes_by_name(module: nn.Module, name: str) -> bool:
    """Whether a module passes this keyword argument itself, in code that reads which implementation it runs with: with
    "eager" it may do something else instead."""
    constants = set()
    for one in inspect.unwrap(type(module).forward).__code__.co_consts:
        constants |= {*one} if isinstance(one, tuple) else {one}
    return {name, "eager"} <= constants


def computed_by_model(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    options: dict[str, Any], mask: Mask | None, position: Position, to_itself: bool, error: HeadwiseError,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The result of the model's own attention function, published with the statistics of its weights. `error`, why
    headwise does not compute it, is raised if that code cannot, or where someone edits the call."""
    function = own_function(module)
    former = vars(module).get(FORMER)
    if attention_mask is None and former not in (None, "eager"):  # implementations differ without a mask
        function = library("modeling_utils").ALL_ATTENTION_FUNCTIONS.get(former, function)
    seen_by = events.subscribers_of(module)
    if function is None or any(one.edits or one.on_delta is not None for one in seen_by):
        raise error
    try:
        out, weights = function(module, query, key, value, attention_mask, **options)
    except Exception:
        raise error from None
    amap: WeightsMap | None = None
    why: Exception | None = error if weights is None else None
    if weights is not None and seen_by:
        keys = position.keys
        bias, scale = options.get("position_bias"), options.get("scaling")
        try:
            with torch.no_grad():
                amap = _map_of(weights.detach()[..., :keys].float(), query, key[:, :, :keys], scale, bias, mask)
        except Exception as unread:
            why = unread
    left_to_own_code(module, str(error), partial(held_by, module, query, key, value), out.transpose(1, 2), why)
    if amap is not None:
        seen = amap

        def compute(
            *given: Tensor, mask: Mask, return_map: bool = False, measures: Sequence[str | Measure] = ()
        ) -> tuple[Tensor, Any]:
            seen.measured = seen.measure(*measures) if measures else None
            return out.transpose(1, 2), seen

        attended(
            module, query, key, value, compute=compute, mask=amap.rule.mask, to_itself=to_itself,
            at_end=position.at_end, unplaced=position.at_end is False, unstarted=position.first is None,
        )  # fmt: skip
    return out, weights


class WeightsMap(AttentionMap):
    """The map that has given weights, and whose scores are one bias [b, h, n, m]. What a row lacks of 1 is a learned
    sink of logit 0."""

    other: AttentionMap | None = None  # None where this map has the model's scores, or nothing knows them
    exact: bool = True  # whether they are known

    def measured_by(
        self, found: Mapping[Statistic, Tensor] | None, wanted: Sequence[Measure], **how: Any
    ) -> Measurements:
        mine = super().measured_by(found, wanted, **how)
        if self.other is None:
            return mine
        shifted, states = self.other.measure(*wanted), mine.states
        for one in wanted:
            if not (isinstance(one, LearnedSinkMass) or torch.allclose(mine[one.name], shifted[one.name], 1e-3, 1e-3)):
                of_scores = shifted.states[one.name]
                states[one.name] = (
                    of_scores if self.exact else with_tensors(of_scores, lambda x: torch.full_like(x, torch.nan))
                )
        return renamed(mine, wanted, [states[one.name] for one in wanted])


def _map_of(w: Tensor, q: Tensor, k: Tensor, scale: float | None, bias: Tensor | None, mask: Mask | None) -> WeightsMap:
    """The map of weights [b, h, n, m] that were computed of q [b, h, n, d] and k [b, h_kv, m, d]."""
    b, h, n, m = w.shape
    scores = q.float() @ k.float().repeat_interleave(h // k.shape[1], 1).mT
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale) + (0.0 if bias is None else bias[..., :m])
    few = 1e-4 if q.dtype == torch.float32 else 0.02
    hidden, log, near = (w == 0).all(-1), w.log(), w > 1e-4  # the logarithms of smaller ones have few digits
    lse = (scores - log).masked_fill(~near, -torch.inf).amax(-1)
    off = (scores - log - lse[..., None]).masked_fill(~near, 0.0).abs().amax()
    exact = bool(off <= few * (1 + lse.masked_fill(hidden, 0.0).abs().max()))
    if not exact:
        scores, lse = log.masked_fill(w == 0, 0.0), torch.zeros_like(lse)
    lse = lse.masked_fill(hidden, -torch.inf)
    lacking = (1 - w.sum(-1)).masked_fill(hidden, 0.0)
    sunk = bool((lacking > 10 * few).any())
    shown = both(mask, of_boolean(w > 0)) or Everything()
    nothing = scores.new_zeros(b, h, n, 1), scores.new_zeros(b, h, m, 1)

    def of(kind: type[Map], lse: Tensor, scores: Tensor, *more: Score, whole: bool = True) -> Map:
        rule = Rule(shown, 1.0, Grid(b, h, n, m), (Bias(scores), *more))
        return kind(*nothing, lse, rule, named="torch_blocks", whole=whole)

    if exact and not sunk:
        return of(WeightsMap, lse, scores)
    sink = (lse + lacking.clamp_min(1e-7).log() if sunk else lse - 1).masked_fill(hidden, 0.0)
    more = (SinkLogits(scores.new_zeros(h)),) if sunk else ()
    found = of(WeightsMap, lse - sink, scores - sink[..., None], *more)
    found.other, found.exact = of(AttentionMap, lse, scores, whole=not sunk), exact
    return found


# Arguments that do not change the attention of a call: positions are in the queries and keys already, and packed
# sequences in the mask.
HARMLESS = frozenset({
    "cache_position", "logits_to_keep", "num_items_in_batch", "output_attentions", "output_hidden_states",
    "output_router_logits", "position_ids", "return_dict", "use_cache",
})  # fmt: skip
# Those that a graph may contain: their values, and the module's code, need not be read.
RECORDED = HARMLESS | {
    "attention_mask", "dropout", "is_causal", "position_bias", "s_aux", "scaling", "sliding_window", "softcap",
}  # fmt: skip
# Modules that return weights from every call, as attn_implementation="eager" does, to hooks of other libraries.
always_weights: "WeakSet[nn.Module]" = WeakSet()
# FlashAttention's arguments for packed sequences.
PACKED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})


def attention_in_graphs(module: nn.Module, *tensors: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """`attention_forward`; outside of a graph of torch.compile that cannot contain it."""
    if torch.compiler.is_dynamo_compiling() and _unrecorded(module, options):
        from headwise.kernels.dynamo import outside

        return outside(attention_forward, module, *tensors, **options)
    return attention_forward(module, *tensors, **options)


def _unrecorded(module: nn.Module, options: Mapping[str, Any]) -> bool:
    """Whether a call returns weights, has subscribers that a graph cannot have, or arguments that must be read."""
    if module in always_weights or _attentions_wanted(options) or not can_publish_recorded():
        return True
    return any(x is not None and x is not False and name not in RECORDED for name, x in options.items())


def attention_forward(
    module: nn.Module,
    query: Tensor,  # [b, h, n, d]
    key: Tensor,  # key, value: [b, h_kv, m, d], not repeated for grouped queries
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,  # share of weights dropped; models pass 0 outside of training
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,  # Gemma 2's soft cap of scores
    s_aux: Tensor | None = None,  # [h] logits of learned sinks (gpt-oss)
    position_bias: Tensor | None = None,  # [b or 1, h or 1, n, m], added to the scores (T5)
    indices: Tensor | None = None,  # [b, n, k] keys that each query may attend to, −1 for none (DeepSeek V3.2)
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention, by transformers' `AttentionInterface`: [b, n, h, d_v], contiguous, and `AttentionWeights` where they
    are wanted. A call that headwise cannot compute is computed by the eager function of the model's own code."""
    check_local()
    try:
        call = _read(
            module, query, key, value, attention_mask, is_causal, sliding_window, softcap, s_aux, position_bias,
            indices, kwargs,
        )  # fmt: skip
    except HeadwiseError as error:
        given = {
            "dropout": dropout, "scaling": scaling, "is_causal": is_causal, "sliding_window": sliding_window,
            "softcap": softcap, "s_aux": s_aux, "position_bias": position_bias, "indices": indices,
        }  # fmt: skip
        given = {k: v for k, v in given.items() if v is not None} | kwargs
        if torch.compiler.is_dynamo_compiling():
            from headwise.kernels.dynamo import outside

            return outside(attention_forward, module, query, key, value, attention_mask, **given)
        own = own_mask(attention_mask)
        position = position_of(module, None, query.shape[2], key.shape[2], None, {}) if own is None else own.position
        mask = None if own is None else own.mask
        return computed_by_model(
            module, query, key, value, attention_mask, given, mask, position,
            _to_itself(module, mask, query.shape[2], position), error,
        )  # fmt: skip
    wanted = module in always_weights or _attentions_wanted(kwargs)
    unfilled = key.shape[2] - call.key.shape[2]
    query, key, value, position, scores, whole = call
    gap = Span(0, position.first) if position.first else None
    if isinstance(key, Kept):
        if not _to_itself(module, whole, query.shape[2], position):
            raise ConfigError(
                f"past_key_values: {type(module).__name__} attends to another sequence, whose keys a cache of "
                f"hw.cache.for_transformers cannot hold"
            )
        whole_maps = wanted or bool(events.editing) or events.subscribed(module)
        found = _of_cache(key, call, whole_maps, scale=scaling, dropout_p=float(dropout))
        if isinstance(found, Tensor):
            events.unproven.discard(module)
            return found.transpose(1, 2).contiguous(), None
        key, value, whole, scores, gap = found
    elif wanted and not key.requires_grad:
        key = key.clone()  # caches of a fixed size change it in place, before the weights are read
    out, amap = attended(
        module, query, key, value, return_map=wanted, to_itself=_to_itself(module, whole, query.shape[2], position),
        at_end=position.at_end, unplaced=position.at_end is False, unstarted=position.first is None, mask=whole,
        scale=scaling, score=scores, dropout_p=float(dropout), gap=gap,
    )  # fmt: skip
    weights: Tensor | None = None
    if wanted and amap is not None:
        graph = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (query, key, s_aux, position_bias)
        )
        rule = Rule(amap.rule.mask, amap.rule.scale, amap.rule.grid, scores)
        weights = given_weights = AttentionWeights(
            amap, query.dtype, unfilled=unfilled, graph=(query, key, rule) if graph else None
        )
        if module in always_weights:
            # Tracers of other libraries find the weights at these calls of eager functions, and may change them.
            if isinstance(getattr(module, "attn_dropout", None), nn.Module) and not module.training:
                weights = module.attn_dropout(weights)  # type: ignore[operator]
            weights = nn.functional.dropout(weights, p=0.0)  # dropout is in the output already
            if weights is not given_weights or given_weights.changed:
                value = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
                changed = weights[..., : value.shape[2]].to(value.dtype)
                out = torch.dropout(changed, float(dropout), dropout > 0) @ value
    return out.transpose(1, 2).contiguous(), weights  # models call .view on it


def _of_cache(
    kept: Kept, call: "_Call", whole_maps: bool, **options: Any
) -> Tensor | tuple[Any, Any, Mask | None, tuple[Score, ...], Span | None]:
    """The output [b, h, n, d_v] of a call with a cache of headwise whose KV heads hold other tokens; or keys, values,
    mask and scores of one call for all heads, and the gap. whole_maps: whether the call must be one of all heads."""
    cache: Any
    cache, k, v = kept.taken()
    b, h, n, _ = call.query.shape
    grid = Grid(b, h, n, kept.shape[2])
    if getattr(cache, "sinks", 0) and call.mask is not None and any(part.padding for part in conjuncts(call.mask)):
        raise ConfigError(
            "attention_mask: has padding, and the first tokens, which a budget with sinks keeps, would be padding; "
            "give prompts of one length, one by one, or make the budget with sinks=0"
        )
    parts = getattr(cache, "parts", ())
    if parts and not whole_maps:
        group = h // k.shape[1]
        runs = [runs_of(heads, part, group, call.mask, call.scores, grid, call.query.device) for heads, part in parts]
        return attend_in_parts(attend_to, cache, call.query, k, v, runs, **options)
    mask, scores = over_cache(call.mask, call.scores, cache, grid)
    gap = gap_of(cache)
    held = cache.append(k, v) if whole_maps else remembered(cache, k, v)
    return *held, mask, scores, gap if gap.size and whole_maps else None


class _Call(NamedTuple):
    """The arguments of a call, as `attended` takes them."""

    query: Tensor
    key: Tensor
    value: Tensor
    position: Position
    scores: tuple[Score, ...]
    mask: Mask | None


def _read(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    is_causal: bool | None, sliding_window: int | None, softcap: float | None, s_aux: Tensor | None,
    position_bias: Tensor | None, indices: Tensor | None, kwargs: dict[str, Any],
) -> _Call:  # fmt: skip
    """The arguments of `attention_forward` as those of `attended`; a HeadwiseError says why they cannot be."""
    if indices is not None and (indices.ndim != 3 or indices.is_floating_point()):
        kwargs, indices = kwargs | {"indices": indices}, None
    _refuse_unknown(module, kwargs)
    b, h, n, _ = query.shape
    if query.dtype != value.dtype or key.dtype != value.dtype:
        query = query.to(value.dtype)  # under autocast norms widen them
        key = key if key.dtype == value.dtype else key.to(value.dtype)
    packed = kwargs.get("cu_seq_lens_q") is not None or kwargs.get("cu_seq_lens_k") is not None
    found: list[Mask | None] = []
    scores: tuple[Score, ...] = () if softcap is None else (SoftCap(float(softcap)),)
    own = own_mask(attention_mask)
    if own is not None and own.sizes == (b, n, key.shape[2]):
        position = own.position
    else:
        own, allowed = None, None
        if attention_mask is not None:
            allowed = _checked(module, attention_mask, Grid(b, h, n, key.shape[2]))
        position = position_of(module, allowed, n, key.shape[2], sliding_window, kwargs)
    if (keys := position.keys) < key.shape[2]:
        key, value = key[:, :, :keys], value[:, :, :keys]
        position_bias = None if position_bias is None else position_bias[..., :keys]
    if own is not None:
        found.append(own.mask)
    elif attention_mask is None and not packed:
        _refuse_contradictions(module, n, keys, is_causal, sliding_window)
    elif attention_mask is None:  # FlashAttention derives the mask of packed sequences from the module
        if getattr(module, "is_causal", True) if is_causal is None else is_causal:
            found.append(Causal() if sliding_window is None else Causal() & Window(sliding_window))
        else:
            _refuse_contradictions(module, keys, keys, None, sliding_window)
    else:
        given = attention_mask[..., :keys]
        if given.dtype == torch.bool:
            found.append(of_boolean(given.expand(-1, -1, n, -1)))
        else:
            given = given.expand(b, -1, -1, -1) if given.shape[2] == 1 else given  # padding has a length for each
            mask, score = of_additive(given, n, lowest=_lowest(given))
            found.append(mask)
            scores += score
    if packed:
        found.append(_of_packed(kwargs, b, n, key.shape[2]))
    if indices is not None:  # keys that each query has chosen; others than 0 … keys − 1 are none
        chosen = torch.zeros(*indices.shape[:2], keys + 1, dtype=torch.bool, device=indices.device)
        chosen.scatter_(-1, indices.long().masked_fill((indices < 0) | (indices >= keys), keys), True)
        found.append(of_boolean(chosen[:, None, :, :keys]))
    if position_bias is not None and (position_bias.requires_grad or recording() or bool(position_bias.any())):
        scores += (Bias(position_bias),)
    if s_aux is not None:
        scores += (SinkLogits(s_aux),)
    return _Call(query, key, value, position, scores, both(*found))


def _to_itself(module: nn.Module, mask: Mask | None, n: int, position: Position) -> bool:
    """Whether queries and keys are one sequence, as far as the call shows: causal attention is, and attention of a
    decoder that is not causal reads the encoder."""
    if mask_is_causal(mask) or (position.at_end and n < position.keys):
        return True
    return n == position.keys and not crosses(module) and not getattr(module, "is_decoder", False)


def _refuse_unknown(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise if an argument may change the result. One that the model's eager function does not read changes nothing,
    unless the module passes it in the place of something that it does with the implementation "eager" alone."""
    for name, value in kwargs.items():
        if name in HARMLESS or name in PACKED or value is None or value is False:
            continue
        function = own_function(module)
        if function is not None and not uses(function, name) and not passes_by_name(module, name):
            continue
        known = "softcap, s_aux, sliding_window, position_bias, indices, cu_seq_lens_q and cu_seq_lens_k"
        raise ConfigError(
            f"{type(module).__name__} calls its attention with {name}=…, which attn_implementation='headwise' does "
            f"not support; it supports {known}. Use attn_implementation='eager' for this "
            f"model: detach() the handle of headwise.attach(model)"
        )


def _refuse_contradictions(
    module: nn.Module, n: int, m: int, is_causal: bool | None, sliding_window: int | None
) -> None:
    """Raise if a call without a mask claims to hide keys, and the implementation whose place headwise takes hides them:
    eager attention hides none, and SDPA those of causal attention."""
    before = vars(module).get(FORMER)
    if before == "eager":
        return
    sliding_window = None if before == "sdpa" else sliding_window
    claim = "is_causal=True" if is_causal and n > 1 else None
    if sliding_window is not None and m > sliding_window:
        claim = f"sliding_window={sliding_window}"
    if claim is not None:
        raise ConfigError(
            f"{type(module).__name__} calls its attention with {claim} and no mask, for {n} queries and {m} keys: "
            f"transformers' eager attention hides no key then, and its others do. Give the model a 4-D attention_mask"
        )


def _checked(module: nn.Module, given: Tensor, grid: Grid) -> Tensor:
    """Which keys a 4-D mask from a user or a model allows, boolean."""
    if not isinstance(given, Tensor) or (given.dtype != torch.bool and not given.is_floating_point()):
        came = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise DTypeError(f"attention_mask: expected a boolean or floating tensor, got {came}")
    b, h, n, m = grid
    if given.ndim != 4 or any(
        size not in fits for size, fits in zip(given.shape, ((1, b), (1, h), (1, n), (m,)), strict=True)
    ):
        raise ShapeError(
            f"attention_mask: {type(module).__name__} passed shape {tuple(given.shape)}, expected [{b} or 1, {h} "
            f"or 1, {n} or 1, {m}]; a model that passes a 2-D padding mask on would ignore it, which headwise does not"
        )
    return given if given.dtype == torch.bool else given.detach() > _lowest(given)


def _lowest(given: Tensor) -> float:
    """What masks a key if it is added to its score."""
    return torch.finfo(given.dtype).min / 2


def _of_packed(kwargs: dict[str, Any], b: int, n: int, m: int) -> Mask:
    """The mask of packed sequences in one batch entry, by FlashAttention's arguments."""
    ends, key_ends = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if ends is None or key_ends is None or not torch.equal(ends, key_ends) or b != 1 or n != m or int(ends[-1]) != m:
        raise ConfigError(
            f"cu_seq_lens_q and cu_seq_lens_k: expected the same ends of sequences for queries and keys, in a batch of "
            f"1, the last of them {m}; got {ends} and {key_ends} for a batch of {b}, {n} queries and {m} keys"
        )
    return Documents(torch.searchsorted(ends[1:].contiguous(), torch.arange(m, device=ends.device), right=True))


def _attentions_wanted(kwargs: Mapping[str, Any]) -> bool:
    """Whether the model's caller requested attentions: by an argument, or by transformers' outputs to capture."""
    if kwargs.get("output_attentions"):
        return True
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    catching = None if collector is None else collector.get()
    return catching is not None and any(name.endswith("attentions") for name in catching)
