"""Heads as subspaces of the model's width."""

import torch
from torch import Tensor

from headwise.analysis import subspace_overlap
from headwise.lm.checkpoint import load_pretrained
from headwise.reports.curves import Matrices, Matrix
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual


@exercise(
    "The largest angle in radians between the column spaces of `a` `[d, k]` and `b` `[d, k]` (k < d, full rank): the arc cosine of the smallest singular value of Q_aᵀ Q_b, where the columns of Q_a and Q_b are orthonormal bases of the two.",
    "`a` `[d, k]` 与 `b` `[d, k]`（k < d，满秩）列空间之间的最大夹角（弧度）：Q_aᵀ Q_b 的最小奇异值的反余弦，其中 Q_a、Q_b 的列是两者的标准正交基。",
    lambda draw: (
        draw.normal(d := draw.size(3, 7), k := draw.size(1, 2)) + torch.eye(d, k) * 0.1,
        draw.normal(d, k) + torch.eye(d, k) * 0.3,
    ),
    tolerance=2e-3,
)
def largest_angle(a: Tensor, b: Tensor) -> Tensor:
    """Our solution."""
    cosines = torch.linalg.svdvals(torch.linalg.qr(a.double())[0].T @ torch.linalg.qr(b.double())[0])
    return cosines.clamp(max=1.0).min().arccos()


@exercise(
    "Equation (5.3.11) for all pairs: the cosines `[h, h]` between the outputs `heads` `[h, n, d_k]`, over all tokens and channels.",
    "对所有头对计算公式 (5.3.11)：各头输出 `heads` `[h, n, d_k]` 之间（在所有词元与通道上）的余弦 `[h, h]`。",
    lambda draw: (draw.normal(draw.size(1, 4), draw.size(), draw.size(1, 4)) + 0.1,),
    tolerance=1e-3,
)
def cosines(heads: Tensor) -> Tensor:
    """Our solution."""
    unit = torch.nn.functional.normalize(heads.flatten(1), dim=-1)
    return unit @ unit.T


@exercise(
    "Can this matrix be the scores of one head of size `d_k`? Return whether the rank of `scores` `[n, n]` is at most d_k.",
    "这个矩阵可能是一个 `d_k` 维的头的分数吗？返回 `scores` `[n, n]` 的秩是否不超过 d_k。",
    lambda draw: (
        draw.normal(n := draw.size(1, 6), k := draw.size(1, 6)).round() @ draw.normal(k, n).round(),
        draw.size(1, 6),
    ),
)
def fits_one_head(scores: Tensor, d_k: int) -> bool:
    """Our solution."""
    return int(torch.linalg.matrix_rank(scores.double())) <= d_k


def picture() -> Matrices:
    """The overlap of the query spaces of the heads of each layer."""
    decoder, _, _ = load_pretrained()
    weights = [block.attention.per_head_weights() for block in decoder.blocks]  # type: ignore[union-attr, operator]
    overlap = subspace_overlap(weights, "q").matrix
    names = [f"H{j}" for j in range(8)]
    return Matrices(
        tuple(
            Matrix(
                Bilingual(f"layer {i}", f"第 {i} 层"), overlap[8 * i : 8 * i + 8, 8 * i : 8 * i + 8].clone().fill_diagonal_(0),
                rows=names, columns=names, top=0.4,
            )
            for i in range(4)
        )
    )  # fmt: skip


TOPIC = Topic(
    place=17,
    title=Bilingual("Heads as subspaces", "子空间"),
    formula=r"\mathcal{S}_i = \operatorname{col}(W_i^Q), \qquad \cos\theta = \sigma(Q_i^{\top} Q_j), \qquad \rho_{ij} = \frac{\langle \text{head}_i, \text{head}_j \rangle}{\|\text{head}_i\|\,\|\text{head}_j\|}",
    plain="S_i = col(W_i^Q);  cos θ = σ(Q_iᵀ Q_j);  ρ_ij = ⟨head_i, head_j⟩ / (‖head_i‖ ‖head_j‖)",
    intro=Bilingual(
        """
        Each W_i^Q projects the tokens onto d_k directions. Two heads may read the same directions or different ones; the
        angles between their subspaces say which. A baseline is needed here as well: two random subspaces of 32 of 256
        dimensions overlap by 32/256 = 0.125 on average. "Heads have learned different subspaces" is only shown by numbers
        that differ from this.
        """,
        """
        每个 W_i^Q 把词元投影到 d_k 个方向上。两个头读取的方向可能相同，也可能不同，子空间之间的夹角可以说明这一点。这里同样需要
        基线：256 维中两个随机的 32 维子空间平均重叠 32/256 = 0.125。只有与它不同的数字，才能说明“各头学到了不同的子空间”。
        """,
    ),
    code="""
import torch, headwise as hw
layers = [block.attention for block in hw.load_model().model.blocks]
overlap = hw.analysis.subspace_overlap([layer.per_head_weights() for layer in layers], "q").matrix
print("expected of random subspaces: 0.125")
for i in range(4):
    own = overlap[8*i:8*i+8, 8*i:8*i+8][~torch.eye(8, dtype=bool)]
    print(f"layer {i}: overlap of two heads {own.min():.3f} … {own.max():.3f}, mean {own.mean():.3f}")
w = layers[1].per_head_weights()["q"]
angles = hw.analysis.principal_angles(w[0], w[1]).rad2deg()
print(f"angles between L1H0 and L1H1: {angles[0]:.0f}° … {angles[-1]:.0f}°")
""",
    reading=Bilingual(
        """
        Trained heads overlap *more* than random ones, in every layer: all of them read the directions in which the tokens
        differ. They are far from orthogonal and far from equal. Whether several heads can compute more than one is another
        question: x_{i−1} − x_{i+1} requires two rows of weights per token. But at equal total width narrow heads cannot do
        all that a wide one can, since the scores of a head have rank d_k at most.
        """,
        """
        在每一层，训练后的头彼此重叠都多于随机子空间：它们都读取词元差异较大的那些方向。它们远非正交，也远不相同。
        多个头能否算出一个头算不出的东西，是另一个问题：x_{i−1} − x_{i+1} 就需要每个词元有两行权重。反过来，总维度相同时，小的头也
        不能完全代替大的头，因为一个头的分数矩阵的秩最多是 d_k。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "Overlap of the query spaces of the eight heads of each layer; 0.125 is expected of random ones.",
        "每层八个头的查询子空间的重叠；随机子空间的期望是 0.125。",
    ),
    claims=("heads-have-subspaces", "many-heads-beat-one", "outputs-are-dissimilar"),
    exercises=(largest_angle, cosines, fits_one_head),
)
