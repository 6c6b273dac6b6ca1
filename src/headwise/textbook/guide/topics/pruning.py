"""Which heads matter, and removing those that do not."""

import torch
from torch import Tensor

from headwise.analysis import ablation_importance, gradient_importance
from headwise.lm.loading import load_model
from headwise.reports.curves import Matrices, Matrix
from headwise.textbook.claims.model import PASSAGE
from headwise.textbook.guide.grading.draw import Draw
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual


def _projections(draw: Draw) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    h, d_k, d = draw.size(2, 4), draw.size(1, 3), draw.size(1, 6)
    return *(draw.normal(d, h * d_k) for _ in range(3)), draw.normal(h * d_k, d), h, draw.size(0, h - 1)  # type: ignore[return-value]


@exercise(
    "Remove head `i` from a layer: `wq`, `wk`, `wv` `[d, h·d_k]` lose its columns, `wo` `[h·d_k, d]` its rows. Return the four smaller matrices.",
    "从一层中剪掉第 `i` 个头：`wq`、`wk`、`wv` `[d, h·d_k]` 去掉它的列，`wo` `[h·d_k, d]` 去掉它的行。返回四个变小的矩阵。",
    _projections,
)
def prune_head(
    wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, num_heads: int, i: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Our solution."""
    d_k = wo.shape[0] // num_heads
    kept = [row for row in range(wo.shape[0]) if row // d_k != i]
    return wq[:, kept], wk[:, kept], wv[:, kept], wo[kept]


@exercise(
    "The importance of each head by its gate: heads `[h, n, d]` are multiplied by gates ξ = 1 and summed to the output, and `grad` `[n, d]` is the loss's gradient at the output. Return |∂loss/∂ξ| `[h]`.",
    "用门控求每个头的重要性：各头 `[h, n, d]` 乘以门 ξ = 1 后相加得到输出，`grad` `[n, d]` 是损失对输出的梯度。返回 |∂loss/∂ξ| `[h]`。",
    lambda draw: (draw.normal(draw.size(1, 4), n := draw.size(), d := draw.size()), draw.normal(n, d)),
    tolerance=1e-3,
)
def gate_importance(heads: Tensor, grad: Tensor) -> Tensor:
    """Our solution."""
    return (heads * grad).sum((-2, -1)).abs()


@exercise(
    "The heads to remove: the `count` least important of `importance` `[layers, h]`, as (layer, head) pairs, least important first; a head is skipped if it is the only one left in its layer.",
    "选出要剪掉的头：`importance` `[layers, h]` 中最不重要的 `count` 个，按重要性从低到高以元组（层，头）返回；若某层只剩这一个头，则跳过它。",
    lambda draw: (
        draw.normal(layers := draw.size(1, 4), h := draw.size(1, 4)).abs()
        + torch.arange(layers * h).view(layers, h) * 1e-3,
        draw.size(0, layers * (h - 1)),
    ),
)
def heads_to_remove(importance: Tensor, count: int) -> list[tuple[int, int]]:
    """Our solution."""
    layers, h = importance.shape
    left = [h] * layers
    chosen: list[tuple[int, int]] = []
    for at in importance.flatten().argsort().tolist():
        layer, head = divmod(at, h)
        if len(chosen) < count and left[layer] > 1:
            chosen.append((layer, head))
            left[layer] -= 1
    return chosen


def picture() -> Matrices:
    """The importance of all heads by two methods."""
    subject = load_model()
    batches = [subject.read(PASSAGE).ids[None]]
    loss_fn = subject.loss_fn
    assert loss_fn is not None  # the embedded model has one
    found = [method(subject.model, batches, loss_fn) for method in (gradient_importance, ablation_importance)]
    arrays = [torch.stack([torch.as_tensor(one.column[i]) for i in range(4)]).clamp(min=0) for one in found]
    names = [f"H{j}" for j in range(8)]
    titles = (
        Bilingual("by gradient, |∂L/∂ξ|", "梯度法 |∂L/∂ξ|"),
        Bilingual("by removal, rise of the loss", "消融法：损失的上升"),
    )
    return Matrices(
        tuple(
            Matrix(title, one, rows=[f"L{i}" for i in range(4)], columns=names, numbers=True)
            for title, one in zip(titles, arrays, strict=True)
        )
    )


TOPIC = Topic(
    place=13,
    title=Bilingual("Redundant heads and pruning", "头的冗余与剪枝"),
    formula=r"Y = \sum_i \xi_i\, \text{head}_i W_i^{O}, \qquad I_i = \left|\frac{\partial \mathcal{L}}{\partial \xi_i}\right|_{\xi = 1}",
    plain=Bilingual(
        "Y = Σ_i ξ_i head_i W_i^O,  importance_i = |∂L/∂ξ_i| at ξ = 1",
        "Y = Σ_i ξ_i head_i W_i^O，ξ = 1 处的重要性_i = |∂L/∂ξ_i|",
    ),
    intro=Bilingual(
        """
        Because the output is a sum over heads, a head is removed by leaving its term out, and its importance is how much
        worse the loss gets. Removing every head in turn takes a pass for each; the derivative with respect to a gate ξ_i
        gives an estimate of all of them in one backward pass. `hw.edit.prune` then takes rows and columns out of the
        matrices: the model becomes smaller, not masked.
        """,
        """
        输出是各头之和，去掉一个头就是去掉一项，它的重要性就是损失因此变差多少。逐个去掉要为每个头算一遍；对门控 ξ_i 求导，
        则一次反向传播就能估计所有头。之后 `hw.edit.prune` 从矩阵中取走相应的行和列：模型是真的变小，而不是加掩码。
        """,
    ),
    code="""
import headwise as hw
from headwise.textbook.claims.model import PASSAGE     # of a chapter that the model was not trained on
subject = hw.load_model()
batches = [subject.read(PASSAGE).ids[None]]
importance = hw.analysis.ablation_importance(subject.model, batches, subject.loss_fn)
order = sorted(((importance.column[i][j], i, j) for i in range(4) for j in range(8)))
loss = lambda heads: float(hw.analysis.losses_without(subject.model, batches, subject.loss_fn, heads).mean())
print(f"all 32 heads: {loss([]):.2f} nats per character")
for name, some in (("least important", order[:4]), ("most important", order[-4:])):
    print(f"without the 4 {name}: {loss([(i, j) for _, i, j in some]):.2f}", [f"L{i}H{j}" for _, i, j in some])
small = hw.edit.prune(subject.model, {"blocks.0.attention": [6]}, copy=True)
print(str(small).splitlines()[0])
""",
    reading=Bilingual(
        """
        Four of 32 heads can go for nothing, four others are what the model depends on: L1H1, which attends to the previous
        character, is the most important one. The gradient is cheaper and only an estimate: it misses L0H3, which the
        picture shows. And redundancy is a fact about groups: heads that are unimportant one by one may matter together,
        because each can replace the other. `headwise prune --file TEXT --out DIR` plans with the loss curve, asks for
        confirmation, and measures afterwards.
        """,
        """
        32 个头中有四个可以白白去掉，另外四个则是模型的支柱：关注前一个字符的 L1H1 最为重要。梯度法更省，但只是估计：
        从图中可以看到它漏掉了 L0H3。冗余又是对一组头而言的：逐个看并不重要的头，合在一起可能很重要，因为它们可以互相替代。`headwise prune --file 文本 --out 文件夹`
        会给出带损失曲线的计划，经你确认后执行，并在剪枝后重新测量。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "The importance of the 32 heads of the model by two methods. They agree on L1H1, not on L0H3.",
        "模型 32 个头的重要性，两种方法。对 L1H1 一致，对 L0H3 不一致。",
    ),
    claims=("heads-can-be-pruned", "importance-from-gradient", "heads-as-ensemble", "more-heads-more-robust"),
    exercises=(prune_head, gate_importance, heads_to_remove),
    slow=True,
)
