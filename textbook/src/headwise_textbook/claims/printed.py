"""Formulas and listings taken as they are printed: shapes that do not fit, and results that differ from the meant "
"ones."""

import torch
from torch import Tensor

from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.definitions import formula_of
from headwise_textbook.claims.evidence import Check, Verdict, at_least, at_most, difference, equal, same
from headwise_textbook.claims.samples import layer, multi_head, normal
from headwise_textbook.texts import place


@claim(
    "Stacking the W_i^Q by rows gives W_all ∈ ℝ^{(h·d_k) × d_model}, and X W_all holds the queries of all heads.",
    "把各 W_i^Q 按行堆叠得到 W_all ∈ ℝ^{(h·d_k) × d_model}，X W_all 就包含所有头的查询。",
    formula=("claimed: W_all = [W_1; …; W_h];  meant: W_all = [W_1 | … | W_h]",
             "所述：W_all = [W_1; …; W_h]；应为：W_all = [W_1 | … | W_h]"),
    at=[
        place("treatment", "5.3.4",
              "The matrices of the heads are put below one another, to a matrix of (h·d_k) × d_model.",
              "各头的矩阵上下堆叠，成为 (h·d_k) × d_model 的矩阵。", equations="5.3.3"),
        place("treatment", "5.3.4", "The stacking is by rows, as the text points out.",
              "文中特别指出是按行堆叠。", paragraph=2),
        place("treatment", "5.3.4", "X times it is n × (h·d_k), the queries of all heads.",
              "X 乘以它得 n × (h·d_k)，即所有头的查询。", equations="5.3.4"),
    ],
    control=("put next to one another, by columns, they do give the queries", "左右并排（按列）则确实得到查询"),
    note="§5.3.2 中 W_i^Q 为 d_model × d_k，按行堆叠得 (h·d_model) × d_k，与 X 乘不起来。即使先转置再堆叠，使形状恰为"
         "所印，"
    "X W_all 也不是各头的查询，只因 h·d_k = d_model 才凑巧可乘。§5.3.11 第 2 段写的 d_model × (h·d_k) 是对的。",
    expected=Verdict.FAILS,
)  # fmt: skip
def row_stacking() -> list[Check]:
    """By §5.3.2 W_i^Q is d_model × d_k; stacked by rows that is (h·d_model) × d_k, which X cannot be multiplied by. If
    the blocks are transposed first, so that the shape is as printed, X W_all is not the queries: it can be multiplied
    only because h·d_k = d_model. §5.3.11, paragraph 2, has d_model × (h·d_k), which is right.
    """
    module, x = multi_head(), normal(2, 7, 12, seed=5)
    w = module.per_head_weights()["q"].detach()  # [h, d_model, d_k]
    queries = torch.cat([x @ one for one in w], -1)
    rows, transposed, columns = torch.cat(list(w), 0), torch.cat([one.mT for one in w], 0), torch.cat(list(w), 1)
    error = difference(x @ transposed, queries)
    return [
        equal(("rows of the stack, printed as h·d_k", "堆叠后的行数，印作 h·d_k"), len(rows), 3 * 4),
        equal(("columns of the stack, printed as d_model", "堆叠后的列数，印作 d_model"), rows.shape[1], 12),
        at_most(("error of X W_all with the blocks transposed", "各块转置后 X W_all 的误差"), error, 1e-12),
        same(("error with the blocks side by side", "左右并排时的误差"), x @ columns, queries).control(error),
    ]  # fmt: skip


