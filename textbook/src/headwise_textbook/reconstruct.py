"""A common small demonstration: attention trained to reconstruct its own embeddings, with and without a mask."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import ConfigError, TextError
from headwise.lm import read_text
from headwise.masks import Lengths, Mask
from headwise.nn import DESIGNS, STANDARD
from headwise.reports import Passage, Report
from headwise.table import HeadColumn, HeadTable
from headwise.wording import tr
from headwise_textbook.trace import seeded

EMBEDDING, HEADS, EPOCHS, DROPOUT, RATE = 32, 4, 200, 0.1, 1e-3
MOST_SENTENCES, MOST_CHARACTERS = 32, 64
MOST_LENGTH = 300  # characters that have room along an axis
PADDING = "·"
# Where a sentence ends: at its mark, unless another mark or a closing quotation mark follows.
END = re.compile(r"""(?<=[。！？!?…])(?![。！？!?…”’」』"'])|(?<=\.)(?=\s)""")
PAUSES = frozenset("，、；：,;:")
VIEWS = (
    tr("as in tutorials: padding is attended to"),
    tr("padding masked"),
    tr("as in tutorials, in training mode: after dropout"),
)


@dataclass(frozen=True)
class Trained:
    """One version."""

    losses: list[float]  # of each epoch
    weights: Tensor  # final ones, [sentences, heads, n, n]
    dropped: Tensor  # the same after dropout


@dataclass(frozen=True)
class Sentences:
    """The sentences that are used, and what became of the text of the file."""

    used: list[str]
    notes: list[str]


def reconstruct(
    file: str | os.PathLike[str],
    *,
    length: int = MOST_CHARACTERS,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Report:
    """Train both versions on the sentences of a file, and report a heat map for each sentence and head.

    Each line of at most `length` characters is one sentence. A longer line is split at the ends of its sentences, a
    longer sentence at its commas, and a longer part every `length` characters; the first 32 sentences are used.
    The *faithful* version is the demonstration as in tutorials: padding is attended to and counts in the loss. The
    *masked* version excludes it from both. In the report, layer 0 is the faithful version, layer 1 the masked one, and
    layer 2 the faithful one as tutorials show it: in training mode, after dropout.

    TextError for a file that is empty, no text, or only white space. progress: told ("training", epochs done, of all).
    """
    if not 1 <= length <= MOST_LENGTH:
        raise ConfigError(
            "length={length}: expected 1 to {most_length} characters; longer lines are split",
            length=length,
            most_length=MOST_LENGTH,
        )
    text = sentences_in(read_text(file), length)
    if not text.used:
        raise TextError(
            "{file!r} contains only white space; expected one sentence or paragraph on a line", file=os.fspath(file)
        )
    return trained_on(text, seed=seed, progress=progress)


def trained_on(
    text: Sentences, *, seed: int = 0, epochs: int = EPOCHS, progress: Callable[[str, int, int], None] | None = None
) -> Report:
    """The report of `reconstruct` on these sentences."""
    ids, lengths = numbered(text.used), torch.tensor([len(sentence) for sentence in text.used])
    runs = []
    for before, mask in enumerate((None, Lengths(lengths, queries=lengths))):

        def trained(epoch: int, before: int = before) -> None:
            if progress is not None:
                progress("training", before * epochs + epoch, 2 * epochs)

        with seeded(seed):
            embedding, attention, losses = fit(ids, mask, None if mask is None else lengths, trained, epochs)
            with torch.no_grad():
                weights = attention.eval()(embedding(ids), mask=mask, return_map=True)[1][:]
            runs.append(Trained(losses, weights, nn.functional.dropout(weights, DROPOUT, training=True)))
    return _report(text, lengths, runs)


def numbered(texts: Sequence[str]) -> Tensor:
    """The characters of texts as numbers, [texts, n]; 0 is padding."""
    symbols = sorted(set("".join(texts)))
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor([symbols.index(c) + 1 for c in text])
    return ids


def fit(
    ids: Tensor,
    mask: Mask | None = None,
    lengths: Tensor | None = None,
    trained: Callable[[int], None] = lambda epoch: None,
    epochs: int = EPOCHS,
) -> tuple[nn.Embedding, Any, list[float]]:
    """An embedding, a layer that is trained to rebuild it, and the loss of each epoch; `trained` is told each of them.

    lengths: of the sentences, if padding does not count in the loss.
    """
    embedding = nn.Embedding(int(ids.max()) + 1, EMBEDDING)
    attention = DESIGNS[STANDARD].build(EMBEDDING, HEADS, bias=True, dropout=DROPOUT)
    optimizer = torch.optim.Adam([*embedding.parameters(), *attention.parameters()], lr=RATE)
    real = None if lengths is None else (torch.arange(ids.shape[1]) < lengths[:, None])[..., None]
    losses = []
    for epoch in range(epochs):
        x = embedding(ids)
        error = (attention(x, mask=mask) - x).square()
        loss = error.mean() if real is None else (error * real).sum() / (real.sum() * EMBEDDING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        trained(epoch + 1)
    return embedding, attention, losses


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
        for sentence in END.split(line):
            parts = _parts(sentence.strip(), length)
            cut += len(parts) > 1
            found += parts
    notes: list[str] = []
    if paragraphs:
        notes.append(
            tr(
                "{paragraphs} of {count} lines have more than {length} characters and were split into sentences; "
                "--length keeps lines of up to {most_length} characters whole.",
                paragraphs=paragraphs,
                count=len(lines),
                length=length,
                most_length=MOST_LENGTH,
            )
        )
    if cut:
        notes.append(tr("{cut} sentences have more than {length} characters and were cut at commas, or every {length} "
                        "characters.", cut=cut, length=length))  # fmt: skip
    used, left = found[:MOST_SENTENCES], found[MOST_SENTENCES:]
    if left:
        characters = sum(map(len, left))
        notes.append(
            tr(
                "Left out: the last {count} of {all} sentences ({characters:,} characters); at most "
                "{most_sentences} are used.",
                count=len(left),
                all=len(found),
                characters=characters,
                most_sentences=MOST_SENTENCES,
            )
        )
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


def _report(text: Sentences, lengths: Tensor, runs: list[Trained]) -> Report:
    sentences, width = text.used, int(lengths.max())
    faithful, masked = runs
    falls = [f"{run.losses[0]:.4f} → {run.losses[-1]:.4f}" for run in runs]
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
    real = (torch.arange(width) < lengths[:, None])[:, None]
    diagonals = torch.stack([view.diagonal(dim1=-2, dim2=-1) for view in views])  # [3, sentences, heads, n]
    own = ((diagonals * real).sum((1, 3)) / real.sum()).numpy()
    statistics = HeadTable(
        {
            "padding_mass": HeadColumn(
                shares, unit="mass", description=tr("Mean weight of real characters on padding.")
            ),
            "self_mass": HeadColumn(own, unit="mass", description=tr("Mean weight of real characters on themselves.")),
        },
        layers=VIEWS,
    )
    patterns: list[list[str]] = [
        [
            tr("padding {pad:.2f}, itself {itself:.2f}", pad=pad, itself=itself)
            for pad, itself in zip(*rows, strict=True)
        ]
        for rows in zip(shares, own, strict=True)
    ]
    padded = 1 - float(lengths.float().mean()) / width
    taken = [f"{share.mean():.1%}" for share in shares]
    facts: list[tuple[str, str]] = [
        (tr("sentences"), str(len(sentences))),
        (tr("length"), tr("{width} characters, padding {padded:.0%} of the places", width=width, padded=padded)),
        (tr("loss, faithful (layer 0)"), falls[0]),
        (tr("loss, masked (layer 1)"), falls[1]),
        (tr("mass on padding"), tr("faithful {faithful}, masked {masked}", faithful=taken[0], masked=taken[1])),
    ]
    return Report(
        tr("Rebuilding embeddings: faithful and masked"),
        passages, statistics, patterns, facts, [*text.notes, *_notes(faithful.dropped, lengths, taken[0])],
    )  # fmt: skip


def _notes(dropped: Tensor, lengths: Tensor, taken: str) -> list[str]:
    rows = dropped.movedim(1, 2)[torch.arange(dropped.shape[-1]) < lengths[:, None]]  # of real characters
    zero, low, high = float((rows == 0).float().mean()), float(rows.sum(-1).min()), float(rows.sum(-1).max())
    return [
        tr(
            "Layer 0 is the demonstration as in tutorials: padding is attended to and counts in the loss. Layer 1 "
            "excludes padding from both."
        ),
        tr(
            "Layer 2 shows what the pictures of tutorials show: the weights of layer 0 in training mode, after "
            "dropout {dropout}. {zero:.1%} of the cells are exactly 0 at random, the others are divided by "
            "{kept}, and rows sum to {low:.2f} to {high:.2f} instead of 1: the holes are random.",
            dropout=DROPOUT,
            zero=zero,
            kept=1 - DROPOUT,
            low=low,
            high=high,
        ),
        tr("Without a mask, padding takes {taken} of the weight of the real characters; with it, none.", taken=taken),
        tr(
            "The target is the embedding itself, which changes during training: a falling loss says little about "
            "language."
        ),
    ]
