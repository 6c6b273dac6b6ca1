"""How a sequence is partitioned over ranks, and attention in rectangles that are combined exactly.

    contiguous, 3 ranks:   0 0 0 0 1 1 1 1 2 2 2 2
    zigzag, 3 ranks:       0 0 1 1 2 2 2 2 1 1 0 0

Under a causal mask, late queries attend to more keys than early ones. In the zigzag layout rank r holds the chunks r
and 2R − 1 − r of 2R, so that all ranks have equal work. Chunk lengths differ by at most one token, longer chunks come
first, and chunks may be empty, so any length fits any number of ranks.

Attention computed in rectangles of queries × keys; outputs, statistics and gradients are combined exactly. For two sets
of keys with log-sum-exps L₁ and L₂, a query's row has L = ln(e^L₁ + e^L₂), and the share of each set is e^(L_s − L).
Outputs, masses and distances are sums weighted by the shares, Σp² by their squares, and entropy is Σ_s share_s · (H_s −
ln share_s) (Milakov & Gimelshein 2018, 1805.02867, for the sums; the chain rule of entropy). Each statistic declares
how it is combined (`headwise.stats.Join`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise.errors import ConfigError, ShapeError, check_choice
from headwise.kernels import KERNELS, run
from headwise.kernels.call import Call
from headwise.masks import Everything, Span, State
from headwise.rule import Rule, Terms, compute, own_dtypes, sink_gradient
from headwise.scores import cell
from headwise.stats import Join, Part, Statistic

CHUNKS = {"contiguous": 1, "zigzag": 2}  # per rank


class Members(NamedTuple):
    """A group of processes, the rank of this process in it, and the number of ranks."""

    group: Any
    rank: int
    ranks: int

    def peer(self, rank: int) -> int:
        """The global rank of the group's `rank`, modulo the size of the group."""
        return dist.get_global_rank(self.group, rank % self.ranks)


