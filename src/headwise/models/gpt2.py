"""GPT-2 of transformers: weights are [in, out], with queries, keys and values in one packed map."""

from typing import Any

from torch import Tensor, nn

from headwise.models.site import HeadSite, Kind, norms_of, put_sizes
from headwise.nn.layout import Layout, Part, Resizing


class Gpt2Kind(Kind):
    """A module with `c_attn` and `c_proj` of the class Conv1D, and its `head_dim`; with `q_attn` in cross attention."""

    name = "gpt2"
    about = "GPT-2-like models of transformers (c_attn, c_proj)"

    def site(self, name: str, module: Any) -> HeadSite | None:
        """As in `Kind`."""
        packed, out = (_weight(getattr(module, x, None)) for x in ("c_attn", "c_proj"))
        d = getattr(module, "head_dim", None)
        if not isinstance(d, int) or packed is None or out is None:
            return None
        width = out.shape[0]
        if packed.shape[1] != (2 if hasattr(module, "q_attn") else 3) * width:
            return None
        return HeadSite(name, module, self.name, width // d, width // d, d, d, module.c_proj, self)

    def layout(self, site: HeadSite) -> Layout:
        """As in `Kind`."""
        held: Any = site.module
        width, d = site.num_heads * site.head_dim, held.head_dim
        if hasattr(held, "q_attn"):
            places = [("q", held.q_attn, 0), ("k", held.c_attn, 0), ("v", held.c_attn, width)]
        else:
            places = [(x, held.c_attn, i * width) for i, x in enumerate("qkv")]
        parts = [Part(x, owner, "weight", 1, "query", d, start) for x, owner, start in places]
        parts += [Part(x, owner, "bias", 0, "query", d, start) for x, owner, start in places]
        out = Part("o", held.c_proj, "weight", 0, "query", d)
        return Layout((*parts, out), site.output, norms_of(held))

    def resizing(self, site: HeadSite) -> Resizing:
        """As in `Kind`."""
        return Resizing()

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        """As in `Kind`."""
        put_sizes(site.module, num_heads=num_heads, split_size=num_heads * site.head_dim)


def _weight(linear: object) -> Tensor | None:
    """The weight [in, out] of a Conv1D, alone or within an adapter; None for another object."""
    parts: list[Any] = [*linear.modules()] if isinstance(linear, nn.Module) else []
    return next((part.weight for part in parts if type(part).__name__ == "Conv1D"), None)
