"""The layer around the heads, and designs derived from it: blocks, mixtures, groups, mixing."""

import math

import torch
from torch import Tensor, nn

from headwise.nn.base import AttentionLayer
from headwise.nn.counts import counts_of
from headwise.textbook.claims.claim import claim
from headwise.textbook.claims.definitions import formula_of
from headwise.textbook.claims.evidence import Check, Verdict, at_least, at_most, equal, same
from headwise.textbook.claims.samples import layer, multi_head, normal, standard


@claim(
    "LayerNorm(X + MultiHead(X)) has mean 0 and variance 1 in every token, whatever the heads say.",
    formula="LayerNorm(X + MultiHead(X))",
    source="5.3.9; Vaswani et al. 2017, §3.1; Ba et al. 2016, 1607.06450",
)
def residual_norm() -> list[Check]:
    """With gain 1 and shift 0, up to ε in the denominator. It does not hold for X + MultiHead(LayerNorm(X))."""
    module, x, norm = multi_head(), 50.0 * normal(2, 7, 12, seed=5), nn.LayerNorm(12, eps=0.0).double()
    y, before = norm(x + module(x)).detach(), (x + module(norm(x))).detach()
    return [
        at_most("largest |mean| of a token", float(y.mean(-1).abs().max()), 1e-12),
        at_most("largest |variance − 1|", float((y.var(-1, unbiased=False) - 1).abs().max()), 1e-12),
        at_least("pre-norm: largest |variance − 1|", float((before.var(-1) - 1).abs().max()), 10.0).control(),
    ]


