"""Which heads of a partitioned layer are on this rank, and maps and statistics of all of them, gathered."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headwise.errors import ConfigError
from headwise.kernels.spread import HELD
from headwise.map import AttentionMap
from headwise.nn.base import AttentionLayer
from headwise.rule import Rule
from headwise.stats import Measurements
from headwise.stats.base import side_by_side, tensors_of, with_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class HeldHeads:
    """The heads of a layer on this rank; `layer.num_heads` and `layer.num_kv_heads` count only these.

    Attributes:
        heads: indices of the query heads, in a layer of `num_heads`.
        kv_heads: indices of the KV heads, in a layer of `num_kv_heads`; several ranks share a KV head if there are
            fewer than ranks.
        mesh: the 1-D mesh over which the heads are partitioned.
    """

    heads: range
    kv_heads: range
    num_heads: int
    num_kv_heads: int
    mesh: "DeviceMesh"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.mesh.size()

    @property
    def sharing(self) -> int:
        """Number of ranks that share a KV head: 1, or ranks / num_kv_heads."""
        return max(1, self.ranks // self.num_kv_heads)

    def __repr__(self) -> str:
        return (
            f"HeldHeads(head{_span(self.heads)} of {self.num_heads}, key head{_span(self.kv_heads)} of "
            f"{self.num_kv_heads}, rank {self.mesh.get_local_rank()} of {self.ranks})"
        )


def held_heads(layer: nn.Module) -> HeldHeads | None:
    """Return the heads of a layer on this rank; None if it is not partitioned."""
    return getattr(layer, HELD, None)


def hold(layer: AttentionLayer, mesh: "DeviceMesh") -> HeldHeads:
    """Resize a layer to the heads of this rank. ConfigError, without any change, if they cannot be divided evenly."""
    ranks, h, h_kv = check_even(layer, mesh.size()), layer.num_heads, layer.num_kv_heads
    rank = mesh.get_local_rank()
    share, kv_share = h // ranks, max(1, h_kv // ranks)
    first, kv_first = rank * share, rank * h_kv // ranks
    held = HeldHeads(range(first, first + share), range(kv_first, kv_first + kv_share), h, h_kv, mesh)
    layer.resize(share, kv_share)
    setattr(layer, HELD, held)
    return held


def check_even(layer: AttentionLayer, ranks: int) -> int:
    """Return `ranks` if the heads of a layer can be divided evenly; else raise ConfigError."""
    kind, h, h_kv = type(layer).__name__, layer.num_heads, layer.num_kv_heads
    if h % ranks:
        raise ConfigError(
            f"{kind}: num_heads={h} cannot be spread evenly over {ranks} ranks; take a number of ranks that divides it"
        )
    if h_kv % ranks and ranks % h_kv:
        raise ConfigError(
            f"{kind}: num_kv_heads={h_kv} and {ranks} ranks: one has to divide the other, so that every rank's query "
            f"heads read key heads of their own"
        )
    sharing = max(1, ranks // h_kv)
    for name in ("head_dim", "value_dim"):
        if getattr(layer, name) % sharing:
            raise ConfigError(
                f"{kind}: {sharing} ranks share each of the {h_kv} key heads, and {name}={getattr(layer, name)} is not "
                f"divisible by {sharing}; take fewer ranks"
            )
    return ranks


def _span(heads: range) -> str:
    return f" {heads.start}" if len(heads) == 1 else f"s {heads.start}–{heads.stop - 1}"


def gather_map(amap: AttentionMap, layer: nn.Module) -> AttentionMap:
    """Gather the maps of all ranks to the map of all heads, on every rank. All ranks of the layer's mesh must call it.

    Args:
        amap: this rank's map, from `layer(x, return_map=True)`.
        layer: a layer partitioned by `parallelize_heads`.
    Returns:
        The map of the whole layer, with the statistics of all heads if measures were computed. Memory is O(n) per head
        for all heads: queries, keys and log-sum-exps are sent to every rank.
    Raises:
        ConfigError: if the layer's heads are not partitioned, or if a custom measure has no [batch, heads, …] sums.
    """
    held = held_heads(layer)
    if held is None:
        raise ConfigError(f"gather_map: the heads of this {type(layer).__name__} are not spread over ranks")
    rule, own = amap.rule, amap.nonfinite_values
    bad = gathered(torch.zeros_like(amap.k[:, :, 0, 0], dtype=torch.long) if own is None else own, held, keys=True)

    def join(x: Tensor, dim: int) -> Tensor:
        parts = gathered(x.to(amap.q.device, torch.uint8 if x.dtype == torch.bool else x.dtype), held, dim)
        return parts.to(x.device, x.dtype)

    whole = AttentionMap(
        gathered(amap.q, held),
        gathered(amap.k, held, keys=True),
        gathered(amap.lse, held),
        Rule(
            rule.mask.joined("h", len(held.heads), join), rule.scale, replace(rule.grid, h=held.num_heads),
            tuple(score.joined("h", len(held.heads), join) for score in rule.scores),
        ),
        kernel=amap.kernel, named=amap.named, refusals=amap.refusals,
        nonfinite_values=bad if bool(bad.any()) else None,
    )  # fmt: skip
    if amap.measured is not None:
        measured, states = amap.measured, []
        for measure, state in zip(measured._measures, measured.states.values(), strict=True):
            of_ranks = []
            for each in zip(*(_of_ranks(x, held) for x in tensors_of(state)), strict=True):
                numbers = iter(each)
                of_ranks.append(with_tensors(state, lambda _, numbers=numbers: next(numbers)))  # type: ignore[misc]
            states.append(side_by_side(measure, of_ranks, [len(held.heads)] * held.ranks))
        whole.measured = Measurements(measured._measures, states, gathered(measured.nonfinite, held))
        whole.measured.nonfinite_values = whole.nonfinite_values
    return whole


def gathered(x: Tensor, held: HeldHeads, dim: int = 1, *, keys: bool = False) -> Tensor:
    """The parts of all ranks joined along the axis of heads; each KV head once."""
    parts = _of_ranks(x, held)
    return torch.cat(parts[:: held.sharing] if keys else parts, dim)


def _of_ranks(x: Tensor, held: HeldHeads) -> list[Tensor]:
    """The tensors of all ranks."""
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(held.ranks)]
    dist.all_gather(parts, x, group=held.mesh.get_group())
    return parts
