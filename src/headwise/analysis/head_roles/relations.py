"""Relations between words of the text: whether a head attends along dependency arcs (Voita et al. 2019), or from a
mention to an earlier one of the same entity (Clark et al. 2019 §4.3), compared with the best simple rule.
"""

import unicodedata
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.head_roles.conllu import Sentence
from headwise.analysis.head_roles.score import Choice
from headwise.analysis.head_roles.tally import pooled
from headwise.analysis.head_roles.tokens import is_marker
from headwise.errors import ConfigError, ShapeError, TextError
from headwise.map import AttentionMap

DIRECTIONS = ("dependent → head", "head → dependent")
UNKNOWN = {"[UNK]", "<unk>"}
FARTHEST = 10  # words, of the fixed offsets that the baseline chooses from


@dataclass(frozen=True)
class Placed:
    """A sentence aligned to the tokens of an input.

    Attributes:
        words: token range [start, stop) of each word, in order. batch: the batch entry of the sentence.
        arcs: (dependent, head, relation), indices of words.
    """

    words: tuple[tuple[int, int], ...]
    arcs: tuple[tuple[int, int, str], ...]
    batch: int = 0


def place_words(sentence: Sentence, pieces: Sequence[str], *, start: int = 0, batch: int = 0) -> Placed:
    """Find the words of a sentence in the texts of the tokens, from token `start`.

    Markers such as [CLS] and white space are skipped; case and accents may differ; [UNK] matches any word.

    Args:
        sentence: its words. pieces: the text of each token. start: the first token. batch: index of the batch entry.
    Returns:
        A `Placed`: the words with their tokens.
    Raises:
        TextError: naming the first word that the pieces do not spell.
    """
    at, ranges = start, []
    for number, word in enumerate(sentence.words):
        while at < len(pieces) and (not pieces[at].strip() or _passed(pieces[at])):
            at += 1
        first, left = at, _letters(word)
        while left and at < len(pieces):
            if pieces[at] in UNKNOWN and at == first:
                left, at = "", at + 1
                break
            part = _letters(pieces[at])
            if not left.startswith(part):
                break
            left, at = left[len(part) :], at + 1
        if left or at == first:
            here = repr(pieces[at]) if at < len(pieces) else "the end"
            raise TextError(
                f"pieces: word {number + 1} of the sentence at line {sentence.line}, {word!r}, was not found at piece "
                f"{first}, which is {here}; give start=, or the pieces of this sentence"
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
    """For each relation in both directions, how often the word with the most weight is the right one.

    Weights to a word are summed over its tokens, and weights from a word are averaged; candidates are the other words
    of the sentence in sight (Clark et al. 2019 §4.1). Cases whose right word is masked are not counted.
    """
    for sentence in placed:
        _check(sentence, maps[0])
    names = sorted({relation for sentence in placed for _, _, relation in sentence.arcs})
    right = {(name, way): [] for name in names for way in DIRECTIONS}  # type: dict[tuple[str, str], list[np.ndarray]]
    cases = {key: [0] * len(placed) for key in right}
    total: Counter[tuple[str, str]] = Counter()
    rules: dict[tuple[str, str], Counter[str]] = {key: Counter() for key in right}
    for index, sentence in enumerate(placed):
        picked, seen = zip(*(_picked(amap, sentence) for amap in maps), strict=True)
        best = torch.stack(picked)  # [layers, h, words]
        may = torch.stack(seen).all(0)  # [words, words]
        sums = {key: np.zeros(best.shape[:2]) for key in right}
        for dependent, head, relation in sentence.arcs:
            for way, query, target in ((DIRECTIONS[0], dependent, head), (DIRECTIONS[1], head, dependent)):
                key = relation, way
                total[key] += 1
                if may[query, target]:
                    cases[key][index] += 1
                    sums[key] += (best[:, :, query] == target).numpy()
                    if abs(target - query) <= FARTHEST:
                        rules[key][f"offset {target - query:+d}".replace("-", "−")] += 1
        for key, value in sums.items():
            right[key].append(value)
    return {
        f"{name}, {way}": Choice(
            pooled(np.stack(right[name, way], 1)), pooled(np.array([cases[name, way]]))[0], total[name, way],
            rules[name, way],
        )
        for name, way in right
    }  # fmt: skip


def _picked(amap: AttentionMap, sentence: Placed) -> tuple[Tensor, Tensor]:
    """The word on which each word has most weight, [h, words] (−1 for none), and the words in sight of each
    [words, words]."""
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
        raise ConfigError(f"arcs: require self-attention, got {n} queries and {m} keys")
    if not 0 <= sentence.batch < b:
        raise ShapeError(f"arcs: a sentence in batch entry {sentence.batch}, expected 0 to {b - 1}")
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
    """The text without case, accents and blanks, as uncased tokenizers write it."""
    parts = unicodedata.normalize("NFKD", text.casefold())
    return "".join(c for c in parts if not unicodedata.combining(c) and not c.isspace())


NEAREST, SAME_HEAD = "nearest mention", "nearest mention with the same head, else the nearest"


@dataclass(frozen=True)
class Mention:
    """A mention of an entity.

    Attributes:
        token: of its head word, on the key axis. entity: what is mentioned; equal for equal entities.
        batch: the batch entry of the mention.
    """

    token: int
    entity: Hashable
    batch: int = 0


@torch.no_grad()
def coreference(
    maps: Sequence[AttentionMap], mentions: Sequence[Mention], heads: Sequence[Sequence[Hashable]] | None
) -> Choice:
    """How often, among all earlier mentions in sight, the one with the most weight is of the same entity.

    Cases are mentions with an earlier mention of their entity; those with none of them in sight, or without a query,
    are not counted.

    Args:
        heads: the text or id of each token, one list or one a batch entry, for the rule of equal head words; or None.
    """
    b, _, n, m = maps[0].shape
    if n > m:
        raise ConfigError(f"mentions: require self-attention, got {n} queries and {m} keys")
    for mention in mentions:
        if not (0 <= mention.token < m and 0 <= mention.batch < b):
            raise ShapeError(f"mentions: {mention}, expected a token of 0 to {m - 1} and a batch entry of 0 to {b - 1}")
    places = {(mention.batch, mention.token) for mention in mentions}
    if len(places) < len(mentions):
        raise ConfigError("mentions: two of them have the same head token; keep the larger one")
    right, cases, total = [], [], 0
    rules: Counter[str] = Counter({NEAREST: 0} if heads is None else {NEAREST: 0, SAME_HEAD: 0})
    for batch in sorted({mention.batch for mention in mentions}):
        here = sorted((x for x in mentions if x.batch == batch), key=lambda x: x.token)
        weights, seen = zip(*(_between(amap, batch, [x.token for x in here]) for amap in maps), strict=True)
        found, may = (
            np.stack(weights),
            np.logical_and.reduce(seen),
        )  # [layers, h, mentions, mentions], [mentions, mentions]
        for i, mention in enumerate(here):
            same = np.array([x.entity == mention.entity for x in here[:i]], bool)
            if not same.any():
                continue
            total += 1
            candidates = np.flatnonzero(may[i, :i])
            if not same[candidates].any():
                continue
            best = candidates[found[:, :, i, candidates].argmax(-1)]
            right.append(same[best].astype(np.float64))
            cases.append(1.0)
            rules[NEAREST] += int(same[candidates[-1]])
            if heads is not None:
                words = heads[batch if len(heads) > 1 else 0]
                alike = [j for j in candidates if words[here[j].token] == words[mention.token]]
                rules[SAME_HEAD] += int(same[(alike or list(candidates))[-1]])
    layers, h = len(maps), maps[0].shape[1]
    stacked = np.stack(right, 1) if right else np.zeros((layers, 0, h))
    return Choice(pooled(stacked), pooled(np.array([cases]))[0], total, rules)


def _between(amap: AttentionMap, batch: int, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Weights between the tokens [h, tokens, tokens], and whether the second of two is in sight of the first in every
    head; 0 and False for tokens without a query."""
    shift = amap.rule.grid.shift
    at = torch.tensor(tokens)
    rows = at[at >= shift] - shift
    weights = torch.zeros(amap.shape[1], len(tokens), len(tokens), dtype=torch.float64)
    seen = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for i, row in enumerate(rows.tolist(), len(at) - len(rows)):
        weights[:, i] = amap[batch, :, row, : tokens[-1] + 1].double().cpu()[:, at]
    allowed = amap.mask.allowed(rows, at, amap.rule.grid).cpu()
    seen[len(at) - len(rows) :] = allowed[batch if len(allowed) > 1 else 0].all(0)
    return weights.numpy(), seen.numpy()
