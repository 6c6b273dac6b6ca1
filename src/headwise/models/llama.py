"""Llama and what is built like it in transformers: Mistral, Qwen2 and 3, Gemma 1 to 3, …"""

from typing import Any

from torch import nn

from headwise.models.site import HeadSite, Kind, Part, features, linear_parts

MAPS = ("q_proj", "k_proj", "v_proj", "o_proj")


class LlamaKind(Kind):
    """A module with q_proj, k_proj, v_proj and o_proj, its `head_dim` and its `num_key_value_groups`."""

    name = "llama"
    about = "Llama-like models of transformers (q_proj, k_proj, v_proj, o_proj, num_key_value_groups)"

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

    def parts(self, module: nn.Module, output: nn.Module | None) -> list[Part]:
        """As in `Kind`."""
        held: Any = module
        d = held.head_dim
        return [
            *linear_parts("q", held.q_proj, 0, "query", d),
            *linear_parts("k", held.k_proj, 0, "key", d),
            *linear_parts("v", held.v_proj, 0, "key", d),
            *linear_parts("o", held.o_proj, 1, "query", d),
        ]
