"""One text on its way from characters to tiles: its state, and what is known of it so far."""

import bisect
import re
import secrets
import threading
from itertools import accumulate
from typing import Any

from headwise.map import AttentionMap
from headwise.measures import MEASURES
from headwise.subject import Reading, Subject
from headwise.viewer.pyramid import HeadPyramid, Levels
from headwise.viewer.tiles import Unwanted

STATISTICS = (
    "entropy", "normalized_entropy", "effective_keys", "max_logit", "mean_distance", "local_mass", "sink_mass",
    "previous_mass", "self_mass",
)  # fmt: skip
READING, POOLING, READY, FAILED, CANCELLED = "reading", "pooling", "ready", "failed", "cancelled"
Head = tuple[int, int]  # layer, head


class Text:
    """What a worker thread finds out about a text, and what the server tells of it.

    `state` goes from reading over pooling to ready, or ends in failed or cancelled. Every attribute is written by the
    worker alone and only ever replaced, so that the server reads without a lock.
    """

    def __init__(self, subject: Subject, reading: Reading, title: str) -> None:
        self.id = secrets.token_urlsafe(9)
        self.subject, self.reading, self.title = subject, reading, title
        self.state, self.what, self.error = READING, "waiting", ""
        self.done, self.of = 0, 1
        self.levels: Levels | None = None
        self.heads: dict[Head, AttentionMap] = {}
        self.pyramids: dict[Head, HeadPyramid] = {}
        self.statistics: dict[str, dict[str, Any]] = {}
        self.warnings: list[str] = []
        self.n = len(reading)
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def wanted(self) -> bool:
        """False once it has failed or was cancelled."""
        return not self._ended.is_set()

    def advance(self, state: str) -> None:
        """Go on to the next state. Raises Unwanted if it was cancelled."""
        with self._lock:
            if self._ended.is_set():
                raise Unwanted
            self.state = state

    def cancel(self) -> None:
        """Ask the worker to give it up; one that has failed stays so."""
        self._end(CANCELLED)

    def fail(self, error: str) -> None:
        """It cannot be read; one that was cancelled stays so."""
        self._end(FAILED, error)

    def let_go(self) -> None:
        """Forget all that takes memory."""
        self.heads, self.pyramids = {}, {}
        self.reading = Reading("", self.reading.ids[:0], [], [], [], self.reading.remarks)

    def _end(self, state: str, error: str = "") -> None:
        with self._lock:
            if not self._ended.is_set():
                self._ended.set()
                self.state, self.error = state, error

    def tell(self, what: str, done: int, of: int) -> None:
        """Progress."""
        self.what, self.done, self.of = what, done, of

    @property
    def order(self) -> list[Head]:
        """All heads, by layer and head."""
        return [(layer, head) for layer, count in enumerate(self.subject.heads) for head in range(count)]

    def status(self) -> dict[str, Any]:
        """As the page polls it."""
        levels = self.levels
        return {
            "id": self.id,
            "state": self.state,
            "what": self.what,
            "done": self.done,
            "of": self.of,
            "error": self.error or None,
            "title": self.title,
            "n": self.n,
            "base": levels.base if levels else None,
            "coarsest": levels.coarsest if levels else None,
            "statistics": self.statistics,
            "notes": [*self.subject.remarks(self.n), *self.reading.remarks, *self.warnings],
        }

    def ahead(self, start: int, stop: int) -> list[str]:
        """What stands before each of these tokens and is in none: blanks that the tokenizer drops, mostly nothing."""
        spans, first = self.reading.spans, start
        while first > 0 and spans[first - 1][0] == spans[first - 1][1]:  # special tokens stand nowhere
            first -= 1
        end = spans[first - 1][1] if first else 0
        found = []
        for begin, after in spans[start:stop]:
            found.append(self.reading.text[end:begin] if begin < after else "")
            end = max(end, after) if begin < after else end
        return found

    def find(self, wanted: str, limit: int) -> tuple[list[int], bool]:
        """Tokens at which `wanted` begins in the text, whatever its case, ascending, and whether there are more."""
        spans = self.reading.spans
        ends = list(accumulate((end for _, end in spans), max))  # special tokens at the end stand nowhere
        found: list[int] = []
        for match in re.finditer(re.escape(wanted), self.reading.text, re.IGNORECASE):
            token = bisect.bisect_right(ends, match.start())
            if token >= len(spans):
                break
            if found and found[-1] == token:
                continue
            if len(found) == limit:
                return found, True
            found.append(token)
        return found, False


def statistics_of(maps: list[AttentionMap]) -> dict[str, dict[str, Any]]:
    """name → unit, what it is, and values [layers][heads], of what was measured with the maps; None for NaN."""
    found = {}
    for name in STATISTICS:
        measure: Any = MEASURES[name]()
        values = [amap.measured[name][0].tolist() if amap.measured is not None else [] for amap in maps]
        about = " ".join((type(measure).__doc__ or "").split("\n\n")[0].split())
        found[name] = {"unit": measure.unit, "about": about, "values": [[_number(x) for x in row] for row in values]}
    return found


def warnings_of(maps: list[AttentionMap]) -> list[str]:
    """A sentence for each head whose scores are not all finite: its map shows such queries as if they saw nothing."""
    found = []
    for layer, amap in enumerate(maps):
        bad = (amap.lse.isnan() | (amap.lse == float("inf"))).sum((0, 2)).tolist()
        found += [
            f"Layer {layer}, head {head}: the scores of {count} queries are NaN or infinite; nothing is shown of them."
            for head, count in enumerate(bad)
            if count
        ]
    return found


def _number(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if abs(value) < float("inf") else None