def members(group: Any = None) -> Members:
    """The members of a `ProcessGroup`, a `DeviceMesh` of one dimension, or of all processes; ConfigError if there is
    none, or this process is outside."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "group: torch.distributed is not initialised; call torch.distributed.init_process_group first, or "
            "headwise.attend, which needs one process alone"
        )
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ConfigError(
                f"group: a mesh of {group.ndim} dimensions; give the one of the sequence, as mesh['name']"
            )
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        raise ConfigError("group: this process is not in it; only its members may call")
    return Members(group, rank, dist.get_world_size(group))


@dataclass(frozen=True)
class Layout:
    """How `length` tokens are partitioned over `ranks` ranks; kind is "contiguous" or "zigzag"."""

    kind: str
    length: int
    ranks: int

    def __post_init__(self) -> None:
        check_layout(self.kind)

    def pieces(self, rank: int) -> tuple[range, ...]:
        """The positions of the sequence that a rank holds, one range per chunk, in the order on the rank."""
        if self.kind == "contiguous":
            return (self._chunk(rank, self.ranks),)
        return self._chunk(rank, 2 * self.ranks), self._chunk(2 * self.ranks - 1 - rank, 2 * self.ranks)

    def held(self, rank: int) -> int:
        """Number of tokens of a rank."""
        return sum(map(len, self.pieces(rank)))

    def _chunk(self, index: int, count: int) -> range:
        size, longer = divmod(self.length, count)
        start = index * size + min(index, longer)
        return range(start, start + size + (index < longer))


def check_layout(kind: object) -> None:
    """Raise ConfigError if there is no layout of that name."""
    check_choice("layout", kind, CHUNKS)


def shard(x: Tensor, layout: str = "zigzag", *, dim: int = -2, group: Any = None) -> Tensor:
    """Return this rank's part of a sequence that every rank has. Nothing is sent.

    Args:
        x: any tensor whose axis `dim` is the sequence, such as [b, n, d_model] or [b, h, n, d]; for token ids [b, n]
            use dim=-1.
        layout: "zigzag" or "contiguous", as in later calls with the result.
        group: a `ProcessGroup`, a one-dimensional `DeviceMesh`, or None for all processes.
    Returns:
        x with the rank's tokens along `dim`; the numbers of tokens on ranks may differ by one or two.
    """
    who = members(group)
    held = Layout(layout, x.shape[dim], who.ranks).pieces(who.rank)
    return torch.cat([x.narrow(dim, piece.start, len(piece)) for piece in held], dim)


def unshard(x: Tensor, layout: str = "zigzag", *, dim: int = -2, group: Any = None) -> Tensor:
    """Gather the whole sequence on every rank, the inverse of `shard`. All ranks must call it.

    Gradients are those of the sum of all ranks' losses. A loss of the whole sequence that every rank computes therefore
    counts once per rank; divide it by the number of ranks, or use it on one rank only.

    Sends (R − 1)·S bytes forward for a part of S bytes, and the same backward.

    Args:
        x, layout, dim, group: as in `shard`; x is this rank's part.
    Returns:
        The whole sequence.
    Raises:
        ShapeError: on every rank, if the parts do not have the lengths of `shard`.
    """
    who = members(group)
    held = lengths(x.shape[dim], who, x.device)
    whole = Layout(layout, sum(held), who.ranks)
    check_held("x", held, whole)
    moved = x.movedim(dim, 0)
    return _Gather.apply(moved, whole, who).movedim(0, dim)


def lengths(own: int, who: Members, device: torch.device) -> list[int]:
    """The number of tokens of each rank; a collective of one number."""
    mine = torch.tensor([own], device=device)
    found = [torch.empty_like(mine) for _ in range(who.ranks)]
    dist.all_gather(found, mine, group=who.group)
    return [int(one) for one in found]


def reduce_together(tensors: Sequence[Tensor], who: Members, operation: Any, dtype: torch.dtype) -> None:
    """All-reduce tensors in place in one message of this dtype; operation is a `ReduceOp`."""
    flat = torch.cat([x.to(dtype).flatten() for x in tensors])
    dist.all_reduce(flat, operation, group=who.group)
    for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
        x.copy_(part.view(x.shape))


def check_held(name: str, held: list[int], layout: Layout) -> None:
    """Raise ShapeError on every rank if the ranks do not have the lengths of the layout."""
    wanted = [layout.held(rank) for rank in range(layout.ranks)]
    if held != wanted:
        raise ShapeError(
            f"{name}: the ranks hold {', '.join(map(str, held))} tokens, but in the {layout.kind} layout "
            f"{layout.length} tokens are partitioned as {', '.join(map(str, wanted))}; split them with "
            f"headwise.parallel.shard"
        )


class _Gather(torch.autograd.Function):
    """Gathers all parts along the first axis; the backward pass sums and scatters the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, who: Members) -> Tensor:
        ctx.layout, ctx.who = layout, who
        longest = max(layout.held(rank) for rank in range(who.ranks))
        mine = x.new_zeros(longest, *x.shape[1:])
        mine[: len(x)] = x
        parts = [torch.empty_like(mine) for _ in range(who.ranks)]
        dist.all_gather(parts, mine, group=who.group)
        whole = x.new_empty(layout.length, *x.shape[1:])
        for rank, part in enumerate(parts):
            at = 0
            for piece in layout.pieces(rank):
                whole[piece.start : piece.stop] = part[at : at + len(piece)]
                at += len(piece)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout, who = ctx.layout, ctx.who
        longest = max(layout.held(rank) for rank in range(who.ranks))
        parts = grad.new_zeros(who.ranks, longest, *grad.shape[1:])
        for rank in range(who.ranks):
            at = 0
            for piece in layout.pieces(rank):
                parts[rank, at : at + len(piece)] = grad[piece.start : piece.stop]
                at += len(piece)
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(mine, parts.flatten(0, 1), group=who.group)
        return mine[: layout.held(who.rank)], None, None


