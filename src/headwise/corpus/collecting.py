"""The passages of a unit, collected window by window in memory that does not depend on their number."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headwise.corpus.passages import Collected, CorpusPassage
from headwise.corpus.windows import TextWindow

BEFORE, AFTER = 24, 8  # tokens that are shown around a query
AROUND = 2  # and on each side of a key outside of these
Keys = tuple[np.ndarray, np.ndarray]  # positions and weights


@dataclass(frozen=True)
class OfWindow:
    """The strongest query of each head in a window: strength [h] and query [h]. read: the keys with the largest weights
    of this query of a head, and these weights."""

    strength: np.ndarray
    query: np.ndarray
    read: Callable[[int], Keys]


class Floors:
    """What the passages of other units of this process leave no room for: units measured later can drop it, and the
    result is the same.

    Args:
        nothing: passages of no windows.
    """

    def __init__(self, nothing: Collected) -> None:
        self._found = nothing
        self.most, self.heads = nothing.most, len(nothing.strongest)

    def raise_by(self, found: Collected) -> None:
        """Raise the floors by the passages of a finished unit."""
        self._found.add(found)

    def least(self) -> np.ndarray:
        """The strength below which a head needs no passage, [h] float32."""
        full = [len(part) == self.most > 0 for part in self._found.strongest]
        least = [
            part[-1].strength if enough else -np.inf for part, enough in zip(self._found.strongest, full, strict=True)
        ]
        return np.array(least, np.float32)  # as strengths are: equal ones stay equal

    def largest(self) -> int:
        """The random number above which a window is not in the sample."""
        sample = self._found.sampled
        return sample[-1][0] if len(sample) == self.most > 0 else 1 << 64


class _Kept(NamedTuple):
    strength: float
    window: TextWindow
    query: int
    keys: Keys


class Collector:
    """Keeps the strongest passages of each head in a unit, and a sample of its windows.

    Args:
        floors: of the units before.
        lines: whether each text of a file, by its number, is a document of its own. A text file is one text, of which
            the tokens of a window count as a document.
        path: of a file, by its number. piece: the text of a special token, by its id.
    """

    def __init__(
        self, floors: Floors, *, lines: Callable[[int], bool], path: Callable[[int], str],
        piece: Callable[[int], str],
    ) -> None:  # fmt: skip
        self._most, self._lines, self._path, self._piece = floors.most, lines, path, piece
        self._best: list[dict[tuple[int, str, int], _Kept]] = [{} for _ in range(floors.heads)]
        self._least, self._largest = floors.least(), floors.largest()
        self._sample: list[tuple[int, list[_Kept | None]]] = []

    def add(self, window: TextWindow, found: OfWindow) -> None:
        """Add a window; they come in any order."""
        for head in np.flatnonzero((found.strength >= self._least) & (found.strength > -np.inf)).tolist():
            self._offer(head, window, found)
        at = _random(window)
        if at < self._largest:
            known = np.flatnonzero(found.strength > -np.inf).tolist()
            kept = {head: _kept(window, found, head) for head in known}
            heads = [kept.get(head) for head in range(len(self._best))]
            self._sample = sorted([*self._sample, (at, heads)], key=lambda one: one[0])[: self._most]
            if len(self._sample) == self._most:
                self._largest = min(self._largest, self._sample[-1][0])

    def _offer(self, head: int, window: TextWindow, found: OfWindow) -> None:
        best, strength = self._best[head], float(found.strength[head])
        document = self._document(window, int(found.query[head]))
        before = best.get(document)
        worst = None if len(best) < self._most else max(best, key=lambda one: _order(best[one]))
        beaten = before if before is not None else None if worst is None else best[worst]
        if beaten is not None and _order(beaten) <= (-strength, window.number):
            return
        if before is None and worst is not None:
            del best[worst]
        best[document] = _kept(window, found, head)
        if len(best) == self._most:
            self._least[head] = max(self._least[head], min(one.strength for one in best.values()))

    def _document(self, window: TextWindow, query: int) -> tuple[int, str, int]:
        """What a head has one passage of: a text; of a text file, as many tokens as a window has."""
        if self._lines(window.source):
            return window.source, window.where, 0
        own = np.flatnonzero(~window.special.numpy())
        return window.source, window.where, (window.first + query - int(own[0])) // window.room

    def collected(self) -> Collected:
        """The passages."""
        strongest = [[self._passage(kept) for kept in sorted(best.values(), key=_order)] for best in self._best]
        sampled = [
            (at, [None if kept is None else self._passage(kept) for kept in heads]) for at, heads in self._sample
        ]
        return Collected(self._most, strongest, sampled)

    def _passage(self, kept: _Kept) -> CorpusPassage:
        window, query, n = kept.window, kept.query, len(kept.window.ids)
        weights = dict(zip(kept.keys[0].tolist(), kept.keys[1], strict=True))
        near = set(range(max(0, query - BEFORE), min(n, query + AFTER + 1)))
        for key in weights.keys() - near:
            near |= set(range(max(0, key - AROUND), min(n, key + AROUND + 1)))
        shown = sorted(near)
        return CorpusPassage(
            _short(kept.strength), self._path(window.source), window.where, window.first, query, tuple(shown),
            tuple(self._token(window, at) for at in shown),
            tuple(_short(weights[at]) if at in weights else None for at in shown),
        )  # fmt: skip

    def _token(self, window: TextWindow, at: int) -> str:
        return self._piece(int(window.ids[at])) if bool(window.special[at]) else window.words[at]


def _kept(window: TextWindow, found: OfWindow, head: int) -> _Kept:
    return _Kept(float(found.strength[head]), window, int(found.query[head]), found.read(head))


def _order(kept: _Kept) -> tuple[float, int]:
    return -kept.strength, kept.window.number


def _random(window: TextWindow) -> int:
    """A number that depends on the place of a window only: those with the least numbers are a sample without order."""
    place = f"{window.source} {window.where} {window.first}".encode()
    return int.from_bytes(hashlib.blake2b(place, digest_size=7).digest(), "big")


def _short(x: np.floating | float) -> float:
    """A float32 as the shortest number that is read back as it."""
    return float(str(np.float32(x)))
