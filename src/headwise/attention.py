"""`attend`, the entry point to attention."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, overload

import torch
from torch import Tensor

from headwise import events
from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.fields import unregistered
from headwise.kernels import named, run
from headwise.kernels.call import Call
from headwise.kernels.graph import (
    can_record,
    has_no_numbers,
    in_graph,
    in_transform,
    is_batched,
    record,
    recordable,
    recording,
    shapes,
)
from headwise.kernels.kernel import Mapped
from headwise.kernels.prepare import again, keep
from headwise.kernels.quantized import QuantizedKV, Vectors, decoded
from headwise.map import AttentionMap
from headwise.mask_tensors import of_argument
from headwise.masks import Causal, Everything, Grid, Mask, Span
from headwise.masks.grid import NO_GAP
from headwise.rule import Rule, check_vectors
from headwise.scores import Score, check_scores
from headwise.spread import check_local
from headwise.stats import Measure, resolve, statistics_for

CAUSAL = Causal()


@overload
def attend(q: Tensor, k: Vectors, v: Vectors, *, mask: Mask | Tensor | None = ..., is_causal: bool = ...,
           scale: float | None = ..., score: Score | Sequence[Score] = ..., dropout_p: float = ...,
           return_map: Literal[False] = ..., measures: Sequence[str | Measure] = ...,
           kernel: str = ..., gap: tuple[int, int] | None = ...) -> Tensor: ...  # fmt: skip
@overload
def attend(q: Tensor, k: Vectors, v: Vectors, *, mask: Mask | Tensor | None = ..., is_causal: bool = ...,
           scale: float | None = ..., score: Score | Sequence[Score] = ..., dropout_p: float = ...,
           return_map: Literal[True], measures: Sequence[str | Measure] = ..., kernel: str = ...,
           gap: tuple[int, int] | None = ...) -> tuple[Tensor, AttentionMap]: ...  # fmt: skip
def attend(
    q: Tensor,
    k: Vectors,
    v: Vectors,
    *,
    mask: Mask | Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    score: Score | Sequence[Score] = (),
    dropout_p: float = 0.0,
    return_map: bool = False,
    measures: Sequence[str | Measure] = (),
    kernel: str = "auto",
    gap: tuple[int, int] | None = None,
) -> Tensor | tuple[Tensor, AttentionMap]:
    """Exact multi-head attention, softmax(scale · q kᵀ + …) v under a mask, without the n×m matrix.

    Args:
        q: [b, h, n, d] float32, bfloat16, float16 or float64. Logits and softmax are float32 (float64 for float64).
        k, v: [b, h_kv, m, d] and [b, h_kv, m, d_v], in q's dtype and on its device. h must be a multiple of h_kv: query
            head i reads KV head i // (h / h_kv), and keys are never repeated in memory (GQA, MQA). They may be
            `QuantizedKV` of that dtype, as caches store them.
        mask: which keys each query may attend to, such as `Causal() & Window(128)`; None for all. Queries are aligned
            to the *end* of the keys (bottom-right) if n < m, as in decoding. Or a tensor, as in
            `F.scaled_dot_product_attention`, broadcastable to [b, h, n, m]: boolean (True = may attend), or floating
            point and added to the scores like a `Bias`, with gradients, where −∞ masks a key.
        is_causal: in addition to `mask`, a query may attend only to keys up to its own position; the same as
            `Causal()`. With n < m it is aligned bottom-right, where `F.scaled_dot_product_attention` is aligned
            top-left; n > m raises.
        scale: factor on q·k; 1/√d by default.
        score: other changes to the scores, such as `(SoftCap(30.0), ALiBi.standard(h))`, in any order: scores are
            capped, then biased, then masked, and learned sinks enter the denominator.
        dropout_p: probability of dropping a weight (with torch's default generator). The map has the weights before
            dropout.
        return_map: also return the `AttentionMap`: O(n) memory, detached from the graph.
        measures: names or `Measure`s to compute in the same pass, stored in `map.measured`; requires `return_map=True`.
        kernel: "auto", or the name of a kernel ("torch_fused", "torch_blocks", "reference"), which then runs or raises,
            for this call and for reads of the map.
        gap: (start, stop), the tokens before all queries that k and v do not have, as a cache drops them: key j is
            token j before `start`, and token j + stop − start from there on. Distances and positions of the map and its
            measures are those of the tokens; `mask` and `score` are over the keys, as their `with_gap` makes them.
            headwise's layers pass it for their cache.
    Returns:
        [b, h, n, d_v] in q's dtype, differentiable in q, k, v and the tensors of `score`; with `return_map`, also the
        `AttentionMap`. The output of a fully masked query is 0.
    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError, KernelError: naming the argument, its value and what is
            expected.
    Source: Vaswani et al. 2017, eq. 1; blockwise: Milakov & Gimelshein 2018, Dao et al. 2022.
    """
    check_local(q=q, k=k, v=v)
    if events.editing and (edited := events.here().edited) is not None and (return_map or not measures):
        changed: Tensor | tuple[Tensor, AttentionMap] = edited(
            q, k, v, mask=mask, is_causal=is_causal, scale=scale, score=score, dropout_p=dropout_p,
            return_map=return_map, measures=measures, kernel=kernel, gap=gap,
        )  # fmt: skip
        return changed
    if is_causal or isinstance(mask, Tensor):
        mask, score = torch_arguments(q, k, v, mask, is_causal, score)
    graph = in_graph()
    plain = not graph and dropout_p == 0 and score == ()
    if plain and (return_map or not measures):
        known = again(q, k, v, mask, scale, kernel, measures if return_map else None, gap)
        if known is not None:
            out, mapped = known
            return out if mapped is None else (out, _map_of(mapped, q, k, kernel))
    check_measures(measures, return_map)
    wanted = resolve(measures) if measures else []
    rule = rule_of(q, k, v, mask, scale, score, dropout_p, graph, gap)
    if graph:
        k, v = decoded(k), decoded(v)
        rule = recordable(rule, q.device)
        listened = events.listening and torch.compiler.is_dynamo_compiling()  # the operator's backward reports no δ
        if not measures and not listened and can_record(rule):
            return _without_numbers(record, q, k, v, rule, float(dropout_p), return_map, kernel)
        if torch.compiler.is_dynamo_compiling():
            from headwise.kernels.dynamo import outside

            return outside(
                attend, q, k, v, mask=mask, scale=scale, score=score, dropout_p=dropout_p, return_map=return_map,
                measures=measures, kernel=kernel, gap=gap,
            )  # fmt: skip
        if measures and in_transform():
            if any(map(is_batched, (q, k, v))):
                raise ConfigError(
                    "measures=…: torch.func.vmap has batched the call, and statistics need its numbers; leave them "
                    "out, or call it (a watched model) for one entry after the other"
                )
            # The operator returns no statistics; without it, tangents would be lost, and most kernels not run.
            out, amap = attend(
                q, k, v, mask=mask, scale=scale, score=score, dropout_p=dropout_p, return_map=True, kernel=kernel,
                gap=gap,
            )  # fmt: skip
            amap.measured = amap.measured_by(None, wanted)
            return out, amap
    rule.mask.check(rule.grid)
    if has_no_numbers(q):
        if measures:
            raise ConfigError(f"measures=… requires data, but q has none: it is on {q.device}, or a FakeTensor")
        if graph and recording():  # without its mask
            unknown = unregistered(rule.mask)
            what = "keys that a cache has dropped"
            if unknown is not None:
                what = f"the mask {type(unknown).__name__}, as it is not registered; see headwise.masks.register"
            raise ConfigError(f"a graph of torch.export or make_fx cannot contain {what}")
        return _without_numbers(shapes, q, decoded(k), decoded(v), rule, float(dropout_p), return_map, kernel)
    # The seed comes from torch's generator, so that torch.manual_seed() makes runs reproducible.
    seed = int(torch.randint(1 << 40, (), device="cpu")) if dropout_p > 0 else 0
    dtype = q.dtype
    if return_map and isinstance(k, QuantizedKV):  # the map then has the keys used in the computation
        wide = torch.promote_types(dtype, torch.float32)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    statistics = statistics_for(wanted, rule) if wanted else ()
    call = Call(q, k, v, rule, float(dropout_p), seed, statistics, events.here().on_delta)
    (out, lse, found), chosen, refusals = run(call, kernel)
    if not return_map:
        if plain and not out.requires_grad:
            keep(call, chosen, mask, scale, kernel, refusals)
        return out
    out = out.to(dtype)
    bad_values = None if call.values_finite else nonfinite_values(call.v)
    amap = AttentionMap(
        q, k, lse, call.rule, kernel=chosen.name, named=named(kernel), refusals=refusals, nonfinite_values=bad_values
    )  # fmt: skip
    if measures:
        amap.measured = amap.measured_by(found, wanted)
    if plain and not out.requires_grad and bad_values is None:
        keep(call, chosen, mask, scale, kernel, refusals, measures, wanted)
    return out, amap


def _map_of(known: Mapped, q: Tensor, k: Vectors, kernel: str) -> AttentionMap:
    """The map of a call that `again` ran."""
    lse, rule, ran, refusals, measured = known
    amap = AttentionMap(q, k, lse, rule, kernel=ran, named=named(kernel), refusals=refusals)
    amap.measured = measured
    return amap


def attend_to(q: Tensor, k: Tensor, v: Tensor, *, return_map: bool = False, **options: Any) -> tuple[Tensor, Any]:
    """`attend`, but always returns an output and a map, which is None if it was not requested."""
    if return_map:
        return attend(q, k, v, return_map=True, **options)
    return attend(q, k, v, **options), None


def torch_arguments(
    q: Tensor, k: Vectors, v: Vectors, mask: Mask | Tensor | None, is_causal: bool, score: Score | Sequence[Score]
) -> tuple[Mask | None, Score | Sequence[Score]]:
    """Convert `mask=<tensor>` and `is_causal=True` to a mask and scores."""
    if isinstance(mask, Tensor):
        _check_tensors(q, k, v)
        b, h, n, _ = q.shape
        grid = Grid(b, h, n, k.shape[2])
        mask, bias = of_argument(mask, grid)
        if bias:
            score = (*check_scores(score, grid, q.device), *bias)
    if not is_causal:
        return mask, score
    check_mask(mask)
    return (CAUSAL if mask is None else mask & CAUSAL), score


def _without_numbers(
    made: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, rule: Rule, dropout_p: float,
    return_map: bool, kernel: str,
) -> Tensor | tuple[Tensor, AttentionMap]:  # fmt: skip
    """A call without data: recorded as an operator of a graph (`record`), or shapes only (`shapes`). The kernel is
    chosen when the graph runs."""
    out, lse = made(q, k, v, rule, dropout_p, kernel)
    if not return_map:
        return out
    return out, AttentionMap(q, k, lse, rule, kernel=kernel, named=kernel, nonfinite_values=nonfinite(v))


def nonfinite(v: Tensor) -> Tensor:
    """The number of NaN and infinite entries of v [b, h_kv, m, d_v] per head: [b, h_kv]."""
    return (~torch.isfinite(v.detach())).sum((-1, -2))


def nonfinite_values(v: Tensor) -> Tensor | None:
    """`nonfinite` as maps have it: None if there are none. While a graph is recorded, and for tensors without data,
    that is not known, and the numbers are returned."""
    found = nonfinite(v)
    return found if in_graph() or has_no_numbers(found) or bool(found.any()) else None


def rule_of(
    q: Tensor, k: Vectors, v: Vectors, mask: Mask | None, scale: float | None, score: Score | Sequence[Score],
    dropout_p: float, graph: bool = False, gap: tuple[int, int] | None = None,
) -> Rule:  # fmt: skip
    """Validate the arguments, except for the mask's data, and return their rule. In a graph, sizes may be symbolic."""
    _check_tensors(q, k, v)
    b, h, n, d = q.shape
    m = k.shape[2]
    check_mask(mask)
    if d == 0 and scale is None:
        raise ShapeError("q: head_dim is 0, so the default scale 1/√d is undefined; pass scale=")
    if scale is not None:
        _check_number("scale", scale)
        if not math.isfinite(scale):
            raise ConfigError(f"scale={scale}: expected a finite number")
    _check_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ConfigError(f"dropout_p={dropout_p}: expected 0 <= dropout_p < 1")
    mask = Everything() if mask is None else mask
    scale = 1.0 / math.sqrt(d) if scale is None else float(scale)
    if score == () and not graph and gap is None and mask.value:
        return _plain_rule(mask, scale, b, h, n, m)
    grid = Grid(b, h, n, m) if gap is None else Grid(b, h, n, m, gap=_checked_gap(gap, m - n))
    return Rule(mask, scale, grid, check_scores(score, grid, q.device))


def _checked_gap(gap: Any, most: int) -> Span:
    """The gap of `attend`, checked; `most`: the keys before all queries."""
    try:
        start, stop = gap
        fits = 0 <= start <= stop and (start <= most or stop == start)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ConfigError(
            f"gap={gap!r}: expected (start, stop) with 0 <= start <= stop, start <= {most}: tokens before all queries"
        )
    return Span(start, stop) if start < stop else NO_GAP


def _check_number(name: str, value: Any) -> None:
    """Raise ConfigError for what is neither a number nor a tensor of one without gradients."""
    if isinstance(value, (float, torch.SymFloat, torch.SymInt)):
        return
    if isinstance(value, Tensor) and value.requires_grad:
        raise ConfigError(
            f"{name}: a tensor that requires gradients, which would not reach it; for a learned scale, multiply q by "
            f"it, and give scale=1"
        )
    try:
        if not isinstance(value, (str, bytes, bytearray)):
            float(value)
            return
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise ConfigError(f"{name}={value!r}: expected a number")


def _check_tensors(q: Tensor, k: Vectors, v: Vectors) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor if name == "q" else (Tensor, QuantizedKV)):
            raise DTypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    check_vectors(q, k, v)


@lru_cache(maxsize=64)
def _plain_rule(mask: Mask, scale: float, b: int, h: int, n: int, m: int) -> Rule:
    """Cached for repeated calls, such as those of a model's layers: a small call takes less time than creating it."""
    return Rule(mask, scale, Grid(b, h, n, m))


def check_measures(measures: Sequence[str | Measure], return_map: bool) -> None:
    """Raise ConfigError for measures without a map."""
    if measures and not return_map:
        raise ConfigError("measures=… requires return_map=True: the results are stored in the map, as map.measured")


def check_mask(mask: object) -> None:
    """Raise DTypeError if this is not a mask; whether it matches the sizes is checked later."""
    if mask is not None and not isinstance(mask, Mask):
        hint = "; wrap a boolean tensor (True = may attend) in Dense(…)" if isinstance(mask, Tensor) else ""
        raise DTypeError(f"mask: expected a headwise mask such as Causal(), got {type(mask).__name__}{hint}")
