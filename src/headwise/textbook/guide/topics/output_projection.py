"""The output projection: what each head adds to the output."""

import torch
from torch import Tensor

from headwise.base.run import seeded
from headwise.nn.registry import STANDARD, build
from headwise.reports.curves import Matrices, Matrix
from headwise.textbook.guide.grading.draw import Draw
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual


def _heads(draw: Draw) -> tuple[Tensor, Tensor]:
    h, n, d_k, d = draw.size(1, 4), draw.size(), draw.size(1, 4), draw.size()
    return draw.normal(h, n, d_k), draw.normal(h * d_k, d)


@exercise(
    "What each head adds to the output: `heads` `[h, n, d_k]` and `wo` `[h·d_k, d]` give `[h, n, d]`, whose sum over the heads is Concat(heads) W_O.",
    "每个头对输出的贡献：由 `heads` `[h, n, d_k]` 与 `wo` `[h·d_k, d]` 得到 `[h, n, d]`，对头求和等于 Concat(heads) W_O。",
    _heads,
)
def contributions(heads: Tensor, wo: Tensor) -> Tensor:
    """Our solution."""
    return heads @ wo.unflatten(0, (heads.shape[0], -1))


@exercise(
    "The output Concat(heads) W_O `[n, d]` without head `i`: `heads` `[h, n, d_k]`, `wo` `[h·d_k, d]`; take its rows of `wo` out instead of setting anything to zero.",
    "去掉第 `i` 个头后的输出 Concat(heads) W_O `[n, d]`：`heads` `[h, n, d_k]`，`wo` `[h·d_k, d]`；从 `wo` 中取走它的那些行，而不是置零。",
    lambda draw: (
        draw.normal(h := draw.size(2, 4), draw.size(), d_k := draw.size(1, 4)),
        draw.normal(h * d_k, draw.size()),
        draw.size(0, h - 1),
    ),
)
def without_head(heads: Tensor, wo: Tensor, i: int) -> Tensor:
    """Our solution."""
    h, _, d_k = heads.shape
    rows = [row for head in range(h) if head != i for row in range(head * d_k, (head + 1) * d_k)]
    return torch.cat([heads[j] for j in range(h) if j != i], -1) @ wo[rows]


@exercise(
    "Fold W_O into the values: the matrix `wv` `[d, d_k]` of one head and its rows `wo` `[d_k, d]` of the output matrix. Return the single matrix [d, d] that the head applies to the tokens it attends to.",
    "把 W_O 并入值矩阵：给定一个头的 `wv` `[d, d_k]` 与输出矩阵中属于它的行 `wo` `[d_k, d]`，返回这个头作用在被关注词元上的单个矩阵 [d, d]。",
    lambda draw: (draw.normal(d := draw.size(1, 6), k := draw.size(1, 4)), draw.normal(k, d)),
)
def value_output(wv: Tensor, wo: Tensor) -> Tensor:
    """Our solution."""
    return wv @ wo


def picture() -> Matrices:
    """The concatenation, the output matrix, and what is written, of a small layer."""
    with seeded(3), torch.no_grad():
        layer = build(STANDARD, 12, 3, {})
        x = torch.randn(1, 6, 12)
        w: dict[str, Tensor] = layer.per_head_weights()  # type: ignore[operator]
        q, k, v = (torch.einsum("bnd,hdk->bhnk", x, w[side]) for side in "qkv")
        heads = (q @ k.mT / 2).softmax(-1) @ v
        parts = (heads @ w["o"])[0]
        y = layer(x)[0]
    named = [(f"head_{i} W_{i}", parts[i]) for i in range(3)]
    top = float(max(part.abs().max() for part in (*parts, y)))
    return Matrices(
        tuple(Matrix(title, one, top=top) for title, one in [*named, ("Σ = A W_O", y)]),
        rows=Bilingual("tokens", "词元"),
        columns=Bilingual("channels of the output", "输出的通道"),
    )


TOPIC = Topic(
    place=7,
    title=Bilingual("The output projection W_O", "输出投影 W_O"),
    formula=r"Y = \text{Concat}(\text{head}_1, \dots, \text{head}_h)\, W_O = \sum_{i=1}^{h} \text{head}_i\, W_i^{O}",
    plain="Y = Concat(head_1 … head_h) W_O = Σ_i head_i W_i^O",
    intro=Bilingual(
        """
        The concatenation A only puts the heads side by side: each channel comes from one head. W_O mixes them. Cut W_O into
        h blocks of d_k rows, and the product becomes a sum: every head writes a vector of full width into the output, and
        these are added. This sum is why heads can be studied, weighted and removed one at a time.
        """,
        """
        拼接得到的 A 只是把各头并排放在一起，每个通道只来自一个头。W_O 把它们混合起来。把 W_O 按行切成 h 块、每块 d_k 行，
        矩阵乘积就成了求和：每个头都向输出写入一个 d_model 维的向量，再加在一起。正因为是求和，才能逐个研究、加权或去掉头。
        """,
    ),
    code="""
import torch, headwise as hw
mha, x = hw.MultiHeadAttention(512, 4), torch.randn(4, 16, 512)
with torch.no_grad():
    w = mha.per_head_weights()                            # q, k, v: [h, d_model, d_k]; o: [h, d_k, d_model]
    q, k, v = (torch.einsum("bnd,hdk->bhnk", x, w[side]) for side in "qkv")
    a, y = hw.attend(q, k, v), mha(x)                     # heads before W_O, and the layer's output
    parts = a @ w["o"]                                    # what each head adds to the output
print("A      ", list(a.transpose(1, 2).flatten(2).shape), f"std {a.std().item():.3f}")
print("A @ W_O", list(y.shape), f"std {y.std().item():.3f}")
print("sum of the parts is the output:", torch.allclose(parts.sum(1), y, atol=1e-5))
print("norm of the output:", round(y.norm().item(), 1), " of each part:", [round(p.norm().item(), 1) for p in parts.transpose(0, 1)])
""",
    reading=Bilingual(
        """
        A and A W_O have the same shape and different numbers, as the chapter shows. The layer's output does not replace the
        token's vector, though: in every Transformer it is added to it (the residual connection), before or after a
        normalisation. The parts of the heads are nearly orthogonal at random initialisation, so that the square of the
        output's norm is about the sum of their squares.
        """,
        """
        A 与 A W_O 形状相同、数值不同，与书中所说一致。不过层的输出并不“替代”词元的向量：在每个 Transformer 中它都是加到词元的向量
        上去的（残差连接），归一化在前或在后。随机初始化时，各头写入的部分几乎正交，所以输出范数的平方约等于各部分范数平方之和。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "What three heads of a small layer write for six tokens, and their sum, which is the output (absolute values).",
        "一个小层的三个头为六个词元写入的内容，以及它们的和，即输出（绝对值）。",
    ),
    claims=("output-sums-heads", "output-mixes-heads"),
    exercises=(contributions, without_head, value_output),
)
