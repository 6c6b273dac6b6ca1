"""Per-head attention: one matrix per head, as in textbooks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.costs.counts import Counts
from headwise.nn.forms import MultiHeadForm, drawn, shifted
from headwise.nn.layout import INDEPENDENT, Resizing
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.notes import Notes, Words
from headwise.nn.steps import Steps


class PerHeadAttention(MultiHeadForm):
    """y = Σ_i head_i W_i^O,  head_i = softmax(X W_i^Q (C W_i^K)ᵀ / √d_k) C W_i^V.

    The same function and gradients as `MultiHeadAttention`, in the form of the paper: lists of matrices
    W_i^Q [d_model, d_k], W_i^K [context_dim, d_k], W_i^V [context_dim, d_v] and W_i^O [d_v, d_model]. For reading,
    teaching and comparison; `MultiHeadAttention` is faster, as its products are larger.

    Args:
        options: sizes, bias, dropout and rotary, as in `MultiHeadAttention`.

    Parameters: as many as `MultiHeadAttention`. Cost: the same floating-point operations, in h times the calls.
    Source: Vaswani et al. 2017, 1706.03762, §3.2.2.
    """

    coupling = INDEPENDENT
    resizing = Resizing()
    outside_attend = ""
    layout = MultiHeadForm.layout
    notes = Notes(
        summary=Words("multi-head attention with one matrix per head", "每个头一个矩阵的多头注意力"),
        use=Words(
            "you want to read or change the matrix of one head; slower, as it computes h small products",
            "要查看或修改某个头的矩阵时用；较慢，因为要做 h 次小乘积",
        ),
        source="Vaswani et al. 2017, 1706.03762, §3.2.2",
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
        self.w_q = nn.ParameterList(drawn(d_model, d_k, inputs=d_model) for _ in range(h))
        self.w_k = nn.ParameterList(drawn(self.context_dim, d_k, inputs=self.context_dim) for _ in range(h_kv))
        self.w_v = nn.ParameterList(drawn(self.context_dim, d_v, inputs=self.context_dim) for _ in range(h_kv))
        self.w_o = nn.ParameterList(drawn(d_v, d_model, inputs=h * d_v) for _ in range(h))

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As in `AttentionLayer`, one head at a time."""
        q = torch.stack([x @ w for w in self.w_q], 1)  # h times [b, n, d_k] -> [b, h, n, d_k]
        k = torch.stack([source @ w for w in self.w_k], 1)
        v = torch.stack([source @ w for w in self.w_v], 1)
        return shifted(q, self.b_q), shifted(k, self.b_k), shifted(v, self.b_v)

    def output(self, concat: Tensor) -> Tensor:
        """Σ_i head_i W_i^O."""
        heads = concat.split(self.value_dim, -1)
        y = torch.stack([head @ w for head, w in zip(heads, self.w_o, strict=True)]).sum(0)
        return y if self.b_o is None else y + self.b_o.to(y.dtype)

    @staticmethod
    def costs(d_model: int, num_heads: int, **options: Any) -> Counts:
        """One matrix per head instead of one for all: the same function and counts as `multi_head`."""
        return MultiHeadAttention.costs(d_model, num_heads, **options)

    def steps(self, x: Tensor, note: Steps) -> None:
        """As in `AttentionLayer`."""
        q = shifted(torch.stack([x @ w for w in self.w_q], 1), self.b_q)
        k = shifted(torch.stack([x @ w for w in self.w_k], 1), self.b_k)
        v = shifted(torch.stack([x @ w for w in self.w_v], 1), self.b_v)
        note("q_each", q, "b h n d_k", "Q_i = X W_i^Q", "each head's queries, with a matrix of its own",
             "每个头用自己的矩阵算出查询")  # fmt: skip
        note("k_each", k, "b h_kv n d_k", "K_i = X W_i^K", "each head's keys", "每个头的键")
        note("v_each", v, "b h_kv n d_v", "V_i = X W_i^V", "each head's values", "每个头的值")
        heads = note.attended(*note.apply_rope(self, q, k), v)
        terms = torch.stack([heads[:, i] @ w for i, w in enumerate(self.w_o)], 1)
        note("terms", terms, "b h n d_model", "head_i W_i^O", "what each head contributes to y", "每个头对输出的贡献")
        y = terms.sum(1) + (0 if self.b_o is None else self.b_o)
        note("output_sum", y, "b n d_model", "Y = Σ_i head_i W_i^O", "the heads are added up", "把各个头相加")

    def matrices(self) -> dict[str, Sequence[Tensor]]:
        """As in `MultiHeadForm`: the lists themselves."""
        return {"q": list(self.w_q), "k": list(self.w_k), "v": list(self.w_v), "o": list(self.w_o)}
