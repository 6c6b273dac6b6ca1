"""Kinds of attention modules, and the search of a model for them: headwise's head designs, which describe their layout,
`nn.MultiheadAttention`, and those of transformers, by the structure of their maps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from threading import Lock
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headwise.errors import ConfigError
from headwise.models.configuration import rotated
from headwise.models.hooks import fixed_code
from headwise.models.site import Change, HeadSite, HeadSites, Kind, ReplacedMethod, features, norms_of, put_sizes
from headwise.models.traced import TracedKind
from headwise.nn.base import AttentionLayer
from headwise.nn.layout import Layout, Part, Resizing, linear_parts
from headwise.nn.owned import check_forward
from headwise.nn.registry import DESIGNS


class HeadwiseKind(Kind):
    """`AttentionLayer`s, by class."""

    name = "headwise"
    about = "headwise's designs (AttentionLayer), alone or in TransformerBlock and Decoder"
    by_class = True

    @property
    def merged(self) -> str:  # type: ignore[override]
        names = [design.__name__ for design in DESIGNS.values() if design.resizing.merges]
        return f"{', '.join(names)}, alone or in TransformerBlock and Decoder"

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        if not isinstance(module, AttentionLayer):
            return None
        layout = module.layout()
        return HeadSite(
            name, module, self.name, module.num_heads, module.num_kv_heads, module.head_dim + layout.shared_key,
            module.value_dim, layout.output, self,
        )  # fmt: skip

    def layout(self, site: HeadSite) -> Layout:
        return _layer(site).layout()

    def resizing(self, site: HeadSite) -> Resizing:
        """As in `Kind`. A class that does not describe itself is refused: the description of its base may be wrong."""
        kind = type(_layer(site))
        if not kind.is_described():
            known = ", ".join(each.__name__ for each in DESIGNS.values() if _can_lose_heads(each))
            return Resizing(f"{kind.__name__} is not known to keep its heads apart; known: {known}")
        if _can_lose_heads(kind):
            return kind.resizing
        return Resizing(f"{kind.__name__} cannot lose a head: {kind.coupling.why or kind.resizing.fixed}")

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        _layer(site).resize(num_heads, num_kv_heads)

    def weights(self, site: HeadSite) -> dict[str, Tensor]:
        layer = _layer(site)
        own = None if layer.layout().missing else layer.head_matrices()
        return super().weights(site) if own is None else own

    @contextmanager
    def tapped(self, site: HeadSite, change: Change) -> Iterator[None]:
        """As in `Kind`; where no module is called with the concatenation, `compute` of the layer is replaced."""
        if site.output is not None:
            with super().tapped(site, change):
                yield
            return
        with _Compute.with_change(_layer(site), change):
            yield


class _Compute(ReplacedMethod):
    name = "compute"

    def changed(
        self, x: Tensor, source: Tensor, cache: Any, options: dict[str, Any], return_concat: bool
    ) -> tuple[Tensor, Any, Any]:
        layer: Any = self.module
        _, amap, concat = self.before(x, source, cache, options, True)
        for change in self.changes:
            concat = change(concat)
        return layer.output(concat), amap, concat if return_concat else None


def _layer(site: HeadSite) -> AttentionLayer:
    assert isinstance(site.module, AttentionLayer)
    return site.module


def _can_lose_heads(kind: type[AttentionLayer]) -> bool:
    return not kind.coupling.at and not kind.resizing.fixed


class TorchKind(Kind):
    """`nn.MultiheadAttention`, by class."""

    name = "torch"
    about = "torch.nn.MultiheadAttention"

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        if not isinstance(module, nn.MultiheadAttention):
            return None
        h, d = module.num_heads, module.head_dim
        return HeadSite(name, module, self.name, h, h, d, d, module.out_proj, self)

    def layout(self, site: HeadSite) -> Layout:
        """As in `Kind`: q, k and v are in in_proj_weight, or have separate weights; the keys and values of
        add_bias_kv have a slice for each head."""
        module = site.module
        assert isinstance(module, nn.MultiheadAttention)
        d, width = module.head_dim, module.embed_dim
        packed = module._qkv_same_embed_dim
        names = {letter: "in_proj_weight" if packed else f"{letter}_proj_weight" for letter in "qkv"}
        starts = {letter: i * width for i, letter in enumerate("qkv")}
        parts = [Part(x, module, names[x], 0, "query", d, starts[x] if packed else 0) for x in "qkv"]
        if module.in_proj_bias is not None:
            parts += [Part(x, module, "in_proj_bias", 0, "query", d, starts[x]) for x in "qkv"]
        parts += [Part(x, module, f"bias_{x}", 2, "query", d) for x in "kv" if getattr(module, f"bias_{x}") is not None]
        return Layout(tuple(parts)).into(module.out_proj, d)

    def resizing(self, site: HeadSite) -> Resizing:
        return Resizing(
            "nn.MultiheadAttention requires num_heads · head_dim = embed_dim, so it cannot have fewer heads. Mask them "
            "instead: headwise.models.scale_heads(find_heads(model), gates), with 0 for a head. Where your own code "
            "calls the module, prune(headwise.MultiHeadAttention.from_torch(module), […]) is called layer(x, mask=…) "
            "in its place; nn.TransformerEncoderLayer and its like cannot call it"
        )

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        """Never called: its sizes are fixed."""
        raise TypeError("the number of heads of nn.MultiheadAttention is fixed")

    @contextmanager
    def tapped(self, site: HeadSite, change: Change) -> Iterator[None]:
        """As in `Kind`. The module does not call its output projection, and fused paths not even the module: these are
        off, and W_O is the identity while heads are computed. ConfigError for a forward replaced on the instance."""
        module = site.module
        assert isinstance(module, nn.MultiheadAttention)
        check_forward(site.place, module)
        with _fused_paths.off(), _Forward.with_change(module, change):
            yield


class _Forward(ReplacedMethod):
    name = "forward"

    def changed(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        module: Any = self.module
        with _identity(module) as project:
            concat, weights = self.before(*args, **kwargs)
        swapped = concat.ndim == 3 and not module.batch_first  # [n, b, h·d_v]
        concat = concat.transpose(0, 1) if swapped else concat
        for change in self.changes:
            concat = change(concat)
        y = project(concat)
        return y.transpose(0, 1) if swapped else y, weights


class _FusedPaths:
    """PyTorch's fused paths of whole layers."""

    def __init__(self) -> None:
        self._lock, self._users, self._before = Lock(), 0, True

    @contextmanager
    def off(self) -> Iterator[None]:
        """They are off as long as any such context is open."""
        with self._lock:
            if not self._users:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    torch.backends.mha.set_fastpath_enabled(self._before)


