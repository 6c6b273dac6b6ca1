"""Whether a head attends along dependency arcs (Voita et al. 2019), also from CoNLL-U files, or from a mention to an
earlier one of the same entity (Clark et al. 2019 §4.3), compared with the best simple rule."""

import os
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.head_roles.score import Choice, is_marker
from headwise.analysis.head_roles.tally import pooled
from headwise.base.files import check_regular
from headwise.errors import ConfigError, ShapeError, TextError
from headwise.map import AttentionMap

COLUMNS = 10  # ID FORM LEMMA UPOS XPOS FEATS HEAD DEPREL DEPS MISC


@dataclass(frozen=True)
class Sentence:
    """A sentence with its tree: of each word the index of its head, −1 for the root, and its relation to it, such as
    "nsubj"; the first line in the file, from 1."""

    words: tuple[str, ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]
    line: int = 1


def read_conllu(path: str | os.PathLike[str]) -> list[Sentence]:
    """Read the sentences of a CoNLL-U file.

    Lines of multiword tokens (3-4) and of empty nodes (3.1) are skipped: arcs are between words.

    Raises:
        TextError: if the file cannot be read, is not UTF-8, or holds a line that is not CoNLL-U or arcs that are not a
            tree; the message names the line.
    """
    name = str(path)
    try:
        check_regular(path)
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TextError(f"{name!r} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise TextError(f"{name!r} is not UTF-8 at byte {error.start}; CoNLL-U files are") from None
    return parse_conllu(text.split("\n"), name)


def parse_conllu(lines: Iterable[str], name: str = "CoNLL-U") -> list[Sentence]:
    """Read sentences from lines; errors call them `name`."""
    sentences: list[Sentence] = []
    block: list[tuple[int, list[str]]] = []  # line number and columns of each word
    for number, line in enumerate([*lines, ""], 1):
        line = line.rstrip("\r\n")
        if not line.strip():
            if block:
                sentences.append(_sentence(block, name))
            block = []
        elif not line.startswith("#"):
            columns = line.split("\t")
            if len(columns) != COLUMNS:
                hint = "; are they separated by spaces instead of tabs?" if len(columns) == 1 else ""
                raise TextError(f"{name}, line {number}: {len(columns)} columns, expected {COLUMNS}{hint}")
            if not _is_skipped(columns[0], number, name):
                block.append((number, columns))
    return sentences


def _is_skipped(identity: str, number: int, name: str) -> bool:
    """Whether the line is a multiword token or an empty node."""
    for sign in "-.":
        parts = identity.split(sign)
        if len(parts) == 2 and all(part.isdecimal() for part in parts):
            return True
    if not identity.isdecimal():
        raise TextError(f"{name}, line {number}: ID {identity!r}, expected a number such as 3, 3-4 or 3.1")
    return False


def _sentence(block: list[tuple[int, list[str]]], name: str) -> Sentence:
    heads = []
    for place, (number, columns) in enumerate(block, 1):
        where = f"{name}, line {number}"
        if int(columns[0]) != place:
            raise TextError(f"{where}: ID {columns[0]}, expected {place}: words are counted from 1 in each sentence")
        if not columns[1] or columns[1] != columns[1].strip():
            raise TextError(f"{where}: FORM {columns[1]!r}, expected a word")
        if not columns[6].isdecimal() or not 0 <= int(columns[6]) <= len(block):
            raise TextError(f"{where}: HEAD {columns[6]!r}, expected 0 (the root) to {len(block)}, a word's ID")
        if columns[7] in ("", "_"):
            raise TextError(f"{where}: DEPREL {columns[7]!r}, expected a relation such as nsubj")
        heads.append(int(columns[6]) - 1)
    _check_tree(heads, [number for number, _ in block], name)
    return Sentence(
        tuple(columns[1] for _, columns in block), tuple(heads), tuple(columns[7] for _, columns in block), block[0][0]
    )


def _check_tree(heads: list[int], numbers: list[int], name: str) -> None:
    roots = [i for i, head in enumerate(heads) if head < 0]
    if len(roots) != 1:
        raise TextError(f"{name}, line {numbers[0]}: {len(roots)} words have HEAD 0 in this sentence, expected one")
    safe = set(roots)
    for start in range(len(heads)):
        path = []
        at = start
        while at not in safe:
            if at in path:
                raise TextError(f"{name}, line {numbers[at]}: following HEAD from this word leads back to it")
            path.append(at)
            at = heads[at]
        safe.update(path)


DIRECTIONS = ("dependent → head", "head → dependent")
UNKNOWN = {"[UNK]", "<unk>"}
FARTHEST = 10  # words, of the fixed offsets that the baseline chooses from


@dataclass(frozen=True)
class Placed:
    """A sentence aligned to the tokens of an input."""

    words: tuple[tuple[int, int], ...]  # token range [start, stop) of each word, in order
    arcs: tuple[tuple[int, int, str], ...]  # (dependent, head, relation), indices of words
    batch: int = 0  # the batch entry of the sentence


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
        while at < len(pieces) and (not pieces[at].strip() or (is_marker(pieces[at]) and pieces[at] not in UNKNOWN)):
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
    """For each relation in both directions, how often the word with the most weight is the right one: summed over the
    tokens to a word, averaged over those from it (Clark et al. 2019 §4.1). Masked cases do not count."""
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
    """The word on which each word has most weight, [h, words] (−1: none), and the words in sight [words, words]."""
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
    """How often, among all earlier mentions in sight, the one with the most weight is of the same entity; cases with
    none in sight do not count. heads: the text or id of each token, for the rule of equal head words."""
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
    """Weights between the tokens [h, tokens, tokens], and whether the second is in sight of the first in every head."""
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
