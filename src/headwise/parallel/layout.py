"""How a sequence is partitioned over ranks.

    contiguous, 3 ranks:   0 0 0 0 1 1 1 1 2 2 2 2
    zigzag, 3 ranks:       0 0 1 1 2 2 2 2 1 1 0 0

Under a causal mask, late queries attend to more keys than early ones. In the zigzag layout rank r holds the chunks r
and 2R − 1 − r of 2R, so that all ranks have equal work. Chunk lengths differ by at most one token, longer chunks come
first, and chunks may be empty, so any length fits any number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise.errors import ConfigError, ShapeError, check_choice

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
    """The members of a group.

    Args:
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all processes.
    Raises:
        ConfigError: if torch.distributed is not initialised, the mesh has more dimensions, or this process is outside.
    """
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
