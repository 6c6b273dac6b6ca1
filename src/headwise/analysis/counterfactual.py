"""One word of a text is replaced: which heads look elsewhere then, and which do so for one query alone.

A head that attends from "it" to "cat" may find what "it" means, or attend to "cat" from everywhere. In "The cat sat on
the mat because it was tired", replacing "tired" by "soft" changes what "it" means and nothing else, so a head that
follows the meaning turns from "cat" to "mat". Such pairs of sentences are Winograd schemas (Levesque et al. 2012).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.analysis.checks import checked_maps, head_name
from headwise.errors import ConfigError, TextError, closest
from headwise.map import AttentionMap
from headwise.table.show import Printed
from headwise.wording import joined, tr, trn

MOST = 1024  # tokens of a text, as all pairs are compared
TURN = 0.1  # weight that a query moves, beyond the mean of all queries
LIFT = 1.5  # times the mean over all queries that it attends to what it turns from and to
EQUAL = 1e-6
SHOWN = 8
_CJK = r"\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|(?:(?![{_CJK}])\w)+|[^\w\s]")


class Change(NamedTuple):
    """How much one head attends from one word (query) to another, in both texts, and the mean of all queries that may
    see the word; layers, heads and words are counted from 0."""

    layer: int
    head: int
    query: int
    word: int
    before: float
    after: float
    mean: float
    mean_after: float

    @property
    def beyond(self) -> float:
        """The change of the weight, less that of the mean over queries."""
        return self.after - self.before - (self.mean_after - self.mean)

    @property
    def lifts(self) -> tuple[float, float]:
        """The weight divided by the mean over queries, in both texts; 0 where both are 0."""
        pairs = ((self.before, self.mean), (self.after, self.mean_after))
        one, other = (weight / mean if mean else 0.0 for weight, mean in pairs)
        return one, other


@dataclass(frozen=True, eq=False, repr=False)
class Counterfactual(Printed):
    """Attention between the words of two texts that differ in one word, as `counterfactual` returns it. It prints as a
    table of the heads that change most.

    Attributes:
        texts: both texts. words: those of the first; special tokens such as [CLS] are among them.
        swapped: the index of the word that is replaced, and its replacement.
        special: which words are special tokens.
        before, after: of each layer [h, words, words] float32: the weight from each word, the mean of its tokens, to
            each word, the sum over its tokens.
        query: the index of the word that alone is asked for as a query; None for all.
    """

    texts: tuple[str, str]
    words: tuple[str, ...]
    swapped: tuple[int, str]
    special: tuple[bool, ...]
    before: tuple[Tensor, ...]
    after: tuple[Tensor, ...]
    query: int | None = None

    def changes(self) -> list[Change]:
        """For each head the pair of words whose weight changes most beyond the mean over queries, the largest first.
        Neither is the word that was replaced, nor a special token."""
        found = []
        for layer, (one, other, mean, mean_after) in enumerate(self._layers):
            beyond = (other - mean_after) - (one - mean)
            size = beyond.abs().masked_fill(~self._pairs, -1.0).flatten(1)
            for head, place in enumerate(size.argmax(1).tolist() if self._pairs.any() else ()):
                found.append(self._change(layer, head, *divmod(place, len(self.words))))
        return sorted(found, key=lambda change: -abs(change.beyond))

    def turns(self) -> list[tuple[Change, Change]]:
        """The heads that follow the swap: how their query attends to the word that it turns from, and to the other. Of
        all words, it attends most to one in the first text and to another in the second; both weights are at least 1.5
        times the means over queries; and it moves 0.1 of its weight away and to the other beyond what these means
        move."""
        found = []
        for layer, (*maps, _, _) in enumerate(self._layers):
            best = torch.stack([one.masked_fill(~self._pairs, -1.0).argmax(-1) for one in maps])
            moved = (best[0] != best[1]) & self._pairs.any(1)
            for head, query in moved.nonzero().tolist():
                source, target = (self._change(layer, head, query, int(word)) for word in best[:, head, query])
                specific = source.lifts[0] >= LIFT and target.lifts[1] >= LIFT
                if specific and -source.beyond >= TURN and target.beyond >= TURN:
                    found.append((source, target))
        return sorted(found, key=lambda turn: turn[0].beyond - turn[1].beyond)

    @property
    def finding(self) -> str:
        """Whether a head follows the swap, in a sentence."""
        turns = [
            tr(
                "{head} (“{query}”: “{source}” → “{target}”)", head=head_name(*source[:2]),
                query=self.words[source.query], source=self.words[source.word], target=self.words[target.word],
            )
            for source, target in self.turns()
        ]  # fmt: skip
        if not self._pairs.any():
            return tr("There is no other pair of words to compare.")
        if not any(bool(((one - other).abs()[:, self._pairs] > EQUAL).any()) for one, other, *_ in self._layers):
            return tr("No weight between the other words changes.")
        if not turns:
            return tr(
                "No head turns from one word to another, so none follows the meaning here, and none is to be called a "
                "coreference head by one row of its map."
            )
        return trn(
            "{count} head turns to another word: {which}. One pair of texts shows this swap, not what a head is for.",
            "{count} heads turn to another word: {which}. One pair of texts shows this swap, not what a head is for.",
            count=len(turns), which=joined(turns),
        )  # fmt: skip

    @property
    def title(self) -> str:
        return tr("“{word}” → “{other}”: {finding}", word=self.words[self.swapped[0]], other=self.swapped[1],
                  finding=self.finding)  # fmt: skip

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Head, query and word, weights, means over queries and lifts, of the heads that change most."""
        head = [tr("head"), tr("query → word"), tr("weight"), tr("mean of all queries"), tr("lift")]
        return list(head), [
            [
                head_name(*change[:2]), f"{self.words[change.query]} → {self.words[change.word]}",
                f"{change.before:.2f} → {change.after:.2f}", f"{change.mean:.2f} → {change.mean_after:.2f}",
                "{:.1f} → {:.1f}".format(*change.lifts),
            ]
            for change in self.changes()[:SHOWN]
        ]  # fmt: skip

    def of(self, layer: int, head: int, query: str, word: str) -> Change:
        """One head and pair of words, such as `found.of(5, 11, "it", "cat")`. ConfigError or TextError if there is no
        such one."""
        if not (0 <= layer < len(self.before) and 0 <= head < len(self.before[layer])):
            raise ConfigError(f"of({layer}, {head}): there is no head {head_name(layer, head)}, counted from 0")
        return self._change(layer, head, _index(self.words, query, "query"), _index(self.words, word, "word"))

    def _change(self, layer: int, head: int, query: int, word: int) -> Change:
        numbers = (float(x[head, query, word]) for x in self._layers[layer])
        return Change(layer, head, query, word, *numbers)

    @cached_property
    def _seen(self) -> Tensor:
        """Whether a word may attend to another in any head, [words, words]; special tokens are no queries."""
        seen = torch.stack([(one > 0).any(0) for one in (*self.before, *self.after)]).any(0)
        return seen & ~torch.tensor(self.special)[:, None]

    @cached_property
    def _pairs(self) -> Tensor:
        """The pairs of words that are compared."""
        pairs = self._seen & ~torch.eye(len(self.words), dtype=torch.bool)
        pairs[:, torch.tensor(self.special)] = False
        pairs[self.swapped[0]] = pairs[:, self.swapped[0]] = False
        if self.query is not None:
            pairs[: self.query] = pairs[self.query + 1 :] = False
        return pairs

    @cached_property
    def _layers(self) -> list[tuple[Tensor, ...]]:
        """Of each layer the weights in both texts, their means over the queries that see a word, [h, words, words]."""
        seen = self._seen.float()
        maps = zip(self.before, self.after, strict=True)
        return [
            (*pair, *(((x * seen).sum(1, keepdim=True) / seen.sum(0).clamp_min(1)).expand_as(x) for x in pair))
            for pair in maps
        ]


