"""A model that writes: the next step after attention."""

import torch
from torch import Tensor

from headwise.lm import load_model
from headwise.wording import Bilingual
from headwise_textbook.claims.model import PASSAGE
from headwise_textbook.curves import Curve
from headwise_textbook.guide.grading.draw import Draw
from headwise_textbook.guide.topic import Topic, exercise


def _logits(draw: Draw) -> Tensor:
    n = draw.size(1, 7)
    return draw.normal(n) + torch.arange(n) * 1e-2


@exercise(
    "The probabilities of the next token, softmax(logits / temperature) over the `k` largest `logits` `[vocab]` only (k ≤ vocab); the others are 0 and the sum is 1.",
    "下一个词元的概率：只在最大的 `k` 个 `logits` `[vocab]` 上（k ≤ vocab）计算 softmax(logits / temperature)，其余为 0，总和为 1。",
    lambda draw: (logits := _logits(draw), draw.size(1, len(logits)), draw.size(1, 20) / 10),
)
def top_k(logits: Tensor, k: int, temperature: float) -> Tensor:
    """Our solution."""
    kept = torch.full_like(logits, -torch.inf)
    at = logits.topk(k).indices
    kept[at] = logits[at]
    return (kept / temperature).softmax(0)


@exercise(
    "The loss of a model that writes: the mean negative log-probability in nats with which `logits` `[n, vocab]` predict the next id; `ids` `[n]`, the last logits predict nothing. n is at least 2.",
    "语言模型的损失：`logits` `[n, vocab]` 预测下一个编号的平均负对数概率（奈特）；`ids` `[n]`，最后一行 logits 不预测。n 至少为 2。",
    lambda draw: (draw.normal(n := draw.size(2, 7), v := draw.size(1, 5)), draw.whole(v, n)),
)
def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Our solution."""
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:])


@exercise(
    "The perplexity of a text from the probabilities `[n]` that a model gave to each of its tokens.",
    "由模型给文本中每个词元的概率 `[n]` 计算困惑度。",
    lambda draw: (0.01 + 0.99 * draw.uniform(draw.size()),),
    tolerance=1e-3,
)
def perplexity(probabilities: Tensor) -> Tensor:
    """Our solution."""
    return (-probabilities.log().mean()).exp()


def picture() -> Curve:
    """How the loss falls along the text."""
    subject = load_model()
    ids = subject.read(PASSAGE).ids[None]
    with torch.no_grad():
        logits = subject.model(ids)
    losses = torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")
    parts = {(i + 1) * 25: float(losses[25 * i : 25 * i + 25].mean()) for i in range(len(losses) // 25)}
    uniform = float(torch.tensor(logits.shape[-1]).log())
    return Curve.of(
        Bilingual("Loss on a chapter that the model was not trained on", "在未训练过的一章上的损失"),
        Bilingual("characters read", "已读字符数"), Bilingual("nats per character", "奈特/字符"),
        {Bilingual("mean over 25 characters", "每 25 个字符的平均"): parts},
        {Bilingual("all characters equally likely", "所有字符等概率"): dict.fromkeys(parts, uniform)},
    )  # fmt: skip


TOPIC = Topic(
    place=26,
    title=Bilingual("A model that writes", "会写作的模型"),
    formula=r"p(x_{t+1} \mid x_{1 \dots t}) = \operatorname{softmax}(\text{logits}_t / \tau), \qquad \mathcal{L} = -\frac{1}{n} \sum_t \log p(x_{t+1} \mid x_{1 \dots t})",
    plain="p(x_t+1 | x_1…t) = softmax(logits_t / τ);  L = −(1/n) Σ_t log p(x_t+1 | x_1…t)",
    intro=Bilingual(
        """
        Causal attention, a feed-forward network, residual connections, four times over, and a softmax over the vocabulary: that is
        a language model. The one that comes with headwise reads and writes single characters of *Water Margin* and of
        Shakespeare; `headwise train FILE --out DIR` trains one on your own text. While it writes, keys and values of earlier
        characters are kept in a cache.
        """,
        """
        因果注意力、前馈网络、残差连接，叠四层，再对词表做 softmax：这就是一个语言模型。headwise 内置的模型逐字读写《水浒传》与莎士比亚；
        `headwise train 文件 --out 文件夹` 可以用你自己的文本训练一个。写作时，之前字符的键与值都保存在缓存中。
        """,
    ),
    code="headwise write --prompt 武松道：“ --length 60 --temperature 0.7 --seed 5",
    reading=Bilingual(
        """
        With the same seed the text is the same. It has the rhythm of the novel, its names and its dialogue, and no plot: 3.8 million
        parameters suffice for style. Its heads are those of the pages before: previous character, punctuation, and a few that
        look for an earlier occurrence. `headwise see` shows them on any text, also on what the model has just written.
        """,
        """
        随机种子相同，写出的文字就相同。它有小说的节奏、人名与对白，但没有情节：380 万个参数只够学到文风。它的头就是前面几页讲过的那些：
        前一个字符、标点，以及几个寻找先前出现处的头。`headwise see` 可以在任何文本上显示它们，包括模型刚写出来的文字。
        """,
    ),
    picture=picture,
    caption=Bilingual(
        "The loss along a chapter that the model was not trained on, and that of a model that knows nothing.",
        "在一章未训练过的文字上的损失，以及一无所知的模型的损失。",
    ),
    claims=("heads-have-kinds", "kv-cache"),
    exercises=(top_k, next_token_loss, perplexity),
)
