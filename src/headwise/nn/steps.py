"""The steps of a design as its `steps` notes them, and steps that designs share."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.masks import Causal


@dataclass(frozen=True)
class Step:
    """One step of a design.

    name: of the step. formula: in plain characters. words: its explanation. tensor: its result. axes: of the tensor,
    separated by blanks.
    """

    name: str
    formula: str
    words: str
    tensor: Tensor
    axes: str


class Steps:
    """A list of steps; calling it adds a step and returns its tensor.

    Args:
        lang: "en" or "zh", the language of the explanations. causal: whether to apply a causal mask.
    """

    def __init__(self, lang: str, causal: bool) -> None:
        self.steps: list[Step] = []
        self.lang, self.causal = lang, causal

    def __call__(self, name: str, tensor: Tensor, axes: str, formula: str, en: str, zh: str) -> Tensor:
        """Add a step: its name, tensor, axes and formula, and an explanation in English and Chinese.

        ConfigError if the axes, separated by blanks, are not as many as the tensor's.
        """
        if len(axes.split()) != tensor.ndim:
            raise ConfigError(f"steps: note({name!r}): axes={axes!r} for a tensor of shape {tuple(tensor.shape)}")
        self.steps.append(Step(name, formula, zh if self.lang == "zh" else en, tensor, axes))
        return tensor

    def projected(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Note and return queries, keys and values of a `ProjectedLayer`: q [b, h, n, d_k], k and v [b, h_kv, n, …]."""
        b, n, _ = x.shape
        h, h_kv, d, d_v = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim
        q = layer.q_proj(x)
        self("q", q, "b n h·d_k", "Q = X W_Q", "queries of all heads side by side", "所有头的查询，并排放置")
        k = self("k", layer.k_proj(x), "b n h_kv·d_k", "K = X W_K", "keys of all KV heads", "所有键值头的键")
        v = self("v", layer.v_proj(x), "b n h_kv·d_v", "V = X W_V", "values of all KV heads", "所有键值头的值")
        q = q.view(b, n, h, d)
        self("q_split", q, "b n h d_k", "split Q", "the last axis is split into heads", "把最后一维切分成各个头")
        q = self(
            "q_heads", q.transpose(1, 2), "b h n d_k", "transpose",
            "heads before tokens: each head is a matrix of its own", "转置：头在前，每个头自成一个矩阵",
        )  # fmt: skip
        k = self(
            "k_heads", k.view(b, n, h_kv, d).transpose(1, 2), "b h_kv n d_k", "split, transpose K",
            "the same for the keys", "对键做同样的切分与转置",
        )  # fmt: skip
        v = self(
            "v_heads", v.view(b, n, h_kv, d_v).transpose(1, 2), "b h_kv n d_v", "split, transpose V",
            "the same for the values", "对值做同样的切分与转置",
        )  # fmt: skip
        if layer.q_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
            self("q_normed", q, "b h n d_k", "RMSNorm(Q)", "queries get the same norm", "查询归一化为相同的范数")
            self("k_normed", k, "b h_kv n d_k", "RMSNorm(K)", "keys get the same norm", "键归一化为相同的范数")
        return *self.apply_rope(layer, q, k), v

    def apply_rope(self, layer: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Note and return queries and keys with rotary positions, if the layer has them."""
        if layer.rotary is None:
            return q, k
        q, k = layer.rotary(q), layer.rotary(k)
        self("q_rotated", q, "b h n d_k", "rope(Q)", "each query is rotated by its position", "按位置旋转每个查询")
        self(
            "k_rotated", k, "b h_kv n d_k", "rope(K)", "each key likewise: products depend on distances only",
            "键也按位置旋转：内积只取决于距离",
        )  # fmt: skip
        return q, k

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """H = softmax(Q Kᵀ / √d_k) V, [b, h, n, d_v]."""
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        return self.heads(self.weights(self.scores(q, k)), v)

    def scores(self, q: Tensor, k: Tensor, formula: str = "S = Q Kᵀ / √d_k") -> Tensor:
        """Note and return q kᵀ / √d_k, [b, h, n, m]."""
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return self(
            "scores", scores, "b h n m", formula, "how well each query matches each key", "每个查询与每个键的匹配程度"
        )

    def weights(self, scores: Tensor, *, scores_as: str = "S", weights_as: str = "P") -> Tensor:
        """Note and return the softmax of the scores [b, h, n, m] under the mask; letters as in the formula."""
        if self.causal:
            allowed = Causal().to_dense(*scores.shape[-2:])
            scores = self(
                "masked", scores.masked_fill(~allowed, -torch.inf), "b h n m", f"{scores_as} ← {scores_as} + mask",
                "later keys are masked with −∞", "查询不能关注其后的词元：该处为 −∞",
            )  # fmt: skip
        return self(
            "weights", scores.softmax(-1), "b h n m" if scores.ndim == 4 else "h n m",
            f"{weights_as} = softmax({scores_as})", "each row becomes weights with sum 1",
            "每一行归一化为和为 1 的权重",
        )  # fmt: skip

    def heads(self, weights: Tensor, v: Tensor) -> Tensor:
        """Note and return the weighted sums of the values, [b, h, n, d_v]."""
        return self("heads", weights @ v, "b h n d_v", "H = P V", "each head: the weighted sum of the values",
                    "每个头：值的加权和")  # fmt: skip

    def back(self, heads: Tensor) -> Tensor:
        """[b, h, n, d_v] to [b, n, h, d_v]."""
        heads = heads.transpose(1, 2)
        return self("back", heads, "b n h d_v", "transpose", "tokens before heads again", "转置：恢复词元在前、头在后")

    def side_by_side(self, heads: Tensor) -> Tensor:
        """[b, n, h, d_v] to [b, n, h·d_v]."""
        return self("concat", heads.flatten(2), "b n h·d_v", "A = Concat(H)", "the heads side by side",
                    "拼接各个头")  # fmt: skip

    def output(self, layer: Any, heads: Tensor, axes: str = "b n d_model") -> Tensor:
        """Concat(head_1 … head_h) W_O of the heads [b, h, n, d_v]."""
        return self.projected_out(layer, self.side_by_side(self.back(heads)), axes)

    def projected_out(self, layer: Any, concat: Tensor, axes: str = "b n d_model") -> Tensor:
        """Note and return W_O of the concatenated heads."""
        return self("output", layer.o_proj(concat), axes, "Y = A W_O", "the output projection mixes the heads",
                    "输出投影混合各个头")  # fmt: skip
