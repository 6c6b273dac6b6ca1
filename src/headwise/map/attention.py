"""`attend`, the entry point to attention."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.fields import unregistered
from headwise.kernels import events, named, run
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
from headwise.kernels.prepare import again, keep
from headwise.kernels.quantized import QuantizedKV, Vectors, decoded
from headwise.kernels.spread import check_local
from headwise.map import AttentionMap
from headwise.map.arguments import check_measures, rule_of, torch_arguments
from headwise.masks import Mask
from headwise.rule import Rule
from headwise.scores import Score
from headwise.stats import Measure, resolve, statistics_for

Attended = Tensor | tuple[Tensor, AttentionMap]


class Options(NamedTuple):
    """The arguments of `attend` besides q, k and v, after `torch_arguments`."""

    mask: Mask | None
    scale: float | None
    score: Score | Sequence[Score]
    dropout_p: float
    return_map: bool
    measures: Sequence[str | Measure]
    kernel: str
    gap: tuple[int, int] | None
    differentiable: bool


@overload
def attend(q: Tensor, k: Vectors, v: Vectors, *, mask: Mask | Tensor | None = ..., is_causal: bool = ...,
           scale: float | None = ..., score: Score | Sequence[Score] = ..., dropout_p: float = ...,
           return_map: Literal[False] = ..., measures: Sequence[str | Measure] = ...,
           kernel: str = ..., gap: tuple[int, int] | None = ..., differentiable: bool = ...,
           ) -> Tensor: ...  # fmt: skip
@overload
def attend(q: Tensor, k: Vectors, v: Vectors, *, mask: Mask | Tensor | None = ..., is_causal: bool = ...,
           scale: float | None = ..., score: Score | Sequence[Score] = ..., dropout_p: float = ...,
           return_map: Literal[True], measures: Sequence[str | Measure] = ..., kernel: str = ...,
           gap: tuple[int, int] | None = ..., differentiable: bool = ...,
           ) -> tuple[Tensor, AttentionMap]: ...  # fmt: skip
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
    differentiable: bool = False,
) -> Attended:
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
        differentiable: the map stays in the graph: all that is read from it, and `map.measured`, has gradients in q, k
            and the tensors of `score`, in O(n) memory, for losses on attention (`headwise.losses`). Requires
            `return_map=True`.
    Returns:
        [b, h, n, d_v] in q's dtype, differentiable in q, k, v and the tensors of `score`; with `return_map`, also the
        `AttentionMap`. The output of a fully masked query is 0.
    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError, KernelError: naming the argument, its value and what is
            expected.
    Source: Vaswani et al. 2017, eq. 1; blockwise: Milakov & Gimelshein 2018, Dao et al. 2022.
    """
    check_local(q=q, k=k, v=v)
    if is_causal or isinstance(mask, Tensor):
        mask, score = torch_arguments(q, k, v, mask, is_causal, score)
    whole = return_map or not measures  # else an error follows
    edited, graph = events.here().edited if events.editing and whole else None, in_graph()
    if whole and edited is None and not graph and dropout_p == 0 and score == () and not differentiable:
        known = again(q, k, v, mask, scale, kernel, measures if return_map else None, gap)
        if known is not None:
            out, mapped = known
            if mapped is None:
                return out
            lse, rule, ran, refusals, measured = mapped
            amap = AttentionMap(q, k, lse, rule, kernel=ran, named=named(kernel), refusals=refusals)
            amap.measured = measured
            return out, amap
    options = Options(mask, scale, score, dropout_p, return_map, measures, kernel, gap, differentiable)
    if edited is None:
        return _attended(q, k, v, options, graph)
    if differentiable:
        raise ConfigError("differentiable=True: within hw.intervene, maps have no gradients; leave its block")
    given = options._asdict()
    del given["differentiable"]
    return edited(q, k, v, **given)


