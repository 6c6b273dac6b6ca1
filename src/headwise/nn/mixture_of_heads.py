"""Mixture-of-head attention (MoH): shared heads, and heads that a router selects for each token."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.costs.counts import Counts, positive
from headwise.errors import ConfigError
from headwise.nn.checks import size
from headwise.nn.gating import Gates, choose_heads
from headwise.nn.layout import Resizing
from headwise.nn.multi_head import MultiHeadAttention, copy_projections
from headwise.nn.notes import Notes, Words
from headwise.nn.sparse_mixture import UNCHOSEN, SparseHeadMixture
from headwise.nn.steps import Steps
from headwise.rule import own_dtypes


class MixtureOfHeads(SparseHeadMixture):
    """y = Σ_i g_i head_i W_i^O, the sum form of Concat(g_1 head_1 … g_h head_h) W_O, with, for each token x,

    g_i = α_1 Softmax(W_s x)_i for the h_s shared heads, g_i = α_2 Softmax(W_r x)_i for the top k of the other h_r
    heads and 0 for the rest, [α_1, α_2] = Softmax(W_h x).

    With `scaled` the weights average 1 instead of 1 / (h_s + k), so that a module converted from a
    trained `MultiHeadAttention` starts close to it: 2·h_s·g_i for the shared heads, and 2·k·g_i / Σ of the selected
    probabilities.

    Args:
        shared_heads: h_s, a quarter of the heads by default; the first ones.
        top_k: k, half of all heads by default.
        scaled: as above.
        d_model, num_heads, options: sizes, bias, dropout, rotary and qk_norm, as in `MultiHeadAttention`; gates are
            per token.

    Parameters: those of `MultiHeadAttention` and d_model·(h + 2) for the routers.
    Cost: as in `SparseHeadMixture` with per="token": queries, outputs and attention of h_s + k of h heads.
    Source: Jin et al. 2024, 2410.11842, §3.
    """

    coupling = SparseHeadMixture.coupling
    resizing = Resizing()
    outside_attend = SparseHeadMixture.outside_attend
    refused_options = frozenset({"top_p", "threshold"})
    layout = SparseHeadMixture.layout
    notes = Notes(
        summary=Words("heads that all tokens share and heads that each token selects", "共享头与由词元选择的头"),
        use=Words(
            "a few of many heads suffice beside some that are always active; it can be converted from a trained module",
            "除共享头外每个词元只需几个头时用；可由训练好的模块转换而来",
        ),
        source="Jin et al. 2024, 2410.11842",
        parameters="MHA's + d·(h + 2)",
        work="as sparse_mixture",
        cache="MHA's",
        limits={},
        map=UNCHOSEN,
        compared=None,
        form_of=None,
    )

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        shared_heads: int | None = None,
        top_k: int | None = None,
        scaled: bool = False,
        **options: Any,
    ) -> None:
        num_heads = size("num_heads", num_heads)
        shared_heads = max(1, num_heads // 4) if shared_heads is None else size("shared_heads", shared_heads, 0)
        if num_heads > 1 and shared_heads < 1:
            raise ConfigError(f"shared_heads={shared_heads}: expected at least 1; SparseHeadMixture supports 0")
        if options.get("per", "token") != "token":
            raise ConfigError(f"per={options['per']!r}: MixtureOfHeads selects heads per token; see SparseHeadMixture")
        top_k = max(1, num_heads // 2) if top_k is None else top_k
        super().__init__(d_model, num_heads, shared_heads=shared_heads, top_k=top_k, **options)
        self.scaled = scaled
        self.shared_gate = nn.Linear(d_model, shared_heads, bias=False)
        self.balance = nn.Linear(d_model, 2, bias=False)

    def route(self, x: Tensor) -> Gates:
        """As in `SparseHeadMixture`; probabilities are those of the routed heads."""
        with own_dtypes(x):
            x = x.to(self.gate.weight.dtype)
            wide = torch.promote_types(x.dtype, torch.float32)
            shared, routed, alpha = (
                linear(x).to(wide).softmax(-1) for linear in (self.shared_gate, self.gate, self.balance)
            )
        chosen = choose_heads(routed, self.top_k, self.shared_heads)
        kept = routed * chosen[..., self.shared_heads :]
        if self.scaled:
            shared = 2.0 * self.shared_heads * shared
            kept = 2.0 * self.top_k * kept / kept.sum(-1, keepdim=True)
        return Gates(torch.cat((alpha[..., :1] * shared, alpha[..., 1:] * kept), -1), chosen, routed)

    @staticmethod
    def costs(
        d_model: int, num_heads: int, *, top_k: int | None = None, shared_heads: int | None = None, **options: Any
    ) -> Counts:
        """`sparse_mixture` with weights for its shared heads and a balance of both kinds: routers of d·(h + 2) weights
        (Jin et al. 2024, 2410.11842, §3)."""
        positive(d_model=d_model, num_heads=num_heads)
        shared = max(1, num_heads // 4) if shared_heads is None else shared_heads
        top_k = max(1, num_heads // 2) if top_k is None else top_k
        mixture = SparseHeadMixture.costs(d_model, num_heads, top_k=top_k, shared_heads=shared, **options)
        more = d_model * (shared + 2)
        parameters, per_query = mixture.parameters + more, mixture.per_query + more
        return replace(mixture, parameters=parameters, used=mixture.met + more, per_query=per_query)

    def steps(self, x: Tensor, note: Steps) -> None:
        """As in `AttentionLayer`, computed for all heads."""
        probabilities, chosen = self._noted_choice(x, "b n", note)
        shared, alpha = self.shared_gate(x).softmax(-1), self.balance(x).softmax(-1)
        note("shared", shared, "b n h_shared", "softmax(X W_s)", "weights of the shared heads",
             "共享头的权重")  # fmt: skip
        note("balance", alpha, "b n 2", "α = softmax(X W_h)", "the shares of the shared and of the selected heads",
             "共享头与被选头各占的比例")  # fmt: skip
        routed = probabilities * chosen[..., self.shared_heads :]
        if self.scaled:
            shared = 2 * self.shared_heads * shared
            routed = 2 * self.top_k * routed / routed.sum(-1, keepdim=True)
        self._noted_heads(x, torch.cat((alpha[..., :1] * shared, alpha[..., 1:] * routed), -1), "b n", note)

    @classmethod
    def from_multi_head(
        cls,
        other: MultiHeadAttention,
        *,
        shared_heads: int | None = None,
        top_k: int | None = None,
        router_std: float = 0.01,
    ) -> "MixtureOfHeads":
        """Return a mixture with the weights of a trained module and `scaled=True`, for further training.

        The first heads become the shared ones. Routers start at zero; the one that selects heads starts with random
        weights of standard deviation `router_std`, so that tokens select different heads. With router_std=0 and all
        heads selected (top_k = h − shared_heads) it computes the function of the module.
        """
        other.check_owned()
        module = cls(
            other.d_model, other.num_heads, shared_heads=shared_heads, top_k=top_k, scaled=True,
            num_kv_heads=other.num_kv_heads, head_dim=other.head_dim, value_dim=other.value_dim,
            context_dim=other.context_dim, bias=other.q_proj.bias is not None, dropout=other.dropout,
            rotary=other.rotary is not None, qk_norm=other.q_norm is not None,
        ).to(other.q_proj.weight)  # fmt: skip
        copy_projections(other, module)
        for router, std in ((module.gate, router_std), (module.shared_gate, 0.0), (module.balance, 0.0)):
            nn.init.normal_(router.weight, std=std)
        return module.train(other.training)