@claim(
    "Q of all heads is X · BlockDiag(W_1 … W_h): each input dimension feeds one head.",
    formula="claimed: Q = X BlockDiag(W_1 … W_h);  standard: Q = X [W_1 | … | W_h]",
    source="5.3.10",
    expected=Verdict.FAILS,
)
def block_diagonal() -> list[Check]:
    """Each W_i^Q is d×d_k and reads all of X: Q = X [W_1 | … | W_h]. The block-diagonal layer is a different one, with
    h times fewer weights in Q, K and V.
    """
    d, h = 12, 3
    standard, sliced = layer("multi_head", d, h), layer("block_diagonal", d, h)
    same_as_sliced = sliced.to_multi_head()
    x = normal(2, 7, d, seed=5)
    return [
        equal("heads that an input dimension feeds", _heads_fed(standard), 1),
        equal("weights of Q", standard.q_proj.weight.numel(), d * d // h),
        equal("the same, of the block-diagonal layer", _heads_fed(sliced), 1).control(),
        equal("weights of its Q", sliced.w_q.numel(), d * d // h).control(),
        same("its own error as a multi-head layer with zeros", same_as_sliced(x), sliced(x)).control(),
    ]


@claim(
    "A gate may choose k ≪ h heads: Σ_{i ∈ TopK(G(X))} head_i · Softmax(G(X))_i, and the others cost nothing.",
    formula="Σ_{i ∈ TopK(G(X))} head_i · Softmax(G(X))_i",
    source="5.3.12; Shazeer et al. 2017, 1701.06538; Zhang et al. 2022, 2210.05144",
)
def sparse_heads() -> list[Check]:
    """Equal to the sum written out over all heads. Keys and values are needed for every head that any token selects."""
    module, x = layer("sparse_mixture", 12, 6, top_k=2), normal(2, 7, 12, seed=5)
    y, gates = module(x, return_gates=True)
    heads = formula_of(*module.project(x, x))  # all six, [b, h, n, d_k]
    g = torch.softmax(module.gate(x), -1)  # [b, n, h]
    chosen = g >= g.topk(2, -1).values[..., -1:]
    weighted = heads * (g * chosen).transpose(1, 2)[..., None]
    sizes = {"d_model": 12, "num_heads": 6}
    dense, few = counts_of("multi_head", sizes), counts_of("sparse_mixture", {**sizes, "top_k": 2})
    return [
        same("error", y, module.o_proj(weighted.transpose(1, 2).flatten(2))),
        equal("heads used per token", float(gates.chosen.sum(-1).double().mean()), 2),
        equal("scores computed, of those of all heads", few.scores / dense.scores, 2 / 6, 1e-12),
        at_least("sum of the gate weights of the others", float(g[~chosen].detach().sum()), 0.1).control(),
    ]


@claim(
    "Heads are like the experts of a mixture.",
    formula="Σ_i g_i(x) head_i W_i^O, g_i = 1/h",
    source="§5.3, analogy to mixture of experts",
    expected=Verdict.CONDITIONS,
)
def heads_as_experts() -> list[Check]:
    """Multi-head attention is a mixture in which every expert has the same constant weight; it has no gate that reads
    the token.
    """
    module, x = layer("sparse_mixture", 12, 6, top_k=6), normal(2, 7, 12, seed=5)
    dense = standard(12, 6).double()
    dense.load_state_dict({name: w for name, w in module.state_dict().items() if not name.startswith("gate")})
    open_gate = module(x)
    nn.init.zeros_(module.gate.weight)
    return [
        same("constant gate: error of h times the mixture", 6 * module(x), dense(x)),
        same("a gate that reads tokens: the same error", 6 * open_gate, dense(x)).beyond(),
    ]


@claim(
    "MLP(Concat(Group_1 … Group_g)): heads of a group interact fully, groups only through the MLP.",
    formula="MLP(Concat(Group_1 … Group_g))",
    source="5.3.13",
)
def grouped_heads() -> list[Check]:
    """The layer compared with the formula; the channels that a group reads, from its Jacobian."""
    module, x = layer("grouped_mlp", 12, 6, num_groups=2), normal(2, 7, 12, seed=5)
    y, concat = module(x, return_concat=True)
    groups = [concat[..., 6 * j : 6 * j + 6] @ module.w_groups[j] for j in range(2)]
    hidden = torch.cat(groups, -1) @ module.mlp_in.weight.mT + module.mlp_in.bias
    gelu = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    reads = torch.autograd.functional.jacobian(lambda c: module.groups(c).flatten(-2)[0, 0], concat)[:, 0, 0] != 0
    within, between = reads[:6, :6], torch.cat((reads[:6, 6:], reads[6:, :6]))
    return [
        same("error", y, gelu @ module.mlp_out.weight.mT + module.mlp_out.bias),
        equal("share of channels read within a group", float(within.double().mean()), 1),
        equal("channels read between groups before the MLP", int(between.sum()), 0),
    ]


@claim(
    "Attention(M·Q, M·K, M·V) along the axis of heads, M a learned map, lets heads read one another.",
    formula="Attention(M·Q, M·K, M·V) along the heads",
    source="5.3.14; Shazeer et al. 2020, 2003.02436",
)
def head_mixing() -> list[Check]:
    """Equal to the formula, token by token; no token reads another one in this second step."""
    module, x = layer("head_mixing", 12, 3), normal(2, 7, 12, seed=5)
    with torch.no_grad():
        module.head_map.add_(0.3 * normal(3, 3, seed=6))
    first = formula_of(*module.project(x, x)).transpose(1, 2)  # [b, n, h, d_v]
    q, k, v = (module.head_map @ u(first) for u in (module.u_q, module.u_k, module.u_v))
    mixed = formula_of(q, k, v)
    moved = module.mix(first.transpose(1, 2) + _bump(first).transpose(1, 2))[0].transpose(1, 2) - mixed
    others = torch.cat((moved[:, :3], moved[:, 4:]), 1).detach()
    return [
        same("error", module(x), module.o_proj(mixed.flatten(2))),
        equal("heads affected by head 1 of token 3", int((moved[0, 3].abs().amax(-1) > 0).sum()), 3),
        at_most("its effect on other tokens", float(others.abs().max()), 1e-14),
    ]


def _heads_fed(module: AttentionLayer) -> int:
    """The largest number of heads whose queries depend on one input dimension."""
    x = normal(1, 1, 12, seed=5)

    def queries(t: Tensor) -> Tensor:
        return module.project(t, t)[0][0, :, 0]  # [h, d_k]

    slopes = torch.autograd.functional.jacobian(queries, x)[:, :, 0, 0]  # [h, d_k, d]
    return int((slopes != 0).any(1).sum(0).max())


def _bump(heads: Tensor) -> Tensor:
    """A perturbation of head 1 of token 3 only, [b, n, h, d_v]."""
    bump = torch.zeros_like(heads)
    bump[:, 3, 1] = 1.0
    return bump
