"""Which heads of a partitioned layer are on this rank."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from headwise.errors import ConfigError
from headwise.nn.base import AttentionLayer
from headwise.spread import HELD

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
