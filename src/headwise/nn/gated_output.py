"""Gates on heads: of a router that selects them, and a sigmoid on every head's output."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.costs.work import Counts
from headwise.errors import check_choice
from headwise.nn.base import ProjectedLayer, copy_into
from headwise.nn.layout import INDEPENDENT, Layout, Resizing, linear_parts
from headwise.nn.multi_head import MultiHeadAttention, copied_as, copy_projections
from headwise.nn.steps import Notes, Steps
from headwise.wording import tr


@dataclass(frozen=True)
class Gates:
    """A router's selection among h heads, g selections in each of b sequences: g = n tokens, or 1 for the sequence.

    Attributes:
        weights: [b, g, h] factor of each head, 0 where it was not selected; differentiable.
        chosen: boolean [b, g, h], whether each head was selected.
        probabilities: [b, g, h_r] the router's softmax over the routed heads, which come last; float32 or wider.
    """

    weights: Tensor
    chosen: Tensor
    probabilities: Tensor

    @property
    def shared(self) -> int:
        """The number of heads that are always selected; they come first."""
        return self.chosen.shape[-1] - self.probabilities.shape[-1]

    def balance_loss(self) -> Tensor:
        """Return h_r / k · Σ_i f_i P_i, a differentiable scalar: 1 if the load of the routed heads is even.

        f_i is the share of selections with head i, P_i its mean probability (Fedus et al. 2021, 2101.03961,
        eq. 4, for k of h_r; Jin et al. 2024, 2410.11842, without the factor h_r / k). Add a small multiple of it,
        such as 0.01, to a training loss.
        """
        routed = self.chosen[..., self.shared :].to(self.probabilities.dtype)
        f, p = routed.mean((0, 1)), self.probabilities.mean((0, 1))
        return len(p) / f.sum() * (f * p).sum()

    def load(self) -> Tensor:
        """Return the share of selections with each head, [h]."""
        return self.chosen.float().mean((0, 1))

    def importance(self) -> Tensor:
        """Return the mean weight of each head, [h]; detached."""
        return self.weights.detach().float().mean((0, 1))

    def entropy(self) -> Tensor:
        """Return the mean entropy of the router's probabilities in nats, a scalar between 0 and ln h_r; detached."""
        return torch.special.entr(self.probabilities.detach()).sum(-1).mean()


def choose_heads(
    probabilities: Tensor, top_k: int, shared: int, *, top_p: float | None = None, threshold: float | None = None
) -> Tensor:
    """Boolean [b, g, shared + h_r]: the shared heads and the top_k of probabilities [b, g, h_r]; with `top_p` only as
    many as sum to it, with `threshold` only those with at least it, but always the most probable one."""
    found = probabilities.topk(top_k, -1)
    kept = torch.ones_like(found.values, dtype=torch.bool)
    if top_p is not None:
        kept &= found.values.cumsum(-1) - found.values < top_p
    if threshold is not None:
        kept &= found.values >= threshold
    kept[..., 0] = True
    routed = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(-1, found.indices, kept)
    return torch.cat((routed.new_ones(*routed.shape[:2], shared), routed), -1)


class GatedAttention(ProjectedLayer):
    """y = (Concat(head_1 … head_h) ⊙ σ(X W_G + b_G)) W_O: the gate scales each head's output per token.

    Softmax weights sum to 1, so an ungated head always contributes; a gate near 0 switches it off without an attention
    sink. The gate also adds a nonlinearity between W_V and W_O.

    Args:
        gate: "head", one gate per head and token, or "channel", one per channel of each head.
        bias: on the projections; the gate always has a bias.
        d_model, num_heads, options: sizes, dropout, rotary and qk_norm, as in `MultiHeadAttention`.

    Parameters: those of `MultiHeadAttention` and (d_model + 1)·h, or (d_model + 1)·h·d_v with gate="channel".
    Cost: that of `MultiHeadAttention` and two operations per parameter of the gate and token.
    Source: Qiu et al. 2025, 2505.06708, gate after the attention (G1).
    """

    coupling = INDEPENDENT
    resizing = Resizing()
    outside_attend = ""
    notes = Notes(
        summary=tr("a sigmoid gate on every head's output, read from the query's token"),
        use=tr("a token may need nothing from a head and would attend to a sink instead"),
        source="Qiu et al. 2025, 2505.06708",
        parameters="MHA's + (d + 1)·h, or (d + 1)·h·d_v",
        work="one more for each parameter",
        cache="MHA's",
        limits={},
        map=tr("Weights are those before the gate, which may silence a head for a token."),
        compared=None,
        form_of=None,
    )

    def __init__(self, d_model: int, num_heads: int, *, gate: str = "head", bias: bool = False, **options: Any) -> None:
        super().__init__(d_model, num_heads, bias=bias, **options)
        check_choice("gate", gate, ("head", "channel"))
        self.gate = gate
        self.o_proj = nn.Linear(num_heads * self.value_dim, d_model, bias=bias)
        self.gate_proj = nn.Linear(d_model, num_heads * (1 if gate == "head" else self.value_dim))

    def gates(self, x: Tensor) -> Tensor:
        """Return σ(X W_G + b_G) of x [b, n, d_model]: [b, h, n, 1 or d_v], between 0 and 1."""
        return torch.sigmoid(self.gate_proj(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def merge(self, heads: Tensor, x: Tensor) -> Tensor:
        """The gated heads side by side, [b, n, h·d_v]."""
        return super().merge(heads * self.gates(x).to(heads.dtype), x)

    def layout(self) -> Layout:
        """As in `ProjectedLayer`, rows of W_G and columns of W_O."""
        width = 1 if self.gate == "head" else self.value_dim
        joined = super().layout().into(self.o_proj, self.value_dim)
        return joined.more(linear_parts("gate", self.gate_proj, 0, "query", width))

    @staticmethod
    def costs(d_model: int, num_heads: int, *, gate: str = "head", gate_bias: bool = True, **options: Any) -> Counts:
        """`multi_head` with a sigmoid gate on each head's output, or on each of its channels: (d + 1)·h weights, or
        (d + 1)·h·d_v (Qiu et al. 2025, 2505.06708).

        gate_bias: whether the gate has a bias b.
        """
        check_choice("gate", gate, ("head", "channel"))
        full = MultiHeadAttention.costs(d_model, num_heads, **options)
        gates = num_heads if gate == "head" else full.concat
        parameters = full.parameters + (d_model + bool(gate_bias)) * gates
        return replace(
            full, parameters=parameters, per_query=full.per_query + d_model * gates, query=full.query + gates
        )

    def steps(self, x: Tensor, note: Steps) -> None:
        heads = note.attended(*note.projected(self, x))
        gate = torch.sigmoid(self.gate_proj(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        axes = "b h n 1" if self.gate == "head" else "b h n d_v"
        note("gate", gate, axes, "σ(X W_G + b)", tr("the share of each head that the token keeps"))
        heads = note("gated", heads * gate, "b h n d_v", "H ← H ⊙ gate", tr("each head times its gate"))
        note.output(self, heads)

    @classmethod
    def from_multi_head(cls, other: MultiHeadAttention, *, gate: str = "head") -> "GatedAttention":
        """Return a module that computes the same function, for further training: gates are ½, and W_O is doubled."""
        module = copied_as(cls, other, gate=gate)
        copy_projections(other, module)
        nn.init.zeros_(module.gate_proj.weight)
        nn.init.zeros_(module.gate_proj.bias)
        copy_into([(module.o_proj.weight, 2.0 * other.o_proj.weight)])
        return module
