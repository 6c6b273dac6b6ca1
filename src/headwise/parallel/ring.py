"""Ring attention: every rank keeps its queries, and keys and values are passed around the ring of ranks.

    # on each of R ranks, with its own part of the sequence
    q, k, v = (parallel.shard(x, "zigzag") for x in (q, k, v))          # [b, h, n/R, d]
    out = parallel.ring_attend(q, k, v, mask=hw.Causal(), layout="zigzag")

Liu et al. 2023, Ring Attention with Blockwise Transformers, 2310.01889; the balanced layout: Brandon et al. 2023,
Striped Attention, 2311.09431, in the common zigzag form. Bytes sent: `headwise.parallel.travel`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from headwise.errors import KernelError
from headwise.kernels import named
from headwise.kernels.compiling import eager
from headwise.kernels.gradients import SavedRule, once
from headwise.masks import Everything, Mask, Span
from headwise.parallel.layout import Members, RowGradients, Rows, ScoreSums, Way, members
from headwise.parallel.maps import RingMap
from headwise.parallel.sequence_call import agree
from headwise.parallel.travel import Gradients, Held, Plan, plan, split, travel, wanted_of_kernels
from headwise.rule import Rule, Terms, compute
from headwise.scores import Score
from headwise.stats import Measure


@overload
def ring_attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = ..., scale: float | None = ...,
                score: Score | Sequence[Score] = ..., dropout_p: float = ..., group: Any = ..., layout: str = ...,
                return_map: Literal[False] = ..., measures: Sequence[str | Measure] = ...,
                kernel: str = ...) -> Tensor: ...  # fmt: skip
@overload
def ring_attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = ..., scale: float | None = ...,
                score: Score | Sequence[Score] = ..., dropout_p: float = ..., group: Any = ..., layout: str = ...,
                return_map: Literal[True], measures: Sequence[str | Measure] = ...,
                kernel: str = ...) -> tuple[Tensor, RingMap]: ...  # fmt: skip
def ring_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    score: Score | Sequence[Score] = (),
    dropout_p: float = 0.0,
    group: Any = None,
    layout: str = "zigzag",
    return_map: bool = False,
    measures: Sequence[str | Measure] = (),
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, RingMap]:
    """`headwise.attend` over a sequence partitioned over ranks: the same results, with O(n / R) memory on each rank.

    All ranks of the group must call it, and all must run its backward pass. Fully masked blocks are not computed, and
    keys are sent only to ranks that need them.

    Args:
        q: [b, h, n_r, d], this rank's queries; k, v: [b, h_kv, m_r, d] and [b, h_kv, m_r, d_v], its keys and values, as
            returned by `shard`. h_kv must divide h; keys are never repeated.
        mask, score: for the *whole* sequence, the same objects on every rank. Their tensors cover the whole sequence,
            and their gradients are this rank's share, to be summed over the group as for any replicated parameter.
        scale, dropout_p, kernel: as in `attend`, for each block; each block has its own dropout pattern.
        group: a `ProcessGroup`, a one-dimensional `DeviceMesh`, or None for all processes.
        layout: "zigzag" or "contiguous". Zigzag balances the work of a causal mask; with a window, contiguous sends
            the fewest bytes.
        return_map: also return the `RingMap` with this rank's rows.
        measures: names or `RowMeasure`s, over all rows of all ranks, equal on each rank; require `return_map=True`.
    Returns:
        [b, h, n_r, d_v], this rank's rows, differentiable in q, k, v and the tensors of `score`.
    Raises:
        ShapeError, DTypeError, ConfigError, KernelError, …: as `attend`, on every rank; also if the parts do not have
            the lengths of the layout, or if arguments differ between ranks.
        RuntimeError: if another rank does not respond within the group's timeout.
    Source: Liu et al. 2023, 2310.01889.
    """
    if torch.compiler.is_dynamo_compiling():
        return _outside(
            q, k, v, mask=mask, scale=scale, score=score, dropout_p=dropout_p, group=group, layout=layout,
            return_map=return_map, measures=measures, kernel=kernel,
        )  # fmt: skip
    who = members(group)
    wanted, queries, keys, rule = agree(
        who, "ring_attend", q, k, v, mask, scale, score, dropout_p, layout, kernel, return_map, measures
    )
    terms = rule.terms(compute(q[..., :0, :]))
    learned = any(x is not None and x.requires_grad for x in (terms.relative, *terms.biases))
    if dropout_p > 0 and learned:
        # The only kernel with the same dropout in both passes if biases require gradients.
        if kernel not in ("auto", "torch_blocks"):
            raise KernelError(f"kernel={kernel!r} has no gradients of biases with dropout; torch_blocks has")
        kernel = "torch_blocks"
    seed = int(torch.randint(1 << 40, (), device="cpu")) if dropout_p > 0 else 0
    way = Way(rule, kernel, float(dropout_p), seed, wanted_of_kernels(wanted, rule))
    ring = _Ring(way, plan(queries, keys, way), who, terms.soft_cap, terms.split)
    out, lse = _Attend.apply(q, k, v, ring, terms.n, terms.relative, terms.sinks, *terms.biases)
    if not return_map:
        return out
    amap = RingMap(
        q, k, v, lse, rule, ring.plan, who, kernels=ring.kernels, named=named(kernel), refusals=ring.refusals
    )  # fmt: skip
    if wanted:
        amap.measured = amap.measured_by(ring.found, wanted)
    return out, amap


@eager
def _outside(*args: Any, **options: Any) -> Any:
    """`ring_attend` in a graph break of torch.compile."""
    return ring_attend(*args, **options)


@dataclass
class _Ring:
    """One call: its options, and its results in addition to the output."""

    way: Way
    plan: Plan
    who: Members
    soft_cap: float
    split: int
    found: list[Any] = field(default_factory=list)  # the statistics of each run of rows
    kernels_of: list[dict[Span, str]] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of the kernels that were used."""
        return tuple(dict.fromkeys(name for run in self.kernels_of for name in run.values()))

    @property
    def rows(self) -> tuple[Span, ...]:
        return self.plan.rows(self.who.rank)

    @property
    def cols(self) -> tuple[Span, ...]:
        return self.plan.cols(self.who.rank)


