"""A common small demonstration: attention trained to reconstruct its own embeddings."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from headwise.masks import Dense, Mask
from headwise.wording import Bilingual
from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.evidence import Check, at_least, at_most
from headwise_textbook.claims.model import PASSAGE, trained
from headwise_textbook.claims.samples import adam, standard
from headwise_textbook.curves import Curve
from headwise_textbook.reconstruct import DROPOUT, EMBEDDING, EPOCHS, HEADS, RATE, reconstruct
from headwise_textbook.seeds import seeded

# Three paragraphs of Water Margin, chapters 1 to 3, as the demonstration has them.
PARAGRAPHS = (
    "話說大宋仁宗天子在位，嘉祐三年三月三日五更三點，天子駕坐紫宸殿，受百官朝賀。但見：祥雲迷鳳閣，瑞氣罩龍樓。含煙"
    "御柳拂旌旗，帶露宮花迎劍戟。天香影裏，玉簪珠履聚丹墀。仙樂聲中，繡襖錦衣扶御駕。珍珠廉卷，黃金殿上現金輿。鳳尾"
    "扇開，白玉階前停寶輦。隱隱凈鞭三下響，層層文武兩班齊。",
    "那高俅在臨淮州，因得了赦宥罪犯，思鄉要回東京。這柳世權卻和東京城里金梁橋下開生藥鋪的董將士是親戚，寫了一封書札，"
    "收拾些人事盤纏，赍發高俅回東京，投奔董將士家過活。",
    "話說當時史進道：「卻怎生是好？」朱武等三個頭領跪下答道：「哥哥，你是乾淨的人，休為我等連累了大郎。可把索來綁縛"
    "我三個，出去請賞，免得負累了你不好看。」",
)
PAIRS = "天子", "鳳閣"
SENTENCES = [part for part in PASSAGE.replace("？", "。").replace("！", "。").split("。") if len(part) > 4][:6]


@claim
def demo_learns_attention() -> list[Check | Curve]:
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


@claim
def phrases_attend() -> list[Check]:
    text, found = PARAGRAPHS[0], []
    places = [text.index(pair) for pair in PAIRS]
    for seed in range(3):
        weights = len(text) * _weights_after(seed)  # relative to uniform, [heads, n, n]
        found.append(torch.stack([weights[:, i, j] for at in places for i, j in ((at, at + 1), (at + 1, at))]))
    mean = torch.stack(found).mean((0, 2))  # 天 → 子, 子 → 天, 鳳 → 閣, 閣 → 鳳
    model = trained()
    with torch.no_grad():
        maps = model.decoder(torch.from_numpy(model.tokenizer.encode(text))[None], return_maps=True)[1]
    back = torch.stack([amap.to_dense()[0][:, at + 1, at] for amap in maps for at in places])
    known = len(text) * float(back.unflatten(0, (len(maps), len(places))).mean(1).max())
    return [
        at_least(("天 and 子, mean weight relative to uniform",
                  "天与子，平均权重与均匀之比"), float(mean[:2].mean()), 2),
        at_least(("鳳 and 閣", "鳳与閣"), float(mean[2:].mean()), 2),
        at_least(("子 → 天 and 閣 → 鳳 in the best head of the language model",
                  "子 → 天、閣 → 鳳，语言模型中最强的头"), known, 2)
        .control(float(mean.mean())),
    ]  # fmt: skip


def _width() -> int:
    return max(map(len, SENTENCES))


def _ids(texts: Sequence[str]) -> tuple[Tensor, int]:
    """The characters of the texts as numbers [texts, n], 0 being padding, and how many numbers there are."""
    symbols = sorted(set("".join(texts)))
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor([symbols.index(c) + 1 for c in text])
    return ids, len(symbols) + 1


def _weights_after(seed: int) -> Tensor:
    """The weights of the first paragraph after training as described, without dropout, [heads, n, n]."""
    ids, count = _ids(PARAGRAPHS)
    with seeded(seed):
        embedding = nn.Embedding(count, EMBEDDING)
        attention = standard(EMBEDDING, HEADS, bias=True, dropout=DROPOUT)

        def loss() -> Tensor:
            x = embedding(ids)
            return (attention(x) - x).square().mean()

        list(adam([*embedding.parameters(), *attention.parameters()], loss, EPOCHS, RATE))
    with torch.no_grad():
        return attention.eval()(embedding(ids[:1]), return_map=True)[1].to_dense()[0]


def _trained(mask: Mask | None) -> tuple[list[float], float]:
    """Train under a mask: the loss of each epoch, and the relative change of the characters' embeddings."""
    ids, count = _ids(SENTENCES)
    with seeded(0):
        embedding = nn.Embedding(count, EMBEDDING)
        attention = standard(EMBEDDING, HEADS, bias=True, dropout=DROPOUT)
        start = embedding.weight.detach().clone()

        def loss() -> Tensor:
            x = embedding(ids)
            return (attention(x, mask=mask) - x).square().mean()

        losses = list(adam([*embedding.parameters(), *attention.parameters()], loss, EPOCHS, RATE))
    moved = (embedding.weight.detach() - start)[1:].norm() / start[1:].norm()
    return losses, float(moved)
