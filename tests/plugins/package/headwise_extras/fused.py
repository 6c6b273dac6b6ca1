"""A kind of attention modules of somebody's own models: queries, keys and values side by side in one map."""

import torch
from torch import Tensor, nn

from headwise.models import HeadSite, Kind, register
from headwise.nn.layout import Layout, Part, Resizing


class FusedAttention(nn.Module):
    """Plain causal attention, as a model of another house has it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.wqkv, self.wo = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, n, width] to the same shape."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.wqkv(x).chunk(3, -1))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(heads.transpose(1, 2).flatten(2))


class FusedKind(Kind):
    """`FusedAttention`."""

    name = "fused"
    about = "FusedAttention (wqkv, wo, heads)"
    by_class = True

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        """As in `Kind`."""
        if type(module) is not FusedAttention:
            return None
        h, d = module.heads, module.wqkv.out_features // 3 // module.heads
        return HeadSite(name, module, self.name, h, h, d, d, module.wo, self)

    def layout(self, site: HeadSite) -> Layout:
        """As in `Kind`."""
        held, d, width = site.module, site.head_dim, site.num_heads * site.head_dim
        assert isinstance(held, FusedAttention)
        parts = [
            Part(letter, held.wqkv, name, 0, "query", d, at * width)
            for at, letter in enumerate("qkv") for name in ("weight", "bias")
        ]  # fmt: skip
        return Layout(tuple(parts)).into(held.wo, d)

    def resizing(self, site: HeadSite) -> Resizing:
        """As in `Kind`."""
        return Resizing()

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        """As in `Kind`."""
        assert isinstance(site.module, FusedAttention)
        site.module.heads = num_heads


register(FusedKind())


def fused_model() -> nn.Module:
    """A small model with it."""
    torch.manual_seed(3)
    return nn.Sequential(FusedAttention(12, 4), nn.LayerNorm(12), FusedAttention(12, 3)).double()
