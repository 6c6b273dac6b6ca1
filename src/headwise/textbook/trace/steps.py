"""One step of a trace, and the steps that most designs share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.masks import Causal
from headwise.nn.base import AttentionLayer
from headwise.nn.projected import ProjectedLayer
from headwise.textbook.trace.words import WORDS


@dataclass(frozen=True)
class Step:
    """One step: its formula, what it does, the tensor and the names of its axes."""

    name: str
    formula: str
    words: str
    tensor: Tensor
    axes: str


class Notes:
    """The steps so far; called with a new one, gives its tensor back."""

    def __init__(self, lang: str, causal: bool) -> None:
        self.steps: list[Step] = []
        self.causal = causal
        self._column = 1 if lang == "zh" else 0

    def __call__(self, name: str, tensor: Tensor, axes: str, *, letters: str = "") -> Tensor:
        """letters: where a design writes the step in letters of its own, the suffix of that entry in `WORDS`."""
        formula, *words = WORDS[name + letters]
        self.steps.append(Step(name, formula, words[self._column], tensor, axes))
        return tensor


def projected(layer: ProjectedLayer, x: Tensor, note: Notes) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all heads by one large map each: q [b, h, n, d_k], k, v [b, h_kv, n, …]."""
    b, n, _ = x.shape
    h, h_kv, d, d_v = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim
    q = note("q", layer.q_proj(x), "b n h·d_k")
    k = note("k", layer.k_proj(x), "b n h_kv·d_k")
    v = note("v", layer.v_proj(x), "b n h_kv·d_v")
    q = note("q_split", q.view(b, n, h, d), "b n h d_k")
    q = note("q_heads", q.transpose(1, 2), "b h n d_k")
    k = note("k_heads", k.view(b, n, h_kv, d).transpose(1, 2), "b h_kv n d_k")
    v = note("v_heads", v.view(b, n, h_kv, d_v).transpose(1, 2), "b h_kv n d_v")
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = note("q_normed", layer.q_norm(q), "b h n d_k"), note("k_normed", layer.k_norm(k), "b h_kv n d_k")
    return *turned(layer, q, k, note), v


def turned(layer: AttentionLayer, q: Tensor, k: Tensor, note: Notes) -> tuple[Tensor, Tensor]:
    """Queries and keys with rotary positions, if the layer has them."""
    if layer.rotary is None:
        return q, k
    return note("q_turned", layer.rotary(q), "b h n d_k"), note("k_turned", layer.rotary(k), "b h_kv n d_k")


def attended(q: Tensor, k: Tensor, v: Tensor, note: Notes) -> Tensor:
    """H = softmax(Q Kᵀ / √d_k) V, [b, h, n, d_v]."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))  # spelled out; kernels never repeat
    scores = note("scores", q @ k.mT / q.shape[-1] ** 0.5, "b h n m")
    return note("heads", weights(scores, note) @ v, "b h n d_v")


def weights(scores: Tensor, note: Notes, *, letters: str = "") -> Tensor:
    """softmax of the scores [b, h, n, m] under the mask, if there is one; letters as in `Notes`."""
    if note.causal:
        n, m = scores.shape[-2:]
        allowed = Causal().to_dense(n, m)
        scores = note("masked", scores.masked_fill(~allowed, -torch.inf), "b h n m", letters=letters)
    return note("weights", scores.softmax(-1), "b h n m", letters=letters)


def concatenated(heads: Tensor, note: Notes) -> Tensor:
    """[b, h, n, d_v] to [b, n, h·d_v]."""
    heads = note("back", heads.transpose(1, 2), "b n h d_v")
    return note("concat", heads.flatten(2), "b n h·d_v")
