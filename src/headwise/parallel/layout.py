"""Which rank holds which part of a sequence, and how a sequence gets there and back.

    contiguous, 3 ranks:   0 0 0 0 1 1 1 1 2 2 2 2
    zigzag, 3 ranks:       0 0 1 1 2 2 2 2 1 1 0 0

Under a causal mask a late query sees many keys and an early one few: in the zigzag layout rank r holds the chunks r and
2R − 1 − r of 2R, so that all ranks have as much to compute. Chunks differ by at most one token, the longer ones first,
so any length fits any number of ranks; chunks may be empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise.errors import ConfigError, ShapeError

CHUNKS = {"contiguous": 1, "zigzag": 2}  # chunks a rank


class Members(NamedTuple):
    """A group of processes: the group itself, this process's place in it, and how many there are."""

    group: Any
    rank: int
    ranks: int

    def peer(self, rank: int) -> int:
        """The place in the whole job of the group's `rank`, counted round the group."""
        return dist.get_global_rank(self.group, rank % self.ranks)


def members(group: Any = None) -> Members:
    """Who takes part.

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
    """How `length` tokens lie on `ranks` ranks; kind is "contiguous" or "zigzag"."""

    kind: str
    length: int
    ranks: int

    def __post_init__(self) -> None:
        check_layout(self.kind)

    def pieces(self, rank: int) -> tuple[range, ...]:
        """The places of the sequence that a rank holds, one range a chunk, in the order in which it holds them."""
        if self.kind == "contiguous":
            return (self._chunk(rank, self.ranks),)
        return self._chunk(rank, 2 * self.ranks), self._chunk(2 * self.ranks - 1 - rank, 2 * self.ranks)

    def held(self, rank: int) -> int:
        """How many tokens a rank holds."""
        return sum(map(len, self.pieces(rank)))

    def _chunk(self, index: int, count: int) -> range:
        size, longer = divmod(self.length, count)
        start = index * size + min(index, longer)
        return range(start, start + size + (index < longer))


def check_layout(kind: object) -> None:
    """Raise if there is no layout of that name."""
    if kind not in CHUNKS:
        raise ConfigError(f"layout={kind!r}: expected one of {', '.join(map(repr, CHUNKS))}")


def shard(x: Tensor, layout: str = "zigzag", *, dim: int = -2, group: Any = None) -> Tensor:
    """This rank's part of a sequence that every rank has: nothing is sent.

    Args:
        x: any tensor whose axis `dim` is the sequence, such as [b, n, d_model] or [b, h, n, d]; token ids [b, n] take
            dim=-1.
        layout: "zigzag" or "contiguous", as everything that later takes the parts.
    Returns:
        x with the rank's tokens along `dim`; ranks may differ by a token or two.
    """
    who = members(group)
    held = Layout(layout, x.shape[dim], who.ranks).pieces(who.rank)
    return torch.cat([x.narrow(dim, piece.start, len(piece)) for piece in held], dim)


def unshard(x: Tensor, layout: str = "zigzag", *, dim: int = -2, group: Any = None) -> Tensor:
    """The whole sequence on every rank, from every rank's part of it: `shard` backwards. All ranks call it.

    Gradients are those of the sum of all ranks' losses. A loss that every rank computes alike of the whole therefore
    counts once a rank; divide it by their number, or let one rank have it.

    Sends (R − 1)·S bytes forward for a part of S bytes, and as many backward.

    Raises:
        ShapeError: on every rank, if the parts are not those of `shard`.
    """
    who = members(group)
    held = lengths(x.shape[dim], who, x.device)
    whole = Layout(layout, sum(held), who.ranks)
    check_held("x", held, whole)
    moved = x.movedim(dim, 0)
    return _Gather.apply(moved, whole, who).movedim(0, dim)


def lengths(own: int, who: Members, device: torch.device) -> list[int]:
    """How many tokens each rank holds; a collective of one number."""
    mine = torch.tensor([own], device=device)
    found = [torch.empty_like(mine) for _ in range(who.ranks)]
    dist.all_gather(found, mine, group=who.group)
    return [int(one) for one in found]


def reduce_together(tensors: Sequence[Tensor], who: Members, operation: Any, dtype: torch.dtype) -> None:
    """All-reduce tensors in place, in one message of that dtype; operation is a `ReduceOp`."""
    flat = torch.cat([x.to(dtype).flatten() for x in tensors])
    dist.all_reduce(flat, operation, group=who.group)
    for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
        x.copy_(part.view(x.shape))


def check_held(name: str, held: list[int], layout: Layout) -> None:
    """Raise if the ranks do not hold what the layout says; on every rank alike, for all know all lengths."""
    wanted = [layout.held(rank) for rank in range(layout.ranks)]
    if held != wanted:
        raise ShapeError(
            f"{name}: the ranks hold {', '.join(map(str, held))} tokens, but in the {layout.kind} layout "
            f"{layout.length} tokens lie as {', '.join(map(str, wanted))}; split them with headwise.parallel.shard"
        )


class _Gather(torch.autograd.Function):
    """All parts in their places along the first axis; backward each rank gets the sum of what all ask of its part."""

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
