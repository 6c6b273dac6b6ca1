"""Llama and models of the same structure in transformers: Mistral, Qwen2 and 3, Gemma 1 to 3, …"""

from typing import Any

from torch import nn

from headwise.models.configuration.config import rotated
from headwise.models.fixed_code import fixed_code
from headwise.models.site import HeadSite, Kind, features, norms_of, put_sizes
from headwise.nn.layout import Layout, Resizing, linear_parts

MAPS = ("q_proj", "k_proj", "v_proj", "o_proj")
# Attention modules that rotate the pairs (t, t + d/2) of all channels.
HALF_SPLIT = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3")


class LlamaKind(Kind):
    """A module with q_proj, k_proj, v_proj and o_proj, its `head_dim` and its `num_key_value_groups`."""

    name = "llama"
    about = "Llama-like models of transformers (q_proj, k_proj, v_proj, o_proj, num_key_value_groups)"
    merged = "Llama-like models of transformers"

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        """As in `Kind`."""
        d, group = getattr(module, "head_dim", None), getattr(module, "num_key_value_groups", None)
        q, k, v, o = maps = [getattr(module, x, None) for x in MAPS]
        if not isinstance(d, int) or not isinstance(group, int) or not all(isinstance(x, nn.Module) for x in maps):
            return None
        query, key, value, out = (features(x, axis) for x, axis in ((q, 0), (k, 0), (v, 0), (o, 1)))
        if query is None or key is None or query != out or key != value or query != group * key or key % d:
            return None  # values of another size, or gates packed with the queries: not this kind
        return HeadSite(name, module, self.name, query // d, key // d, d, d, o, self)

    def layout(self, site: HeadSite) -> Layout:
        """As in `Kind`."""
        held: Any = site.module
        d = site.head_dim
        parts = (
            *linear_parts("q", held.q_proj, 0, "query", d),
            *linear_parts("k", held.k_proj, 0, "key", d),
            *linear_parts("v", held.v_proj, 0, "key", d),
        )
        return Layout(parts, norms=norms_of(held), rotary=True).into(held.o_proj, d)

    def resizing(self, site: HeadSite) -> Resizing:
        """As in `Kind`."""
        if why := fixed_code(site.module):
            return Resizing(why)
        name, config = type(site.module).__name__, getattr(site.module, "config", None)
        if name in {f"{each}Attention" for each in HALF_SPLIT} and rotated(config) == 1.0:
            return Resizing(merges=True)
        unknown = f"which channels {name} rotates together is unknown; known: {', '.join(HALF_SPLIT)}"
        return Resizing(merges=True, unknown_rotary=unknown)

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        """As in `Kind`."""
        put_sizes(
            site.module, num_key_value_groups=num_heads // num_kv_heads, num_heads=num_heads,
            num_attention_heads=num_heads, num_key_value_heads=num_kv_heads,
        )  # fmt: skip