def _attended(q: Tensor, k: Vectors, v: Vectors, options: Options, graph: bool) -> Attended:
    """`attend` for any call; graph: whether it is recorded, or transformed by torch.func."""
    mask, scale, score, dropout_p, return_map, measures, _, gap, learned = options
    check_measures(measures, return_map, learned)
    wanted = resolve(measures) if measures else []
    rule = rule_of(q, k, v, mask, scale, score, dropout_p, graph, gap)
    if graph:
        k, v = decoded(k), decoded(v)
        rule = recordable(rule, q.device)
        listened = events.listening and torch.compiler.is_dynamo_compiling()  # the operator's backward reports no δ
        if not measures and not listened and not learned and can_record(rule):
            return _without_numbers(record, q, k, v, rule, options)
        if torch.compiler.is_dynamo_compiling():
            from headwise.kernels.dynamo import outside

            return outside(attend, q, k, v, **options._asdict())
        if learned:
            raise ConfigError(
                "differentiable=True: a map with gradients is no part of a graph of torch.export or make_fx, nor of "
                "torch.func; call it outside of these, or without differentiable=True"
            )
        if measures and in_transform():
            if any(map(is_batched, (q, k, v))):
                raise ConfigError(
                    "measures=…: torch.func.vmap has batched the call, and statistics need its numbers; leave them "
                    "out, or call it (a watched model) for one entry after the other"
                )
            # The operator returns no statistics; without it, tangents would be lost, and most kernels not run.
            out, amap = _attended(q, k, v, options._replace(return_map=True, measures=()), graph)
            amap.measured = amap.measured_by(None, wanted)
            return out, amap
    rule.mask.check(rule.grid)
    if not has_no_numbers(q):
        return _computed(q, k, v, rule, wanted, options, graph)
    if measures:
        raise ConfigError(f"measures=… requires data, but q has none: it is on {q.device}, or a FakeTensor")
    if graph and recording():  # without its mask
        unknown = unregistered(rule.mask)
        what = "keys that a cache has dropped"
        if unknown is not None:
            what = f"the mask {type(unknown).__name__}, as it is not registered; see headwise.masks.register"
        raise ConfigError(f"a graph of torch.export or make_fx cannot contain {what}")
    return _without_numbers(shapes, q, decoded(k), decoded(v), rule, options)


def _computed(
    q: Tensor, k: Vectors, v: Vectors, rule: Rule, wanted: list[Measure], options: Options, graph: bool,
    seed: int | None = None,
) -> Attended:  # fmt: skip
    """Run a call whose arguments are checked, with the statistics of the wanted measures."""
    mask, scale, score, dropout_p, return_map, measures, kernel, _, learned = options
    # The seed comes from torch's generator, so that torch.manual_seed() makes runs reproducible.
    if seed is None:
        seed = int(torch.randint(1 << 40, (), device="cpu")) if dropout_p > 0 else 0
    dtype = q.dtype
    if return_map and isinstance(k, QuantizedKV):  # the map then has the keys used in the computation
        wide = torch.promote_types(dtype, torch.float32)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    statistics = statistics_for(wanted, rule) if wanted else ()
    call = Call(q, k, v, rule, float(dropout_p), seed, statistics, events.here().on_delta, learned)
    (out, lse, found), chosen, refusals = run(call, kernel)
    plain = not graph and dropout_p == 0 and score == () and not learned
    if not return_map:
        if plain:
            keep(call, chosen, mask, scale, kernel, refusals)
        return out
    out = out.to(dtype)
    bad_values = None if call.values_finite else nonfinite_values(call.v)
    amap = AttentionMap(
        q, k, lse, call.rule, kernel=chosen.name, named=named(kernel), refusals=refusals, nonfinite_values=bad_values,
        differentiable=learned,
    )  # fmt: skip
    if measures:
        amap.measured = amap.measured_by(found, wanted, lse=lse)
    if plain and bad_values is None:
        keep(call, chosen, mask, scale, kernel, refusals, measures, wanted)
    return out, amap


def attend_recorded(call: Call, kernel: str, measures: Sequence[str | Measure]) -> tuple[Tensor, AttentionMap]:
    """Output and map of a call of a graph, when the graph runs."""
    rule = call.rule
    options = Options(rule.mask, rule.scale, rule.scores, call.dropout_p, True, measures, kernel, None, False)
    found: Any = _computed(call.q, call.k, call.v, rule, resolve(measures), options, True, call.seed)
    return found[0], found[1]


def attend_to(q: Tensor, k: Tensor, v: Tensor, *, return_map: bool = False, **options: Any) -> tuple[Tensor, Any]:
    """`attend`, but always returns an output and a map, which is None if it was not requested."""
    if return_map:
        return attend(q, k, v, return_map=True, **options)
    return attend(q, k, v, **options), None


def _without_numbers(
    made: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, rule: Rule, options: Options
) -> Attended:
    """A call without data: recorded as an operator of a graph (`record`), or shapes only (`shapes`). The kernel is
    chosen when the graph runs."""
    kernel = options.kernel
    out, lse = made(q, k, v, rule, float(options.dropout_p), kernel)
    if not options.return_map:
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
