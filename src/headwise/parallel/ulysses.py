"""Ulysses attention: ranks exchange their parts of the sequence for whole heads, and back.

Jacobs et al. 2023, DeepSpeed Ulysses, 2309.14509. Each rank computes whole heads, with any kernel and any measure. It
is simpler than a ring, and requires at least as many heads as ranks. Bytes sent: `ulysses_exchange`.
"""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from headwise.attention import nonfinite_values
from headwise.fields import Section
from headwise.kernels import named, run
from headwise.kernels.call import Call
from headwise.kernels.eager import eager
from headwise.map import AttentionMap
from headwise.masks import Mask
from headwise.parallel.layout import members
from headwise.parallel.sequence_call import agree
from headwise.parallel.ulysses_exchange import Exchange, ToHeads, ToRows, shares
from headwise.parallel.ulysses_map import UlyssesMap
from headwise.scores import Score
from headwise.stats import Measure, statistics_for


@overload
def ulysses_attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = ..., scale: float | None = ...,
                   score: Score | Sequence[Score] = ..., dropout_p: float = ..., group: Any = ..., layout: str = ...,
                   return_map: Literal[False] = ..., measures: Sequence[str | Measure] = ...,
                   kernel: str = ...) -> Tensor: ...  # fmt: skip
@overload
def ulysses_attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = ..., scale: float | None = ...,
                   score: Score | Sequence[Score] = ..., dropout_p: float = ..., group: Any = ..., layout: str = ...,
                   return_map: Literal[True], measures: Sequence[str | Measure] = ...,
                   kernel: str = ...) -> tuple[Tensor, UlyssesMap]: ...  # fmt: skip
def ulysses_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    score: Score | Sequence[Score] = (),
    dropout_p: float = 0.0,
    group: Any = None,
    layout: str = "contiguous",
    return_map: bool = False,
    measures: Sequence[str | Measure] = (),
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, UlyssesMap]:
    """`headwise.attend` over a sequence partitioned over ranks; each rank computes some heads over the whole sequence.

    All ranks of the group must call it, and all must run its backward pass. Heads are divided as evenly as possible; h
    need not be a multiple of the number of ranks. A KV head that several ranks need is sent to each of them, and its
    gradients are summed; keys are repeated in memory only if ranks divide groups of queries unevenly.

    Args:
        q: [b, h, n_r, d], this rank's queries; k, v: [b, h_kv, m_r, d] and [b, h_kv, m_r, d_v], its keys and values, as
            returned by `shard`.
        mask, score: for the *whole* sequence and *all* heads, the same objects on every rank. The gradients of their
            tensors are this rank's share, to be summed over the group.
        scale, dropout_p, kernel: as in `attend`.
        group: a `ProcessGroup`, a one-dimensional `DeviceMesh`, or None for all processes.
        layout: "contiguous" or "zigzag"; the work is the same.
        return_map: also return the `UlyssesMap` with this rank's heads.
        measures: names or measures, of all heads of all ranks, equal on each rank; require `return_map=True`.
    Returns:
        [b, h, n_r, d_v], this rank's rows of all heads, differentiable in q, k, v and the tensors of `score`.
    Raises:
        ShapeError: also if there are fewer heads than ranks. Others as for `ring_attend`, on every rank.
    Source: Jacobs et al. 2023, 2309.14509, §3.
    """
    if torch.compiler.is_dynamo_compiling():
        return _outside(
            q, k, v, mask=mask, scale=scale, score=score, dropout_p=dropout_p, group=group, layout=layout,
            return_map=return_map, measures=measures, kernel=kernel,
        )  # fmt: skip
    who = members(group)
    wanted, queries, keys, rule = agree(
        who, "ulysses_attend", q, k, v, mask, scale, score, dropout_p, layout, kernel, return_map, measures
    )
    of_ranks = shares(rule.grid.h, k.shape[1], who.ranks)
    of_queries, of_keys = tuple(one.queries for one in of_ranks), tuple(one.keys for one in of_ranks)
    own = of_ranks[who.rank]
    there = Exchange(who, (of_queries, of_keys, of_keys), (queries, keys, keys))
    q_own, k_own, v_own = ToHeads.apply(there, q, k, v)
    if max(own.repeats) > 1:
        times = torch.tensor(own.repeats, device=q.device)
        k_own, v_own = (x.repeat_interleave(times, 1) for x in (k_own, v_own))
    own_rule = rule.cut({"h": Section(own.queries.start, own.queries.stop, rule.grid.h)})
    # With the same seed on all ranks, the heads of all ranks would have the same dropout.
    seed = (
        (int(torch.randint(1 << 40, (), device="cpu")) + who.rank * 0x9E3779B97F4A7C15) % (1 << 40)
        if dropout_p > 0
        else 0
    )
    statistics = statistics_for(wanted, own_rule) if wanted else ()
    call = Call(q_own, k_own, v_own, own_rule, float(dropout_p), seed, statistics)
    (heads, lse, found), chosen, refusals = run(call, kernel)
    (out,) = ToRows.apply(Exchange(who, (of_queries,), (queries,)), heads)
    if not return_map:
        return out
    bad_values = None if call.values_finite else nonfinite_values(v_own)
    own_map = AttentionMap(
        q_own, k_own, lse, own_rule, kernel=chosen.name, named=named(kernel), refusals=refusals,
        nonfinite_values=bad_values,
    )  # fmt: skip
    amap = UlyssesMap(own_map, own.queries, q, k, v, rule, who)
    if wanted:
        amap.measured = amap.of_all_heads(own_map.measured_by(found, wanted), wanted)
    return out, amap


@eager
def _outside(*args: Any, **options: Any) -> Any:
    """`ulysses_attend` in a graph break of torch.compile."""
    return ulysses_attend(*args, **options)
