"""Grouped-MLP attention: dense maps within groups of heads, and an MLP over the groups."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.costs.counts import Counts, positive
from headwise.errors import ConfigError, ShapeError
from headwise.nn.checks import size
from headwise.nn.forms import drawn
from headwise.nn.layout import Coupling, Layout, Resizing
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.notes import Notes, Words
from headwise.nn.projected import ProjectedLayer
from headwise.nn.steps import Steps


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
        summary=Words(
            "dense maps within groups of heads, and an MLP over the groups", "组内各头由稠密矩阵混合，组间由 MLP 混合"
        ),
        use=Words("heads should interact nonlinearly before the output", "希望各头在输出之前非线性地相互作用时用"),
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
                f"num_heads={num_heads} is not divisible by num_groups={groups}",
                f"num_heads={num_heads} 不能被 num_groups={groups} 整除",
            )
        output = full.concat**2 // groups + full.concat * hidden + hidden * d_model
        parameters = full.parameters - full.output + output + hidden + d_model
        return replace(full, parameters=parameters, output=output)

    def steps(self, x: Tensor, note: Steps) -> None:
        """As in `AttentionLayer`."""
        concat = note.side_by_side(note.back(note.attended(*note.projected(self, x))))
        groups = torch.einsum("bngi,gio->bngo", concat.unflatten(-1, (self.num_groups, -1)), self.w_groups)
        note("groups", groups, "b n g h/g·d_v", "G_j = A_j W_j", "the heads of a group are mixed by a dense map",
             "组内各头由稠密矩阵混合")  # fmt: skip
        hidden = nn.functional.gelu(self.mlp_in(groups.flatten(2)))
        note("hidden", hidden, "b n hidden", "GELU(G W_1 + b_1)", "the groups are mixed by an MLP", "组间由 MLP 混合")
        note("output_mlp", self.mlp_out(hidden), "b n d_model", "Y = (…) W_2 + b_2", "the second map of the MLP",
             "MLP 的第二层")  # fmt: skip