@claim(
    "The second layer reads LayerNorm(X + MultiHead(X W_Q, X W_K, X W_V) W_O), with MultiHead as defined before.",
    "第二层的输入是 LayerNorm(X + MultiHead(X W_Q, X W_K, X W_V) W_O)，其中 MultiHead 如前文所定义。",
    formula="MultiHead(X W_Q, X W_K, X W_V) W_O",
    at=[
        place("treatment", "5.3.6", "MultiHead is given X times the stacked projections, and multiplied by W_O.",
              "MultiHead 的输入是 X 乘堆叠的投影，结果再乘 W_O。", equations="5.3.9", paragraph=1),
    ],
    control=("with a MultiHead that neither projects nor has a W_O it is the layer",
             "若 MultiHead 既不投影、也不含 W_O，就是该层"),
    note="按式 (5.3.1)、(5.3.2)，MultiHead 自己就含有投影与 W_O：照字面代入就投影两次、乘两次 W_O，结果不同。显然本意"
         "是 "
    "MultiHead(X, X, X)，或只做切分、注意力与拼接。",
    expected=Verdict.FAILS,
)  # fmt: skip
def projects_twice() -> list[Check]:
    """By eqs. 5.3.1 and 5.3.2 MultiHead has the projections and W_O in it: taken literally everything is projected
    twice, and multiplied by W_O twice, with another result. MultiHead(X, X, X) is meant, or splitting, attention and
    concatenation alone.
    """
    module, x = multi_head(), normal(2, 7, 12, seed=5)
    w = {name: one.detach() for name, one in module.per_head_weights().items()}
    q, k, v = (torch.cat(list(x @ w[name][:, None]), -1) for name in "qkv")  # X times the stacked projections
    w_o = module.o_proj.weight.mT.detach()
    heads = [formula_of(q @ w["q"][i], k @ w["k"][i], v @ w["v"][i]) for i in range(3)]
    literal = torch.cat(heads, -1) @ w_o @ w_o
    split = [formula_of(*(t[..., 4 * i : 4 * i + 4] for t in (q, k, v))) for i in range(3)]
    error = difference(literal, module(x))
    return [
        at_most(("error of the formula taken literally", "照字面计算的误差"), error, 1e-12),
        same(("error with splitting and attention only",
              "只做切分与注意力时的误差"), torch.cat(split, -1) @ w_o, module(x))
        .control(error),
    ]  # fmt: skip


@claim(
    "The sum of selected heads Σ_{i ∈ TopK} head_i · Softmax(G(X))_i takes the place of multi-head attention.",
    "选中各头之和 Σ_{i ∈ TopK} head_i · Softmax(G(X))_i 可以代替多头注意力。",
    formula=("claimed: Σ g_i head_i;  required: Σ g_i head_i W_i^O", "所述：Σ g_i head_i；需要：Σ g_i head_i W_i^O"),
    at=[place("treatment", "5.3.13", "The sparse variant is printed as a weighted sum of heads, without W_O.",
              "稀疏变体印作各头的加权和，没有 W_O。", equations="5.3.12")],
    also="Zhang et al. 2022, 2210.05144",
    control=("with a W_i^O for each head the output has d_model channels", "每头有自己的 W_i^O 时，输出为 d_model 维"),
    note="每个 head_i 为 n × d_k，其和也是 n × d_k，不能与 X 相加，也不能进入下一层；而且所有头共用同一组 d_k 个通道。"
    "我们读作先乘各头的 W_i^O 再求和，与所引论文一致。",
    expected=Verdict.FAILS,
)  # fmt: skip
def sparse_sum_size() -> list[Check]:
    """Each head_i is n × d_k, and so is the sum: it cannot be added to X or enter the next layer, and all heads share
    the same d_k channels. We read a sum of heads each multiplied by its W_i^O, as in the cited paper.
    """
    module, x = layer("sparse_mixture", 12, 6, top_k=2), normal(2, 7, 12, seed=5)
    heads = formula_of(*module.project(x, x))  # [b, h, n, d_k]
    g = torch.softmax(module.gate(x), -1)
    weighted = heads * (g * (g >= g.topk(2, -1).values[..., -1:])).transpose(1, 2)[..., None]
    printed, w = weighted.sum(1), module.o_proj.weight.mT.unflatten(0, (6, 2))  # [b, n, d_k]; [h, d_k, d_model]
    mapped: Tensor = (weighted @ w).sum(1)
    rank = int(torch.linalg.matrix_rank(printed.detach().flatten(0, 1)))
    return [
        equal(("channels of the sum, of d_model = 12", "和的通道数，d_model = 12"), printed.shape[-1], 12),
        at_least(("directions in the sum, of d_model = 12", "和中的方向数，d_model = 12"), rank, 12),
        equal(("channels with W_i^O", "有 W_i^O 时的通道数"), mapped.shape[-1], 12).control(printed.shape[-1]),
    ]  # fmt: skip


