"""All heads at once as contractions of tensors."""

import torch
from torch import Tensor

from headwise.reports.curves import Matrices, Matrix
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual


@exercise(
    "(5.3.5) with `torch.einsum`: `x` `[b, n, d]` and `w` `[h, k, d]` give the queries of all heads, `[b, h, n, k]`.",
    "用 `torch.einsum` 写出 (5.3.5)：由 `x` `[b, n, d]` 与 `w` `[h, k, d]` 得到所有头的查询 `[b, h, n, k]`。",
    lambda draw: (
        draw.normal(draw.size(1, 3), draw.size(), d := draw.size()),
        draw.normal(draw.size(1, 4), draw.size(1, 4), d),
    ),
)
def queries(x: Tensor, w: Tensor) -> Tensor:
    """Our solution."""
    return torch.einsum("bnd,hkd->bhnk", x, w)


@exercise(
    "(5.3.7) and (5.3.8) in one contraction: `heads` `[b, h, n, k]` and `wo` `[h, k, d]` give `[b, n, d]`.",
    "把 (5.3.7) 与 (5.3.8) 合成一次收缩：由 `heads` `[b, h, n, k]` 与 `wo` `[h, k, d]` 得到 `[b, n, d]`。",
    lambda draw: (
        draw.normal(draw.size(1, 3), h := draw.size(1, 4), draw.size(), k := draw.size(1, 4)), draw.normal(h, k, draw.size()),
    ),
)  # fmt: skip
def output(heads: Tensor, wo: Tensor) -> Tensor:
    """Our solution."""
    return torch.einsum("bhnk,hkd->bnd", heads, wo)


@exercise(
    "One matrix from the tensor `w` `[h, k, d]`: the `[d, h·k]` matrix W with x @ W = the queries of all heads side by side.",
    "由张量 `w` `[h, k, d]` 得到一个矩阵：返回 `[d, h·k]` 的 W，使 x @ W 等于并排放置的所有头的查询。",
    lambda draw: (draw.normal(draw.size(1, 4), draw.size(1, 4), draw.size()),),
)
def one_matrix(w: Tensor) -> Tensor:
    """Our solution."""
    return w.flatten(0, 1).T


def picture() -> Matrices:
    """The two ways to stack the matrices of heads."""
    heads = [torch.full((6, 2), float(i + 1)) for i in range(3)]
    side = torch.cat(heads, 1)
    return Matrices(
        (
            *(Matrix(f"W_{i + 1} [6, 2]", head, top=4) for i, head in enumerate(heads)),
            Matrix("[W₁ | W₂ | W₃] [6, 6]", side, top=4),
            Matrix(Bilingual("stacked in rows [18, 2]", "按行堆叠 [18, 2]"), torch.cat(heads, 0), top=4),
        )
    )


TOPIC = Topic(
    place=15,
    title=Bilingual("One contraction for all heads", "张量收缩：所有头一次算完"),
    formula=r"\mathcal{Q}_{ink} = \sum_{d} X_{nd}\, W^{Q}_{ikd}, \qquad Y_{ne} = \sum_{i,k} \mathcal{O}_{ink}\, W^{O}_{ike}",
    plain="Q_ink = Σ_d X_nd W_ikd;  Y_ne = Σ_ik O_ink W_ike",
    intro=Bilingual(
        """
        With the head as an index i, a layer is three contractions: tokens with the projection tensor, queries with keys, and
        heads with the output tensor. The large matrix is the same tensor, read with head and channel as one index: its columns
        are [W_1 | … | W_h]. Equations (5.3.3) and (5.3.4) stack the matrices in rows and multiply X from the left. Matrices
        of d × d_k stacked like that are [h·d, d_k], and the product does not exist. With the printed shape [h·d_k, d], that
        of transposed matrices as `nn.Linear` stores them, it exists because h·d_k = d, but is not the queries.
        """,
        """
        把头当作下标 i，一层就是三次收缩：词元与投影张量、查询与键、各头与输出张量。那个“大矩阵”就是同一个张量，只是把头与通道看成
        一个下标：它的列是 [W_1 | … | W_h]。公式 (5.3.3) 与 (5.3.4) 按行堆叠各矩阵，再用 X 左乘。d × d_k 的
        矩阵这样堆叠得到 [h·d, d_k]，乘积并不存在；若按所印的形状 [h·d_k, d]，即像 `nn.Linear` 那样存放转置后的矩阵，
        则只因 h·d_k = d 才能相乘，结果也不是各头的查询。
        """,
    ),
    code="""
import torch, headwise as hw
mha, x = hw.MultiHeadAttention(12, 3).double(), torch.randn(2, 7, 12).double()
w = mha.per_head_weights()                                        # q, k, v: [h, d, d_k]; o: [h, d_k, d]
q, k, v = (torch.einsum("bnd,hdk->bhnk", x, w[side]) for side in "qkv")           # (5.3.5)
p = (torch.einsum("bhnk,bhmk->bhnm", q, k) / 4**0.5).softmax(-1)
heads = torch.einsum("bhnm,bhmk->bhnk", p, v)                                     # (5.3.6)
joined = heads.transpose(1, 2).flatten(2)                                         # (5.3.7)
y = joined @ mha.o_proj.weight.T                                                  # (5.3.8)
for name, one in (("Q", q), ("P", p), ("O_i", heads), ("O_concat", joined), ("Y", y)):
    print(f"{name:8}", list(one.shape))
print("equal to the layer:", torch.allclose(y, mha(x)))
try:
    x[0] @ torch.cat(list(w["q"]), 0)                             # (5.3.3) and (5.3.4) as printed, [h·d, d_k]
except RuntimeError as error:
    print("stacked in rows:", error)
""",
    reading=Bilingual(
        """
        The layer and the five equations agree to rounding. `hw.nn.ContractionAttention` is this form as a module, with one
        tensor of rank three for each projection; it has the same parameters, the same outputs and the same gradients.
        """,
        """
        该层与这五个公式在舍入误差内一致。`hw.nn.ContractionAttention` 就是这种形式的模块，每个投影是一个三阶张量；
        参数、输出与梯度都与标准形式相同。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "Three matrices of heads, and the two ways to stack them: only side by side can X [n, 6] be multiplied with all.",
        "三个头的矩阵与两种堆叠方式：只有并排放置时，X [n, 6] 才能与它们全部相乘。",
    ),
    claims=("tensor-contraction", "per-head-projection", "row-stacking"),
    exercises=(queries, output, one_matrix),
)
