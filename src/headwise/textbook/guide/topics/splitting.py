"""Splitting the width of the model into slices, one for each head."""

import torch
from torch import Tensor

from headwise.reports.curves import Matrices, Matrix
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual


@exercise(
    "Split `x` `[b, n, d]` into heads: `[b, h, n, d/h]`; head i has the channels i·d/h … (i+1)·d/h − 1.",
    "把 `x` `[b, n, d]` 切分成头：`[b, h, n, d/h]`；第 i 个头得到通道 i·d/h … (i+1)·d/h − 1。",
    lambda draw: (draw.normal(draw.size(), draw.size(), (h := draw.size(1, 4)) * draw.size(1, 4)), h),
)
def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Our solution."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


@exercise(
    "To which head does `channel` belong (both counted from 0), if `d_model` channels are split into `num_heads` heads?",
    "把 `d_model` 个通道切分成 `num_heads` 个头时，第 `channel` 个通道属于第几个头（都从 0 数起）？",
    lambda draw: ((c := draw.size(1, 8) * (h := draw.size(1, 8))) and draw.size(0, c - 1), c, h),
)
def head_of_channel(channel: int, d_model: int, num_heads: int) -> int:
    """Our solution."""
    return channel // (d_model // num_heads)


@exercise(
    "Return `x` `[b, n, d]` with the channels of head `a` and head `b` exchanged (a and b may be equal).",
    "返回交换了第 `a` 个头与第 `b` 个头的通道之后的 `x` `[b, n, d]`（a 与 b 可能相等）。",
    lambda draw: (
        draw.normal(draw.size(), draw.size(), (h := draw.size(2, 4)) * draw.size(1, 3)), h, draw.size(0, h - 1),
        draw.size(0, h - 1),
    ),
)  # fmt: skip
def swap_two_heads(x: Tensor, num_heads: int, a: int, b: int) -> Tensor:
    """Our solution."""
    order = list(range(num_heads))
    order[a], order[b] = order[b], order[a]
    return x.unflatten(-1, (num_heads, -1))[..., order, :].flatten(-2)


def picture() -> Matrices:
    """Two tokens whose channels carry the number of their head, before and after the split."""
    x = (torch.arange(8) // 2 + 1).expand(3, 8)
    whole = Matrix("X [3, 8]", x, rows=("x₀", "x₁", "x₂"), columns="01234567", top=5)
    heads = [
        Matrix(
            Bilingual(f"head {i} [3, 2]", f"头 {i} [3, 2]"),
            x[:, 2 * i : 2 * i + 2],
            columns=(str(2 * i), str(2 * i + 1)),
            top=5,
        )
        for i in range(4)
    ]
    return Matrices((whole, *heads))


TOPIC = Topic(
    place=2,
    title=Bilingual("Splitting into heads", "切分成头"),
    formula=r"[b, n, d_{\text{model}}] \;\to\; [b, n, h, d_k] \;\to\; [b, h, n, d_k], \qquad d_k = d_{\text{model}} / h",
    plain="[b, n, d] → [b, n, h, d_k] → [b, h, n, d_k],  d_k = d / h",
    intro=Bilingual(
        """
        A layer with h heads does not copy its input h times. It divides the d_model channels of every token into h
        slices of d_k = d_model / h channels, one slice for each head. In memory nothing moves: the last axis gets a
        second index, and the transpose only changes the order in which the axes are read, so that the batch and the
        head come first and `@` multiplies the matrices of all heads at once.
        """,
        """
        有 h 个头的层并不会把输入复制 h 份。它把每个词元的 d_model 个通道分成 h 段，每段 d_k = d_model / h
        个通道，一个头一段。内存中的数据没有移动：最后一个轴拆成两个下标，转置只改变读取轴的顺序，使批次和头排在
        最前，这样一个 `@` 就能同时计算所有头的矩阵乘法。
        """,
    ),
    code="""
import torch
k = torch.randn(4, 16, 512)                       # [batch, seq, d_model]
parts = k.view(4, 16, 4, 128)                     # [batch, seq, heads, d_k]
heads = parts.transpose(1, 2)                     # [batch, heads, seq, d_k]
for x in (k, parts, heads):
    print(list(x.shape), "same memory:", x.data_ptr() == k.data_ptr(), "contiguous:", x.is_contiguous())
print("head 2 is columns 256 … 383:", torch.equal(heads[:, 2], k[..., 256:384]))
print("merged again:", torch.equal(heads.transpose(1, 2).reshape(4, 16, 512), k))
""",
    reading=Bilingual(
        """
        All three tensors share one block of memory; only their strides differ. After the transpose the tensor is no
        longer contiguous, which is why `view` cannot merge the heads again and code writes `.contiguous().view(…)` or
        `.reshape(…)`: that copy is the only one of the whole layer. The reverse order, `view(b, h, n, d_k)` without a
        transpose, has the right shape and wrong contents: its "heads" are slices of the sequence.
        """,
        """
        三个张量共用同一块内存，只是步长不同。转置之后张量不再连续，所以不能直接用 `view` 合并，代码里要写
        `.contiguous().view(…)` 或 `.reshape(…)`：整个层只在这里复制一次。如果省去转置，直接写 `view(b, h, n, d_k)`，
        形状虽然对，内容却是错的：那样得到的“头”是序列的片段。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "Eight channels of three tokens, coloured by the head that gets them, and the four heads.",
        "三个词元的八个通道，颜色表示所属的头；右边是切分得到的四个头。",
    ),
    claims=("splitting", "per-head-projection"),
    exercises=(split_heads, head_of_channel, swap_two_heads),
)
