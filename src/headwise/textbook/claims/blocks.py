"""The block around the heads: residual connection, norm, and the projections in front."""

from typing import Any

import torch
from torch import Tensor, nn

from headwise.base.run import seeded
from headwise.masks import Causal
from headwise.nn.base import AttentionLayer
from headwise.reports.curves import Curve
from headwise.textbook.claims.claim import claim
from headwise.textbook.claims.evidence import Check, Verdict, at_least, at_most, difference, equal, same
from headwise.textbook.claims.model import trained
from headwise.textbook.claims.samples import layer, multi_head, normal, standard
from headwise.textbook.texts import place
from headwise.wording import Bilingual


@claim(
    "Residual connections and LayerNorm keep gradients from vanishing.",
    "残差连接与层归一化可缓解梯度消失。",
    formula="‖∂L/∂X_1‖ / ‖∂L/∂X_L‖,  X_{l+1} = LayerNorm(X_l + MultiHead(X_l))",
    at=[
        place("tutorial", "5",
              "Residual connection and layer normalisation mitigate vanishing gradients (and are added in "
              "practice).", "残差连接加层归一化缓解梯度消失（实际实现中会添加）。", item=3),
        place("treatment", "5.3.6", "A second layer reads LayerNorm(X + MultiHead(X)).",
              "第二层的输入是 LayerNorm(X + MultiHead(X))。", equations="5.3.9"),
    ],
    also="He et al. 2015, 1512.03385",
    control=("without either the gradient vanishes through 24 layers", "两者都没有时，梯度穿过 24 层就消失了"),
    note="24 层随机初始化的注意力，输入处与输出处梯度范数之比。两者任取其一就够：单有残差约为 1.2，单有层归一化约为 "
         "0.4。",
)  # fmt: skip
def residual_norm() -> list[Check | Curve]:
    """24 layers of attention as initialised: the norm of the gradient at the input relative to that at the output.
    Either of the two is sufficient: the residual connection alone gives about 1.2, LayerNorm alone about 0.4.
    """
    depths = 1, 3, 6, 12, 24
    cases = {
        Bilingual("residual and LayerNorm", "残差与层归一化"): (True, True),
        Bilingual("residual only", "只有残差"): (True, False),
        Bilingual("LayerNorm only", "只有层归一化"): (False, True),
        Bilingual("neither", "两者都没有"): (False, False),
    }
    left = {what: {depth: _gradient_left(depth, *case) for depth in depths} for what, case in cases.items()}
    both, residual, norm, neither = (line[24] for line in left.values())
    return [
        at_least(("gradient after 24 layers with both", "两者都有，24 层之后的梯度"), both, 0.1),
        at_least(("with the residual connection only", "只有残差"), residual, 0.1),
        at_least(("with LayerNorm only", "只有层归一化"), norm, 0.1),
        at_most(("with neither", "两者都没有"), neither, 1e-6).control(both),
        Curve.of(Bilingual("Gradient at the input of a stack of attention layers", "多层注意力输入处的梯度"),
                 Bilingual("layers", "层数"), Bilingual("relative to the output's", "与输出处之比"), left, log="xy"),
    ]  # fmt: skip


@claim(
    "LayerNorm(X + MultiHead(X)) has mean 0 and variance 1 in every token, whatever the heads do.",
    "LayerNorm(X + MultiHead(X)) 的每个词元均值为 0、方差为 1，与各头的输出无关。",
    formula="LayerNorm(X + MultiHead(X))",
    at=[
        place("treatment", "5.3.6", "The norm is outside of the sum of X and the heads' output.",
              "归一化在 X 与多头输出之和的外面。", equations="5.3.9"),
        place("chapter", "11.5.2", "The output enters the next layer: LayerNorm, then the feed-forward network.",
              "输出进入下一层：LayerNorm，再到 FFN。", item=4),
    ],
    also="Vaswani et al. 2017, §3.1; Ba et al. 2016, 1607.06450",
    control=("X + MultiHead(LayerNorm(X)), the other placement, is not normalised",
             "另一种写法 X + MultiHead(LayerNorm(X)) 没有归一化"),
    note="增益为 1、平移为 0，分母中的 ε 除外。",
)  # fmt: skip
def normalised_tokens() -> list[Check]:
    """With gain 1 and shift 0, up to ε in the denominator."""
    module, x, norm = multi_head(), 50.0 * normal(2, 7, 12, seed=5), nn.LayerNorm(12, eps=0.0).double()
    y, before = norm(x + module(x)).detach(), (x + module(norm(x))).detach()
    deviation = float((y.var(-1, unbiased=False) - 1).abs().max())
    return [
        at_most(("largest |mean| of a token", "词元均值的最大绝对值"), float(y.mean(-1).abs().max()), 1e-12),
        at_most(("largest |variance − 1|", "|方差 − 1| 的最大值"), deviation, 1e-12),
        at_least(("pre-norm: largest |variance − 1|", "前置归一化：|方差 − 1| 的最大值"),
                 float((before.var(-1) - 1).abs().max()), 10.0).control(deviation),
    ]  # fmt: skip


