"""A common small demonstration: attention trained to reconstruct its own embeddings."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from headwise.masks import Dense, Mask
from headwise.reports.curves import Curve
from headwise.seeds import seeded
from headwise.textbook.claims.claim import claim
from headwise.textbook.claims.evidence import Check, Verdict, at_least, at_most
from headwise.textbook.claims.model import PASSAGE
from headwise.textbook.claims.samples import adam, standard
from headwise.textbook.reconstruct import DROPOUT, EMBEDDING, EPOCHS, HEADS, RATE, reconstruct
from headwise.textbook.texts import place
from headwise.wording import Bilingual

SENTENCES = [part for part in PASSAGE.replace("？", "。").replace("！", "。").split("。") if len(part) > 4][:6]


@claim(
    "Four heads trained to rebuild the 32-number embeddings of a text learn: the loss falls, and the heat maps show "
    "what they have found.",
    "四个头训练来重建一段文字的 32 维嵌入，确实在学习：损失下降，热图显示学到了什么。",
    formula="L = ‖MultiHead(E) − E‖² / (b·n·d)",
    at=[
        place("demonstration", "03",
              "200 epochs of Adam at 1e-3 with dropout 0.1; the mean squared error between output and "
              "embeddings; heat maps of every head.",
              "Adam 1e-3 训练 200 轮，dropout 0.1；损失为输出与嵌入的均方误差；画出每个头的热图。",
              listing=1),
        place("demonstration", "03", "The heat maps show how the model distributes attention over the text.",
              "热图直观展示模型处理文本时的注意力分布。", paragraph=2),
        place("demonstration", "04", "They open the black box for people to see.",
              "把模型内部的决策过程摊开给人看。", paragraph=2),
    ],
    control=("with padding masked, none of the weight is on it", "屏蔽填充之后，就没有权重落在上面"),
    note="训练确如所述。但填充没有屏蔽、会得到权重；目标随嵌入一起移动；若每个字只关注自己，损失反而更低：热图显示的是"
         "妨碍重建的东西，而不是学到的东西。",
    expected=Verdict.MISLEADING,
    slow=True,
)  # fmt: skip
def demo_learns_attention() -> list[Check | Curve]:
    """It trains as described. But padding is not masked and receives weight, the target changes with the embedding,
    and the loss is lower if each character attends only to itself: the maps show what hinders the reconstruction, not
    what has been found.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sentences.txt"
        file.write_text("\n".join(SENTENCES), encoding="utf-8")
        report = reconstruct(file)
    first, last = (float(x) for x in dict(report.facts)["loss, faithful (layer 0)"].split(" → "))
    padding = report.statistics.dense("padding_mass").numpy()
    losses, moved = _trained(None)
    to_itself, _ = _trained(Dense(torch.eye(_width(), dtype=torch.bool)))
    left, alone = losses[-1] / losses[0], to_itself[-1] / to_itself[0]
    epochs = (*range(0, EPOCHS, 10), EPOCHS - 1)
    lines = {
        Bilingual("as described", "如所述"): {at + 1: losses[at] for at in epochs},
        Bilingual("each character attends only to itself", "每个字只关注自己"): {
            at + 1: to_itself[at] for at in epochs
        },
    }
    on_padding = float(padding[0].mean())
    return [
        at_most(("remaining share of the loss", "损失剩余的比例"), last / first, 0.5),
        at_most(("remaining share of the loss, trained here", "损失剩余的比例，在此训练"), left, 0.5),
        at_most(("weight of characters on padding", "字落在填充上的权重"), on_padding, 0.01).suggested(),
        at_most(("relative change of the target", "目标的相对变化"), moved, 0.01).suggested(),
        at_least(("loss if each character attends only to itself, relative to that",
                  "每个字只关注自己时的损失，与之比"),
                 alone / left, 1.0).suggested(),
        at_most(("weight on padding if it is masked",
                 "屏蔽填充后落在其上的权重"), float(padding[1].max()), 0.0).control(on_padding),
        Curve.of(Bilingual("Loss of the demonstration", "演示的损失"), Bilingual("epoch", "轮"),
                 Bilingual("mean squared error", "均方误差"), lines),
    ]  # fmt: skip


def _width() -> int:
    return max(map(len, SENTENCES))


def _trained(mask: Mask | None) -> tuple[list[float], float]:
    """Train under a mask: the loss of each epoch, and the relative change of the characters' embeddings."""
    symbols = sorted(set("".join(SENTENCES)))
    ids = torch.zeros(len(SENTENCES), _width(), dtype=torch.long)  # 0 is padding
    for row, sentence in zip(ids, SENTENCES, strict=True):
        row[: len(sentence)] = torch.tensor([symbols.index(c) + 1 for c in sentence])
    with seeded(0):
        embedding = nn.Embedding(len(symbols) + 1, EMBEDDING)
        attention = standard(EMBEDDING, HEADS, bias=True, dropout=DROPOUT)
        start = embedding.weight.detach().clone()

        def loss() -> Tensor:
            x = embedding(ids)
            return (attention(x, mask=mask) - x).square().mean()

        losses = list(adam([*embedding.parameters(), *attention.parameters()], loss, EPOCHS, RATE))
    moved = (embedding.weight.detach() - start)[1:].norm() / start[1:].norm()
    return losses, float(moved)
