"""Heads as experts, and gates that choose a few of them for each token."""

import torch
from torch import Tensor

from headwise.base.run import seeded
from headwise.nn.registry import build
from headwise.reports.curves import Matrices, Matrix
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual


@exercise(
    "Weights of a top-k gate: from `logits` `[n, h]` the softmax over all heads, kept for the `k` largest of each token and 0 elsewhere (not renormalised), as in (5.3.12).",
    "top-k 门控的权重：对 `logits` `[n, h]` 在所有头上做 softmax，每个词元只保留最大的 `k` 个，其余为 0（不再归一化），同 (5.3.12)。",
    lambda draw: (draw.normal(draw.size(), h := draw.size(1, 6)) + torch.arange(h) * 1e-2, draw.size(1, h)),
)
def top_k_gate(logits: Tensor, k: int) -> Tensor:
    """Our solution."""
    weights = logits.softmax(-1)
    chosen = torch.zeros_like(weights).scatter(-1, logits.topk(k).indices, 1.0)
    return weights * chosen


@exercise(
    "A variable number of heads: keep, for each token, the fewest heads whose gate weights `[n, h]` (rows sum to 1) together reach `p`; booleans `[n, h]`.",
    "可变的头数：对每个词元保留最少的头，使其门控权重 `[n, h]`（每行和为 1）之和达到 `p`；返回布尔 `[n, h]`。",
    lambda draw: (draw.weights(draw.size(), draw.size(1, 6)), draw.size(1, 9) / 10),
)
def top_p_heads(weights: Tensor, p: float) -> Tensor:
    """Our solution."""
    ordered, order = weights.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(weights, dtype=torch.bool).scatter(-1, order, before < p)


@exercise(
    "The sum of (5.3.12) with an output matrix: `heads` `[h, n, d_k]`, gate `weights` `[n, h]`, `wo` `[h, d_k, d]` give Σ_i g_i head_i W_i `[n, d]`.",
    "带输出矩阵的 (5.3.12)：由 `heads` `[h, n, d_k]`、门控 `weights` `[n, h]` 与 `wo` `[h, d_k, d]` 得到 Σ_i g_i head_i W_i `[n, d]`。",
    lambda draw: (
        draw.normal(h := draw.size(1, 4), n := draw.size(), k := draw.size(1, 3)), draw.weights(n, h), draw.normal(h, k, draw.size(1, 5)),
    ),
)  # fmt: skip
def mixed_heads(heads: Tensor, weights: Tensor, wo: Tensor) -> Tensor:
    """Our solution."""
    return torch.einsum("hnk,nh,hkd->nd", heads, weights, wo)


def picture() -> Matrices:
    """The gates of two designs on random tokens."""
    x = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(1))
    with seeded(0), torch.no_grad():
        sparse = build("sparse_mixture", 64, 8, {"top_k": 2}).eval()
        shared = build("mixture_of_heads", 64, 8, {"shared_heads": 2, "top_k": 2}).eval()
        gates = [layer(x, return_gates=True)[-1].weights[0] for layer in (sparse, shared)]
    names = "01234567"
    titles = Bilingual("two of eight heads", "八选二"), Bilingual("H0 and H1 shared, two of six", "H0、H1 共享，六选二")
    return Matrices(
        tuple(Matrix(title, gate, columns=names) for title, gate in zip(titles, gates, strict=True)),
        rows=Bilingual("tokens", "词元"),
        columns=Bilingual("gate weights", "门控权重"),
    )


TOPIC = Topic(
    place=18,
    title=Bilingual("Mixtures of heads", "混合专家与稀疏激活"),
    formula=r"Y = \sum_{i \in \text{TopK}(G(X))} \text{Softmax}(G(X))_i\; \text{head}_i\, W_i^{O}",
    plain="Y = Σ_{i ∈ TopK(G(X))} Softmax(G(X))_i head_i W_i^O",
    intro=Bilingual(
        """
        The sum over heads invites the analogy with experts: each head has its own parameters, and W_O adds them with fixed
        weights. A mixture makes the weights depend on the token, and if most of them are 0, most heads need not be computed.
        As printed, (5.3.12) adds outputs of width d_k; to return to d_model it needs an output matrix, as below.
        """,
        """
        对头求和的形式很容易让人联想到专家：每个头有自己的参数，W_O 以固定的权重把它们相加。混合专家让权重依赖词元；如果大多数权重
        为 0，大多数头就不必计算。按书中的写法，(5.3.12) 相加的是 d_k 维的输出；要回到 d_model，还需要一个输出矩阵，如下式。
        """,
    ),
    code="""
import torch, headwise as hw
from headwise.nn.registry import counts_of
from headwise.costs import Work, attention_stages
x, work = torch.randn(1, 6, 768), Work(batch=8, queries=512, keys=512, causal=False)
layer = hw.nn.SparseHeadMixture(768, 12, top_k=3)
gates = layer(x, return_gates=True)[-1]
for token in range(3):
    print("token", token, "uses heads", gates.chosen[0, token].nonzero().flatten().tolist())
for gate in ({"top_p": 0.4}, {"threshold": 0.1}):               # a variable number of heads
    layer = hw.nn.SparseHeadMixture(768, 12, **gate)
    print(gate, "uses", layer(x, return_gates=True)[-1].chosen[0].sum(-1).tolist(), "heads for the tokens")
few, own, shared = {"top_k": 3}, {"top_k": 3, "keys": "chosen"}, {"shared_heads": 1, "top_k": 2}
for name, options in (("multi_head", {}), ("sparse_mixture", few), ("sparse_mixture", own), ("mixture_of_heads", shared)):
    counts = counts_of(name, {"d_model": 768, "num_heads": 12, **options})
    flops = sum(stage.flops for stage in attention_stages(counts, work))
    print(f"{name:17}{options.get('keys', ''):7} {flops / 1e9:5.1f} GFLOP, {counts.parameters:,} parameters")
""",
    reading=Bilingual(
        """
        Three of twelve heads for each token save queries, scores and outputs of the others, and hardly any parameters.
        With `top_p` a token takes the fewest heads whose probabilities together reach p, with `threshold` all heads that
        reach it. The work does not fall to a quarter, since keys and values are needed for all tokens of a head that anyone
        chose. It falls below a quarter with `keys="chosen"`, where a token attends only to tokens that chose the same head.
        Standard heads are no experts: every head is computed for every token, and no gate weighs them.
        """,
        """
        每个词元十二选三，省下的是其余各头的查询、分数与输出，参数几乎不变。用 `top_p` 时，每个词元取概率之和达到 p 的最少的头；
        用 `threshold` 时，取概率达到阈值的所有头，因此头数随词元变化。计算量不会降到四分之一：只要有词元选了某个头，就需要所有
        词元在这个头上的键和值。用 `keys="chosen"` 则低于四分之一：在每个头中，词元只关注同样选了这个头的词元。标准的头不是专家：每个词元都要计算每个头，也没有门控为它们加权。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "Gate weights of 16 random tokens: two of eight heads each, without shared heads and with two.",
        "16 个随机词元的门控权重：每个词元选两个头；右边另有两个共享的头。",
    ),
    claims=("heads-as-experts", "sparse-heads", "sparse-sum-size"),
    exercises=(top_k_gate, top_p_heads, mixed_heads),
)