@dataclass(frozen=True)
class Way:
    """The options shared by all rectangles."""

    rule: Rule  # of the whole matrix
    kernel: str = "auto"  # "auto", or the name of a kernel
    dropout_p: float = 0.0
    seed: int = 0  # of the dropout; the seed of each rectangle is derived from it
    statistics: tuple[Statistic, ...] = ()  # computed for every row in addition to the output

    def allows(self, rows: Span, cols: Span) -> bool:
        """Whether the mask allows any of these keys for any of these queries."""
        if rows.start == rows.stop or cols.start == cols.stop:
            return False
        return self.rule.mask.state(rows, cols, self.rule.grid) is not State.EMPTY

    def call(self, q: Tensor, k: Tensor, v: Tensor, rows: Span, cols: Span) -> Call:
        """The rectangle as a call of its own."""
        # The odd constant spreads the positions over all seeds, so that no two rectangles have the same dropout.
        place = rows.start * self.rule.grid.m + cols.start + 1
        seed = (self.seed + place * 0x9E3779B97F4A7C15) % (1 << 40)
        part = self.rule.part(rows, cols)
        placed = any(x.placed for x in part.scores) or any(x.placed for x in self.statistics)
        if part.is_full() and not placed:
            # More kernels support full blocks without a position.
            part = replace(part, mask=Everything(), grid=replace(part.grid, first=None))
        return Call(q, k, v, part, self.dropout_p, seed)


class Rows:
    """The accumulated results of a run of queries over the keys processed so far; out and lse are final after all."""

    def __init__(self, q: Tensor, rows: Span, way: Way, value_dim: int) -> None:
        self.q, self.rows, self.way = q, rows, way
        like = compute(q[..., :0])
        self.lse = like.new_full(q.shape[:-1], -torch.inf)  # [b, h, r]
        self.out = like.new_zeros(*q.shape[:-1], value_dim)  # [b, h, r, d_v], in the accumulating dtype
        needed = [other for statistic in way.statistics for other in _join(statistic).beside]
        self.found: dict[Statistic, Tensor] = {
            statistic: torch.full_like(self.lse, _join(statistic).empty, dtype=torch.float64)
            for statistic in dict.fromkeys((*way.statistics, *needed))
        }  # the statistics [b, h, r] in float64 that all kernels returned
        self.missing: set[Statistic] = set()  # those that a kernel did not
        self.kernels: dict[Span, str] = {}  # the kernel of each rectangle, by its keys
        self.refusals: dict[str, str] = {}  # why others do not support it

    def meet(self, k: Tensor, v: Tensor, cols: Span) -> None:
        """Accumulate keys [b, h_kv, c, d] and values at the positions `cols`, unless all are masked."""
        if not self.way.allows(self.rows, cols):
            return
        here = {statistic: statistic.at(cols) for statistic in self.found if statistic not in self.missing}
        wanted = tuple(dict.fromkeys(local for local in here.values() if local is not None))
        call = replace(self.way.call(self.q, k, v, self.rows, cols), statistics=wanted)
        result, kernel, refusals = run(call, self.way.kernel)
        self.kernels[cols] = kernel.name
        self.refusals.update(refusals)
        nothing = torch.zeros_like(self.lse, dtype=torch.float64)
        values = {
            statistic: nothing if local is None else result.statistics[local].double()
            for statistic, local in here.items()
            if local is None or local in result.statistics
        }
        values = {s: x for s, x in values.items() if all(other in values for other in _join(s).beside)}
        self.missing.update(statistic for statistic in here if statistic not in values)
        self._join(result.out, result.lse, values)

    def _join(self, out: Tensor, lse: Tensor, values: Mapping[Statistic, Tensor]) -> None:
        both = torch.logaddexp(self.lse, lse)
        base = both.masked_fill(both == -torch.inf, 0.0)  # a fully masked row so far
        one, other = self.lse - base, lse - base
        self.out.mul_(one.exp()[..., None]).addcmul_(compute(out), other.exp()[..., None])
        before, there = Part(one.double(), self.found), Part(other.double(), values)
        self.found |= {statistic: _join(statistic).both(statistic, before, there) for statistic in values}
        self.lse = both

    def finish(self, sinks: Tensor | None) -> None:
        """After all keys: add the share of the learned sinks [h], and drop incomplete statistics."""
        for statistic in self.missing:
            self.found.pop(statistic, None)
        if sinks is None:
            return
        masked = self.lse == -torch.inf
        both = torch.where(masked, self.lse, torch.logaddexp(self.lse, sinks.detach()[:, None]))
        share = (self.lse - both).masked_fill(masked, 0.0)
        self.out.mul_(share.exp()[..., None])
        self.found = {s: _join(s).beside_sink(x, share.double()) for s, x in self.found.items()}
        self.lse = both