@torch.no_grad()
def counterfactual(model: Any, text: str, word: str, other: str, *, query: str | None = None) -> Counterfactual:
    """Replace one word of a text by another, and compare what every head attends to, word by word.

        found = hw.analysis.counterfactual(hw.load_model("minilm"), "The cat sat on the mat because it was tired.",
                                           "tired", "soft", query="it")
        print(found)                       # the heads that change most, and whether one follows the meaning
        found.of(5, 11, "it", "cat")       # one head and pair of words, with the mean over queries and the lift

    The words may have different numbers of tokens: weights are summed over the tokens of a word and averaged over those
    of a query (Clark et al. 2019, 1906.04341, §4.1), so that the words of both texts correspond. Words of Chinese,
    Japanese and Korean are single characters, unless one token has several.

    Args:
        model: a `LoadedModel` (`hw.load_model`).
        text: at most 1,024 tokens.
        word: a word or phrase that the text has once. other: what replaces it.
        query: the word whose attention is compared, which the text has once; None for all.
    Returns:
        `Counterfactual`.
    Raises:
        TextError: if the text does not have a word, or has it several times; if the texts are too long, or differ in
            other tokens too. ConfigError: if both words are the same or one is empty, if the query is the word that is
            replaced, or the model is no `LoadedModel`.
    Source: Levesque et al. 2012 (Winograd schemas); the change of one word, as in causal tracing with prompts.
    """
    if not (hasattr(model, "read") and hasattr(model, "maps")):
        raise ConfigError(f"model: got {type(model).__name__}; expected a loaded model, such as hw.load_model()")
    if not word.strip() or not other.strip() or word.strip() == other.strip():
        raise ConfigError("swap: got {word!r} and {other!r}; expected two different words", word=word, other=other)
    word, other = word.strip(), other.strip()
    start, stop = _place(text, word, "swap")
    texts = text, text[:start] + other + text[stop:]
    sides = [_Side.of(model, one, (start, start + len(new))) for one, new in zip(texts, (word, other), strict=True)]
    one, two = sides
    if one.others() != two.others():
        raise TextError(
            "swap: with {other!r} for {word!r} the model divides other words into other tokens too; replace a longer "
            "part of the text, such as whole words",
            other=other,
            word=word,
        )
    at = None if query is None else _index(one.words, query, "query")
    if at == one.swapped:
        raise ConfigError("query: {query!r} is the word that is replaced; expected another one", query=query)
    if at is not None and one.special[at]:
        raise ConfigError("query: {query!r} is a special token; expected a word of the text", query=query)
    before, after = (side.between(checked_maps(list(model.maps(side.ids).values()), square=True)) for side in sides)
    swapped = one.swapped, two.words[two.swapped]
    return Counterfactual((texts[0], texts[1]), one.words, swapped, one.special, before, after, at)


