"""Whether a head looks along dependency arcs, beside the fixed offset that is right most often (Voita et al. 2019)."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.head_roles.choices import Choice
from headwise.analysis.head_roles.conllu import Sentence
from headwise.analysis.head_roles.given import is_marker, plain
from headwise.analysis.head_roles.tally import pooled
from headwise.errors import ConfigError, ShapeError, TextError
from headwise.map import AttentionMap

DIRECTIONS = ("dependent → head", "head → dependent")
UNKNOWN = {"[UNK]", "<unk>"}
FARTHEST = 10  # words, of the fixed offsets that the baseline chooses from


@dataclass(frozen=True)
class Placed:
    """A sentence on the tokens of an input.

    Attributes:
        words: token range [start, stop) of each word, in order. batch: the batch entry that it stands in.
        arcs: (dependent, head, relation), indices of words.
    """

    words: tuple[tuple[int, int], ...]
    arcs: tuple[tuple[int, int, str], ...]
    batch: int = 0


def place_words(sentence: Sentence, pieces: Sequence[str], *, start: int = 0, batch: int = 0) -> Placed:
    """The sentence's words found in the text of the tokens, from token `start` on.

    Markers such as [CLS] and white space are passed over; case and accents may differ; [UNK] stands for a word.

    Raises:
        TextError: naming the first word that the pieces do not spell.
    """
    at, ranges = start, []
    for number, word in enumerate(sentence.words):
        while at < len(pieces) and (not plain(pieces[at]).strip() or _passed(pieces[at])):
            at += 1
        first, left = at, _letters(word)
        while left and at < len(pieces):
            if pieces[at] in UNKNOWN and at == first:
                left, at = "", at + 1
                break
            part = _letters(plain(pieces[at]))
            if not left.startswith(part):
                break
            left, at = left[len(part) :], at + 1
        if left or at == first:
            here = repr(pieces[at]) if at < len(pieces) else "the end"
            raise TextError(
                f"pieces: word {number + 1} of the sentence at line {sentence.line}, {word!r}, does not stand at piece "
                f"{first}: found {here}; give start=, or the pieces of this very sentence"
            )
        ranges.append((first, at))
    arcs = tuple(
        (i, head, relation)
        for i, (head, relation) in enumerate(zip(sentence.heads, sentence.relations, strict=True))
        if head >= 0
    )
    return Placed(tuple(ranges), arcs, batch)


@torch.no_grad()
def syntax(maps: Sequence[AttentionMap], placed: Sequence[Placed]) -> dict[str, Choice]:
    """For each relation, both directions: how often the word with the most weight is the right one.

    Weights to a word are summed over its tokens, those from it are their mean; candidates are the other words of the
    sentence that may be seen (Clark et al. 2019 §4.1). A case in which the right word may not be seen does not count.
    """
    for sentence in placed:
        _check(sentence, maps[0])
    names = sorted({relation for sentence in placed for _, _, relation in sentence.arcs})
    right = {(name, way): [] for name in names for way in DIRECTIONS}  # type: dict[tuple[str, str], list[np.ndarray]]
    cases = {key: [0] * len(placed) for key in right}
    asked: Counter[tuple[str, str]] = Counter()
    rules: dict[tuple[str, str], Counter[str]] = {key: Counter() for key in right}
    for index, sentence in enumerate(placed):
        picked, seen = zip(*(_picked(amap, sentence) for amap in maps), strict=True)
        best = torch.stack(picked)  # [layers, h, words]
        may = torch.stack(seen).all(0)  # [words, words]
        sums = {key: np.zeros(best.shape[:2]) for key in right}
        for dependent, head, relation in sentence.arcs:
            for way, query, target in ((DIRECTIONS[0], dependent, head), (DIRECTIONS[1], head, dependent)):
                key = relation, way
                asked[key] += 1
                if may[query, target]:
                    cases[key][index] += 1
                    sums[key] += (best[:, :, query] == target).numpy()
                    if abs(target - query) <= FARTHEST:
                        rules[key][f"offset {target - query:+d}".replace("-", "−")] += 1
        for key, value in sums.items():
            right[key].append(value)
    return {
        f"{name}, {way}": Choice(
            pooled(np.stack(right[name, way], 1)), pooled(np.array([cases[name, way]]))[0], asked[name, way],
            rules[name, way],
        )
        for name, way in right
    }  # fmt: skip


def _picked(amap: AttentionMap, sentence: Placed) -> tuple[Tensor, Tensor]:
    """The word that each word looks at most, [h, words] (−1 for none), and which words each may see [words, words]."""
    n, m = amap.shape[2:]
    first, last = min(start for start, _ in sentence.words), max(stop for _, stop in sentence.words)
    low = max(first, m - n)  # tokens before it have no query
    rows, cols = torch.arange(low, last) - (m - n), torch.arange(first, last)
    weights = amap[sentence.batch, :, low - (m - n) : last - (m - n), first:last].double().cpu()
    allowed = amap.mask.allowed(rows, cols, amap.rule.grid).cpu()
    allowed = allowed[sentence.batch if len(allowed) > 1 else 0].all(0)  # [rows, cols], of every head
    member = torch.zeros(len(sentence.words), last - first, dtype=torch.float64)
    for i, (start, stop) in enumerate(sentence.words):
        member[i, start - first : stop - first] = 1.0
    from_word = member[:, low - first :]
    whole = from_word.sum(1) == member.sum(1)  # all tokens of the word are queries
    words = from_word / from_word.sum(1, keepdim=True).clamp_min(1.0) @ weights @ member.T
    may = (from_word @ allowed.double() @ member.T > 0) & whole[:, None]
    may.fill_diagonal_(False)
    best = words.masked_fill(~may, -1.0).max(-1)
    return torch.where(best.values >= 0, best.indices, -1), may


def _check(sentence: Placed, amap: AttentionMap) -> None:
    b, _, n, m = amap.shape
    if n > m:
        raise ConfigError(f"arcs: need self attention, and there are {n} queries on {m} keys")
    if not 0 <= sentence.batch < b:
        raise ShapeError(f"arcs: a sentence in batch entry {sentence.batch}, and there are {b}")
    size = len(sentence.words)
    for start, stop in sentence.words:
        if not 0 <= start < stop <= m:
            raise ShapeError(f"arcs: a word on tokens ({start}, {stop}), expected 0 <= start < stop <= {m}, the keys")
    for dependent, head, relation in sentence.arcs:
        if not (0 <= dependent < size and 0 <= head < size) or dependent == head:
            raise ShapeError(f"arcs: ({dependent}, {head}, {relation!r}) in a sentence of {size} words")


def _passed(piece: str) -> bool:
    return is_marker(piece) and piece not in UNKNOWN


def _letters(text: str) -> str:
    """Without case, accents and blanks, as uncased tokenizers have it."""
    parts = unicodedata.normalize("NFKD", text.casefold())
    return "".join(c for c in parts if not unicodedata.combining(c) and not c.isspace())
