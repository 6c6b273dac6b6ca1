"""Kinds of attention modules of transformers, by the structure of their maps."""

from inspect import signature
from typing import Any, ClassVar

from torch import Tensor, nn

from headwise.models.configuration.config import rotated
from headwise.models.hooks import fixed_code
from headwise.models.site import HeadSite, Kind, features, norms_of, put_sizes
from headwise.nn.layout import Layout, Part, Resizing, linear_parts


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


class FourMapsKind(Kind):
    """A module with four such maps and an attribute for the head size; one KV head per query head."""

    maps: ClassVar[tuple[str, str, str, str]]  # names of the maps of queries, keys, values and the output
    size: ClassVar[str]  # name of the attribute

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