class _Side(NamedTuple):
    """A text as words. groups: the tokens of each word; ids: their numbers; swapped: which word is replaced."""

    words: tuple[str, ...]
    special: tuple[bool, ...]
    groups: list[list[int]]
    ids: Tensor
    swapped: int

    @classmethod
    def of(cls, model: Any, text: str, swap: tuple[int, int]) -> "_Side":
        """Read a text, with one word at `swap`."""
        read = model.read(text)
        if len(read.ids) > MOST:
            raise TextError("swap: the text has {n:,} tokens; expected at most {most:,}", n=len(read.ids), most=MOST)
        spans = _parts(text, swap, read.spans)
        groups: list[list[int]] = [[] for _ in spans]
        alone = []  # special tokens, and those without characters of their own
        for token, (start, stop) in enumerate(read.spans):
            start += len(text[start:stop]) - len(text[start:stop].lstrip())
            inside = next((i for i, span in enumerate(spans) if start < stop and span[0] <= start < span[1]), None)
            groups[inside].append(token) if inside is not None else alone.append(token)
        found = [(tokens, text[slice(*span)], False) for tokens, span in zip(groups, spans, strict=True) if tokens]
        swapped = next(tokens for tokens, span in zip(groups, spans, strict=True) if span[0] <= swap[0] < span[1])
        if not swapped:
            raise TextError("swap: the model has no token for {word!r}", word=text[slice(*swap)])
        found += [([token], read.pieces[token], True) for token in alone]
        tokens, words, special = zip(*sorted(found, key=lambda one: one[0]), strict=True)
        return cls(tuple(words), tuple(special), list(tokens), read.ids, tokens.index(swapped))

    def others(self) -> list[tuple[str, list[int]]]:
        """All words but the one that is replaced, with the numbers of their tokens."""
        each = [(word, self.ids[group].tolist()) for word, group in zip(self.words, self.groups, strict=True)]
        return each[: self.swapped] + each[self.swapped + 1 :]

    def between(self, maps: Sequence[AttentionMap]) -> tuple[Tensor, ...]:
        """The weights between words in each layer, [h, words, words]."""
        member = torch.zeros(len(self.groups), len(self.ids))
        for i, group in enumerate(self.groups):
            member[i, group] = 1.0
        mean = member / member.sum(1, keepdim=True)
        return tuple(mean @ amap[0].float().cpu() @ member.T for amap in maps)


def _parts(text: str, swap: tuple[int, int], tokens: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The places of the words of a text; those at `swap`, or in one token, are one."""
    found = [match.span() for match in _WORD.finditer(text)]
    for start, stop in (swap, *tokens):
        inside = [span for span in found if span[0] < stop and start < span[1]]
        if len(inside) > 1:
            first = found.index(inside[0])
            found[first : first + len(inside)] = [(inside[0][0], inside[-1][1])]
    return found


def _place(text: str, word: str, argument: str) -> tuple[int, int]:
    """Where the text has a word, as a whole."""
    letter = rf"(?![{_CJK}])\w"
    pattern = (r"(?<!\w)" if re.match(letter, word) else "") + re.escape(word)
    pattern += r"(?!\w)" if re.search(letter + "$", word) else ""
    found = [match.span() for match in re.finditer(pattern, text)]
    _check_once(word, len(found), _WORD.findall(text), argument)
    return found[0]


def _index(words: Sequence[str], word: str, argument: str) -> int:
    """Which of the words it is."""
    _check_once(word, words.count(word), words, argument)
    return words.index(word)


def _check_once(word: str, count: int, words: Sequence[str], argument: str) -> None:
    if count > 1:
        raise TextError(
            "{argument}: the text has {word!r} {count} times; expected once. Give more of the text around it",
            argument=argument,
            word=word,
            count=count,
        )
    if not count:
        close = closest(word, dict.fromkeys(words))
        raise TextError(
            "{argument}: the text does not have the word {word!r}{meant}", argument=argument, word=word,
            meant=tr("; did you mean {close!r}?", close=close[0]) if close else "",
        )  # fmt: skip
