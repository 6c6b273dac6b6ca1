"""A call that headwise does not compute: the model's own attention computes it, and its weights are measured."""

import dis
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from headwise import events
from headwise.errors import HeadwiseError
from headwise.map import AttentionMap
from headwise.mask_tensors import both, of_boolean
from headwise.masks import Everything, Grid, Mask
from headwise.models.adapters.huggingface.library import library
from headwise.models.adapters.huggingface.positions import Position
from headwise.publishing import left_to_own_code, published
from headwise.publishing.tokens import renamed
from headwise.rule import Rule
from headwise.scores import Bias
from headwise.stats import LearnedSinkMass, Measure, Measurements, resolve
from headwise.stats.states import with_tensors

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


@cache
def passes_by_name(kind: type[nn.Module], name: str) -> bool:
    """Whether a module passes this keyword argument itself, in code that reads which implementation it runs with: with
    "eager" it may do something else instead."""
    constants = set()
    for one in inspect.unwrap(kind.forward).__code__.co_consts:
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
    """The result of the model's own attention function, published with the statistics of its weights.

    Args:
        options: the other arguments of the call. mask, position: of the call, as far as they are known.
        error: why headwise does not compute it; raised if the model's own code cannot, or where someone edits the call.
    """
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
    left_to_own_code(module, str(error), out.transpose(1, 2), error if weights is None else None)
    if weights is not None and seen_by:
        keys = position.keys
        bias, scale = options.get("position_bias"), options.get("scaling")
        with torch.no_grad():
            amap = _map_of(weights.detach()[..., :keys].float(), query, key[:, :, :keys], scale, bias, mask)

        def compute(return_map: bool = False, measures: Sequence[str | Measure] = ()) -> tuple[Tensor, Any]:
            amap.measured = _measured(amap, resolve(measures)) if measures else None
            return out.transpose(1, 2), amap

        published(
            module, compute, mask=amap.rule.mask, to_itself=to_itself, at_end=position.at_end, values=value,
            unplaced=position.at_end is False, unstarted=position.first is None,
        )  # fmt: skip
    return out, weights


class _OfWeights(AttentionMap):
    """The map of given weights.

    Attributes:
        logits: whether its scores are those of the model, not only up to a number for each row.
    """

    logits: bool


def _map_of(w: Tensor, q: Tensor, k: Tensor, scale: float | None, bias: Tensor | None, mask: Mask | None) -> _OfWeights:
    """The map that has these weights: scores without queries and keys, and a bias of all of them. O(n·m) memory.

    Where log w differs from scale · q·k + bias by one number in each row, that number is the row's log-sum-exp, with
    whatever else is in the denominator; otherwise the scores are log w.
    """
    b, h, n, m = w.shape
    scores = q.float() @ k.float().repeat_interleave(h // k.shape[1], 1).mT
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale) + (0.0 if bias is None else bias[..., :m])
    log, near = w.log(), w > 1e-4  # the logarithms of smaller ones have few digits in half precision
    lse = (scores - log).masked_fill(~near, -torch.inf).amax(-1)
    off = (scores - log - lse[..., None]).masked_fill(~near, 0.0).abs().amax()
    exact = bool(off <= (1e-4 if q.dtype == torch.float32 else 0.05) * (1 + lse[lse.isfinite()].abs().max()))
    if not exact:
        scores, lse = log.masked_fill(w == 0, 0.0), torch.zeros_like(lse)
    lse = lse.masked_fill((w == 0).all(-1), -torch.inf)
    whole = both(mask, of_boolean(w > 0)) or Everything()
    rule = Rule(whole, 1.0, Grid(b, h, n, m), (Bias(scores),))
    made = _OfWeights(scores.new_zeros(b, h, n, 1), scores.new_zeros(b, h, m, 1), lse, rule, named="torch_blocks")
    made.logits = exact
    return made


def _measured(amap: _OfWeights, measures: Sequence[Measure]) -> Measurements:
    """The measures of a map of weights; NaN for those which weights do not determine."""
    found = amap.measure(*measures)
    unknown = {one.name for one in measures if isinstance(one, LearnedSinkMass)}
    if not amap.logits:  # what changes with a number that is added to all scores of a row
        (bias,) = amap.rule.scores
        assert isinstance(bias, Bias)
        rule = replace(amap.rule, scores=(Bias(bias.values + 1),))
        other = AttentionMap(amap.q, amap.k, amap.lse + 1, rule, named=amap.named).measure(*measures)
        unknown |= {name for name in found if not torch.allclose(found[name], other[name], 1e-3, 1e-3)}
    nan = {one: with_tensors(found.states[one], lambda x: torch.full_like(x, torch.nan)) for one in unknown}
    return renamed(found, measures, [(found.states | nan)[one.name] for one in measures])
