"""A call that headwise does not compute: the model's own attention computes it, and its weights are measured."""

import dis
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headwise import events
from headwise.errors import HeadwiseError
from headwise.map import AttentionMap
from headwise.mask_tensors import both, of_boolean
from headwise.masks import Everything, Grid, Mask
from headwise.models.adapters.huggingface.library import Position, library
from headwise.publishing import attended, left_to_own_code
from headwise.publishing.tokens import renamed
from headwise.rule import Rule
from headwise.scores import Bias, Score, SinkLogits
from headwise.spread import held_by
from headwise.stats import LearnedSinkMass, Measure, Measurements, Statistic
from headwise.stats.base import with_tensors

Map = TypeVar("Map", bound=AttentionMap)
FORMER = "_headwise_former"  # on an attention module: the implementation that headwise takes the place of


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


def former(module: nn.Module) -> str | None:
    """The attention implementation whose place headwise takes in a module; None if it was loaded with headwise's."""
    found: str | None = module.__dict__.get(FORMER)
    return found


def computed_by_model(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    options: dict[str, Any], mask: Mask | None, position: Position, to_itself: bool, error: HeadwiseError,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The result of the model's own attention function, published with the statistics of its weights. `error`, why
    headwise does not compute it, is raised if that code cannot, or where someone edits the call."""
    function = own_function(module)
    if attention_mask is None and former(module) not in (None, "eager"):  # implementations differ without a mask
        function = library("modeling_utils").ALL_ATTENTION_FUNCTIONS.get(former(module), function)
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
        """As in `AttentionMap`."""
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
