"""Multi-head attention as tensor contractions: one tensor of rank three for all heads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.nn.forms import MultiHeadForm, drawn, shifted
from headwise.nn.layout import INDEPENDENT, Resizing


class ContractionAttention(MultiHeadForm):
    """Q_bhna = Σ_e X_bne W^Q_hae,  K_bhma = Σ_e C_bme W^K_hae,  V_bhmc = Σ_e C_bme W^V_hce,
    head = softmax(Σ_a Q_bhna K_bhma / √d_k) V,  y_bne = Σ_h Σ_c head_bhnc W^O_hec.

    The same function and the same gradients as `MultiHeadAttention`; the head is an index of a tensor here, not a
    range of columns: W^Q [h, d_k, d_model], W^K [h_kv, d_k, context_dim], W^V [h_kv, d_v, context_dim], W^O [h,
    d_model, d_v].

    Args:
        options: sizes, bias, dropout and rotary, as in `MultiHeadAttention`.

    Parameters: as many as `MultiHeadAttention`. Cost: the same.
    Source: Vaswani et al. 2017, 1706.03762, §3.2.2, in index notation.
    """

    coupling = INDEPENDENT
    resizing = Resizing()
    beyond_attend = ""

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
        """Σ_h Σ_c head_bhnc W^O_hec: over heads and channels at once."""
        heads = concat.unflatten(-1, (self.num_heads, self.value_dim))
        y = torch.einsum("bnhc,hec->bne", heads, self.w_o)
        return y if self.b_o is None else y + self.b_o.to(y.dtype)

    def matrices(self) -> dict[str, Sequence[Tensor]]:
        """As in `MultiHeadForm`."""
        weights = {"q": self.w_q, "k": self.w_k, "v": self.w_v, "o": self.w_o}
        return {name: list(w.mT) for name, w in weights.items()}
