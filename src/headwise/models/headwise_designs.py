"""Our own head designs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.models.site import Change, HeadSite, Kind, Part, linear_parts, no_layout
from headwise.nn.base import AttentionLayer
from headwise.nn.block_diagonal import BlockDiagonalAttention
from headwise.nn.contraction import ContractionAttention
from headwise.nn.convolution import ConvolutionAttention
from headwise.nn.forms import MultiHeadForm
from headwise.nn.gated_output import GatedAttention
from headwise.nn.grouped_mlp import GroupedMLPAttention
from headwise.nn.head_mixing import HeadMixingAttention
from headwise.nn.latent import LatentAttention
from headwise.nn.per_head import PerHeadAttention
from headwise.nn.projected import ProjectedLayer
from headwise.nn.sparse_mixture import SparseHeadMixture
from headwise.nn.talking_heads import TalkingHeadsAttention

# Designs that do not hand Concat(head_1 … head_h) to a module of theirs.
_NO_OUTPUT = (MultiHeadForm, GroupedMLPAttention, SparseHeadMixture)


class HeadwiseKind(Kind):
    """`AttentionLayer`s, by class."""

    name = "headwise"
    about = "headwise's designs (AttentionLayer), alone or in TransformerBlock and Decoder"

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        """As in `Kind`."""
        if not isinstance(module, AttentionLayer):
            return None
        output = None if isinstance(module, _NO_OUTPUT) else getattr(module, "o_proj", None)
        turned = module.rope_dim if isinstance(module, LatentAttention) else 0
        return HeadSite(
            name, module, self.name, module.num_heads, module.num_kv_heads, module.head_dim + turned, module.value_dim,
            output, self,
        )  # fmt: skip

    def parts(self, module: nn.Module, output: nn.Module | None) -> list[Part]:
        """As in `Kind`."""
        if isinstance(module, PerHeadAttention | ContractionAttention):
            return _of_form(module)
        if isinstance(module, LatentAttention):
            width = module.head_dim + module.rope_dim
            ups = [Part(letter, module, f"{letter}_up", 0, "query", 1) for letter in "kv"]
            return [*linear_parts("q", module.q_proj, 0, "query", width), *ups, *_output(module)]
        if isinstance(module, ConvolutionAttention):
            places = [Part(name, module, name, 0, "query", 1) for name in ("centres", "sharpness")]
            return [*places, *_output(module)]
        if isinstance(module, ProjectedLayer) and not isinstance(module, GroupedMLPAttention):
            return _of_projected(module)
        reason = {
            BlockDiagonalAttention: "each reads a slice of the channels; to_multi_head() gives the same function with "
            "matrices that read all of them",
            GroupedMLPAttention: "an MLP over groups of heads stands in the place of W_O",
        }.get(type(module), "this design is not known")  # fmt: skip
        raise no_layout(type(module).__name__, reason)

    def weights(self, site: HeadSite) -> dict[str, Tensor]:
        """As in `Kind`."""
        module = site.module
        if isinstance(module, PerHeadAttention | ContractionAttention):
            return {name: torch.stack([w.detach() for w in each]) for name, each in module.matrices().items()}
        if isinstance(module, BlockDiagonalAttention):
            return {name: w.detach() for name, w in module.to_multi_head().per_head_weights().items()}
        if isinstance(module, LatentAttention):
            return _of_latent(module)
        if isinstance(module, ConvolutionAttention):
            raise no_layout(type(module).__name__, "queries and keys are codes of places, and values the input itself")
        return super().weights(site)

    @contextmanager
    def tapped(self, site: HeadSite, change: Change) -> Iterator[None]:
        """As in `Kind`; where no module takes the concatenation, the layer's own steps are asked for it."""
        if site.output is not None:
            with super().tapped(site, change):
                yield
            return
        layer = site.module
        assert isinstance(layer, AttentionLayer)
        before, own = layer.compute, vars(layer).get("compute")

        def compute(
            x: Tensor, source: Tensor, cache: Any, options: dict[str, Any], return_concat: bool
        ) -> tuple[Tensor, Any, Any]:
            _, amap, concat = before(x, source, cache, options, True)
            changed = change(concat)
            return layer.output(changed), amap, changed if return_concat else None

        vars(layer)["compute"] = compute
        try:
            yield
        finally:
            if own is None:
                del vars(layer)["compute"]
            else:
                vars(layer)["compute"] = own


def _of_projected(module: ProjectedLayer) -> list[Part]:
    d_k, d_v = module.head_dim, module.value_dim
    parts = [
        *linear_parts("q", module.q_proj, 0, "query", d_k),
        *linear_parts("k", module.k_proj, 0, "key", d_k),
        *linear_parts("v", module.v_proj, 0, "key", d_v),
        *_output(module),
    ]
    if isinstance(module, GatedAttention):
        parts += linear_parts("gate", module.gate_proj, 0, "query", 1 if module.gate == "head" else d_v)
    if isinstance(module, TalkingHeadsAttention):
        parts += [Part("mix", module, f"{x}_mix", axis, "query", 1) for x in ("logits", "weights") for axis in (0, 1)]
    if isinstance(module, HeadMixingAttention):
        parts += [Part("mix", module, "head_map", axis, "query", 1) for axis in (0, 1)]
    return parts


def _of_form(module: PerHeadAttention | ContractionAttention) -> list[Part]:
    heads = {"q": "query", "k": "key", "v": "key", "o": "query"}
    parts = [Part(letter, module, f"w_{letter}", 0, of, 1) for letter, of in heads.items()]
    if module.b_q is not None:
        parts += [Part(letter, module, f"b_{letter}", 0, heads[letter], 1) for letter in "qkv"]
    return parts


def _output(module: Any) -> list[Part]:
    return linear_parts("o", module.o_proj, 1, "query", module.value_dim)


def _of_latent(module: LatentAttention) -> dict[str, Tensor]:
    """The matrices that queries, keys and values are products of, multiplied: DeepSeek-AI 2024, eqs. 9–19."""
    if module.kv_norm is not None:
        raise no_layout("LatentAttention with latent_norm=True", "a norm stands between their factors")
    d_c, d_r, h = module.latent_dim, module.rope_dim, module.num_heads
    down_c, down_r = module.kv_down.weight.detach().split((d_c, d_r))  # [d_c, d_model], [d_h^R, d_model]
    q = module.q_proj.weight.detach()
    q = q if module.q_down is None else q @ module.q_down.weight.detach()
    k = torch.einsum("hdc,ce->hed", module.k_up.detach(), down_c)
    return {
        "q": q.unflatten(0, (h, -1)).mT,
        "k": torch.cat((k, down_r.mT.expand(h, -1, -1)), -1),
        "v": torch.einsum("hdc,ce->hed", module.v_up.detach(), down_c),
        "o": module.o_proj.weight.detach().mT.unflatten(0, (h, module.value_dim)),
    }
