"""Masks: which keys a query may attend to."""

import torch
from torch import Tensor

from headwise.attention import attend
from headwise.masks import Causal, Lengths, Mask, Sinks, Window
from headwise.reports.curves import Matrices, Matrix
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual


@exercise(
    "The causal mask `[n, m]` of booleans (true = may attend) for n queries that are the last of m keys, n ≤ m.",
    "因果掩码 `[n, m]`（布尔，真 = 可以关注）：n 个查询对应 m 个键中的最后 n 个，n ≤ m。",
    lambda draw: (n := draw.size(), n + draw.size(0, 4)),
)
def causal_mask(n: int, m: int) -> Tensor:
    """Our solution."""
    return torch.ones(n, m, dtype=torch.bool).tril(m - n)


@exercise(
    "The softmax of `scores` `[n, m]` over the keys that `mask` allows; a query that may attend to nothing gets zeros, not NaN.",
    "只在 `mask` 允许的键上对 `scores` `[n, m]` 做 softmax；什么都不能关注的查询得到全零，而不是 NaN。",
    lambda draw: (draw.normal(n := draw.size(), m := draw.size()), draw.booleans(n, m)),
)
def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Our solution."""
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.where(mask.any(-1, keepdim=True), weights, 0.0)


@exercise(
    "Sequences of different `lengths` `[b]` are padded to `m` tokens. Return the mask `[b, 1, 1, m]` of the real tokens.",
    "长度为 `lengths` `[b]` 的序列都填充到 `m` 个词元。返回真实词元的掩码 `[b, 1, 1, m]`。",
    lambda draw: (1 + draw.whole(m := draw.size(1, 7), draw.size()), m),
)
def padding_mask(lengths: Tensor, m: int) -> Tensor:
    """Our solution."""
    return (torch.arange(m) < lengths[:, None])[:, None, None]


def picture() -> Matrices:
    """Weights of the same queries and keys under four masks."""
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 1, 1, 9, 8, generator=generator)
    masks: dict[str, Mask] = {
        "Causal()": Causal(), "Causal() & Window(3, 0)": Causal() & Window(3, 0),
        "… & (Window(3, 0) | Sinks(1))": Causal() & (Window(3, 0) | Sinks(1)), "Lengths([6])": Lengths(torch.tensor([6])),
    }  # fmt: skip
    maps = [attend(q, k, k, mask=mask, return_map=True)[1].to_dense()[0, 0] for mask in masks.values()]
    return Matrices(
        tuple(Matrix(title, one, top=1.0) for title, one in zip(masks, maps, strict=True)),
        rows=Bilingual("queries", "查询"),
        columns=Bilingual("keys", "键"),
    )


TOPIC = Topic(
    place=5,
    title=Bilingual("Masks", "掩码"),
    formula=r"A_{ij} = \frac{M_{ij}\, e^{S_{ij}}}{\sum_{j'} M_{ij'}\, e^{S_{ij'}}}, \qquad M_{ij} \in \{0, 1\}",
    plain="A_ij = M_ij exp(S_ij) / Σ_j' M_ij' exp(S_ij')",
    intro=Bilingual(
        """
        A mask removes keys before the softmax, so that the remaining weights still sum to 1. Three masks are the
        most common: causal (no token reads a later one), padding (no token reads the filling of short sequences),
        and a window (a token reads its neighbours only). Textbook code writes `scores.masked_fill(mask == 0, -inf)`, which
        needs an n × n tensor and gives NaN where a query may attend to nothing. Here a mask is a rule; it composes with `&`
        and `|`, and is never stored as a matrix.
        """,
        """
        掩码在 softmax 之前去掉一些键，剩下的权重之和仍为 1。最常用的有三种：因果掩码（不读后面的词元）、填充掩码
        （不读短序列的填充部分）、窗口掩码（只读邻近的词元）。教材代码通常写成 `scores.masked_fill(mask == 0, -inf)`，
        需要一个 n × n 的张量，而且当某个查询什么都不能关注时会得到 NaN。在 headwise 中，掩码是一条规则，可以用 `&` 与 `|`
        组合，从不存成矩阵。
        """,
    ),
    code="""
import torch, headwise as hw
q, k, v = torch.randn(3, 1, 1, 6, 8)
for mask in (hw.Causal(), hw.Causal() & (hw.Window(2, 0) | hw.Sinks(1)), hw.Lengths(torch.tensor([4]))):
    out, amap = hw.attend(q, k, v, mask=mask, return_map=True)
    print(mask)
    for row in amap[0, 0]:
        print("   ", "".join("#" if weight > 0 else "." for weight in row))
last = hw.attend(q[:, :, -1:], k, v, mask=hw.Causal())
print("one query is the last of six:", torch.allclose(last, hw.attend(q, k, v, mask=hw.Causal())[:, :, -1:]))
nothing = hw.attend(q, k, v, mask=torch.zeros(6, 6, dtype=torch.bool))
print("largest output without any key:", nothing.abs().max().item())
""",
    reading=Bilingual(
        """
        The second mask is the one of StreamingLLM: two recent keys and the first one, which many heads use as a sink.
        Queries are aligned to the end of the keys, so the same `Causal()` is right for a whole text and for a decoding
        step with one query. A fully masked query returns zeros. Mind the polarity: here and in PyTorch's
        `scaled_dot_product_attention` true means "may attend"; in `nn.MultiheadAttention` true means "ignore".
        """,
        """
        第二个掩码就是 StreamingLLM 的做法：最近的两个键，加上许多头用作“注意力汇聚”（sink）的第一个键。查询与键的末尾对齐，所以同一个
        `Causal()` 既适用于整段文本，也适用于只有一个查询的解码步。完全被屏蔽的查询返回零。注意真值的含义：这里与 PyTorch 的
        `scaled_dot_product_attention` 一样，真表示“可以关注”；而在 `nn.MultiheadAttention` 中，真表示“忽略”。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "The same nine queries and keys under four masks: every row sums to 1.",
        "同样的九个查询与键在四种掩码下的权重：每一行之和都是 1。",
    ),
    claims=("one-step-path",),
    exercises=(causal_mask, masked_softmax, padding_mask),
)
