"""Groups of heads, and heads that attend to each other."""

import torch
from torch import Tensor

from headwise.base.run import seeded
from headwise.reports.curves import Matrices, Matrix
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual


@exercise(
    "Attention among the heads of one token: for `q`, `k`, `v` `[h, n, d]`, head i of token t attends to all heads j of the same token, with the weights softmax over j of q·k / √d. Return `[h, n, d]`.",
    "同一词元的头之间的注意力：对 `q`、`k`、`v` `[h, n, d]`，词元 t 的头 i 关注同一词元的所有头 j，权重是 q·k / √d 对 j 的 softmax。返回 `[h, n, d]`。",
    lambda draw: (
        *(draw.normal(h, n, d) for h, n, d in [(draw.size(1, 4), draw.size(), draw.size(1, 4))] for _ in range(3)),
    ),
    tolerance=1e-3,
)
def heads_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Our solution."""
    p = (torch.einsum("hnd,gnd->nhg", q, k) / q.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("nhg,gnd->hnd", p, v)


@exercise(
    "A matrix `w` `[g, g]` within each of the groups of g neighbouring heads: `heads` `[h, n, d]` (g divides h) become Σ_b w[a, b] head_b for head a of each group. Return `[h, n, d]`.",
    "在每组 g 个相邻的头内部用矩阵 `w` `[g, g]` 混合：`heads` `[h, n, d]`（g 整除 h）中，每组的头 a 变为 Σ_b w[a, b] head_b。返回 `[h, n, d]`。",
    lambda draw: (
        draw.normal((g := draw.size(1, 3)) * draw.size(1, 3), draw.size(), draw.size(1, 4)),
        draw.normal(g, g),
    ),
)
def mix_groups(heads: Tensor, w: Tensor) -> Tensor:
    """Our solution."""
    return torch.einsum("ab,gbnd->gand", w, heads.unflatten(0, (-1, w.shape[0]))).flatten(0, 1)


@exercise(
    "Fold the matrix of a group into the first layer of the MLP: x → relu(x @ group @ first) equals relu(x @ W). Return W for `group` `[d, d]` and `first` `[d, m]`.",
    "把组内的矩阵并入 MLP 的第一层：x → relu(x @ group @ first) 等于 relu(x @ W)。给定 `group` `[d, d]` 与 `first` `[d, m]`，返回 W。",
    lambda draw: (draw.normal(d := draw.size(), d), draw.normal(d, draw.size())),
)
def folded(group: Tensor, first: Tensor) -> Tensor:
    """Our solution."""
    return group @ first


def picture() -> Matrices:
    """The weights of heads attending to heads, for a few tokens."""
    with seeded(0), torch.no_grad():
        q, k = torch.randn(2, 4, 6, 8)
        weights = (torch.einsum("hnd,gnd->nhg", q, k) / 8**0.5).softmax(-1)
    names = [f"H{j}" for j in range(4)]
    return Matrices(
        tuple(
            Matrix(Bilingual(f"token {t}", f"词元 {t}"), weights[t], rows=names, columns=names, numbers=True, top=1.0)
            for t in range(4)
        )
    )


TOPIC = Topic(
    place=19,
    title=Bilingual("Groups of heads and attention among heads", "分组与跨头交互"),
    formula=r"\text{MLP}(\text{Concat}(\text{Group}_1, \dots, \text{Group}_g)), \qquad \text{Attention}(M\,Q, M\,K, M\,V)",
    plain=Bilingual(
        "MLP(Concat(Group_1 … Group_g));  Attention(M Q, M K, M V) over the heads of a token",
        "MLP(Concat(Group_1 … Group_g))；对每个词元的各头做 Attention(M Q, M K, M V)",
    ),
    intro=Bilingual(
        """
        In standard attention heads meet only in W_O, linearly. Two variants let them interact before. In (5.3.13) an MLP
        takes the place of W_O, with dense maps within groups of heads in front of it. In (5.3.14) an attention combines
        the heads. Its axis is not said there; we read it as attention along the axis of heads, separately for each token,
        because M is to be learned over the heads.
        """,
        """
        标准注意力中，各头只在 W_O 里以线性方式相遇。有两种变体让它们更早交互。(5.3.13) 用 MLP 代替 W_O，前面还有组内的稠密映射；
        (5.3.14) 用一个注意力来组合各头。书中没有说明它沿哪个轴；我们理解为对每个词元分别沿头轴做注意力，因为 M 是在头上学习的变换。
        """,
    ),
    code="""
import torch, headwise as hw
x = torch.randn(1, 7, 48)
for name, options in (("multi_head", {}), ("grouped_mlp", {"num_groups": 2}), ("head_mixing", {}), ("talking_heads", {})):
    layer = hw.nn.DESIGNS[name].build(48, 4, **options)
    count = sum(p.numel() for p in layer.parameters())
    print(f"{name:14} {list(layer(x).shape)}  {count:6,} parameters, {count / 9216:.3f} × multi-head")
group, first, relu = torch.randn(48, 48), torch.randn(48, 96), torch.nn.functional.relu
print("a linear map before the MLP adds nothing:",
      torch.allclose(relu(x @ group @ first), relu(x @ (group @ first)), atol=1e-3))
""",
    reading=Bilingual(
        """
        The matrices within groups of (5.3.13) are followed at once by the first layer of the MLP: two linear maps in a row
        are one, so they add parameters and no power. The nonlinearity of the MLP is what is new. Attention among the heads
        (`head_mixing`) and talking heads, which mix the scores of heads before and after the softmax, couple the heads:
        none of these can be pruned head by head without changing the others.
        """,
        """
        (5.3.13) 中组内的矩阵后面紧接着 MLP 的第一层：两个相连的线性映射等于一个，所以只增加参数，不增加表达能力；真正新增的是
        MLP 的非线性。头之间的注意力（`head_mixing`）与 talking heads（在 softmax 前后混合各头的分数）使各头互相耦合：
        剪掉其中一个头，必然影响其他的头。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "Weights with which the four heads of a token attend to one another, for four tokens (random).",
        "四个词元各自的四个头互相关注的权重（随机数）。",
    ),
    claims=("grouped-heads", "head-mixing", "group-maps-fold"),
    exercises=(heads_attend, mix_groups, folded),
)
