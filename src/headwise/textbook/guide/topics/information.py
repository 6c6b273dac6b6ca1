"""How much the heads carry, and how much of it twice."""

import torch
from torch import Tensor

from headwise.analysis import output_similarities
from headwise.lm.loading import load_model
from headwise.models import find_heads, record_heads
from headwise.reports.curves import Matrices, Matrix
from headwise.textbook.claims.model import PASSAGE
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual


@exercise(
    "Linear CKA of two heads' outputs `x` `[n, a]` and `y` `[n, b]`: centre the columns, then ‖yᵀx‖²_F / (‖xᵀx‖_F ‖yᵀy‖_F).",
    "两个头的输出 `x` `[n, a]` 与 `y` `[n, b]` 的线性 CKA：先将各列中心化，再计算 ‖yᵀx‖²_F / (‖xᵀx‖_F ‖yᵀy‖_F)。",
    lambda draw: (
        draw.normal(n := draw.size(3, 8), draw.size(1, 4)) + torch.arange(n)[:, None] * 0.1,
        draw.normal(n, draw.size(1, 4)) + torch.arange(n)[:, None] * 0.2,
    ),
    tolerance=1e-3,
)
def cka(x: Tensor, y: Tensor) -> Tensor:
    """Our solution."""
    x, y = (one.double() - one.double().mean(0) for one in (x, y))
    return (y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())


@exercise(
    "The mutual information in nats of two discrete variables with the joint distribution `p` `[a, b]` (sums to 1).",
    "联合分布为 `p` `[a, b]`（和为 1）的两个离散变量的互信息（奈特）。",
    lambda draw: ((p := draw.uniform(draw.size(1, 4), draw.size(1, 4)) + 0.01) / p.sum(),),
)
def mutual_information(p: Tensor) -> Tensor:
    """Our solution."""
    return torch.xlogy(p, p / (p.sum(1, keepdim=True) * p.sum(0, keepdim=True))).sum()


@exercise(
    "A head of size 2 that tells n tokens apart: place n keys on the unit circle, `[n, 2]`, key i = (cos, sin) of the angle 2πi/n, i from 0, so that query i (the same vectors) has its largest score with key i.",
    "只有 2 维的头也能区分 n 个词元：把 n 个键放在单位圆上 `[n, 2]`，键 i 是角度 2πi/n 的 (cos, sin)，i 从 0 数起，使查询 i（同样的向量）与键 i 的分数最大。",
    lambda draw: (draw.size(1, 12),),
)
def circle_keys(n: int) -> Tensor:
    """Our solution."""
    angles = 2 * torch.pi * torch.arange(n) / n
    return torch.stack((angles.cos(), angles.sin()), -1)


def picture() -> Matrices:
    """The similarity of the outputs of all heads."""
    subject = load_model()
    with torch.no_grad(), record_heads(find_heads(subject.model)) as outputs:
        subject.model(subject.read(PASSAGE).ids[None])
    found = output_similarities(outputs, corrected=False)
    labels = [f"L{i // 8}" if i % 8 == 0 else "" for i in range(32)]
    titles = {"cosine": Bilingual("cosine ρ_ij (absolute)", "余弦 ρ_ij（绝对值）"), "cka": "CKA"}
    return Matrices(
        tuple(
            Matrix(title, found[kind].matrix.clone().fill_diagonal_(0), rows=labels, columns=labels, top=1.0)
            for kind, title in titles.items()
        )
    )


TOPIC = Topic(
    place=22,
    title=Bilingual("Information in heads", "头间的信息流动"),
    formula=r"I(\text{head}_i; \text{head}_j), \qquad \rho_{ij} = \frac{\langle \text{head}_i, \text{head}_j\rangle}{\|\text{head}_i\|\|\text{head}_j\|}, \qquad \operatorname{rank}(Q_i K_i^{\top}) \le d_k",
    plain="I(head_i; head_j),  ρ_ij = ⟨head_i, head_j⟩ / (‖head_i‖ ‖head_j‖),  rank(Q_i K_iᵀ) ≤ d_k",
    intro=Bilingual(
        """
        Do heads carry different information? The cosine of outputs (5.3.11) is near 0 for most pairs, but each head has a
        basis of its own: two heads with the same information in rotated bases have cosine 0 as well. CKA does not depend on
        the basis; `head_information` estimates how much of a head the others predict, from one covariance.
        """,
        """
        各个头携带的信息是否不同？多数头对的输出余弦 (5.3.11) 接近 0，但每个头各有自己的基：两个头即使信息相同，只要基旋转过，
        余弦也是 0。CKA 与基的选取无关；`head_information` 则用一个协方差矩阵估计一个头有多少能由其他头预测出来。
        """,
    ),
    code="""
import torch, headwise as hw
from headwise.textbook.claims.model import PASSAGE     # of a chapter that the model was not trained on
subject = hw.load_model()
with hw.models.record_heads(hw.find_heads(subject.model)) as outputs:
    subject.model(subject.read(PASSAGE).ids[None])
mixed = [torch.stack([layer[:, i, torch.randperm(252)] for i in range(8)], 1) for layer in outputs]
pairs = torch.triu(torch.ones(32, 32, dtype=torch.bool), 1)
print("median of 496 pairs    cosine   CKA   predicted from the other heads of the layer")
for name, heads in (("heads", outputs), ("with tokens shuffled", mixed)):
    found = hw.analysis.output_similarities(heads, corrected=False)
    cosine, cka = (found[kind].matrix[pairs].abs().median() for kind in ("cosine", "cka"))
    shares = [float(x) for layer in hw.analysis.head_information(heads, corrected=False)["redundancy"] for x in layer]
    print(f"{name:20}  {cosine:7.2f} {cka:5.2f}   {min(shares):.0%} … {max(shares):.0%}")
angles = torch.arange(4096).double() * (2 * torch.pi / 4096)
circle = torch.stack((angles.cos(), angles.sin()), -1)
print("a head of size 2 picks its own key for", int(((circle @ circle.T).argmax(-1) == torch.arange(4096)).sum()), "of 4096 queries")
""",
    reading=Bilingual(
        """
        By the cosine the heads look independent. By CKA they are more alike than after each head's tokens were shuffled, but
        far from equal. A large share of a head seems to be predicted from the others; but the share is nearly as large for
        shuffled tokens, where there is nothing to predict: with 224 predictors and 252 tokens it is mostly chance. Therefore
        `head_information` requires more tokens, unless `corrected=False`. And d_k does not bound the information of a head in
        bits: with two numbers, each of 4,096 queries can pick a key of its own. What d_k bounds is the rank of the scores.
        """,
        """
        按余弦看，各头似乎相互独立；按 CKA 看，它们比打乱各头的词元之后更相似，但远不相同。一个头似乎大部分都能由其他头预测，
        可是打乱词元之后本无可预测，这一比例却几乎一样大：用 224 个数预测 252 个词元，多半是偶然。因此 `head_information`
        默认要求更多的词元，除非给出 `corrected=False`。另外，d_k 限制的并不是一个头的信息位数：用两个数，4,096 个查询就能各自
        选中自己的键。d_k 限制的是分数矩阵的秩。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "Similarity of the outputs of all 32 heads by cosine and by CKA (diagonal left out).",
        "32 个头两两之间的输出相似度：余弦与 CKA（不含对角线）。",
    ),
    claims=("outputs-are-dissimilar", "d-k-bounds-information", "head-output-is-limited"),
    exercises=(cka, mutual_information, circle_keys),
)
