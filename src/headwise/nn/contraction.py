"""Multi-head attention as tensor contractions: one rank-three tensor for all heads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.costs.counts import Counts
from headwise.nn.forms import MultiHeadForm, drawn, shifted
from headwise.nn.layout import INDEPENDENT, Resizing
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.notes import Notes, Words
from headwise.nn.steps import Steps


class ContractionAttention(MultiHeadForm):
    """Q_bhna = Σ_e X_bne W^Q_hae,  K_bhma = Σ_e C_bme W^K_hae,  V_bhmc = Σ_e C_bme W^V_hce,
    head = softmax(Σ_a Q_bhna K_bhma / √d_k) V,  y_bne = Σ_h Σ_c head_bhnc W^O_hec.

    The same function and gradients as `MultiHeadAttention`; the head is a tensor index instead of a range of
    columns: W^Q [h, d_k, d_model], W^K [h_kv, d_k, context_dim], W^V [h_kv, d_v, context_dim], W^O [h,
    d_model, d_v].

    Args:
        options: sizes, bias, dropout and rotary, as in `MultiHeadAttention`.

    Parameters: as many as `MultiHeadAttention`. Cost: the same.
    Source: Vaswani et al. 2017, 1706.03762, §3.2.2, in index notation.
    """

    coupling = INDEPENDENT
    resizing = Resizing()
    outside_attend = ""
    layout = MultiHeadForm.layout
    notes = Notes(
        summary=Words("multi-head attention with the head as an index of tensors", "头是张量下标的多头注意力"),
        use=Words(
            "you prefer index notation: one rank-three tensor for all heads",
            "偏好下标记法时用：所有头共用一个三阶张量",
        ),
        source="Vaswani et al. 2017, 1706.03762, §3.2.2, in index notation",
        parameters="MHA's",
        work="the same",
        cache="MHA's",
        limits={},
        map=None,
        compared=None,
        form_of="multi_head",
    )

    def __init__(self, d_model: int, num_heads: int, **options: Any) -> None:
        super().__init__(d_model, num_heads, **options)
        h, h_kv, d_k, d_v = self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim
        self.w_q = drawn(h, d_k, d_model, inputs=d_model)
        self.w_k = drawn(h_kv, d_k, self.context_dim, inputs=self.context_dim)
        self.w_v = drawn(h_kv, d_v, self.context_dim, inputs=self.context_dim)
        self.w_o = drawn(h, d_model, d_v, inputs=h * d_v)

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As in `AttentionLayer`: one contraction over e for each of Q, K and V."""
        q = torch.einsum("bne,hae->bhna", x, self.w_q)
        k = torch.einsum("bme,hae->bhma", source, self.w_k)
        v = torch.einsum("bme,hce->bhmc", source, self.w_v)
        return shifted(q, self.b_q), shifted(k, self.b_k), shifted(v, self.b_v)

    def output(self, concat: Tensor) -> Tensor:
        """Σ_h Σ_c head_bhnc W^O_hec, over heads and channels at once."""
        heads = concat.unflatten(-1, (self.num_heads, self.value_dim))
        y = torch.einsum("bnhc,hec->bne", heads, self.w_o)
        return y if self.b_o is None else y + self.b_o.to(y.dtype)

    @staticmethod
    def costs(d_model: int, num_heads: int, **options: Any) -> Counts:
        """One tensor for all heads: the same function and counts as `multi_head`."""
        return MultiHeadAttention.costs(d_model, num_heads, **options)

    def steps(self, x: Tensor, note: Steps) -> None:
        """As in `AttentionLayer`."""
        q = shifted(torch.einsum("bne,hae->bhna", x, self.w_q), self.b_q)
        k = shifted(torch.einsum("bme,hae->bhma", x, self.w_k), self.b_k)
        v = shifted(torch.einsum("bme,hce->bhmc", x, self.w_v), self.b_v)
        note(
            "q_contracted", q, "b h n a", "Q_bhna = Σ_e X_bne W^Q_hae",
            "one contraction for all heads: the head is an index of the weights",
            "一次张量收缩得到所有头：头是权重的一个下标",
        )  # fmt: skip
        note("k_contracted", k, "b h_kv m a", "K_bhma = Σ_e X_bme W^K_hae", "the same for the keys", "对键做同样的收缩")
        note("v_contracted", v, "b h_kv m c", "V_bhmc = Σ_e X_bme W^V_hce", "the same for the values",
             "对值做同样的收缩")  # fmt: skip
        heads = note.attended(*note.apply_rope(self, q, k), v)
        y = torch.einsum("bhnc,hec->bne", heads, self.w_o)
        note(
            "output_contracted", y + (0 if self.b_o is None else self.b_o), "b n e",
            "Y_bne = Σ_h Σ_c H_bhnc W^O_hec", "over heads and channels at once", "同时对头与通道求和",
        )  # fmt: skip

    def matrices(self) -> dict[str, Sequence[Tensor]]:
        """As in `MultiHeadForm`."""
        weights = {"q": self.w_q, "k": self.w_k, "v": self.w_v, "o": self.w_o}
        return {name: list(w.mT) for name, w in weights.items()}
