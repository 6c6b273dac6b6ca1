"""A common small demonstration: attention trained to reconstruct its own embeddings, with and without a mask."""

import os
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from headwise.base.run import Progress, part, seeded
from headwise.errors import ConfigError, TextError
from headwise.lm.texts import read_text
from headwise.masks import Lengths
from headwise.nn.registry import DESIGNS, STANDARD
from headwise.reports.data import Passage, Report
from headwise.reports.passages import sentences as sentences_of
from headwise.table import HeadColumn, HeadTable
from headwise.wording import Bilingual

EMBEDDING, HEADS, EPOCHS, DROPOUT, RATE = 32, 4, 200, 0.1, 1e-3
MOST_SENTENCES, MOST_CHARACTERS = 32, 64
MOST_LENGTH = 300  # characters that have room along an axis
PADDING = "·"
PAUSES = frozenset("，、；：,;:")
VIEWS = (
    Bilingual("as in tutorials: padding is attended to", "如教程所示：关注填充"),
    Bilingual("padding masked", "屏蔽填充"),
    Bilingual("as in tutorials, in training mode: after dropout", "如教程所示，训练模式：经过 dropout"),
)


@dataclass(frozen=True)
class Trained:
    """One version: the loss of each epoch, the final weights [sentences, heads, n, n], and those after dropout."""

    losses: list[float]
    weights: Tensor
    dropped: Tensor


@dataclass(frozen=True)
class Sentences:
    """The sentences that are used, and what became of the text of the file."""

    used: list[str]
    notes: list[str]


def reconstruct(
    file: str | os.PathLike[str], *, length: int = MOST_CHARACTERS, seed: int = 0, progress: Progress | None = None
) -> Report:
    """Train both versions on the sentences of a file, and report a heat map for each sentence and head.

    Each line of at most `length` characters is one sentence. A longer line is split at the ends of its sentences, a
    longer sentence at its commas, and a longer part every `length` characters; the first 32 sentences are used. The
    notes of the report name everything that was split or left out.

    Sentences are padded to one length. A 32-dimensional embedding is the input of one attention layer of 4 heads with
    dropout 0.1; Adam at 1e-3 minimises the mean squared difference from the embedding itself for 200 epochs.

    The *faithful* version is the demonstration as in tutorials: padding is attended to and counts in the loss. The
    *masked* version excludes it from both. In the report, layer 0 is the faithful version, layer 1 the masked one, and
    layer 2 the faithful one as tutorials show it: in training mode, after dropout.

    Args:
        file: UTF-8 text. length: characters of the longest sentence, at most 300. seed: of weights and dropout.
        progress: called with ("training", epochs done, epochs in all).
    Raises:
        TextError: if the file is empty, is not text, or contains only white space. ConfigError: for another length.
    """
    if not 1 <= length <= MOST_LENGTH:
        raise ConfigError(
            f"length={length}: expected 1 to {MOST_LENGTH} characters; longer lines are split",
            f"length={length}：应为 1 到 {MOST_LENGTH} 个字符；更长的行会被切分",
        )
    text = sentences_in(read_text(file), length)
    if not text.used:
        raise TextError(
            f"{os.fspath(file)!r} contains only white space; expected one sentence or paragraph on a line",
            f"{os.fspath(file)!r} 只有空白；应每行一个句子或段落",
        )
    sentences = text.used
    vocabulary = sorted(set("".join(sentences)))
    index = {c: i + 1 for i, c in enumerate(vocabulary)}  # 0 is padding
    lengths = torch.tensor([len(s) for s in sentences])
    width = int(lengths.max())
    ids = torch.zeros(len(sentences), width, dtype=torch.long)
    for i, sentence in enumerate(sentences):
        ids[i, : len(sentence)] = torch.tensor([index[c] for c in sentence])
    runs = []
    for number, masked in enumerate((False, True)):
        with seeded(seed):
            runs.append(_train(ids, lengths, len(vocabulary) + 1, masked, part(progress, "training", number, 2)))
    return _report(text, lengths, runs)


