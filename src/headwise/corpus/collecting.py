"""The passages of a unit, collected window by window in memory that does not depend on their number."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headwise.corpus.passages import Collected, CorpusPassage
from headwise.corpus.windows import TextWindow

BEFORE, AFTER = 24, 8  # tokens that are shown around a query
AROUND = 2  # and on each side of a key outside of these


@dataclass(frozen=True)
class OfWindow:
    """The strongest query of each head in a window: strength [h], query [h], and its keys and weights, each [h, count];
    key −1 beyond those that the query may attend to."""

    strength: np.ndarray
    query: np.ndarray
    keys: np.ndarray
    weights: np.ndarray


class _Kept(NamedTuple):
    strength: float
    window: TextWindow
    found: OfWindow


class Collector:
    """Keeps the strongest passages of each head in a unit, and a sample of its windows.

    Args:
        most: how many of each. heads: how many heads there are. lines: whether each text of a file, by its number, is a
            document of its own; a text file is one text, whose windows are taken as documents.
        path: of a file, by its number. piece: the text of a special token, by its id.
    """

    def __init__(
        self, most: int, heads: int, *, lines: Callable[[int], bool], path: Callable[[int], str],
        piece: Callable[[int], str],
    ) -> None:  # fmt: skip
        self._most, self._heads, self._lines, self._path, self._piece = most, heads, lines, path, piece
        self._best: list[dict[tuple[int, str, int], _Kept]] = [{} for _ in range(heads)]
        self._least = np.full(heads, -np.inf)
        self._sample: list[tuple[int, TextWindow, OfWindow]] = []

    def add(self, window: TextWindow, found: OfWindow) -> None:
        """Add a window; they come in any order."""
        for head in np.flatnonzero((found.strength >= self._least) & (found.strength > -np.inf)).tolist():
            self._offer(head, _Kept(float(found.strength[head]), window, found))
        at = _random(window)
        if len(self._sample) < self._most or at < self._sample[-1][0]:
            self._sample = sorted([*self._sample, (at, window, found)], key=lambda one: one[0])[: self._most]

    def _offer(self, head: int, kept: _Kept) -> None:
        best = self._best[head]
        document = self._document(kept.window, int(kept.found.query[head]))
        before = best.get(document)
        if before is not None and _order(before) <= _order(kept):
            return
        best[document] = kept
        if len(best) > self._most:
            del best[max(best, key=lambda one: _order(best[one]))]
        if len(best) == self._most:
            self._least[head] = min(one.strength for one in best.values())

    def _document(self, window: TextWindow, query: int) -> tuple[int, str, int]:
        """What a head has one passage of: a text; of a text file, as many tokens as a window has."""
        if self._lines(window.source):
            return window.source, window.where, 0
        own = np.flatnonzero(~window.special.numpy())
        return window.source, window.where, (window.first + query - int(own[0])) // window.room

    def collected(self) -> Collected:
        """The passages."""
        strongest = [
            [self._passage(kept.window, kept.found, head) for kept in sorted(best.values(), key=_order)]
            for head, best in enumerate(self._best)
        ]
        sampled = [
            (at, [
                self._passage(window, found, head) if found.strength[head] > -np.inf else None
                for head in range(self._heads)
            ])
            for at, window, found in self._sample
        ]  # fmt: skip
        return Collected(self._most, strongest, sampled)

    def _passage(self, window: TextWindow, found: OfWindow, head: int) -> CorpusPassage:
        query, known = int(found.query[head]), found.keys[head] >= 0
        weights = dict(zip(found.keys[head][known].tolist(), found.weights[head][known], strict=True))
        n = len(window.ids)
        near = set(range(max(0, query - BEFORE), min(n, query + AFTER + 1)))
        for key in weights.keys() - near:
            near |= set(range(max(0, key - AROUND), min(n, key + AROUND + 1)))
        shown = sorted(near)
        return CorpusPassage(
            _short(found.strength[head]), self._path(window.source), window.where, window.first, query, tuple(shown),
            tuple(self._token(window, at) for at in shown),
            tuple(_short(weights[at]) if at in weights else None for at in shown),
        )  # fmt: skip

    def _token(self, window: TextWindow, at: int) -> str:
        return self._piece(int(window.ids[at])) if bool(window.special[at]) else window.words[at]


def _order(kept: _Kept) -> tuple[float, int]:
    return -kept.strength, kept.window.number


def _random(window: TextWindow) -> int:
    """A number that depends on the place of a window only: those with the least numbers are a sample without order."""
    place = f"{window.source} {window.where} {window.first}".encode()
    return int.from_bytes(hashlib.blake2b(place, digest_size=7).digest(), "big")


def _short(x: np.floating) -> float:
    """A float32 as the shortest number that is read back as it."""
    return float(str(np.float32(x)))


def of_batch(arrays: Sequence[np.ndarray], entry: int) -> OfWindow:
    """The part of one batch entry in the arrays of `OfWindow`, each [b, …]; a copy, so that the others are freed."""
    return OfWindow(*(array[entry].copy() for array in arrays))
