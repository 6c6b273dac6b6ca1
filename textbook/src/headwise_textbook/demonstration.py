"""The Water Margin demonstration of a tutorial: three passages, twelve pictures, and what is bright in them.

A cell is *bright* if its weight is at least twice the uniform one, 1 / n. A pair is to be held against the
share of all cells that are bright.

>>> [len(passage) for passage in PASSAGES]
[137, 81, 74]
"""

from collections.abc import Callable
from importlib.resources import files
from typing import NamedTuple

import torch
from rich.table import Column, Table
from torch import Tensor

from headwise.reports import Report
from headwise.wording import in_language, tr
from headwise_textbook.reconstruct import EPOCHS, Sentences, trained_on

# Water Margin, chapters 1 to 3: a paragraph of each.
PASSAGES = tuple(files("headwise_textbook").joinpath("passages.txt").read_text(encoding="utf-8").split())
BRIGHT = 2.0  # times the uniform weight
# What the tutorial names: words of the first passage, and which of their characters is the query and which the key.
PAIRS = ("宋仁宗天", 0, 3), ("天子", 0, 1), ("天子", 1, 0), ("鳳閣", 0, 1), ("鳳閣", 1, 0)
MARKS = frozenset("，。：；？“”")
KEYS = {
    "itself": tr("the character itself"),
    "beside": tr("the characters beside it"),
    "first": tr("the first character"),
    "marks": tr("punctuation"),
    "padding": tr("padding"),
}


class Demonstration(NamedTuple):
    """What came out."""

    report: Report  # as that of `reconstruct`
    keys: dict[str, Tensor]  # kind → mean weight of real characters on such a key, relative to uniform, [heads]
    pairs: dict[str, Tensor]  # "query → key" → weight relative to uniform, [heads]
    bright: float  # share of all cells between real characters


def demonstrate(
    passages: tuple[str, ...] = PASSAGES,
    *,
    seed: int = 0,
    epochs: int = EPOCHS,
    progress: Callable[[str, int, int], None] | None = None,
) -> Demonstration:
    """Train as the tutorial does, and measure before dropout what its pictures are said to show.

    progress: told ("training", epochs done, of all).
    """
    report = trained_on(Sentences(list(passages), []), seed=seed, epochs=epochs, progress=progress)
    weights = torch.stack([torch.as_tensor(passage.maps[0]) for passage in report.passages])  # [passages, heads, n, n]
    n = weights.shape[-1]
    weights, at = weights * n, torch.arange(n)
    of = {kind: torch.zeros(len(passages), n, n, dtype=torch.bool) for kind in KEYS}  # which cells are of a kind
    real = torch.stack([at < len(passage) for passage in passages])
    of["itself"] |= at[:, None] == at
    of["beside"] |= (at[:, None] - at).abs() == 1
    of["first"] |= at == 0
    for i, passage in enumerate(passages):
        of["marks"][i, :, [j for j, character in enumerate(passage) if character in MARKS]] = True
    inner = real[:, :, None] & real[:, None]
    cells = {kind: those & inner for kind, those in of.items()} | {"padding": real[:, :, None] & ~real[:, None]}
    means = {
        kind: (weights * those[:, None]).sum((0, 2, 3)) / those.sum() for kind, those in cells.items() if those.any()
    }
    pairs: dict[str, Tensor] = {}
    for words, query, key in PAIRS:
        for passage, one in zip(passages, weights, strict=True):
            if (begin := passage.find(words)) >= 0:
                pairs.setdefault(f"{words[query]} → {words[key]}", one[:, begin + query, begin + key])
    bright = (weights >= BRIGHT)[inner[:, None].expand_as(weights)].float().mean()
    return Demonstration(report, means, pairs, float(bright))


def brightness(found: Demonstration, lang: str) -> Table:
    """For each kind of key and each pair the weight of each head relative to uniform, and whether that is bright."""
    heads = [in_language(tr("head {head}", head=head), lang) for head in range(found.report.shape[1])]
    table = Table("", *(Column(head, justify="right") for head in heads), box=None, pad_edge=False, header_style="dim")
    for name, values in ({KEYS[kind]: values for kind, values in found.keys.items()} | found.pairs).items():
        said = (
            tr("{value:.1f} bright", value=value) if value >= BRIGHT else tr("{value:.1f} dark", value=value)
            for value in values.tolist()
        )
        table.add_row(in_language(name, lang), *(in_language(one, lang) for one in said))
    return table
