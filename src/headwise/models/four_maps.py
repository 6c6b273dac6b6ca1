"""Modules of transformers with four linear maps of one width, for queries, keys, values and the output."""

from inspect import signature
from typing import Any, ClassVar

from torch import nn

from headwise.models.fixed_code import fixed_code
from headwise.models.site import HeadSite, Kind, features, norms_of, put_sizes
from headwise.nn.layout import Layout, Part, Resizing, linear_parts


class FourMapsKind(Kind):
    """A module with four such maps and an attribute for the head size; one KV head per query head.

    Attributes:
        maps: names of the maps of queries, keys, values and the output. size: name of the attribute.
    """

    maps: ClassVar[tuple[str, str, str, str]]
    size: ClassVar[str]

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        """As in `Kind`."""
        d = getattr(module, self.size, None)
        q, k, v, o = maps = [getattr(module, x, None) for x in self.maps]
        if not isinstance(d, int) or not all(isinstance(x, nn.Module) for x in maps):
            return None
        width = features(o, 1)
        if not width or width % d or any(features(x, 0) != width for x in (q, k, v)):
            return None
        return HeadSite(name, module, self.name, width // d, width // d, d, d, o, self)

    def layout(self, site: HeadSite) -> Layout:
        """As in `Kind`."""
        held: Any = site.module
        d, (*inputs, out) = site.head_dim, (getattr(held, x) for x in self.maps)
        parts = [part for x, owner in zip("qkv", inputs, strict=True) for part in linear_parts(x, owner, 0, "query", d)]
        return Layout(tuple(parts), norms=norms_of(held)).into(out, d)

    def resizing(self, site: HeadSite) -> Resizing:
        """As in `Kind`."""
        return Resizing(fixed_code(site.module))


class BartKind(FourMapsKind):
    """BART and models of the same structure: Whisper, mBART, Marian, Pegasus, OPT, CLIP, SigLIP, wav2vec 2.0 …"""

    name = "bart"
    about = "BART-like models of transformers, Whisper, OPT and CLIP among them (q_proj, k_proj, v_proj, out_proj)"
    maps = ("q_proj", "k_proj", "v_proj", "out_proj")
    size = "head_dim"

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        """As in `Kind`."""
        # `embed_dim` is the width that the code gives all heads together; GPT-J has `num_attention_heads`.
        width = num_heads * site.head_dim
        put_sizes(site.module, num_heads=num_heads, num_attention_heads=num_heads, embed_dim=width)


class ViTKind(FourMapsKind):
    """ViT: maps named as in Llama, with one KV head per query head."""

    name = "vit"
    about = "ViT-like models of transformers (q_proj, k_proj, v_proj, o_proj, num_attention_heads)"
    maps = ("q_proj", "k_proj", "v_proj", "o_proj")
    size = "head_dim"

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        """As in `Kind`; modules with groups of heads are "llama", and headwise's own have no such attribute."""
        if hasattr(module, "num_key_value_groups") or not isinstance(getattr(module, "num_attention_heads", None), int):
            return None
        return super().site(name, module)

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        """As in `Kind`."""
        put_sizes(site.module, num_attention_heads=num_heads)


class DistilBertKind(FourMapsKind):
    """DistilBERT."""

    name = "distilbert"
    about = "DistilBERT of transformers (q_lin, k_lin, v_lin, out_lin)"
    maps = ("q_lin", "k_lin", "v_lin", "out_lin")
    size = "attention_head_size"

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        """As in `Kind`."""
        put_sizes(site.module, n_heads=num_heads, dim=num_heads * site.head_dim)


class T5Kind(FourMapsKind):
    """T5 and models of the same structure: mT5, UMT5, Switch Transformers … Relative biases have a column per head."""

    name = "t5"
    about = "T5-like models of transformers (q, k, v, o, key_value_proj_dim)"
    maps = ("q", "k", "v", "o")
    size = "key_value_proj_dim"

    def layout(self, site: HeadSite) -> Layout:
        """As in `Kind`; the letter of a relative bias is "bias"."""
        bias = getattr(site.module, "relative_attention_bias", None)
        own = [] if not isinstance(bias, nn.Module) else [Part("bias", bias, "weight", 1, "query", 1)]
        return super().layout(site).more(own)

    def resizing(self, site: HeadSite) -> Resizing:
        """As in `Kind`."""
        name = type(site.module)
        if "position_bias" not in signature(name.forward).parameters:
            return Resizing()
        return Resizing(
            f"the layers of {name.__name__} share one relative bias [1, heads, n, m], so that none can have fewer "
            f"heads than the others. Mask them instead: headwise.models.scale_heads(find_heads(model), gates), with "
            f"0 for a head"
        )

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        """As in `Kind`."""
        put_sizes(site.module, n_heads=num_heads, inner_dim=num_heads * site.head_dim)
