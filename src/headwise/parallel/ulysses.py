"""Ulysses attention: ranks exchange their parts of the sequence for whole heads, and back.

Each rank computes whole heads, with any kernel and any measure. It is simpler than a ring, and requires at least as
many heads as ranks (Jacobs et al. 2023, DeepSpeed Ulysses, 2309.14509). For heads H_r on rank r, the KV heads K_r that
they need, and e bytes per element, rank r sends in the forward pass

    to heads:   Σ_{s≠r} b · n_r · (|H_s| · d + |K_s| · (d + d_v)) · e
    and back:   Σ_{s≠r} b · |H_r| · n_s · d_v · e

bytes, and in the backward pass the same in the other direction. If R divides h and h_kv, that is
(1 − 1/R) · b · n/R · (h · (d + d_v) + h_kv · (d + d_v)) · e, which decreases with R, unlike that of a ring.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise.errors import ShapeError
from headwise.fields import Section
from headwise.kernels import named, run
from headwise.kernels.call import Call
from headwise.kernels.compiling import eager
from headwise.map import AttentionMap
from headwise.map.attention import nonfinite_values
from headwise.masks import Mask
from headwise.parallel.layout import Layout, Members, members
from headwise.parallel.maps import UlyssesMap
from headwise.parallel.sequence_call import agree
from headwise.rule import compute
from headwise.scores import Score
from headwise.stats import Measure, statistics_for


@dataclass(frozen=True)
class Share:
    """The heads of one rank."""

    queries: range  # its query heads
    keys: range  # the KV heads that these need, which other ranks may need too
    repeats: tuple[int, ...]  # copies of each KV head, all with equally many queries; 1 if groups divide evenly


def shares(h: int, h_kv: int, ranks: int) -> list[Share]:
    """Divide the query heads over the ranks evenly, in order, with the KV heads that they need, or ShapeError."""
    if h < ranks:
        raise ShapeError(
            f"q has {h} heads, too few for {ranks} ranks: in Ulysses each rank computes at least one; use ring_attend, "
            f"or a group of at most {h} ranks"
        )
    group = h // h_kv
    found = []
    for rank in range(ranks):
        start, stop = rank * h // ranks, (rank + 1) * h // ranks
        keys = range(start // group, (stop - 1) // group + 1)
        readers = [min(stop, (key + 1) * group) - max(start, key * group) for key in keys]
        each = math.gcd(*readers)
        found.append(Share(range(start, stop), keys, tuple(count // each for count in readers)))
    return found


@dataclass(frozen=True)
class Exchange:
    """An exchange of several tensors at once."""

    who: Members
    heads: tuple[tuple[range, ...], ...]  # for each tensor, the heads of each rank
    layouts: tuple[Layout, ...]  # for each tensor, the layout of its tokens

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Exchange each [b, h, n_r, e] for [b, h_r, n, e]."""
        who = self.who
        outgoing = [
            [x[:, heads[to].start : heads[to].stop] for x, heads in zip(tensors, self.heads, strict=True)]
            for to in range(who.ranks)
        ]
        shapes = [
            [
                (x.shape[0], len(heads[who.rank]), layout.held(source), x.shape[3])
                for x, heads, layout in zip(tensors, self.heads, self.layouts, strict=True)
            ]
            for source in range(who.ranks)
        ]
        incoming = _all_to_all(outgoing, shapes, who)
        found = []
        for index, (x, heads, layout) in enumerate(zip(tensors, self.heads, self.layouts, strict=True)):
            whole = x.new_empty(x.shape[0], len(heads[who.rank]), layout.length, x.shape[3])
            for source in range(who.ranks):
                pieces = layout.pieces(source)
                parts = incoming[source][index].split([len(piece) for piece in pieces], 2)
                for piece, part in zip(pieces, parts, strict=True):
                    whole[:, :, piece.start : piece.stop] = part
            found.append(whole)
        return found

    def to_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Exchange each [b, h_r, n, e] for [b, h, n_r, e]; a head on several ranks is summed."""
        who = self.who
        outgoing = [
            [
                torch.cat([x[:, :, piece.start : piece.stop] for piece in layout.pieces(to)], 2)
                for x, layout in zip(tensors, self.layouts, strict=True)
            ]
            for to in range(who.ranks)
        ]
        shapes = [
            [
                (x.shape[0], len(heads[source]), layout.held(who.rank), x.shape[3])
                for x, heads, layout in zip(tensors, self.heads, self.layouts, strict=True)
            ]
            for source in range(who.ranks)
        ]
        incoming = _all_to_all(outgoing, shapes, who)
        found = []
        for index, (x, heads) in enumerate(zip(tensors, self.heads, strict=True)):
            total = max(part.stop for part in heads)
            shared = sum(map(len, heads)) > total
            b, _, held, e = incoming[0][index].shape
            like = compute(x[:0]) if shared else x
            rows = like.new_zeros(b, total, held, e)
            for source in range(who.ranks):
                rows[:, heads[source].start : heads[source].stop] += incoming[source][index]
            found.append(rows.to(x.dtype))
        return found


class Exchanged(torch.autograd.Function):
    """`to_heads` of an exchange, or `to_rows`: each is the backward pass of the other."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = exchange.to_rows if to_heads else exchange.to_heads
        return tuple(exchange.to_heads(tensors) if to_heads else exchange.to_rows(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.back(grads)


def _all_to_all(
    outgoing: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], who: Members
) -> list[list[Tensor]]:
    """Send tensors to each rank and receive tensors from each rank, one message per rank."""
    flat = [torch.cat([x.reshape(-1) for x in parts]) for parts in outgoing]
    sizes = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
    into = flat[0].new_empty(sum(map(sum, sizes)))
    totals = [sum(of_rank) for of_rank in sizes]
    dist.all_to_all_single(into, torch.cat(flat), totals, [len(x) for x in flat], group=who.group)
    return [
        [x.view(shape) for x, shape in zip(message.split(of_rank), there, strict=True)]
        for message, of_rank, there in zip(into.split(totals), sizes, shapes, strict=True)
    ]


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
    q_own, k_own, v_own = Exchanged.apply(there, True, q, k, v)
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
    (out,) = Exchanged.apply(Exchange(who, (of_queries,), (queries,)), False, heads)
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
