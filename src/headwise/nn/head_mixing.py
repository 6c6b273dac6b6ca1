"""Head-mixing attention: the heads of each token attend to one another."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention import attend_to
from headwise.costs.counts import Counts
from headwise.map import AttentionMap
from headwise.masks import Mask
from headwise.nn.layout import Coupling, Layout, Part, Resizing
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.notes import Notes, Words
from headwise.nn.projected import ProjectedLayer
from headwise.nn.steps import Steps


class HeadMixingAttention(ProjectedLayer):
    """H' = Attention(M·Q, M·K, M·V) along the head axis, y = Concat(H'_1 … H'_h) W_O.

    H [h, d_v] are a token's heads after the usual attention along the sequence; Q = H U^Q, K = H U^K, V = H U^V are
    their projections, the same for every head; M [h, h] is a learned map over heads, the identity at the start; and
    Attention is softmax(· / √d_v) with h queries and h keys. No token is mixed with another in this second step, so
    masks apply as usual.

    Args:
        d_model, num_heads, options: sizes, bias (of the projections and W_O), dropout, rotary and qk_norm, as in
            `MultiHeadAttention`.

    Parameters: those of `MultiHeadAttention`, 3·d_v² and h².
    Cost: that of `MultiHeadAttention` and, for each token, 6·h·d_v² + 6·h²·d_v + 4·h²·d_v operations.
    Source: learned maps over heads as in Shazeer et al. 2020, 2003.02436, put before an attention (1706.03762, eq. 1)
        whose sequence is the list of heads.
    """

    coupling = Coupling(
        "heads", "each of its heads is a query, a key and a value in a second attention, over the heads"
    )
    resizing = Resizing()
    outside_attend = ""
    notes = Notes(
        summary=Words("the heads of a token attend to one another", "同一词元的各头互相注意"),
        use=Words("the heads of a token should attend to one another", "希望同一词元的各头互相注意时用"),
        source="an attention along the head axis, after 2003.02436",
        parameters="MHA's + 3·d_v² + h²",
        work="a token: 3·h·d_v² + 5·h²·d_v more",
        cache="MHA's",
        limits={},
        map=Words(
            "Weights are those over the text; afterwards the heads of each token attend to one another.",
            "显示的是对文本的权重；之后同一词元的各头之间还会做一次注意力。",
        ),
        compared=None,
        form_of=None,
    )

    def __init__(self, d_model: int, num_heads: int, *, bias: bool = False, **options: Any) -> None:
        super().__init__(d_model, num_heads, bias=bias, **options)
        self.o_proj = nn.Linear(num_heads * self.value_dim, d_model, bias=bias)
        self.u_q, self.u_k, self.u_v = (nn.Linear(self.value_dim, self.value_dim, bias=False) for _ in range(3))
        self.head_map = nn.Parameter(torch.eye(num_heads))

    def mix(self, heads: Tensor, *, return_map: bool = False) -> tuple[Tensor, AttentionMap | None]:
        """Return the heads [b, h, n, d_v] after the attention over heads, and its map [b·n, 1, h, h] or None."""
        b, h, n, d = heads.shape
        of_token = heads.transpose(1, 2).reshape(b * n, h, d)
        q, k, v = (
            torch.einsum("gh,thd->tgd", self.head_map, u(of_token))[:, None] for u in (self.u_q, self.u_k, self.u_v)
        )
        mixed, amap = attend_to(q, k, v, return_map=return_map)
        return mixed.view(b, n, h, d).transpose(1, 2), amap

    def merge(self, heads: Tensor, x: Tensor) -> Tensor:
        """The mixed heads side by side, [b, n, h·d_v]."""
        return super().merge(self.mix(heads)[0], x)

    def layout(self) -> Layout:
        """As in `ProjectedLayer`, rows and columns of M, and columns of W_O."""
        mixes = [Part("mix", self, "head_map", axis, "query", 1) for axis in (0, 1)]
        return super().layout().into(self.o_proj, self.value_dim).more(mixes)

    @staticmethod
    def costs(d_model: int, num_heads: int, **options: Any) -> Counts:
        """`multi_head`, and then each token's heads attend to one another: 3d_v² + h² weights, and for each token
        3h·d_v² + 5h²·d_v multiply-adds before W_O."""
        full, h = MultiHeadAttention.costs(d_model, num_heads, **options), num_heads
        d_v = full.concat // h
        weights = 3 * d_v * d_v + h * h
        return replace(
            full, parameters=full.parameters + weights, output=full.output + 3 * h * d_v * d_v + 5 * h * h * d_v,
            output_weights=full.output + weights,
        )  # fmt: skip

    def steps(self, x: Tensor, note: Steps) -> None:
        """As in `AttentionLayer`."""
        heads = note.back(note.attended(*note.projected(self, x)))
        q, k, v = (self.head_map @ u(heads) for u in (self.u_q, self.u_k, self.u_v))
        note(
            "q_over_heads", q, "b n h d_v", "Q' = M H U^Q", "queries over the heads of a token",
            "头维度上的查询：每个头作为一个查询",
        )  # fmt: skip
        note("k_over_heads", k, "b n h d_v", "K' = M H U^K", "keys over the heads", "头维度上的键")
        note("v_over_heads", v, "b n h d_v", "V' = M H U^V", "values over the heads", "头维度上的值")
        scores = q @ k.mT / self.value_dim**0.5
        note("scores_over_heads", scores, "b n h h", "S' = Q' K'ᵀ / √d_v", "how well the heads of a token match",
             "同一词元各头的匹配程度")  # fmt: skip
        weights = scores.softmax(-1)
        note("weights_over_heads", weights, "b n h h", "P' = softmax(S')", "weights over the heads", "头维度上的权重")
        mixed = weights @ v
        note("mixed", mixed, "b n h d_v", "H ← P' V'", "each head: the weighted sum of the heads it attends to",
             "每个头：所关注的各头的加权和")  # fmt: skip
        note.projected_out(self, note.side_by_side(mixed))

    @torch.no_grad()
    def map_of_heads(self, x: Tensor, context: Tensor | None = None, *, mask: Mask | None = None) -> AttentionMap:
        """Return the map of the attention over heads, [b·n, 1, h, h], one entry per token."""
        self.check(x, context, None, mask)
        q, k, v = self.project(x, x if context is None else context)
        q, k = self.apply_rope(q, k, 0)
        amap = self.mix(self.attention(q.to(v.dtype), k.to(v.dtype), v, mask=mask)[0], return_map=True)[1]
        assert amap is not None
        return amap