@claim(
    "Q of all heads is X · BlockDiag(W_1 … W_h): each input dimension feeds one head.",
    "所有头的 Q 为 X · BlockDiag(W_1 … W_h)：每个输入维度只供一个头使用。",
    formula=("claimed: Q = X BlockDiag(W_1 … W_h);  standard: Q = X [W_1 | … | W_h]",
             "所述：Q = X BlockDiag(W_1 … W_h)；标准：Q = X [W_1 | … | W_h]"),
    at=[
        place("treatment", "5.3.6", "The map to all queries is written as a block-diagonal matrix of the W_i^Q.",
              "到所有查询的映射写成由各 W_i^Q 组成的分块对角矩阵。", equations="5.3.10", paragraph=3),
        place("treatment", "5.3.6", "So each input dimension contributes to one head only.",
              "因此每个输入维度只贡献给特定的头。",
              paragraph=4),
    ],
    control=("of the block-diagonal design both statements are true", "对分块对角的设计，两句话都成立"),
    note="每个 W_i^Q 为 d×d_k，读取整个 X：Q = X [W_1 | … | W_h]，与式 (5.3.2) 一致。分块对角的层是另一种层，Q、K、V "
         "的权重只有 1/h。",
    expected=Verdict.FAILS,
)  # fmt: skip
def block_diagonal() -> list[Check]:
    """Each W_i^Q is d×d_k and reads all of X: Q = X [W_1 | … | W_h], as in eq. 5.3.2. The block-diagonal layer is a
    different one, with h times fewer weights in Q, K and V.
    """
    d, h = 12, 3
    standard, sliced = layer("multi_head", d, h), layer("block_diagonal", d, h)
    x, fed, weights = normal(2, 7, d, seed=5), _heads_fed(standard), standard.q_proj.weight.numel()
    return [
        equal(("heads that an input dimension feeds", "一个输入维度供给的头数"), fed, 1),
        equal(("weights of Q", "Q 的权重数"), weights, d * d // h),
        equal(("heads fed in the block-diagonal layer", "分块对角层中供给的头数"), _heads_fed(sliced), 1).control(fed),
        equal(("weights of its Q", "其 Q 的权重数"), sliced.w_q.numel(), d * d // h).control(weights),
        same(("its own error as a multi-head layer with zeros",
              "把它写成带零的多头层时的误差"), sliced.to_multi_head()(x), sliced(x))
        .control(difference(standard(x), sliced(x))),
    ]  # fmt: skip


@claim(
    "The output of attention replaces the token embedding.",
    "注意力的输出替代原始的词嵌入。",
    formula=("claimed: X ← MultiHead(X);  in a Transformer: X ← X + MultiHead(X)",
             "所述：X ← MultiHead(X)；Transformer 中：X ← X + MultiHead(X)"),
    at=[
        place("chapter", "11.5.2", "The final output takes the place of the original token embedding.",
              "最终输出会替代原始的 token embedding。", item=3),
    ],
    also="Vaswani et al. 2017, §3.1",
    control=("in the demonstration's model, which has no residual connection, it does",
             "演示中的模型没有残差连接，输出确实取而代之"),
    note="Transformer 中输出是加到词元上的：训练好的模型里，第一次注意力之后的词元与嵌入仍然相近，与注意力的输出则不"
         "同。该书"
         "后面一章才讲残差连接，"
    "这里可看作简化的说法；我们按字面判断。",
    expected=Verdict.FAILS,
)  # fmt: skip
def output_replaces() -> list[Check]:
    """In a Transformer the output is added to the tokens: after the first attention of a trained model they still
    resemble the embeddings, and are not the output of attention. A later chapter of the book introduces the residual
    connection, so the sentence may be a simplification; it is judged as written.
    """
    model, module, x = trained(), multi_head(), normal(2, 7, 12, seed=5)
    block: Any = model.decoder.blocks[0]
    with torch.no_grad():
        embedded = model.decoder.embedding(model.ids)
        added = block.attention(block.attention_norm(embedded), mask=Causal())
        after = embedded + added
    alike = float(nn.functional.cosine_similarity(after, embedded, dim=-1).mean())
    remaining = difference(after, added)
    return [
        at_most(("difference between the tokens after attention and its output",
                 "注意力之后的词元与其输出之差"), remaining, 1e-6),
        at_most(("their mean cosine with the embeddings", "它们与嵌入的平均余弦"), alike, 0.1),
        at_most(("the same difference without a residual connection", "没有残差连接时的同一差值"),
                difference(module(x), module.output(module.merge(module.attention(*module.project(x, x))[0], x))), 1e-6)
        .control(remaining),
    ]  # fmt: skip


def _gradient_left(depth: int, residual: bool, norm: bool) -> float:
    """Norm of the gradient at the input of a stack of layers relative to that at its output."""
    x = normal(4, 16, 32, seed=5).requires_grad_()
    with seeded(0):
        layers = [standard(32, 4).double() for _ in range(depth)]
    z: Tensor = x
    for one in layers:
        z = z + one(z) if residual else one(z)
        z = nn.functional.layer_norm(z, (32,)) if norm else z
    towards = normal(4, 16, 32, seed=6)
    (gradient,) = torch.autograd.grad((z * towards).sum(), [x])
    return float(gradient.norm() / towards.norm())


def _heads_fed(module: AttentionLayer) -> int:
    """The largest number of heads whose queries depend on one input dimension."""
    x = normal(1, 1, 12, seed=5)

    def queries(t: Tensor) -> Tensor:
        return module.project(t, t)[0][0, :, 0]  # [h, d_k]

    slopes = torch.autograd.functional.jacobian(queries, x)[:, :, 0, 0]  # [h, d_k, d]
    return int((slopes != 0).any(1).sum(0).max())