_fused_paths = _FusedPaths()


class _Identity(nn.Module):
    """Stands for an output projection, where h·d_v = d_model, and returns its input. The projection itself is left as
    it is: its weight may be computed from other parameters."""

    bias = None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        like = linear.weight
        self.register_buffer("weight", torch.eye(linear.in_features, dtype=like.dtype, device=like.device))
        self.called = False

    def forward(self, x: Tensor) -> Tensor:
        """As of headwise's adapter, which calls the projection."""
        self.called = True
        return x


@contextmanager
def _identity(module: nn.MultiheadAttention) -> Iterator[Callable[[Tensor], Tensor]]:
    """Replace the output projection by the identity; yields the projection, called as the module calls it."""
    linear = module.out_proj
    module._modules["out_proj"] = identity = _Identity(linear)

    def project(x: Tensor) -> Tensor:
        return linear(x) if identity.called else nn.functional.linear(x, linear.weight, linear.bias)

    try:
        yield project
    finally:
        module._modules["out_proj"] = linear


class OfStructure(Kind):
    """Modules whose sizes are attributes: numbers of heads, widths of all."""

    counts: ClassVar[tuple[str, ...]] = ()
    widths: ClassVar[tuple[str, ...]] = ()

    def resizing(self, site: HeadSite) -> Resizing:
        return Resizing(fixed_code(site.module))

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        width = num_heads * site.head_dim
        put_sizes(site.module, **dict.fromkeys(self.counts, num_heads), **dict.fromkeys(self.widths, width))