def sentences_in(text: str, length: int) -> Sentences:
    """The sentences of at most `length` characters that are used of a text."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found: list[str] = []
    paragraphs = cut = 0
    for line in lines:
        if len(line) <= length:
            found.append(line)
            continue
        paragraphs += 1
        for start, end in sentences_of(list(line)) or [(0, len(line))]:
            sentence = line[start:end].strip()
            parts = _parts(sentence, length)
            cut += len(parts) > 1
            found += parts
    notes: list[str] = []
    if paragraphs:
        notes.append(Bilingual(
            f"{paragraphs} of {len(lines)} lines have more than {length} characters and were split into sentences; "
            f"--length keeps lines of up to {MOST_LENGTH} characters whole.",
            f"{len(lines)} 行中有 {paragraphs} 行超过 {length} 个字符，已按标点拆成句子；--length 可保留至多 "
            f"{MOST_LENGTH} 个字符的整行。",
        ))  # fmt: skip
    if cut:
        notes.append(Bilingual(
            f"{cut} sentences have more than {length} characters and were cut at commas, or every {length} characters.",
            f"{cut} 个句子超过 {length} 个字符，已在逗号处或每 {length} 个字符处切开。",
        ))  # fmt: skip
    used, left = found[:MOST_SENTENCES], found[MOST_SENTENCES:]
    if left:
        characters = sum(map(len, left))
        notes.append(Bilingual(
            f"Left out: the last {len(left)} of {len(found)} sentences ({characters:,} characters); "
            f"at most {MOST_SENTENCES} are used.",
            f"未使用：{len(found)} 句中的最后 {len(left)} 句（{characters:,} 个字符）；最多使用 {MOST_SENTENCES} 句。",
        ))  # fmt: skip
    return Sentences(used, notes)


def _parts(sentence: str, length: int) -> list[str]:
    """A sentence in parts of at most `length` characters, each as long as its commas allow."""
    ends = [i + 1 for i, c in enumerate(sentence[:-1]) if c in PAUSES]
    cuts = [0]
    for end, after in pairwise([*ends, len(sentence), len(sentence) + length + 1]):
        while end - cuts[-1] > length:
            cuts.append(cuts[-1] + length)
        if after - cuts[-1] > length:
            cuts.append(end)
    found = (sentence[start:end].strip() for start, end in pairwise(cuts))
    return [one for one in found if one]


def stolen(weights: Tensor, lengths: Tensor) -> Tensor:
    """Share of the weight of real queries on padding, [heads], from weights [sentences, heads, n, n]."""
    real = torch.arange(weights.shape[-1]) < lengths[:, None]
    to_padding = (weights * ~real[:, None, None, :]).sum(-1)  # [sentences, heads, n]
    return (to_padding * real[:, None, :]).sum((0, 2)) / real.sum()


def _train(ids: Tensor, lengths: Tensor, size: int, masked: bool, progress: Progress | None) -> Trained:
    embedding = nn.Embedding(size, EMBEDDING)
    attention = DESIGNS[STANDARD].build(EMBEDDING, HEADS, bias=True, dropout=DROPOUT)
    optimizer = torch.optim.Adam([*embedding.parameters(), *attention.parameters()], lr=RATE)
    mask = Lengths(lengths, queries=lengths) if masked else None
    real = (torch.arange(ids.shape[1]) < lengths[:, None])[..., None]
    losses = []
    for epoch in range(EPOCHS):
        x = embedding(ids)
        error = (attention(x, mask=mask) - x).square()
        loss = (error * real).sum() / (real.sum() * EMBEDDING) if masked else error.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if progress is not None:
            progress("training", epoch + 1, EPOCHS)
    attention.eval()
    with torch.no_grad():
        _, amap = attention(embedding(ids), mask=mask, return_map=True)
    weights = amap[:]
    return Trained(losses, weights, nn.functional.dropout(weights, DROPOUT, training=True))


def _report(text: Sentences, lengths: Tensor, runs: list[Trained]) -> Report:
    sentences, width = text.used, int(lengths.max())
    faithful, masked = runs
    views = [faithful.weights, masked.weights, faithful.dropped]
    maps = torch.stack(views, 1).numpy()  # [sentences, 3, heads, n, n]
    passages = [
        Passage(
            sentence, [*sentence, *[PADDING] * (width - len(sentence))], maps[i],
            special=list(range(len(sentence), width)),
        )
        for i, sentence in enumerate(sentences)
    ]  # fmt: skip
    shares = torch.stack([stolen(view, lengths) for view in views]).numpy()
    own = np.stack([_own(view, lengths).numpy() for view in views])
    statistics = HeadTable(
        {
            "padding_mass": HeadColumn(shares, unit="mass", description=Bilingual(
                "Mean weight of real characters on padding.", "实际字符落在填充上的平均权重。"
            )),
            "self_mass": HeadColumn(own, unit="mass", description=Bilingual(
                "Mean weight of real characters on themselves.", "实际字符落在自身上的平均权重。"
            )),
        },
        layers=VIEWS,
    )  # fmt: skip
    patterns: list[list[str]] = [
        [
            Bilingual(f"padding {pad:.2f}, itself {itself:.2f}", f"填充 {pad:.2f}，自身 {itself:.2f}")
            for pad, itself in zip(*rows, strict=True)
        ]
        for rows in zip(shares, own, strict=True)
    ]
    padded = 1 - float(lengths.float().mean()) / width
    taken = [f"{share.mean():.1%}" for share in shares]
    facts: list[tuple[str, str]] = [
        (Bilingual("sentences", "句子"), str(len(sentences))),
        (
            Bilingual("length", "长度"),
            Bilingual(
                f"{width} characters, padding {padded:.0%} of the places",
                f"{width} 个字符，填充占全部位置的 {padded:.0%}",
            ),
        ),
        (Bilingual("loss, faithful (layer 0)", "损失，如教程所示（第 0 层）"), _fall(faithful)),
        (Bilingual("loss, masked (layer 1)", "损失，屏蔽填充（第 1 层）"), _fall(masked)),
        (
            Bilingual("mass on padding", "填充上的权重"),
            Bilingual(f"faithful {taken[0]}, masked {taken[1]}", f"如教程所示 {taken[0]}，屏蔽后 {taken[1]}"),
        ),
    ]
    return Report(
        Bilingual("Rebuilding embeddings: faithful and masked", "重建嵌入：如教程所示与屏蔽填充"),
        passages, statistics, patterns, facts, [*text.notes, *_notes(faithful.dropped, lengths, taken[0])],
    )  # fmt: skip


def _fall(run: Trained) -> str:
    return f"{run.losses[0]:.4f} → {run.losses[-1]:.4f}"


def _notes(dropped: Tensor, lengths: Tensor, taken: str) -> list[str]:
    rows = dropped.movedim(1, 2)[torch.arange(dropped.shape[-1]) < lengths[:, None]]  # of real characters
    zero, low, high = float((rows == 0).float().mean()), float(rows.sum(-1).min()), float(rows.sum(-1).max())
    return [
        Bilingual(
            "Layer 0 is the demonstration as in tutorials: padding is attended to and counts in the loss. Layer 1 "
            "excludes padding from both.",
            "第 0 层是教程中的做法：填充被关注，也计入损失；第 1 层在两处都排除填充。",
        ),
        Bilingual(
            f"Layer 2 shows what the pictures of tutorials show: the weights of layer 0 in training mode, after "
            f"dropout {DROPOUT}. {zero:.1%} of the cells are exactly 0 at random, the others are divided by "
            f"{1 - DROPOUT}, and rows sum to {low:.2f} to {high:.2f} instead of 1: the holes are random.",
            f"第 2 层即教程的图片：第 0 层的权重在训练模式下经过概率为 {DROPOUT} 的 dropout。{zero:.1%} 的格子随机"
            f"变为 0，其余除以 {1 - DROPOUT}，每行之和为 {low:.2f} 至 {high:.2f} 而不是 1；哪些格子为 0 是随机的。",
        ),
        Bilingual(
            f"Without a mask, padding takes {taken} of the weight of the real characters; with it, none.",
            f"不加掩码时，填充占去实际字符权重的 {taken}；加掩码后为零。",
        ),
        Bilingual(
            "The target is the embedding itself, which changes during training: a falling loss says little about "
            "language.",
            "目标就是嵌入本身，训练中随之改变：损失下降并不说明学到了语言。",
        ),
    ]


def _own(weights: Tensor, lengths: Tensor) -> Tensor:
    real = torch.arange(weights.shape[-1]) < lengths[:, None]
    diagonal = weights.diagonal(dim1=-2, dim2=-1)
    return (diagonal * real[:, None]).sum((0, 2)) / real.sum()
