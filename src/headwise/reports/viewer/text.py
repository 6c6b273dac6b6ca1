"""One text in the viewer: its state, its maps, and its statistics so far."""

import bisect
import re
import secrets
import threading
from itertools import accumulate
from typing import Any

from torch import Tensor

from headwise.lm.loading import LoadedModel, TokenizedText
from headwise.map import AttentionMap
from headwise.reports import nonfinite
from headwise.reports.viewer.pyramid import HeadPyramid, Levels
from headwise.reports.viewer.tiles import Unwanted
from headwise.stats import describe
from headwise.wording import LANGUAGES, Message

READING, READY, FAILED, CANCELLED = "reading", "ready", "failed", "cancelled"
Head = tuple[int, int]  # layer, head


class Text:
    """A text, its results so far, and its state: reading, ready, failed or cancelled.

    Attributes are written by the worker thread only, and replaced rather than changed, so that the server reads them
    without a lock.

    Attributes:
        heads: the maps of the computed layers. pyramids: the levels of the pooled heads, in this order.
    """

    def __init__(self, subject: LoadedModel, reading: TokenizedText, title: str, levels: Levels) -> None:
        self.id = secrets.token_urlsafe(9)
        self.subject, self.reading, self.title, self.levels = subject, reading, title, levels
        self.state, self.what, self.layer = READING, "waiting", 0
        self.error: Message | None = None
        self.done, self.of = 0, 1
        self.heads: dict[Head, AttentionMap] = {}
        self.pyramids: dict[Head, HeadPyramid] = {}
        self.statistics: dict[str, dict[str, Any]] = {}
        self.warnings: list[Message] = []
        self.n = len(reading)
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def wanted(self) -> bool:
        """Whether it has neither failed nor been cancelled."""
        return not self._ended.is_set()

    def advance(self, state: str) -> None:
        """Enter the next state. Raises Unwanted if it was cancelled."""
        with self._lock:
            if self._ended.is_set():
                raise Unwanted
            self.state = state

    def cancel(self) -> None:
        """Cancel it; a failed text stays failed."""
        self._end(CANCELLED)

    def fail(self, error: Message) -> None:
        """Mark it as failed; a cancelled text stays cancelled."""
        self._end(FAILED, error)

    def let_go(self) -> None:
        """Free its memory."""
        self.heads, self.pyramids = {}, {}
        self.reading = TokenizedText("", self.reading.ids[:0], [], [], [], self.reading.remarks)

    def add_layer(self, layer: int, amap: AttentionMap) -> None:
        """Add the map and the statistics of the next layer."""
        self.statistics = with_layer(self.statistics, amap)
        self.warnings = [*self.warnings, *nonfinite.remarks(layer, nonfinite.counted(amap))]
        self.heads = {**self.heads, **{(layer, head): amap.head(0, head) for head in range(amap.shape[1])}}

    def add_pyramid(self, place: Head, pyramid: HeadPyramid) -> None:
        """Add the pyramid of the next head."""
        self.pyramids = {**self.pyramids, place: pyramid}

    def _end(self, state: str, error: Message | None = None) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._ended.set()
                self.state, self.error = state, error

    def progress(self, what: str, done: int, of: int, layer: int) -> None:
        """Set the progress: the kind of work, the amount done of the total, and the layer."""
        self.what, self.done, self.of, self.layer = what, done, of, layer

    def status(self) -> dict[str, Any]:
        """The state as JSON, polled by the page."""
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
        """The text before each of these tokens that belongs to no token, such as blanks that the tokenizer drops."""
        spans, first = self.reading.spans, start
        while first > 0 and spans[first - 1][0] == spans[first - 1][1]:  # special tokens have no place in the text
            first -= 1
        end = spans[first - 1][1] if first else 0
        found = []
        for begin, after in spans[start:stop]:
            found.append(self.reading.text[end:begin] if begin < after else "")
            end = max(end, after) if begin < after else end
        return found

    def tops(self, place: Head, token: int, k: int) -> dict[str, Any]:
        """The keys that a token attends to most in a head, and the queries that attend to it most: at most `k` of each
        with a weight, largest first."""
        head, pieces = self.heads[place], self.reading.pieces

        def largest(weights: Tensor) -> list[dict[str, Any]]:
            found = weights.nan_to_num().topk(min(k, len(weights)))
            pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
            return [{"at": at, "piece": pieces[at], "weight": weight} for at, weight in pairs if weight > 0]

        keys, queries = head[0, 0, token, :], head[0, 0, :, token]
        return {"piece": pieces[token], "keys": largest(keys), "queries": largest(queries)}

    def find(self, wanted: str, limit: int) -> tuple[list[int], bool]:
        """Tokens at which `wanted` begins in the text, ignoring case, ascending, and whether there are more."""
        spans = self.reading.spans
        ends = list(accumulate((end for _, end in spans), max))  # special tokens at the end have no place
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
    """The statistics with one more layer: name → words in each language, values [layers][heads] (None for NaN)."""
    found = {}
    for name, measured in (amap.measured or {}).items():
        before = so_far[name]["values"] if so_far else []
        found[name] = {"words": words_of(name), "values": [*before, [_number(x) for x in measured[0].tolist()]]}
    return found


def words_of(name: str) -> dict[str, dict[str, str]]:
    """The label, description and unit of a statistic in each language."""
    found = {lang: describe(name, lang) for lang in LANGUAGES}
    return {lang: {"label": x.label, "about": x.about, "unit": x.unit} for lang, x in found.items() if x is not None}


def _number(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if abs(value) < float("inf") else None
