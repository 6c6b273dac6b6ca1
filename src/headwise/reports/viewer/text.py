"""One text on its way from characters to tiles: its state, and what is known of it so far."""

import bisect
import re
import secrets
import threading
from itertools import accumulate
from typing import Any

from headwise.lm.loading import LoadedModel, TokenizedText
from headwise.lm.loading.remarks import Remark
from headwise.map import AttentionMap
from headwise.reports.viewer.pyramid import HeadPyramid, Levels
from headwise.reports.viewer.tiles import Unwanted
from headwise.stats import describe

READING, READY, FAILED, CANCELLED = "reading", "ready", "failed", "cancelled"
Head = tuple[int, int]  # layer, head


class Text:
    """What a worker thread finds out about a text, and what the server tells of it.

    `state` goes from reading to ready, or ends in failed or cancelled. Every attribute is written by the worker alone
    and only ever replaced, so that the server reads without a lock.

    Attributes:
        heads: the maps of the layers that have been read. pyramids: the levels of those that are drawn, in this order.
    """

    def __init__(self, subject: LoadedModel, reading: TokenizedText, title: str, levels: Levels) -> None:
        self.id = secrets.token_urlsafe(9)
        self.subject, self.reading, self.title, self.levels = subject, reading, title, levels
        self.state, self.what, self.layer = READING, "waiting", 0
        self.error: Remark | None = None
        self.done, self.of = 0, 1
        self.heads: dict[Head, AttentionMap] = {}
        self.pyramids: dict[Head, HeadPyramid] = {}
        self.statistics: dict[str, dict[str, Any]] = {}
        self.warnings: list[Remark] = []
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

    def fail(self, error: Remark) -> None:
        """It cannot be read; one that was cancelled stays so."""
        self._end(FAILED, error)

    def let_go(self) -> None:
        """Forget all that takes memory."""
        self.heads, self.pyramids = {}, {}
        self.reading = TokenizedText("", self.reading.ids[:0], [], [], [], self.reading.remarks)

    def add_layer(self, layer: int, amap: AttentionMap) -> None:
        """The next layer has been read."""
        self.statistics = with_layer(self.statistics, amap)
        self.warnings = [*self.warnings, *warnings_of(layer, amap)]
        self.heads = {**self.heads, **{(layer, head): amap.head(0, head) for head in range(amap.shape[1])}}

    def add_pyramid(self, place: Head, pyramid: HeadPyramid) -> None:
        """The next head is drawn."""
        self.pyramids = {**self.pyramids, place: pyramid}

    def _end(self, state: str, error: Remark | None = None) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._ended.set()
                self.state, self.error = state, error

    def tell(self, what: str, done: int, of: int, layer: int) -> None:
        """Progress: what is being done, in which layer, and how much of all that there is to do."""
        self.what, self.done, self.of, self.layer = what, done, of, layer

    def status(self) -> dict[str, Any]:
        """As the page polls it."""
        levels = self.levels
        return {
            "id": self.id,
            "state": self.state,
            "what": self.what,
            "done": self.done,
            "of": self.of,
            "layer": self.layer,
            "drawn": len(self.pyramids),
            "error": None if self.error is None else self.error.to_dict(),
            "title": self.title,
            "n": self.n,
            "base": levels.base,
            "coarsest": levels.coarsest,
            "statistics": self.statistics,
            "notes": [
                note.to_dict() for note in (*self.subject.remarks(self.n), *self.reading.remarks, *self.warnings)
            ],
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


def with_layer(so_far: dict[str, dict[str, Any]], amap: AttentionMap) -> dict[str, dict[str, Any]]:
    """name → unit, what it is, and values [layers][heads], of what was measured with the maps of the layers so far and
    the next one; None for NaN."""
    found = {}
    for name, measured in (amap.measured or {}).items():
        words = describe(name)
        unit, about = ("", "") if words is None else (words.unit, words.about)
        before = so_far[name]["values"] if so_far else []
        found[name] = {"unit": unit, "about": about, "values": [*before, [_number(x) for x in measured[0].tolist()]]}
    return found


def warnings_of(layer: int, amap: AttentionMap) -> list[Remark]:
    """A sentence for each head whose scores are not all finite: its map shows such queries as if they saw nothing."""
    bad = (amap.lse.isnan() | (amap.lse == float("inf"))).sum((0, 2)).tolist()
    sentence = (
        "Layer {layer}, head {head}: the scores of {count:,} queries are NaN or infinite; nothing is shown of them."
    )
    return [
        Remark("not_finite", sentence, layer=layer, head=head, count=count) for head, count in enumerate(bad) if count
    ]


def _number(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if abs(value) < float("inf") else None
