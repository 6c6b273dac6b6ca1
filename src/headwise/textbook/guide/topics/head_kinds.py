"""The kinds of heads that trained models have, and how they are recognised."""

import torch
from torch import Tensor

from headwise.reports.curves import Matrices, Matrix
from headwise.textbook.guide.grading.draw import Draw
from headwise.textbook.guide.sample import weights_on
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual

TEXT = "武松打虎，武松又来打虎。"


def _causal(draw: Draw) -> tuple[Tensor]:
    h, n = draw.size(1, 3), draw.size(2, 7)
    return (draw.normal(h, n, n).masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf).softmax(-1),)


@exercise(
    "The mean weight on the previous token, for each head of causal `weights` `[h, n, n]`; query 0, which has none, is left out.",
    "对因果的 `weights` `[h, n, n]`，求每个头放在前一个词元上的平均权重；没有前一个词元的查询 0 不计。",
    _causal,
)
def previous_score(weights: Tensor) -> Tensor:
    """Our solution."""
    return weights.diagonal(-1, -2, -1).mean(-1)


@exercise(
    "What a head that gives equal weight to all keys in sight would score in previous-score, for n tokens under a causal mask.",
    "在因果掩码下，对所有可见的键给予相同权重的头，在 previous-score 中得分是多少？n 是词元数。",
    lambda draw: (draw.size(2, 12),),
)
def uniform_previous(n: int) -> float:
    """Our solution."""
    return sum(1 / (i + 1) for i in range(1, n)) / (n - 1)


@exercise(
    "For token ids `[n]`: the boolean matrix `[n, n]` of the keys that an induction head attends to: those whose preceding token equals the query's token, and which come before the query.",
    "给定词元编号 `[n]`，返回归纳头所关注的键的布尔矩阵 `[n, n]`：该键的前一个词元与查询的词元相同，且键在查询之前。",
    lambda draw: (draw.whole(3, draw.size(1, 8)),),
)
def induction_keys(ids: Tensor) -> Tensor:
    """Our solution."""
    n = len(ids)
    found = torch.zeros(n, n, dtype=torch.bool)
    found[:, 1:] = ids[:, None] == ids[None, :-1]
    return found & torch.ones(n, n, dtype=torch.bool).tril(-1)


def picture() -> Matrices:
    """A head of each kind on one sentence."""
    weights, pieces = weights_on(TEXT), list(TEXT)
    kinds = (
        (1, 1, Bilingual("previous token", "前一个词元")), (1, 4, Bilingual("nearby", "邻近")),
        (1, 6, Bilingual("punctuation", "标点")), (0, 7, Bilingual("broad", "分散")),
    )  # fmt: skip
    return Matrices(
        tuple(
            Matrix(
                Bilingual(f"L{i}H{j}: {name}", f"L{i}H{j}：{name.zh}"),
                weights[i][j],
                rows=pieces,
                columns=pieces,
                top=1.0,
            )
            for i, j, name in kinds
        ),
        rows=Bilingual("query", "查询"),
        columns=Bilingual("key", "键"),
    )


