"""Attention and convolution."""

import torch
from torch import Tensor, nn

from headwise.base.run import seeded
from headwise.nn.convolution import from_conv1d
from headwise.reports.curves import Matrices, Matrix
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual


@exercise(
    "The weights `[n, n]` of a head that attends to the token `offset` places on (negative: back); rows whose target is outside are zero.",
    "只关注偏移 `offset` 处词元（负数表示之前的词元）的头的权重 `[n, n]`；目标越界的行为零。",
    lambda draw: (draw.size(1, 7), draw.size(0, 4) - 2),
)
def shift_head(n: int, offset: int) -> Tensor:
    """Our solution."""
    return _shifted(n, offset)


def _shifted(n: int, offset: int) -> Tensor:
    each = torch.arange(n)
    return (each[None] == each[:, None] + offset).float()


@exercise(
    "The matrix `[n, n]` of the convolution (as in deep learning, no flip) with `kernel` `[2r + 1]` and zero padding: y = C x is y_i = Σ_j kernel_j x_{i + j − r}, j from 0.",
    "卷积（深度学习的惯例，不翻转）的矩阵 `[n, n]`：核为 `kernel` `[2r + 1]`，补零；y = C x 即 y_i = Σ_j kernel_j x_{i + j − r}，j 从 0 数起。",
    lambda draw: (draw.normal(2 * draw.size(0, 2) + 1), draw.size(1, 7)),
)
def convolution_matrix(kernel: Tensor, n: int) -> Tensor:
    """Our solution."""
    r = len(kernel) // 2
    return sum((kernel[r + at] * _shifted(n, at) for at in range(-r, r + 1)), torch.zeros(n, n))


@exercise(
    "A convolution as a sum of heads: `x` `[n, c]` and `w` `[2r + 1, c, o]`; head Δ = 0 … 2r has the weights A_Δ of shift-head with the offset Δ − r and the value-output matrix w_Δ. Return Σ_Δ A_Δ x w_Δ `[n, o]`.",
    "把卷积写成各头之和：`x` `[n, c]`，`w` `[2r + 1, c, o]`；第 Δ = 0 … 2r 个头的权重 A_Δ 即 shift-head 在偏移 Δ − r 处的权重，值-输出矩阵为 w_Δ。返回 Σ_Δ A_Δ x w_Δ `[n, o]`。",
    lambda draw: (
        draw.normal(draw.size(), c := draw.size(1, 3)),
        draw.normal(2 * draw.size(0, 2) + 1, c, draw.size(1, 3)),
    ),
)
def convolve(x: Tensor, w: Tensor) -> Tensor:
    """Our solution."""
    r = len(w) // 2
    parts = [_shifted(len(x), at - r) @ x @ w[at] for at in range(len(w))]
    return torch.stack(parts).sum(0)


def picture() -> Matrices:
    """The heads of a convolution as attention, sharp and blunt."""
    with seeded(0), torch.no_grad():
        conv = nn.Conv1d(2, 2, 3, padding=1)
        x = torch.randn(1, 10, 2)
        maps = {}
        for sharpness in (16.0, 0.7):
            layer = from_conv1d(conv, sharpness=sharpness)
            maps[sharpness] = layer(x, return_map=True)[1].to_dense()[0]
    return Matrices(
        (
            *(Matrix(f"Δ = {i - 1}, α = 16", maps[16.0][i], top=1.0) for i in range(3)),
            Matrix("Δ = 0, α = 0.7", maps[0.7][1], top=1.0),
        ),
        columns=Bilingual("keys (padding at both ends); rows: queries", "键（两端为填充）；行：查询"),
    )


TOPIC = Topic(
    place=23,
    title=Bilingual("Attention and convolution", "与卷积的关系"),
    formula=r"\sum_{\Delta} A_{\Delta} X W_{\Delta} = \text{conv}(X), \qquad (A_{\Delta})_{ij} = [\,j = i + \Delta\,]",
    plain=Bilingual(
        "Σ_Δ A_Δ X W_Δ = conv(X),  A_Δ[i, j] = 1 if j = i + Δ", "Σ_Δ A_Δ X W_Δ = conv(X)，j = i + Δ 时 A_Δ[i, j] = 1"
    ),
    intro=Bilingual(
        """
        A convolution of width 3 adds three shifted copies of the input, each times a matrix. A head whose queries attend to
        one fixed offset is such a shift, and W_V W_O is its matrix. So three positional heads are a convolution; with scores
        −α (j − i − Δ)² the weights reach the shift as α grows. The reverse does not hold: a convolution has the same weights
        for every input.
        """,
        """
        宽度为 3 的卷积把输入平移出三份，各乘一个矩阵，再相加。一个头若每个查询都只关注某个固定偏移，就是这样的平移，W_V W_O
        就是它的矩阵。所以三个位置头就是一个卷积；分数取 −α (j − i − Δ)² 时，权重随 α 增大趋于平移。反之不成立：
        卷积的权重不随输入变化。
        """,
    ),
    code="""
import torch, headwise as hw
conv = torch.nn.Conv1d(3, 5, 3, padding=1)
x = torch.randn(1, 3, 8)
for alpha in (16.0, 4.0, 1.0):
    layer = hw.nn.from_conv1d(conv, sharpness=alpha)
    y, amap = layer(x.mT, return_map=True)
    error = (y.mT - conv(x)).abs().max() / conv(x).abs().max()
    print(f"sharpness {alpha:4}: {layer.num_heads} heads, largest weight of a row {amap[0, 0, 3].max().item():.4f}, relative error {error.item():.0e}")
""",
    reading=Bilingual(
        """
        With sharp heads the layer is the convolution up to rounding, borders included, because the padding is made of keys too.
        In trained models the heads that attend to the previous token or to the neighbourhood are of this kind; the others
        do what no convolution does: they choose by content.
        """,
        """
        头足够尖锐时，这一层在舍入误差内就是该卷积，边界也一样，因为填充同样是键。训练好的模型中，关注前一个词元或邻近区域的头
        就属于这一类；其他头做的是卷积做不到的事：按内容选择。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "The three heads of a convolution of width 3, and the middle one with a small sharpness.",
        "宽度为 3 的卷积的三个头，以及锐度较小时的中间那个头。",
    ),
    claims=("attention-is-convolution", "convolution-is-a-limit"),
    exercises=(shift_head, convolution_matrix, convolve),
)
