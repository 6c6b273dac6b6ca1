"""The block around the heads: residual connection, norm, and the projections in front."""

from typing import Any

import torch
from torch import Tensor, nn

from headwise.masks import Causal
from headwise.nn import AttentionLayer
from headwise.wording import Bilingual
from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.evidence import Check, at_least, at_most, difference, equal, same
from headwise_textbook.claims.model import trained
from headwise_textbook.claims.samples import layer, multi_head, normal, standard
from headwise_textbook.curves import Curve
from headwise_textbook.seeds import seeded


@claim
def residual_norm() -> list[Check | Curve]:
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


@claim
def normalised_tokens() -> list[Check]:
    module, x, norm = multi_head(), 50.0 * normal(2, 7, 12, seed=5), nn.LayerNorm(12, eps=0.0).double()
    y, before = norm(x + module(x)).detach(), (x + module(norm(x))).detach()
    deviation = float((y.var(-1, unbiased=False) - 1).abs().max())
    return [
        at_most(("largest |mean| of a token", "词元均值的最大绝对值"), float(y.mean(-1).abs().max()), 1e-12),
        at_most(("largest |variance − 1|", "|方差 − 1| 的最大值"), deviation, 1e-12),
        at_least(("pre-norm: largest |variance − 1|", "前置归一化：|方差 − 1| 的最大值"),
                 float((before.var(-1) - 1).abs().max()), 10.0).control(deviation),
    ]  # fmt: skip


@claim
def block_diagonal() -> list[Check]:
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


@claim
def output_replaces() -> list[Check]:
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
