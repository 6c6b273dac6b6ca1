"""BERT and models of the same structure in transformers: RoBERTa, ELECTRA, XLM-R, CamemBERT …"""

from typing import Any

from torch import nn

from headwise.models.fixed_code import fixed_code
from headwise.models.site import HeadSite, Kind, features, norms_of, put_sizes
from headwise.nn.layout import Layout, Resizing, linear_parts


class BertKind(Kind):
    """A module with a child `self` that has query, key and value maps, and an `output.dense`. The site is the child,
    `….attention.self`."""

    name = "bert"
    about = "BERT-like models of transformers (query, key, value, output.dense)"

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        """As in `Kind`; module is the parent of both."""
        inner, dense = getattr(module, "self", None), getattr(getattr(module, "output", None), "dense", None)
        if not isinstance(inner, nn.Module) or not isinstance(dense, nn.Module):
            return None
        d = getattr(inner, "attention_head_size", None)
        maps = [getattr(inner, x, None) for x in ("query", "key", "value")]
        if not isinstance(d, int):
            return None
        width = features(dense, 1)
        if width is None or any(features(linear, 0) != width for linear in maps):
            return None
        h = width // d
        return HeadSite(f"{name}.self".lstrip("."), inner, self.name, h, h, d, d, dense, self)

    def layout(self, site: HeadSite) -> Layout:
        """As in `Kind`."""
        held: Any = site.module
        d, maps = site.head_dim, {"q": held.query, "k": held.key, "v": held.value}
        parts = tuple(part for x, linear in maps.items() for part in linear_parts(x, linear, 0, "query", d))
        assert site.output is not None
        return Layout(parts, norms=norms_of(held)).into(site.output, d)

    def resizing(self, site: HeadSite) -> Resizing:
        """As in `Kind`."""
        return Resizing(fixed_code(site.module))

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        """As in `Kind`."""
        put_sizes(site.module, num_attention_heads=num_heads, all_head_size=num_heads * site.head_dim)
