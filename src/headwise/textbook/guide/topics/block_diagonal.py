"""The block-diagonal view, which is another layer."""

import torch
from torch import Tensor

from headwise.base.run import seeded
from headwise.nn.registry import STANDARD, build
from headwise.reports.curves import Matrices, Matrix
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual


@exercise(
    "The block-diagonal matrix of `blocks` `[h, a, b]`: `[h·a, h·b]`, zero outside of the blocks.",
    "由 `blocks` `[h, a, b]` 构成分块对角矩阵 `[h·a, h·b]`，块外为零。",
    lambda draw: (draw.normal(draw.size(1, 4), draw.size(1, 4), draw.size(1, 4)),),
)
def block_diag(blocks: Tensor) -> Tensor:
    """Our solution."""
    return torch.block_diag(*blocks)


@exercise(
    "x @ BlockDiag(W_1 … W_h) without building the large matrix: `x` `[n, h·a]`, `blocks` `[h, a, b]`.",
    "不构造大矩阵，计算 x @ BlockDiag(W_1 … W_h)：`x` `[n, h·a]`，`blocks` `[h, a, b]`。",
    lambda draw: (
        draw.normal(draw.size(), (h := draw.size(1, 4)) * (a := draw.size(1, 4))), draw.normal(h, a, draw.size(1, 4)),
    ),
)  # fmt: skip
def grouped_linear(x: Tensor, blocks: Tensor) -> Tensor:
    """Our solution."""
    h, a, _ = blocks.shape
    return torch.einsum("nha,hab->nhb", x.unflatten(-1, (h, a)), blocks).flatten(1)


@exercise(
    "Which input channels does each head read? `w` `[d, h·d_k]`; return booleans `[h, d]`, true where any weight of the head is not zero.",
    "每个头读取哪些输入通道？给定 `w` `[d, h·d_k]`，返回布尔 `[h, d]`：该头有非零权重的通道为真。",
    lambda draw: (
        draw.normal(d := draw.size(), (h := draw.size(1, 4)) * (k := draw.size(1, 3))) * draw.booleans(d, h * k) * draw.booleans(d, h * k), h,
    ),
)  # fmt: skip
def channels_read(w: Tensor, num_heads: int) -> Tensor:
    """Our solution."""
    return (w != 0).unflatten(-1, (num_heads, -1)).any(-1).T


def picture() -> Matrices:
    """The query matrices of both layers."""
    with seeded(0):
        dense = build(STANDARD, 12, 3, {}).per_head_weights()["q"]  # type: ignore[operator]
        blocks = torch.randn(3, 4, 4) * dense.std()
    return Matrices(
        (
            Matrix(Bilingual("multi-head: [W₁ | W₂ | W₃]", "多头：[W₁ | W₂ | W₃]"), torch.cat(list(dense.detach()), 1)),
            Matrix(Bilingual("block-diagonal", "分块对角"), torch.block_diag(*blocks)),
        ),
        rows=Bilingual("channels of x", "x 的通道"),
        columns=Bilingual("channels of Q, head by head", "Q 的通道，逐头排列"),
    )


TOPIC = Topic(
    place=16,
    title=Bilingual("The block-diagonal view", "分块对角视角"),
    formula=r"Q^{\text{all}} = X\,[W_1^Q \,|\, \dots \,|\, W_h^Q] \;\neq\; X \cdot \text{BlockDiag}(W_1^Q, \dots, W_h^Q)",
    plain="Q_all = X [W_1 | … | W_h]  ≠  X · BlockDiag(W_1 … W_h)",
    intro=Bilingual(
        """
        Equation (5.3.10) describes the projection of all heads as a block-diagonal matrix, so that each input channel belongs
        to one head. This is not multi-head attention: each W_i has d_model rows and reads every channel. What is divided
        into heads are the *outputs* of the projection. The block-diagonal layer exists too; it is cheaper and weaker.
        """,
        """
        公式 (5.3.10) 把所有头的投影写成分块对角矩阵，于是每个输入通道只属于一个头。这不是多头注意力：每个 W_i 有 d_model 行，
        读取所有通道；被划分给各头的，是投影的输出。分块对角的层也确实存在，它更便宜，也更弱。
        """,
    ),
    code="""
import torch, headwise as hw
for name in ("multi_head", "block_diagonal"):
    layer = hw.nn.DESIGNS[name].build(12, 3)
    x = torch.randn(1, 5, 12, requires_grad=True)
    reads = []
    for head in range(3):
        q = layer.project(x, x)[0][:, head]                       # queries of one head, [1, 5, 4]
        grad = torch.autograd.grad(q.square().sum(), x)[0]
        reads.append(int((grad.abs().amax((0, 1)) > 0).sum()))
    print(f"{name:15} parameters {sum(p.numel() for p in layer.parameters()):4}  channels that each head reads: {reads}")
""",
    reading=Bilingual(
        """
        Each head of a multi-head layer reads all 12 channels; of a block-diagonal one, its own 4. The projections of the
        latter have d²/h parameters each instead of d². For (5.3.10) to be right, X would have to be h copies of the input
        side by side.
        """,
        """
        多头层的每个头读取全部 12 个通道；分块对角层的每个头只读自己的 4 个，其每个投影有 d²/h 个参数而不是 d²。
        要使 (5.3.10) 成立，X 必须是并排放置的 h 份输入。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "The query matrix of a multi-head layer is dense; the block-diagonal one has h blocks (absolute values).",
        "多头层的查询矩阵是稠密的；分块对角矩阵只有 h 个块（绝对值）。",
    ),
    claims=("block-diagonal",),
    exercises=(block_diag, grouped_linear, channels_read),
)