class _Attend(torch.autograd.Function):
    """One round of the ring for the output, and one for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring, n: int, relative: Tensor | None,
        sinks: Tensor | None, *biases: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, k, v = q.detach(), k.detach(), v.detach()
        runs = [
            Rows(part, rows, ring.way, v.shape[-1]) for rows, part in zip(ring.rows, split(q, ring.rows), strict=True)
        ]
        for _, held in travel(_held(ring, k, v), ring.plan, ring.who):
            for cols, (keys, values) in held.items():
                for run in runs:
                    run.meet(keys, values, cols)
        for run in runs:
            run.finish(sinks)
            ring.found.append(run.found)
            ring.kernels_of.append(run.kernels)
            ring.refusals.update(run.refusals)
        out = torch.cat([run.out for run in runs], 2).to(q.dtype)
        lse = torch.cat([run.lse for run in runs], 2)
        ctx.rule, of_mask = SavedRule.of(ring.way.rule, ring.soft_cap, ring.split)
        ctx.save_for_backward(q, k, v, out, lse, relative, sinks, *biases, *of_mask)
        placed = tuple(x for x in ring.way.statistics if x.placed)  # they determine which blocks keep their position
        empty = Rule(Everything(), 1.0, ring.way.rule.grid)
        way = replace(ring.way, rule=empty, statistics=placed)
        ctx.ring = _Ring(way, ring.plan, ring.who, ring.soft_cap, ring.split, kernels_of=ring.kernels_of)
        ctx.n, ctx.biases = n, len(biases)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once(lambda ctx: "ring_attend has no second derivative (create_graph=True, double backward)")
    def backward(ctx: Any, saved: tuple[Any, ...], grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, relative, sinks, *rest = saved
        biases = rest[: ctx.biases]
        rule = ctx.rule.rule(relative, sinks, biases, rest[ctx.biases :])
        ring = replace(ctx.ring, way=replace(ctx.ring.way, rule=rule))
        terms = Terms(ctx.n, relative=relative, biases=tuple(biases), sinks=sinks, split=ring.split)
        sums = ScoreSums(terms, ctx.needs_input_grad[5:], lse)
        parts = zip(*(split(x, ring.rows) for x in (q, out, lse, grad_out)), ring.rows, ring.kernels_of, strict=True)
        runs = [
            RowGradients(queries, rows, ring.way, kernels, o.contiguous(), row_lse.contiguous(), g)
            for queries, o, row_lse, g, rows, kernels in parts
        ]
        own = _held(ring, k, v)
        gradients = Gradients(_zeros(own, lse), ring.plan, ring.who)
        for hop, held in travel(own, ring.plan, ring.who):
            parts_here = _zeros(held, lse)
            for cols, (keys, values) in held.items():
                for run in runs:
                    run.meet(keys, values, cols, sums, *parts_here[cols])
            gradients.add(hop, parts_here)
        total = gradients.home()
        dk, dv = (torch.cat([total[cols][i] for cols in ring.cols], 2).to(k.dtype) for i in (0, 1))
        dq = torch.cat([run.dq for run in runs], 2).to(q.dtype)
        d_sinks = None
        if sinks is not None and ctx.needs_input_grad[6]:
            d_sinks = torch.stack([run.sinks(sinks) for run in runs]).sum(0)
        d_biases = [None if d is None else d.to(x.dtype) for d, x in zip(sums.biases, biases, strict=True)]
        return dq, dk, dv, None, None, sums.relative, d_sinks, *d_biases


def _held(ring: _Ring, *tensors: Tensor) -> Held:
    """This rank's own keys and related tensors, by piece."""
    return dict(zip(ring.cols, zip(*(split(x, ring.cols) for x in tensors), strict=True), strict=True))


def _zeros(held: Held, like: Tensor) -> Held:
    return {cols: tuple(torch.zeros_like(x, dtype=like.dtype) for x in parts) for cols, parts in held.items()}
