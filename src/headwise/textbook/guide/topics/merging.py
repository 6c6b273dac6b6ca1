"""Merging the heads: the way back from [b, h, n, d_k] to [b, n, d_model]."""

import torch
from torch import Tensor

from headwise.reports.curves import Matrices, Matrix
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual


@exercise(
    "Merge `heads` `[b, h, n, d_k]` into `[b, n, h·d_k]`, head 0 first.",
    "把 `heads` `[b, h, n, d_k]` 合并成 `[b, n, h·d_k]`，第 0 个头在最前。",
    lambda draw: (draw.normal(draw.size(1, 3), draw.size(1, 4), draw.size(), draw.size(1, 4)),),
)
def merge_heads(heads: Tensor) -> Tensor:
    """Our solution."""
    return heads.transpose(1, 2).flatten(2)


@exercise(
    "Heads of different sizes: a list of tensors `[n, d_i]`. Return the merged `[n, Σ d_i]` and the column at which each head begins.",
    "各个头的维度不同：给定张量列表 `[n, d_i]`。返回合并后的 `[n, Σ d_i]`，以及每个头开始的列号。",
    lambda draw: ([draw.normal(n, draw.size(1, 4)) for n in [draw.size()] for _ in range(draw.size(1, 4))],),
)
def merge_ragged(heads: list[Tensor]) -> tuple[Tensor, list[int]]:
    """Our solution."""
    starts = [sum(head.shape[1] for head in heads[:i]) for i in range(len(heads))]
    return torch.cat(heads, 1), starts


@exercise(
    "Someone merged `[b, h, n, d_k]` by `reshape(b, n, h·d_k)` without the transpose. Given that wrong result and `num_heads`, return the right one.",
    "有人忘了转置，直接用 `reshape(b, n, h·d_k)` 合并了 `[b, h, n, d_k]`。给定这个错误结果与 `num_heads`，返回正确的结果。",
    lambda draw: (draw.normal(draw.size(1, 3), draw.size(), (h := draw.size(1, 4)) * draw.size(1, 4)), h),
)
def repair_merge(wrong: Tensor, num_heads: int) -> Tensor:
    """Our solution."""
    b, n, d = wrong.shape
    return wrong.reshape(b, num_heads, n, d // num_heads).transpose(1, 2).flatten(2)


def picture() -> Matrices:
    """Four tokens and two heads: which head and token each merged number is from."""
    heads = torch.tensor([1.0, 3.0])[:, None, None] + torch.arange(4)[:, None] / 4 + torch.zeros(2, 4, 2)
    right, wrong = heads.transpose(0, 1).flatten(1), heads.reshape(4, 4)
    rows = ("x₀", "x₁", "x₂", "x₃")
    titles = (
        Bilingual("head 0 [4, 2]", "头 0 [4, 2]"), Bilingual("head 1 [4, 2]", "头 1 [4, 2]"),
        Bilingual("transposed, merged [4, 4]", "转置后合并 [4, 4]"), Bilingual("without the transpose [4, 4]", "未转置 [4, 4]"),
    )  # fmt: skip
    matrices = (heads[0], heads[1], right, wrong)
    return Matrices(tuple(Matrix(title, one, rows=rows, top=4.5) for title, one in zip(titles, matrices, strict=True)))


TOPIC = Topic(
    place=6,
    title=Bilingual("Merging the heads", "合并各头输出"),
    formula=r"A = \text{Concat}(\text{head}_1, \dots, \text{head}_h) \in \mathbb{R}^{n \times h d_v}",
    plain="A = Concat(head_1 … head_h) ∈ [n, h·d_v]",
    intro=Bilingual(
        """
        Every head has its output [n, d_k]. Side by side, token by token, they form a matrix [n, d_model] again. The token
        axis must be in front of the head axis before the last two axes become one; so the transpose comes first, and this
        time the numbers are copied, because a transposed tensor cannot be flattened in place.
        """,
        """
        每个头的输出是 [n, d_k]。按词元把它们并排放好，就又得到 [n, d_model] 的矩阵。把最后两个轴并成一个之前，词元轴必须排在
        头轴前面，所以要先转置；这一次数据必须复制，因为转置后的张量无法原地展平。
        """,
    ),
    code="""
import torch
heads = torch.randn(4, 4, 16, 128)                # [batch, heads, seq, d_k]
turned = heads.transpose(1, 2)                    # [batch, seq, heads, d_k]
merged = turned.reshape(4, 16, 512)               # [batch, seq, d_model]
print(list(heads.shape), "→", list(turned.shape), "→", list(merged.shape))
try:
    turned.view(4, 16, 512)
except RuntimeError as error:
    print("view:", str(error).split("(")[0])
wrong = heads.reshape(4, 16, 512)                 # without the transpose
print("right: token 0 = token 0 of heads 0 … 3:", torch.equal(merged[:, 0], heads[:, :, 0].flatten(1)))
print("wrong: token 0 = tokens 0 … 3 of head 0:", torch.equal(wrong[:, 0], heads[:, 0, :4].flatten(1)))
""",
    reading=Bilingual(
        """
        Both results have the shape [4, 16, 512]; no error says that one of them mixes tokens. This is why a layer is
        compared with a reference and not with a shape. The first tutorial's step 3, `reshape(output, [batch, seq, h·d_k])`
        on a [batch, h, seq, d_k] tensor, is the wrong one; its complete listing further down has the transpose.
        """,
        """
        两个结果的形状都是 [4, 16, 512]，没有任何报错说明其中一个把不同词元混在了一起。所以检验一个层要对照参考实现，不能只看形状。
        第一篇教程的步骤 3 对 [batch, h, seq, d_k] 直接 `reshape(output, [batch, seq, h·d_k])`，就是错误的那一种；
        它后面的完整代码则有转置。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "Two heads of four tokens. Merged after the transpose, each row is one token; without it, rows mix tokens.",
        "两个头、四个词元。先转置再合并，每一行是一个词元；不转置，一行里混入了多个词元。",
    ),
    claims=("splitting", "heads-have-no-order"),
    exercises=(merge_heads, merge_ragged, repair_merge),
)
