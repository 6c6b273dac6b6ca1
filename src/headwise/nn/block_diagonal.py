"""Block-diagonal attention: each head reads its own slice of the input, unlike standard multi-head attention."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.costs.counts import Counts, divided
from headwise.errors import ConfigError, ShapeError
from headwise.nn.base import AttentionLayer
from headwise.nn.forms import drawn
from headwise.nn.layout import INDEPENDENT, Layout, Part, Resizing
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.notes import Notes, Words
from headwise.nn.owned import check_copied
from headwise.nn.steps import Steps


class BlockDiagonalAttention(AttentionLayer):
    """Q_i = X_i W_i^Q, K_i = C_i W_i^K, V_i = C_i W_i^V with X_i, C_i the i-th of h equal slices of the channels.

    That is Q = X · BlockDiag(W_1 … W_h). It is sometimes presented as multi-head attention, but is a different
    layer: in standard attention every W_i^Q is d_model × d_k and reads all of X. Only W_O mixes slices here.

    Args:
        d_model, context_dim: multiples of h.
        options: head_dim, value_dim, dropout and rotary, as in `MultiHeadAttention`.

    Parameters: d_model·d_k + context_dim·(d_k + d_v), which is d²/h each for Q, K and V if d_k = d_v = d/h, and
    h·d_v·d_model for W_O.
    Cost: the projections of Q, K and V h times cheaper than in `MultiHeadAttention`, the attention the same.
    Source: a grouped linear map instead of the projections of 1706.03762, §3.2.2.
    """

    coupling = INDEPENDENT
    resizing = Resizing(
        "head i reads the i-th of h equal slices of the channels, so no head can be removed; to_multi_head() returns "
        "the same function with heads that can"
    )
    outside_attend = ""
    notes = Notes(
        summary=Words("each head reads only its own slice of the channels", "每个头只读取自己的一段通道"),
        use=Words(
            "you want small projections, or to show that this is *not* multi-head attention",
            "需要小的投影，或想说明它*不是*多头注意力时用",
        ),
        source="a grouped linear map",
        parameters="d·(2·d_k + d_v) + h·d_v·d",
        work="Q, K and V: 1/h of them",
        cache="h·(d_k + d_v)",
        limits={"fewer KV heads": "each head has its own slice"},
        map=None,
        compared=None,
        form_of=None,
    )

    def __init__(self, d_model: int, num_heads: int, **options: Any) -> None:
        super().__init__(d_model, num_heads, **options)
        if self.num_kv_heads != num_heads:
            raise ConfigError(
                f"num_kv_heads={self.num_kv_heads}: each of the {num_heads} heads has its own slice of the channels"
            )
        for name, width in (("d_model", d_model), ("context_dim", self.context_dim)):
            if width % num_heads:
                raise ShapeError(
                    f"{name}={width} is not divisible by num_heads={num_heads}, so there are no equal slices",
                    f"{name}={width} 不能被 num_heads={num_heads} 整除，因此没有等宽的切片",
                )
        x_slice, c_slice = d_model // num_heads, self.context_dim // num_heads
        self.w_q = drawn(num_heads, x_slice, self.head_dim, inputs=x_slice)
        self.w_k = drawn(num_heads, c_slice, self.head_dim, inputs=c_slice)
        self.w_v = drawn(num_heads, c_slice, self.value_dim, inputs=c_slice)
        self.o_proj = nn.Linear(num_heads * self.value_dim, d_model, bias=False)

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As in `AttentionLayer`, each head from its own slice."""
        x_parts, c_parts = x.unflatten(-1, (self.num_heads, -1)), source.unflatten(-1, (self.num_heads, -1))
        q = torch.einsum("bnhe,hea->bhna", x_parts, self.w_q)
        k = torch.einsum("bmhe,hea->bhma", c_parts, self.w_k)
        v = torch.einsum("bmhe,hec->bhmc", c_parts, self.w_v)
        return q, k, v

    def layout(self) -> Layout:
        """The head is the first index of W^Q, W^K and W^V; columns of W_O."""
        parts = tuple(Part(letter, self, f"w_{letter}", 0, "query", 1) for letter in "qkv")
        return Layout(parts, rotary=self.rotary is not None).into(self.o_proj, self.value_dim)

    def head_matrices(self) -> dict[str, Tensor]:
        """As in `AttentionLayer`, zero outside the blocks."""
        return {name: w.detach() for name, w in self.to_multi_head().per_head_weights().items()}

    @staticmethod
    def costs(d_model: int, num_heads: int, *, head_dim: int | None = None, value_dim: int | None = None) -> Counts:
        """Each head reads only its own d / h channels: Q, K and V take d·(2d_k + d_v) weights, h times fewer than in
        `multi_head`; the attention and the output are the same."""
        divided(d_model, num_heads)
        full = MultiHeadAttention.costs(d_model, num_heads, head_dim=head_dim, value_dim=value_dim)
        query, key = full.per_query // num_heads, full.per_key // num_heads
        return replace(full, parameters=query + key + full.output, per_query=query, per_key=key)

    def steps(self, x: Tensor, note: Steps) -> None:
        """As in `AttentionLayer`."""
        parts = note(
            "slices", x.unflatten(-1, (self.num_heads, -1)), "b n h d_model/h", "X = [X_1 … X_h]",
            "each head reads only its own slice of the channels", "每个头只读取自己的一段通道",
        )  # fmt: skip
        q = torch.einsum("bnhe,hea->bhna", parts, self.w_q)
        k = torch.einsum("bnhe,hea->bhna", parts, self.w_k)
        v = torch.einsum("bnhe,hec->bhnc", parts, self.w_v)
        note(
            "q_slice", q, "b h n d_k", "Q_i = X_i W_i^Q", "queries of a head, from its slice", "由各自的通道段算出查询"
        )
        note("k_slice", k, "b h n d_k", "K_i = X_i W_i^K", "keys of a head, from its slice", "由各自的通道段算出键")
        note("v_slice", v, "b h n d_v", "V_i = X_i W_i^V", "values of a head, from its slice", "由各自的通道段算出值")
        note.output(self, note.attended(*note.apply_rope(self, q, k), v))

    def to_multi_head(self) -> MultiHeadAttention:
        """Return the `MultiHeadAttention` that computes the same function: its matrices are zero outside the blocks."""
        check_copied(type(self).__name__, self, self.layout().parts)
        h = self.num_heads
        full = {}
        for name, w in (("q", self.w_q), ("k", self.w_k), ("v", self.w_v)):
            blocks = w.new_zeros(h, h, *w.shape[1:])
            blocks[range(h), range(h)] = w.detach()
            full[name] = blocks.flatten(1, 2)  # [h, width, d]
        full["o"] = self.o_proj.weight.detach().mT.view(h, self.value_dim, self.d_model)
        other = MultiHeadAttention.from_heads(**full, dropout=self.dropout, rotary=self.rotary is not None)
        return other.train(self.training)