TOPIC = Topic(
    place=12,
    title=Bilingual("Kinds of heads", "头的类型"),
    formula=Bilingual(
        r"\text{score}_i = \frac{1}{|R|} \sum_{t \in R} \sum_{j \in K(t)} A^{(i)}_{tj}, \qquad \text{lift} = \text{score} / \text{score of a uniform head}",
        r"\text{得分}_i = \frac{1}{|R|} \sum_{t \in R} \sum_{j \in K(t)} A^{(i)}_{tj}, \qquad \text{提升} = \text{得分} / \text{均匀头的得分}",
    ),
    plain=Bilingual(
        "score = mean weight on the keys K(t) of the kind;  lift = score / score of a uniform head",
        "得分 = 该类型的键 K(t) 上的平均权重；提升 = 得分 / 均匀头的得分",
    ),
    intro=Bilingual(
        """
        "Head 1 attends to syntax, head 2 to neighbours" is a hypothesis until it is measured. A kind of head is defined by
        the keys that it should attend to: the previous token, punctuation, the token after an earlier equal token
        (induction). Its score is the mean weight on them. A number alone means little: a head with equal weights also
        puts some on punctuation. So every score has this baseline, and a label needs a published threshold that holds in
        95 % of the samples of a block bootstrap. Similar meaning is measured by the model's own embeddings of query and key,
        beyond the similarity of matched pairs. For syntax and coreference, `roles` takes annotated `arcs=` and `mentions=`.
        """,
        """
        “头 1 关注语法，头 2 关注邻近的词”在测量之前只是假设。头的类型由它应当关注的键来定义：前一个词元、标点、先前相同词元之后
        的词元（归纳头），得分就是放在这些键上的平均权重。单看得分没有意义：权重均匀的头也会把一部分放在标点上。所以每个得分都
        配有这样的基线；要得到标签，得分还须超过文献中的阈值，并在 95 % 的自助法样本中成立。语义相近用模型自身的词嵌入衡量：查询与键
        的相似度须高于距离相同或键相同的配对。对语法与指代，`roles` 接受标注好的 `arcs=` 与 `mentions=`。
        """,
    ),
    code="""
import headwise as hw
from headwise.textbook.claims.model import PASSAGE     # of a chapter that the model was not trained on
subject = hw.load_model()
ids = subject.read(PASSAGE).ids[None]
with hw.watch(subject.model, maps="lazy") as record:
    subject.model(ids)
maps = list(record.maps.values())
roles = hw.analysis.roles(maps, tokens=ids, pieces=list(PASSAGE), embeddings=subject.embedding)
print("kind         best head  score  uniform head  has the label")
for name in ("previous", "local", "punctuation", "duplicate", "induction", "semantic"):
    role = roles[name]
    layer, head = divmod(int(role.mass.argmax()), role.mass.shape[1])
    score, uniform = role.mass[layer, head], role.uniform[layer, head]
    print(f"{name:12} L{layer}H{head}  {score:10.2f} {uniform:13.2f}  {bool(role.holds[layer, head])}")
""",
    reading=Bilingual(
        """
        One head attends to the previous character almost always, one to punctuation, several to the neighbourhood: these
        are positional and separator heads as in the literature. No head is close to the induction threshold on this
        passage, although three have six times the weight of a uniform head. A syntax head is not to be expected in a
        character model of this size, and no head attends to characters of similar meaning. In the MiniLM encoder, head 1 of
        layer 1 links words of similar meaning, and head 11 of layer 5 puts 0.71 of the weight of "it" on "cat":
        `headwise see "The cat sat on the mat because it was tired." --model minilm --png it` writes `it/layer-5-head-11.png`.
        `headwise see` shows all kinds of all heads for your own text.
        """,
        """
        有一个头几乎总是关注前一个字符，一个关注标点，好几个关注邻近区域：这正是文献中的位置头与分隔头。在这段文字上没有哪个头
        接近归纳头的阈值，尽管最高者的权重是均匀头的数倍。对这么小的字符模型，不能指望有语法头，也没有头关注语义相近的字。
        在 MiniLM 编码器中，第 1 层的头 1 把语义相近的词联系起来，第 5 层的头 11 则把 it 的权重的 0.71 放在 cat 上：
        `headwise see "The cat sat on the mat because it was tired." --model minilm --png it --lang zh` 会写出
        `it/layer-5-head-11.png`。`headwise see --lang zh` 可以在你自己的文本上显示所有头的所有类型。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "Four kinds of heads on one sentence.",
        "同一句话上的四类头。",
    ),
    claims=("heads-have-kinds", "outputs-are-dissimilar", "equal-heads-stay-equal"),
    exercises=(previous_score, uniform_previous, induction_keys),
)
