"""Designs that read groups of the input: block-diagonal attention, and grouped-MLP attention."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.costs.work import Counts, divided, positive
from headwise.errors import ConfigError, ShapeError
from headwise.nn.base import AttentionLayer, ProjectedLayer
from headwise.nn.forms import drawn
from headwise.nn.layout import INDEPENDENT, Coupling, Layout, Part, Resizing, size
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.owned import check_copied
from headwise.nn.steps import Notes, Steps
from headwise.wording import tr


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
        summary=tr("each head reads only its own slice of the channels"),
        use=tr("you want small projections, or to show that this is *not* multi-head attention"),
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
                    "{name}={width} is not divisible by num_heads={num_heads}, so there are no equal slices",
                    name=name,
                    width=width,
                    num_heads=num_heads,
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
        parts = note(
            "slices", x.unflatten(-1, (self.num_heads, -1)), "b n h d_model/h", "X = [X_1 … X_h]",
            tr("each head reads only its own slice of the channels"))  # fmt: skip
        q = torch.einsum("bnhe,hea->bhna", parts, self.w_q)
        k = torch.einsum("bnhe,hea->bhna", parts, self.w_k)
        v = torch.einsum("bnhe,hec->bhnc", parts, self.w_v)
        note("q_slice", q, "b h n d_k", "Q_i = X_i W_i^Q", tr("queries of a head, from its slice"))
        note("k_slice", k, "b h n d_k", "K_i = X_i W_i^K", tr("keys of a head, from its slice"))
        note("v_slice", v, "b h n d_v", "V_i = X_i W_i^V", tr("values of a head, from its slice"))
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


class GroupedMLPAttention(ProjectedLayer):
    """y = MLP(Concat(Group_1 … Group_g)),  Group_j = Concat(heads of group j) W_j,
    MLP(z) = GELU(z W_1 + b_1) W_2 + b_2.

    Heads of one group are mixed by its dense W_j; groups are mixed by the MLP only, which replaces the linear W_O of
    `MultiHeadAttention`.

    Args:
        num_groups: g, a divisor of h; by default 2 if h is even, else h.
        hidden: width of the MLP, d_model by default.
        d_model, num_heads, options: sizes, bias (of the projections), dropout, rotary and qk_norm, as in
            `MultiHeadAttention`.

    Parameters: the projections of `MultiHeadAttention` without W_O; g·(h/g·d_v)² for the groups; (h·d_v + 1)·hidden +
        (hidden + 1)·d_model for the MLP.
    Cost: two operations for each parameter and token, and the attention of `MultiHeadAttention`.
    Source: grouped heads followed by a network, in place of W_O of 1706.03762.
    """

    coupling = Coupling("output", "an MLP over groups of equally many heads replaces W_O")
    resizing = Resizing()
    outside_attend = ""
    notes = Notes(
        summary=tr("dense maps within groups of heads, and an MLP over the groups"),
        use=tr("heads should interact nonlinearly before the output"),
        source="groups of heads and an MLP instead of W_O",
        parameters="MHA's without W_O, + (h·d_v)²/g + (h·d_v + 1)·w + (w + 1)·d",
        work="one more for each parameter",
        cache="MHA's",
        limits={},
        map=None,
        compared=None,
        form_of=None,
    )

    def __init__(
        self, d_model: int, num_heads: int, *, num_groups: int | None = None, hidden: int | None = None, **options: Any
    ) -> None:
        super().__init__(d_model, num_heads, **options)
        if num_groups is None:
            num_groups = 2 if num_heads % 2 == 0 else num_heads
        if num_heads % size("num_groups", num_groups):
            raise ConfigError(f"num_groups={num_groups}: expected a divisor of num_heads={num_heads}")
        hidden = d_model if hidden is None else size("hidden", hidden)
        self.num_groups, width = num_groups, num_heads // num_groups * self.value_dim
        self.w_groups = drawn(num_groups, width, width, inputs=width)
        self.mlp_in, self.mlp_out = nn.Linear(num_groups * width, hidden), nn.Linear(hidden, d_model)

    def groups(self, concat: Tensor) -> Tensor:
        """Return Group_1 … Group_g [b, n, g, h/g·d_v] of the concatenated heads [b, n, h·d_v]."""
        return torch.einsum("bngi,gio->bngo", concat.unflatten(-1, (self.num_groups, -1)), self.w_groups)

    def output(self, concat: Tensor) -> Tensor:
        """MLP(Concat(Group_1 … Group_g))."""
        return self.mlp_out(nn.functional.gelu(self.mlp_in(self.groups(concat).flatten(2))))

    def layout(self) -> Layout:
        """As in `ProjectedLayer`; there is no W_O."""
        return replace(super().layout(), missing=self.coupling.why)

    def last_weights(self) -> Sequence[Tensor]:
        """As in `AttentionLayer`: the second map of the MLP."""
        return [self.mlp_out.weight]

    @staticmethod
    def costs(
        d_model: int, num_heads: int, *, num_groups: int | None = None, hidden: int | None = None, **options: Any
    ) -> Counts:
        """Instead of W_O, a dense map of (h/g·d_v)² weights in each of g groups of heads, and an MLP after them."""
        if options.get("bias") in (True, 1):
            options["bias"] = "qkv"  # there is no W_O, and the MLP always has biases
        full = MultiHeadAttention.costs(d_model, num_heads, **options)
        groups = (2 if num_heads % 2 == 0 else num_heads) if num_groups is None else num_groups
        hidden = d_model if hidden is None else hidden
        positive(num_groups=groups, hidden=hidden)
        if num_heads % groups:
            raise ShapeError(
                "num_heads={num_heads} is not divisible by num_groups={groups}", num_heads=num_heads, groups=groups
            )
        output = full.concat**2 // groups + full.concat * hidden + hidden * d_model
        parameters = full.parameters - full.output + output + hidden + d_model
        return replace(full, parameters=parameters, output=output)

    def steps(self, x: Tensor, note: Steps) -> None:
        concat = note.side_by_side(note.back(note.attended(*note.projected(self, x))))
        groups = torch.einsum("bngi,gio->bngo", concat.unflatten(-1, (self.num_groups, -1)), self.w_groups)
        note("groups", groups, "b n g h/g·d_v", "G_j = A_j W_j",
             tr("the heads of a group are mixed by a dense map"))  # fmt: skip
        hidden = nn.functional.gelu(self.mlp_in(groups.flatten(2)))
        note("hidden", hidden, "b n hidden", "GELU(G W_1 + b_1)", tr("the groups are mixed by an MLP"))
        note("output_mlp", self.mlp_out(hidden), "b n d_model", "Y = (…) W_2 + b_2",
             tr("the second map of the MLP"))  # fmt: skip
