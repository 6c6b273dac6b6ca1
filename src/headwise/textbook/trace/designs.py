"""Every head design by its definition, a step at a time: one function a design, and one line in `FOLLOW`.

Each gets the layer, the input x [b, n, d_model] and the notes, and notes everything up to y [b, n, d_model].
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.nn.forms import shifted
from headwise.nn.projected import split
from headwise.textbook.trace.steps import Notes, attended, concatenated, projected, turned, weights


def multi_head(layer: Any, x: Tensor, note: Notes) -> None:
    """`MultiHeadAttention`, and with one head `SingleHeadAttention`."""
    heads = attended(*projected(layer, x, note), note)
    note("output", layer.o_proj(concatenated(heads, note)), "b n d_model")


def per_head(layer: Any, x: Tensor, note: Notes) -> None:
    """`PerHeadAttention`."""
    q = note("q_each", shifted(torch.stack([x @ w for w in layer.w_q], 1), layer.b_q), "b h n d_k")
    k = note("k_each", shifted(torch.stack([x @ w for w in layer.w_k], 1), layer.b_k), "b h_kv n d_k")
    v = note("v_each", shifted(torch.stack([x @ w for w in layer.w_v], 1), layer.b_v), "b h_kv n d_v")
    heads = attended(*turned(layer, q, k, note), v, note)
    terms = note("terms", torch.stack([heads[:, i] @ w for i, w in enumerate(layer.w_o)], 1), "b h n d_model")
    note("output_sum", terms.sum(1) + (0 if layer.b_o is None else layer.b_o), "b n d_model")


def contraction(layer: Any, x: Tensor, note: Notes) -> None:
    """`ContractionAttention`."""
    q = shifted(torch.einsum("bne,hae->bhna", x, layer.w_q), layer.b_q)
    k = shifted(torch.einsum("bme,hae->bhma", x, layer.w_k), layer.b_k)
    v = shifted(torch.einsum("bme,hce->bhmc", x, layer.w_v), layer.b_v)
    q = note("q_contracted", q, "b h n a")
    k, v = note("k_contracted", k, "b h_kv m a"), note("v_contracted", v, "b h_kv m c")
    heads = attended(*turned(layer, q, k, note), v, note)
    y = torch.einsum("bhnc,hec->bne", heads, layer.w_o)
    note("output_contracted", y + (0 if layer.b_o is None else layer.b_o), "b n e")


def block_diagonal(layer: Any, x: Tensor, note: Notes) -> None:
    """`BlockDiagonalAttention`."""
    parts = note("slices", x.unflatten(-1, (layer.num_heads, -1)), "b n h d_model/h")
    q = note("q_slice", torch.einsum("bnhe,hea->bhna", parts, layer.w_q), "b h n d_k")
    k = note("k_slice", torch.einsum("bnhe,hea->bhna", parts, layer.w_k), "b h n d_k")
    v = note("v_slice", torch.einsum("bnhe,hec->bhnc", parts, layer.w_v), "b h n d_v")
    heads = attended(*turned(layer, q, k, note), v, note)
    note("output", layer.o_proj(concatenated(heads, note)), "b n d_model")


def sparse_mixture(layer: Any, x: Tensor, note: Notes) -> None:
    """`SparseHeadMixture`, without leaving anything out."""
    read, tokens = x, "b n"
    if layer.per == "sequence":
        read, tokens = note("pooled", x.mean(1, keepdim=True), "b 1 d_model"), "b 1"
    logits = note("gate_logits", layer.gate(read), f"{tokens} h_routed")
    probabilities = note("probabilities", logits.softmax(-1), f"{tokens} h_routed")
    chosen = _chosen(layer, probabilities, tokens, note)
    routed = probabilities * chosen[..., layer.shared_heads :]
    if layer.renormalise:
        routed = routed / routed.sum(-1, keepdim=True)
    shared = torch.ones_like(chosen[..., : layer.shared_heads])
    _gated_heads(layer, x, torch.cat((shared, routed), -1), tokens, note)


def mixture_of_heads(layer: Any, x: Tensor, note: Notes) -> None:
    """`MixtureOfHeads`, without leaving anything out."""
    logits = note("gate_logits", layer.gate(x), "b n h_routed")
    probabilities = note("probabilities", logits.softmax(-1), "b n h_routed")
    chosen = _chosen(layer, probabilities, "b n", note)
    shared = note("shared", layer.shared_gate(x).softmax(-1), "b n h_shared")
    alpha = note("balance", layer.balance(x).softmax(-1), "b n 2")
    routed = probabilities * chosen[..., layer.shared_heads :]
    if layer.scaled:
        shared = 2 * layer.shared_heads * shared
        routed = 2 * layer.top_k * routed / routed.sum(-1, keepdim=True)
    _gated_heads(layer, x, torch.cat((alpha[..., :1] * shared, alpha[..., 1:] * routed), -1), "b n", note)


def _chosen(layer: Any, probabilities: Tensor, tokens: str, note: Notes) -> Tensor:
    least = probabilities.sort(-1, descending=True).values[..., layer.top_k - 1 : layer.top_k]
    routed = (probabilities >= least).float()
    shared = torch.ones(*routed.shape[:2], layer.shared_heads)
    return note("chosen", torch.cat((shared, routed), -1), f"{tokens} h")


def _gated_heads(layer: Any, x: Tensor, gates: Tensor, tokens: str, note: Notes) -> None:
    """All heads are computed here, to be seen; the module computes those that are chosen."""
    gates = note("gates", gates, f"{tokens} h")
    heads = attended(*projected(layer, x, note), note)
    heads = note("weighted", heads * gates.mT[..., None], "b h n d_v")
    note("output", layer.o_proj(concatenated(heads, note)), "b n d_model")


def grouped_mlp(layer: Any, x: Tensor, note: Notes) -> None:
    """`GroupedMLPAttention`."""
    concat = concatenated(attended(*projected(layer, x, note), note), note)
    parts = concat.unflatten(-1, (layer.num_groups, -1))
    groups = note("groups", torch.einsum("bngi,gio->bngo", parts, layer.w_groups), "b n g h/g·d_v")
    hidden = note("hidden", torch.nn.functional.gelu(layer.mlp_in(groups.flatten(2))), "b n hidden")
    note("output_mlp", layer.mlp_out(hidden), "b n d_model")


def head_mixing(layer: Any, x: Tensor, note: Notes) -> None:
    """`HeadMixingAttention`."""
    heads = note("back", attended(*projected(layer, x, note), note).transpose(1, 2), "b n h d_v")
    q = note("q_over_heads", layer.head_map @ layer.u_q(heads), "b n h d_v")
    k = note("k_over_heads", layer.head_map @ layer.u_k(heads), "b n h d_v")
    v = note("v_over_heads", layer.head_map @ layer.u_v(heads), "b n h d_v")
    scores = note("scores_over_heads", q @ k.mT / layer.value_dim**0.5, "b n h h")
    mixed = note("mixed", note("weights_over_heads", scores.softmax(-1), "b n h h") @ v, "b n h d_v")
    note("output", layer.o_proj(note("concat", mixed.flatten(2), "b n h·d_v")), "b n d_model")


def talking_heads(layer: Any, x: Tensor, note: Notes) -> None:
    """`TalkingHeadsAttention`."""
    q, k, v = projected(layer, x, note)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = note("scores", q @ k.mT / layer.head_dim**0.5, "b h n m")
    logits = note("talk_logits", torch.einsum("bhnm,hj->bjnm", scores, layer.logits_mix), "b h n m")
    softmax = weights(logits, note, letters="_talking")
    mixed = note("talk_weights", torch.einsum("bhnm,hj->bjnm", softmax, layer.weights_mix), "b h n m")
    heads = note("heads", mixed @ v, "b h n d_v", letters="_talking")
    note("output", layer.o_proj(concatenated(heads, note)), "b n d_model")


def latent(layer: Any, x: Tensor, note: Notes) -> None:
    """`LatentAttention` in its plain form, with the scores of the absorbed one."""
    d_c, d_h, d_r = layer.latent_dim, layer.head_dim, layer.rope_dim
    source, name = x, "q_joined"
    if layer.q_down is not None:
        source = note("q_latent", _normed(layer.q_down(x), layer.q_norm), "b n d_q")
        name = "q_joined_latent"
    q = note(name, split(layer.q_proj(source), layer.num_heads), "b h n d_h+d_R")
    down = layer.kv_down(x)
    c = note("latent", _normed(down[..., :d_c], layer.kv_norm), "b n d_c")
    k_r = down[..., d_c:]
    if d_r:
        k_r = note("k_rope", k_r, "b n d_R")
        k_r = note("k_rope_turned", layer.rotary(k_r), "b n d_R")
        q = note("q_joined_turned", torch.cat((q[..., :d_h], layer.rotary(q[..., d_h:])), -1), "b h n d_h+d_R")
    k = note("k_up", torch.einsum("bmc,hdc->bhmd", c, layer.k_up), "b h m d_h")
    v = note("v_up", torch.einsum("bmc,hvc->bhmv", c, layer.v_up), "b h m d_v")
    of_position = q[..., d_h:] @ k_r[:, None].mT
    if d_r:
        joined = torch.cat((k, k_r[:, None].expand(-1, layer.num_heads, -1, -1)), -1)
        k = note("k_joined", joined, "b h m d_h+d_R")
    scale = (d_h + d_r) ** -0.5
    scores = note("scores_latent", q @ k.mT * scale, "b h n m")
    queries = torch.einsum("bhnd,hdc->bhnc", q[..., :d_h], layer.k_up)
    note("absorbed", (queries @ c[:, None].mT + of_position) * scale, "b h n m")
    heads = note("heads", weights(scores, note) @ v, "b h n d_v")
    note("output", layer.o_proj(concatenated(heads, note)), "b n d_model")


def _normed(x: Tensor, norm: Any) -> Tensor:
    return x if norm is None else norm(x)


def gated_output(layer: Any, x: Tensor, note: Notes) -> None:
    """`GatedAttention`."""
    heads = attended(*projected(layer, x, note), note)
    gate = torch.sigmoid(layer.gate_proj(x)).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
    gate = note("gate", gate, "b h n 1" if layer.gate == "head" else "b h n d_v")
    heads = note("gated", heads * gate, "b h n d_v")
    note("output", layer.o_proj(concatenated(heads, note)), "b n d_model")


def convolution(layer: Any, x: Tensor, note: Notes) -> None:
    """`ConvolutionAttention` over one axis: logits from distances, without the module's codes."""
    (before, after), (reach,) = layer.padding[0], layer.reach
    padded = note("padded", torch.nn.functional.pad(x, (0, 0, before, after)), "b m d_model")
    m = padded.shape[1]
    places = torch.arange(m)
    delta = places[None, None, :] - places[None, : m - reach, None] - layer.centres[:, :1, None]
    delta = note("distances", delta, "h n m")
    frequencies = math.ceil(math.log2(max(2, m))) + 2
    r = sum(torch.cos(math.pi * delta / 2**f) for f in range(frequencies))
    scores = note("scores_place", layer.sharpness[:, None, None] * r, "h n m")
    p = note("weights", scores.softmax(-1), "h n m")
    heads = note("heads_place", p @ padded[:, None], "b h n d_model")
    note("output", layer.o_proj(concatenated(heads, note)), "b n out")


FOLLOW: dict[str, Callable[[Any, Tensor, Notes], None]] = {
    function.__name__: function
    for function in (
        multi_head, per_head, contraction, block_diagonal, sparse_mixture, mixture_of_heads, grouped_mlp, head_mixing,
        talking_heads, latent, gated_output, convolution,
    )
} | {"single_head": multi_head}  # fmt: skip
