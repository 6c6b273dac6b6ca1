"""Why several heads: one head has one pattern for a token, several heads have several."""

import torch
from torch import Tensor

from headwise.reports.curves import Matrices, Matrix
from headwise.textbook.guide.sample import weights_on
from headwise.textbook.guide.topic import Topic, exercise
from headwise.wording import Bilingual

TEXT = "武松打虎。武松又来打虎。"


@exercise(
    "`weights` `[h, n, m]`: for each head, the key that receives the most weight on average over the queries, `[h]`.",
    "`weights` `[h, n, m]`：对每个头，求（对所有查询平均后）获得权重最多的键，返回 `[h]`。",
    lambda draw: (draw.weights(draw.size(1, 4), draw.size(), draw.size()),),
)
def favourite_key(weights: Tensor) -> Tensor:
    """Our solution."""
    return weights.mean(-2).argmax(-1)


@exercise(
    "A single head which must do the work of all: the mean of the weights `[h, n, m]` over the heads, and how far each "
    "head is from it, as the largest absolute difference. Return both: `[n, m]` and `[h]`.",
    "让一个头代替所有的头：返回权重 `[h, n, m]` 对头的平均 `[n, m]`，以及每个头与这个平均的最大绝对差 `[h]`。",
    lambda draw: (draw.weights(draw.size(1, 4), draw.size(), draw.size()),),
)
def mean_head(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Our solution."""
    mean = weights.mean(0)
    return mean, (weights - mean).abs().amax((-2, -1))


@exercise(
    "Query i of head a attends fully to key i, of head b fully to key i − 1 (query 0 to key 0). Return the weights of "
    "both heads for n tokens, `[2, n, n]`.",
    "头 a 的查询 i 只关注键 i，头 b 的查询 i 只关注键 i − 1（查询 0 关注键 0）。返回 n 个词元时两个头的权重 `[2, n, n]`。",
    lambda draw: (draw.size(1, 7),),
)
def two_patterns(n: int) -> Tensor:
    """Our solution."""
    each = torch.arange(n)
    return torch.nn.functional.one_hot(torch.stack((each, (each - 1).clamp(min=0))), n).float()


def picture() -> Matrices:
    """Four heads of the embedded model on one sentence."""
    weights, pieces = weights_on(TEXT), list(TEXT)
    chosen = [(0, 0), (1, 1), (1, 6), (3, 6)]
    return Matrices(
        tuple(Matrix(f"L{i}H{j}", weights[i][j], rows=pieces, columns=pieces, top=1.0) for i, j in chosen),
        rows=Bilingual("query", "查询"),
        columns=Bilingual("key", "键"),
    )


TOPIC = Topic(
    place=1,
    title=Bilingual("Why several heads", "为什么需要多个头"),
    formula=r"\text{MultiHead}(X) = \text{Concat}(\text{head}_1, \dots, \text{head}_h)\, W_O",
    plain="MultiHead(X) = Concat(head_1 … head_h) W_O",
    intro=Bilingual(
        """
        A head gives every token one distribution over the other tokens: one row of weights that sum to 1. A token that
        needs its neighbour, the subject of its verb and the beginning of the sentence at once must mix them in fixed
        shares. Several heads have several rows: each reads other features of the same tokens by its own projections,
        and their outputs are kept apart until W_O combines them.

        The model that comes with headwise is a small decoder for characters, with 4 layers of 8 heads. Nobody planned
        what its heads attend to; it can be measured.
        """,
        """
        一个头只给每个词元一个分布：一行和为 1 的权重。如果一个词元同时需要相邻的词、动词的主语和句子的开头，一个头只能按
        固定的比例把它们混在一起。多个头就有多行权重：每个头用自己的投影读取同一批词元的不同特征，各自的输出在 W_O
        合并之前互不混合。

        headwise 内置的模型是一个小型字符级解码器，共 4 层，每层 8 个头。没有人规定它的头该看什么，但可以测量。
        """,
    ),
    code="""
import headwise as hw
text = "武松打虎。武松又来打虎。"
subject = hw.load_model()
with hw.watch(subject.model, maps="lazy") as record:
    subject.model(subject.read(text).ids[None])
maps = list(record.maps.values())                    # one AttentionMap for each layer
for layer, head in ((0, 0), (1, 1), (1, 6), (3, 6)):
    row = maps[layer][0, head, -1:, :][0]            # weights of the last character, 。
    top = row.argsort(descending=True)[:4].tolist()
    print(f"L{layer}H{head}", "  ".join(f"{text[i]}({i}) {row[i]:.2f}" for i in top))
""",
    reading=Bilingual(
        """
        For the last character, the full stop, the four heads give four different rows of weights. L0H0 spreads its weight
        over many characters, L1H1 looks at the character before it, L1H6 at the full stops, and L3H6 at the full stops and,
        a little, at 武, which followed the earlier one. One head would have to average the four rows, and the average of
        "the character before" and "the earlier full stop" is neither.
        """,
        """
        对于最后一个字符“。”，四个头给出了四种不同的答案：L0H0 把权重分散到许多字符上；L1H1 看前一个字符；L1H6 看句号；
        L3H6 也看句号，还有少许权重在上一个句号之后的“武”字上。如果只有一个头，就只能把这四行混成一行，而“前一个字符”与
        “前一个句号”的平均，两者都不是。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "Four heads of the model on one sentence: the same tokens, four patterns.",
        "模型的四个头在同一句话上的权重：同样的词元，四种模式。",
    ),
    claims=("one-head-every-pattern", "many-heads-beat-one", "head-is-a-kernel"),
    exercises=(favourite_key, mean_head, two_patterns),
)
