"""The demonstration on Water Margin: attention trained to rebuild its own embeddings."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from headwise.reports.curves import Matrices, Matrix
from headwise.textbook.guide.topic import Topic, exercise
from headwise.textbook.reconstruct import reconstruct
from headwise.wording import Bilingual

TEXT = "話說大宋仁宗天子在位，嘉祐三年。\n祥雲迷鳳閣，瑞氣罩龍樓。\n天子駕坐紫宸殿。\n"


@exercise(
    "Number the characters of the texts in the order in which they first appear, from 0, without white space; return the ids of each text, padded at the end with the next free number to the longest length.",
    "按首次出现的顺序从 0 起给各文本的字符编号（忽略空白）；返回每个文本的编号列表，末尾用下一个未用的编号填充到最长的长度。",
    lambda draw: (
        [
            "".join("天子 大宋鳳閣"[i] for i in draw.whole(7, draw.size(1, 6)).tolist()) + "宋"
            for _ in range(draw.size(1, 3))
        ],
    ),
)
def encode(texts: list[str]) -> list[list[int]]:
    """Our solution."""
    rows = [[c for c in text if c.strip()] for text in texts]
    ids = {c: i for i, c in enumerate(dict.fromkeys(c for row in rows for c in row))}
    width = max(map(len, rows))
    return [[ids[c] for c in row] + [len(ids)] * (width - len(row)) for row in rows]


@exercise(
    "The share of the weight of real queries that falls on padding, per head: `weights` `[b, h, n, n]`, `lengths` `[b]` of the sequences; mean over all real queries, `[h]`.",
    "真实字符的查询有多少权重落在填充上：`weights` `[b, h, n, n]`，序列长度 `lengths` `[b]`；对所有真实查询取平均，返回 `[h]`。",
    lambda draw: (draw.weights(b := draw.size(1, 3), draw.size(1, 3), n := draw.size(2, 6), n), 1 + draw.whole(n, b)),
)
def padding_share(weights: Tensor, lengths: Tensor) -> Tensor:
    """Our solution."""
    real = torch.arange(weights.shape[-1]) < lengths[:, None]
    lost = (weights * ~real[:, None, None]).sum(-1)
    return (lost * real[:, None]).sum((0, 2)) / real.sum()


@exercise(
    "Dropout with probability `p` on `weights` `[n, m]`, given which entries are `kept`: those are divided by 1 − p, the others are 0. Return the result and its row sums.",
    "对 `weights` `[n, m]` 做概率为 `p` 的 dropout，`kept` 指出保留的项：保留的除以 1 − p，其余为 0。返回结果与每行之和。",
    lambda draw: (draw.weights(n := draw.size(), m := draw.size()), draw.booleans(n, m), draw.size(1, 9) / 10),
)
def dropped(weights: Tensor, kept: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Our solution."""
    found = torch.where(kept, weights / (1 - p), 0.0)
    return found, found.sum(-1)


def picture() -> Matrices:
    """One sentence under the three views."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "shuihu.txt"
        file.write_text(TEXT, encoding="utf-8")
        passage = reconstruct(file).passages[1]
    titles = (
        Bilingual("as in the tutorial", "如教程所示"), Bilingual("padding masked", "屏蔽填充"),
        Bilingual("after dropout", "经过 dropout"),
    )  # fmt: skip
    pieces = list(passage.tokens)
    return Matrices(
        tuple(
            Matrix(title, torch.as_tensor(passage.maps[i][0]), rows=pieces, columns=pieces)
            for i, title in enumerate(titles)
        ),
        rows=Bilingual("query (character)", "查询（字）"),
        columns=Bilingual("key (character); · is padding; head 1", "键（字）；· 为填充；第 1 头"),
    )


TOPIC = Topic(
    place=25,
    title=Bilingual("The Water Margin demonstration", "《水浒传》演示"),
    formula=r"\mathcal{L} = \frac{1}{b\,n\,d} \left\| \text{MultiHead}(E) - E \right\|^2",
    plain="L = ‖MultiHead(E) − E‖² / (b·n·d)",
    intro=Bilingual(
        """
        A popular tutorial trains one attention layer (4 heads, 32 channels) to rebuild the embeddings of three paragraphs of
        the novel, for 200 epochs, and draws the weights. `headwise train FILE --experiment reconstruct --png DIR --lang zh`
        is this demonstration for any file: a heat map for each sentence and head, with every character and every number.
        Beside it runs the version with padding masked, and beside that the view that the tutorial really draws: weights
        in training mode, after dropout, in which a tenth of all cells is exactly 0 and rows do not sum to 1.
        """,
        """
        有一篇流行的教程训练一个注意力层（4 个头、32 维），让它重建小说三段文字的词嵌入，训练 200 轮，再画出权重。
        `headwise train 文件 --experiment reconstruct --png 文件夹 --lang zh` 可以对任何文件做这个演示：每句每头一张热图，
        标出每个字与每个数。旁边同时给出屏蔽填充的版本，以及教程实际画出的那一种：训练模式下、经过 dropout 的权重，
        其中约十分之一的格子恰好为 0，行和也不等于 1。
        """,
    ),
    code="""
import tempfile, pathlib
from headwise.textbook.reconstruct import reconstruct
text = ("話說大宋仁宗天子在位，嘉祐三年三月三日五更三點。\\n"
        "祥雲迷鳳閣，瑞氣罩龍樓。\\n天子駕坐紫宸殿，受百官朝賀。")
with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, "shuihu.txt")
    file.write_text(text, encoding="utf-8")
    report = reconstruct(file)                              # headwise train FILE --experiment reconstruct
for name, value in report.facts:
    print(f"{name:26} {value}")
maps = report.passages[1].maps                              # [3 views, 4 heads, n, n]
for view, name in enumerate(("as in the tutorial", "padding masked", "after dropout")):
    rows = maps[view].sum(-1)
    print(f"{name:19} exactly 0: {(maps[view] == 0).mean():.0%}   row sums {rows.min():.2f} … {rows.max():.2f}")
""",
    reading=Bilingual(
        """
        The loss falls, but the maps show nothing about language: the target is the character's own embedding, so that the ideal
        map is the diagonal, padding takes weight because nothing masks it, and the embedding moves towards what attention can
        reach. Pairs such as 天子 and 鳳閣 do not stand out. To see heads that have learned from text, use `headwise see` on a
        trained model.
        """,
        """
        损失确实下降，但这些热图与语言无关：目标是字符自己的词嵌入，理想的图就是对角线；填充没有屏蔽，所以分走了权重；词嵌入也在向
        注意力能达到的方向移动。“天子”“鳳閣”这样的搭配并不突出。想看从文本中学到东西的头，请对训练好的模型使用 `headwise see`。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "One head on one sentence: padding attended to, padding masked, and after dropout.",
        "同一个头、同一句话：关注填充、屏蔽填充、经过 dropout。",
    ),
    claims=("demo-learns-attention", "phrases-attend"),
    exercises=(encode, padding_share, dropped),
    slow=True,
)
