"""A design: attention by the angle between query and key."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.costs.work import Counts
from headwise.nn.base import ProjectedLayer
from headwise.nn.layout import INDEPENDENT, Layout, Part, Resizing
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.registry import DESIGNS
from headwise.nn.steps import Notes, Steps
from headwise.wording import tr


class CosineAttention(ProjectedLayer):
    """head_i = softmax(τ_i · cos(Q_i, K_i)) V_i with a learned τ_i: scores cannot grow beyond τ_i.

    Args:
        temperature: τ_i at the start.
        options: as in `MultiHeadAttention`.

    Parameters: those of `MultiHeadAttention` and h.
    Cost: that of `MultiHeadAttention`.
    Source: Henry et al. 2020, 2010.04245.
    """

    coupling = INDEPENDENT
    resizing = Resizing()
    outside_attend = ""
    notes = Notes(
        summary=tr("scores are the cosine of query and key times a learned number a head"),
        use=tr("scores of plain attention grow too large in training"),
        source="Henry et al. 2020, 2010.04245",
        parameters="MHA's + h",
        work="MHA's",
        cache="MHA's",
        limits={},
        map=None,
        compared=None,
        form_of=None,
    )  # fmt: skip

    def __init__(self, d_model: int, num_heads: int, *, temperature: float = 10.0, **options: Any) -> None:
        super().__init__(d_model, num_heads, **options)
        self.temperature = nn.Parameter(torch.full((num_heads,), float(temperature)))
        self.o_proj = nn.Linear(num_heads * self.value_dim, d_model, bias=options.get("bias", False))

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of length τ_i·√d_k, keys of length 1: attend divides by √d_k."""
        q, k, v = super().project(x, source)
        length = self.temperature[:, None, None] * self.head_dim**0.5
        return length * nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1), v

    def output(self, concat: Tensor) -> Tensor:
        """The concatenated heads times W_O."""
        return self.o_proj(concat)

    def layout(self) -> Layout:
        """As in `ProjectedLayer`, τ, and columns of W_O."""
        own = Part("temperature", self, "temperature", 0, "query", 1)
        return super().layout().into(self.o_proj, self.value_dim).more([own])

    @staticmethod
    def costs(d_model: int, num_heads: int, *, temperature: float = 10.0, **options: Any) -> Counts:
        """Those of `multi_head`, and h temperatures.

        temperature: takes nothing.
        """
        full = MultiHeadAttention.costs(d_model, num_heads, **options)
        return replace(full, parameters=full.parameters + num_heads)

    def steps(self, x: Tensor, note: Steps) -> None:
        """As in `AttentionLayer`."""
        q, k, v = note.projected(self, x)
        q, k = (nn.functional.normalize(z, dim=-1) for z in (q, k))
        note("q_unit", q, "b h n d_k", "Q / |Q|", tr("each query with length 1"))
        note("k_unit", k, "b h_kv n d_k", "K / |K|", tr("each key with length 1"))
        q = q * self.temperature[:, None, None] * self.head_dim**0.5
        note("q_scaled", q, "b h n d_k", "τ √d_k Q", tr("queries times the temperature"))
        note.output(self, note.attended(q, k, v))


DESIGNS["cosine"] = CosineAttention