class MapsKind(OfStructure):
    """A module with maps of queries, keys, values and the output, and an attribute for the head size."""

    maps: ClassVar[tuple[str, str, str]]  # names of the maps of queries, keys and values
    out: ClassVar[str] = "out_proj"
    size: ClassVar[str] = "head_dim"
    group: ClassVar[str] = ""  # attribute: query heads of a KV head; "" for one
    rotary: ClassVar[bool] = False

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        return self.with_output(name, module, getattr(module, self.out, None))

    def with_output(self, name: str, module: nn.Module, out: Any) -> HeadSite | None:
        """The site, if these are the modules of this kind."""
        d, group = getattr(module, self.size, None), getattr(module, self.group, None) if self.group else 1
        maps = [*(getattr(module, x, None) for x in self.maps), out]
        if not isinstance(d, int) or not isinstance(group, int) or not all(isinstance(x, nn.Module) for x in maps):
            return None
        query, key, value, width = (features(x, axis) for x, axis in zip(maps, (0, 0, 0, 1), strict=True))
        if not query or not key or query != width or key != value or query != group * key or key % d:
            return None  # values of another size, or gates packed with the queries: not this kind
        return HeadSite(name, module, self.name, query // d, key // d, d, d, out, self)

    def layout(self, site: HeadSite) -> Layout:
        d, parts = site.head_dim, list[Part]()
        for letter, name in zip("qkv", self.maps, strict=True):
            heads = "key" if self.group and letter != "q" else "query"
            parts += linear_parts(letter, getattr(site.module, name), 0, heads, d)
        assert site.output is not None
        return Layout(tuple(parts), norms=norms_of(site.module), rotary=self.rotary).into(site.output, d)


class BertKind(MapsKind):
    """A module with a child `self`, which is the site, of query, key and value maps, and an `output.dense`."""

    name = "bert"
    about = "BERT-like models of transformers (query, key, value, output.dense)"
    maps = ("query", "key", "value")
    size = "attention_head_size"
    counts = ("num_attention_heads",)
    widths = ("all_head_size",)

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        inner, dense = getattr(module, "self", None), getattr(getattr(module, "output", None), "dense", None)
        return self.with_output(f"{name}.self".lstrip("."), inner, dense) if isinstance(inner, nn.Module) else None


class Gpt2Kind(OfStructure):
    """A module with `c_attn` and `c_proj` of the class Conv1D, and its `head_dim`; with `q_attn` in cross attention."""

    name = "gpt2"
    about = "GPT-2-like models of transformers (c_attn, c_proj)"
    counts = ("num_heads",)
    widths = ("split_size",)

    def site(self, name: str, module: Any) -> HeadSite | None:
        def weight(linear: Any) -> Tensor | None:
            """[in, out] of a Conv1D, alone or within an adapter."""
            inside: list[Any] = [*linear.modules()] if isinstance(linear, nn.Module) else []
            return next((part.weight for part in inside if type(part).__name__ == "Conv1D"), None)

        packed, out = (weight(getattr(module, x, None)) for x in ("c_attn", "c_proj"))
        d = getattr(module, "head_dim", None)
        if not isinstance(d, int) or packed is None or out is None:
            return None
        width = out.shape[0]
        if packed.shape[1] != (2 if hasattr(module, "q_attn") else 3) * width:
            return None
        return HeadSite(name, module, self.name, width // d, width // d, d, d, module.c_proj, self)

    def layout(self, site: HeadSite) -> Layout:
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


# Attention modules that rotate the pairs (t, t + d/2) of all channels.
HALF_SPLIT = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3")


class LlamaKind(MapsKind):
    """A module with q_proj, k_proj, v_proj and o_proj, its `head_dim` and its `num_key_value_groups`."""

    name = "llama"
    about = "Llama-like models of transformers (q_proj, k_proj, v_proj, o_proj, num_key_value_groups)"
    merged = "Llama-like models of transformers"
    maps = ("q_proj", "k_proj", "v_proj")
    out = "o_proj"
    group = "num_key_value_groups"
    rotary = True
    counts = ("num_heads", "num_attention_heads")

    def resizing(self, site: HeadSite) -> Resizing:
        if why := fixed_code(site.module):
            return Resizing(why)
        name, config = type(site.module).__name__, getattr(site.module, "config", None)
        if name in {f"{each}Attention" for each in HALF_SPLIT} and rotated(config) == 1.0:
            return Resizing(merges=True)
        unknown = f"which channels {name} rotates together is unknown; known: {', '.join(HALF_SPLIT)}"
        return Resizing(merges=True, unknown_rotary=unknown)

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        super().resize(site, num_heads, num_kv_heads)
        put_sizes(site.module, num_key_value_groups=num_heads // num_kv_heads, num_key_value_heads=num_kv_heads)


class BartKind(MapsKind):
    """BART and models of the same structure: Whisper, mBART, Marian, Pegasus, OPT, CLIP, SigLIP, wav2vec 2.0 …"""

    name = "bart"
    about = "BART-like models of transformers, Whisper, OPT and CLIP among them (q_proj, k_proj, v_proj, out_proj)"
    maps = ("q_proj", "k_proj", "v_proj")
    # `embed_dim` is the width that the code gives all heads together; GPT-J has `num_attention_heads`.
    counts = ("num_heads", "num_attention_heads")
    widths = ("embed_dim",)


class ViTKind(MapsKind):
    """ViT: maps named as in Llama, with one KV head per query head."""

    name = "vit"
    about = "ViT-like models of transformers (q_proj, k_proj, v_proj, o_proj, num_attention_heads)"
    maps = ("q_proj", "k_proj", "v_proj")
    out = "o_proj"
    counts = ("num_attention_heads",)

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        """As in `Kind`; modules with groups of heads are "llama", and headwise's own have no such attribute."""
        if hasattr(module, "num_key_value_groups") or not isinstance(getattr(module, "num_attention_heads", None), int):
            return None
        return super().site(name, module)


class DistilBertKind(MapsKind):
    """DistilBERT."""

    name = "distilbert"
    about = "DistilBERT of transformers (q_lin, k_lin, v_lin, out_lin)"
    maps = ("q_lin", "k_lin", "v_lin")
    out = "out_lin"
    size = "attention_head_size"
    counts = ("n_heads",)
    widths = ("dim",)


class T5Kind(MapsKind):
    """T5 and models of the same structure: mT5, UMT5, Switch Transformers … Relative biases have a column per head."""

    name = "t5"
    about = "T5-like models of transformers (q, k, v, o, key_value_proj_dim)"
    maps = ("q", "k", "v")
    out = "o"
    size = "key_value_proj_dim"
    counts = ("n_heads",)
    widths = ("inner_dim",)

    def layout(self, site: HeadSite) -> Layout:
        """As in `Kind`; the letter of a relative bias is "bias"."""
        bias = getattr(site.module, "relative_attention_bias", None)
        own = [] if not isinstance(bias, nn.Module) else [Part("bias", bias, "weight", 1, "query", 1)]
        return super().layout(site).more(own)

    def resizing(self, site: HeadSite) -> Resizing:
        name = type(site.module)
        if "position_bias" not in signature(name.forward).parameters:
            return Resizing()
        return Resizing(
            f"the layers of {name.__name__} share one relative bias [1, heads, n, m], so that none can have fewer "
            f"heads than the others. Mask them instead: headwise.models.scale_heads(find_heads(model), gates), with "
            f"0 for a head"
        )


KINDS: list[Kind] = [
    HeadwiseKind(), TorchKind(), TracedKind(),
    BertKind(), Gpt2Kind(), LlamaKind(), BartKind(), ViTKind(), DistilBertKind(), T5Kind(),
]  # fmt: skip


def register(kind: Kind) -> Kind:
    """Register a kind of attention modules, to be tried after the others. Returns it.

    Raises:
        ConfigError: if it is no `Kind`, or another one has its name.
    """
    if not isinstance(kind, Kind):
        raise ConfigError(f"register({kind!r}): expected a headwise.models.Kind")
    if any(other.name == kind.name and type(other) is not type(kind) for other in KINDS):
        raise ConfigError(f"register({type(kind).__name__}): there is another kind {kind.name!r}; give it another name")
    KINDS[:] = [*(other for other in KINDS if other.name != kind.name), kind]
    return kind


def find_heads(model: nn.Module, batch: Any = None) -> HeadSites:
    """Every attention module of a model whose kind is registered, in the order of registration in the model.

    >>> import headwise as hw
    >>> [site.name for site in find_heads(hw.TransformerBlock(hw.MultiHeadAttention(16, 4), d_ff=32))]
    ['attention']

    They are recognised by class or by structure; transformers is not imported. A module that occurs twice is listed
    once. The list prints as a table.

    Args:
        batch: a tensor, a tuple of arguments or a mapping of keyword arguments with which the model is called once, in
            evaluation mode. Attention that is written by hand is found then: it is recognised as `recognise` does, and
            derivatives show which parameters belong to which head. Later calls find it without a batch, as do `prune`,
            `merge_kv` and others. What a module does not support is said by what needs it: `site.layout().missing`,
            `site.anatomy.resizing(site).fixed`.
    Raises:
        ConfigError: naming the known kinds, if there is none.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={type(model).__name__}: expected an nn.Module")
    if batch is not None:
        from headwise.models.traced.tracing import trace

        own = [site for site in _sites(model) if site.kind != TracedKind.name]
        library = "transformers."
        trace(model, batch, {
            site.module for site in own if site.anatomy.by_class or type(site.module).__module__.startswith(library)
        })  # fmt: skip
    if found := _sites(model):
        return found
    what = (
        f"of a known kind. If its attention is written by hand, call find_heads(model, batch) first, with any batch: "
        f"it is recognised then, as of the kind {TracedKind.name!r}"
    )
    if batch is not None:
        what = "were found, nor recognised on the batch (hw.models.recognise(model, …) names what came nearest)"
    known = "; ".join(f"{kind.name}: {kind.about}" for kind in KINDS if kind.name != TracedKind.name)
    raise ConfigError(f"model={type(model).__name__}: no attention heads {what}. Known without a batch: {known}")


def _sites(model: nn.Module) -> HeadSites:
    """The sites of a model, one for each module: of its class, or else traced, or else of its structure."""
    found: dict[nn.Module, HeadSite] = {}
    for name, module in model.named_modules():
        for kind in KINDS:
            site = kind.site(name, module)
            if site is not None and site.module not in found:
                found[site.module] = site
    return HeadSites(found.values())