@claim(
    "Reshaping Q, K and V to [batch, seq, h, d_k] and multiplying Q by K.transpose(−2, −1) gives scores of "
    "[batch, h, seq, seq].",
    "把 Q、K、V 重塑为 [batch, seq, h, d_k]，再算 Q @ K.transpose(−2, −1)，就得到 [batch, h, seq, seq] 的分数。",
    formula=("claimed: [2, 8, 10, 10];  computed: [2, 10, 8, 8]", "所述：[2, 8, 10, 10]；算得：[2, 10, 8, 8]"),
    at=[
        place("tutorial", "2", "Q, K and V are reshaped to [batch, seq, h, d_k].",
              "Q、K、V 重塑为 [batch, seq, h, d_k]。",
              listing=1),
        place("tutorial", "2", "Scores are said to be [batch, h, seq, seq].",
              "注释称分数为 [batch, h, seq, seq]。", listing=2),
        place("tutorial", "2", "The output is reshaped to [batch, seq, h·d_k] directly.",
              "输出直接重塑为 [batch, seq, h·d_k]。",
              listing=3),
    ],
    control=("with the transposes of the tutorial's own class, part 4, every token reads every other",
             "加上教程第 4 部分类中的转置，每个词元就能读取所有词元"),
    note="缺少两次转置：此时每个词元在自己的各头之间做注意力，词元之间毫无交流。形状 [2, 10, 512] 照样对得上，程序不会"
         "报错。"
    "教程第 4 部分的类是对的。另外 W_Q * X 的 * 应为矩阵乘法。",
    expected=Verdict.FAILS,
)  # fmt: skip
def listing_transposes() -> list[Check]:
    """Two transposes are missing: each token attends among its own heads, and tokens do not communicate. The output
    still has the shape [2, 10, 512], so nothing is reported. The class in part 4 is right. And the * of W_Q * X has to
    be a matrix product.
    """
    x = normal(2, 10, 512, seed=5)
    w = [normal(512, 512, seed=seed) / 512**0.5 for seed in range(3)]
    q, k = (t.reshape(2, 10, 8, 64) for t in (x @ one for one in w[:2]))
    scores = q @ k.transpose(-2, -1)
    printed, meant = (_tokens_read(x, w, transposed) for transposed in (False, True))
    return [
        equal(("second axis of the scores, claimed to be the heads", "分数的第二轴，据称是头"), scores.shape[1], 8),
        equal(("rows of the scores, claimed to be the tokens", "分数的行数，据称是词元"), scores.shape[2], 10),
        equal(("pairs of tokens that read one another", "相互读取的词元对数"), printed, 100),
        equal(("with the transposes", "加上转置"), meant, 100).control(printed),
    ]


def _tokens_read(x: Tensor, w: list[Tensor], transposed: bool) -> int:
    """Pairs of tokens (i, j) for which the output of the listing at i depends on the input at j."""

    def output(t: Tensor) -> Tensor:
        q, k, v = ((t @ one).reshape(1, 10, 8, 64) for one in w)
        if transposed:
            return formula_of(*(one.transpose(1, 2) for one in (q, k, v))).transpose(1, 2).reshape(1, 10, 512)
        return formula_of(q, k, v).reshape(1, 10, 512)

    before, read = output(x[:1]), 0
    for j in range(10):
        moved = x[:1].clone()
        moved[:, j] += 1.0
        read += int((output(moved) != before).any(-1).sum())
    return read