class RowGradients:
    """The backward pass of `Rows`, from out, lse and grad_out over all keys, sinks included: gradients of the queries,
    and contributions to those of keys and values."""

    def __init__(
        self, q: Tensor, rows: Span, way: Way, kernels: Mapping[Span, str], out: Tensor, lse: Tensor, grad_out: Tensor
    ) -> None:
        self.q, self.rows, self.way, self.kernels = q, rows, way, kernels
        self.out, self.lse, self.grad_out = out, lse, grad_out
        self.dq = torch.zeros_like(q, dtype=lse.dtype)

    def meet(self, k: Tensor, v: Tensor, cols: Span, sums: "ScoreSums", dk: Tensor, dv: Tensor) -> None:
        """Process keys and values as in the forward pass, in any order; adds to dk and dv in the accumulating dtype."""
        if cols not in self.kernels:
            return
        call = self.way.call(self.q, k, v, self.rows, cols)
        name, rows = self.kernels[cols], (self.out, self.lse, self.grad_out)
        if name == "reference":
            # Its backward pass does not support rows with keys in other rectangles; torch_blocks does, also in float64.
            name, rows = "torch_blocks", (self.out.double(), self.lse.double(), self.grad_out.double())
            call = replace(call, q=call.q.double(), keys=call.k.double(), values=call.v.double())
        with torch.no_grad(), own_dtypes(self.q):
            found = KERNELS[name].gradients(call, *rows, sums.wanted)
        for total, part in zip((self.dq, dk, dv), found[:3], strict=True):
            assert part is not None  # q, k and v always have gradients
            total += part
        sums.take(found[3], found[5:], self.rows, cols)

    def sinks(self, sinks: Tensor) -> Tensor:
        """The gradient of the learned sinks [h]."""
        return sink_gradient(sinks, self.lse, (compute(self.grad_out) * compute(self.out)).sum(-1))


class ScoreSums:
    """The contribution of these rows to the gradients of the scores' tensors over the whole matrix. wanted: whether
    (relative, sinks, *biases) need them, as passed to kernels; no rectangle has sinks."""

    def __init__(self, terms: Terms, wanted: Sequence[bool], like: Tensor) -> None:
        of_relative, _, *of_biases = wanted
        self.terms, self.wanted = terms, (of_relative, False, *of_biases)
        self.relative, *self.biases = (
            torch.zeros_like(x, dtype=like.dtype) if x is not None and want else None
            for x, want in zip((terms.relative, *terms.biases), (of_relative, *of_biases), strict=True)
        )

    def take(self, relative: Tensor | None, biases: Sequence[Tensor | None], rows: Span, cols: Span) -> None:
        """Add the gradients of a rectangle."""
        if self.relative is not None and relative is not None:
            strips = [where for _, where in self.terms.strips(rows, cols)]
            lengths = [where.stop - where.start for where in strips]
            for where, part in zip(strips, relative.split(lengths, -1), strict=True):
                self.relative[:, where] += part
        for total, part in zip(self.biases, biases, strict=True):
            if total is not None and part is not None:
                total[cell(total, rows, cols)] += part


def _join(statistic: Statistic) -> Join:
    if statistic.joins is None:
        raise ConfigError(f"statistic {statistic.name!r}: the numbers of two sets of keys do not determine it")
    return statistic.joins
