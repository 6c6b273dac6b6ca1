"""The current text of the viewer: computed in a thread, cancelled when a newer one is opened.

It is computed layer by layer, and the heads of each layer are pooled before the next one is computed. The first maps
are thus available early, and cancelling takes no longer than a block of queries.
"""

import bisect
import os
import re
import secrets
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.kernels.events import within
from headwise.lm.loading import LoadedModel, TokenizedText
from headwise.map import AttentionMap
from headwise.masks import Span
from headwise.reports.messages import message
from headwise.reports.numbers import nonfinite_counts, nonfinite_remarks, wanted
from headwise.reports.text import known_of
from headwise.reports.viewer.tiles import (
    BUDGET,
    HeadPyramid,
    Levels,
    Unwanted,
    Wanted,
    choose_levels,
    head_pyramid,
    rectangle,
)
from headwise.stats import describe
from headwise.wording import LANGUAGES, Message

MAX_TOKENS = 1 << 17
SHARE = 0.5  # of the free memory for the longest text
ACTIVATIONS = 28  # vectors of the model's width per token in a forward pass, besides the maps
CHARACTERS = 8  # per token in the limit of characters, where tokens are longer than characters
AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class Limits:
    """The maximum length of a text, and the reason for the number of tokens, for messages."""

    tokens: int
    characters: int
    why: Message


def limits_of(subject: LoadedModel, max_tokens: int = MAX_TOKENS) -> Limits:
    """The limits of a model on this machine. Runs the model on one token to find the size of its maps."""
    tokens, why = max_tokens, message("limit_of_option")
    if subject.limit is not None and subject.limit < tokens:
        tokens = subject.limit
        why = message("limit_of_positions", name=subject.name)
    free = free_memory()
    if free is not None:
        fits = int(SHARE * free / bytes_a_token(subject))
        if fits < tokens:
            tokens = max(1, fits)
            why = message("limit_of_memory")
    return Limits(tokens, tokens if subject.kind == "headwise" else CHARACTERS * tokens, why)


def bytes_a_token(subject: LoadedModel) -> int:
    """Bytes per token while a text is computed: q, k and the log-sum-exp of every head, and the activations."""
    maps = subject.maps(torch.zeros(1, dtype=torch.long))
    held = sum(x.nbytes for amap in maps.values() for x in (amap.q, amap.k, amap.lse))
    width = max(amap.q.shape[1] * amap.q.shape[3] for amap in maps.values())
    return held + ACTIVATIONS * width * 4


def free_memory() -> int | None:
    """Bytes of available memory; half of all memory where only that is known, None where neither is."""
    info = Path("/proc/meminfo")
    found = AVAILABLE.search(info.read_text()) if info.exists() else None
    if found:
        return int(found[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return None


READING, READY, FAILED, CANCELLED = "reading", "ready", "failed", "cancelled"
Head = tuple[int, int]  # layer, head


class Text:
    """A text, its results so far, and its state. Attributes are written by the worker thread only, and replaced rather
    than changed, so that the server reads them without a lock."""

    def __init__(self, subject: LoadedModel, reading: TokenizedText, title: str, levels: Levels) -> None:
        self.id = secrets.token_urlsafe(9)
        self.subject, self.reading, self.title, self.levels = subject, reading, title, levels
        self.state, self.what, self.layer = READING, "waiting", 0
        self.error: Message | None = None
        self.done, self.of = 0, 1
        self.heads: dict[Head, AttentionMap] = {}
        self.pyramids: dict[Head, HeadPyramid] = {}
        self.statistics: dict[str, dict[str, Any]] = {}  # words in each language, values [layers][heads], None for NaN
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

    def end(self, state: str, error: Message | None = None) -> None:
        """Cancel it or mark it as failed; the first of both counts."""
        with self._lock:
            if not self._ended.is_set():
                self._ended.set()
                self.state, self.error = state, error

    def let_go(self) -> None:
        """Free its memory."""
        self.heads, self.pyramids = {}, {}
        self.reading = TokenizedText("", self.reading.ids[:0], [], [], [], self.reading.remarks)

    def add_layer(self, layer: int, amap: AttentionMap) -> None:
        """Add the map and the statistics of the next layer."""
        measured = (amap.measured or {}).items()
        before: dict[str, list[Any]] = {name: one["values"] for name, one in self.statistics.items()}
        self.statistics = {
            name: {"words": words_of(name), "values": [*before.get(name, []), [_number(x) for x in found[0].tolist()]]}
            for name, found in measured
        }
        self.warnings = [*self.warnings, *nonfinite_remarks(layer, nonfinite_counts(amap))]
        self.heads = {**self.heads, **{(layer, head): amap.head(0, head) for head in range(amap.shape[1])}}

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
        """The keys that a token attends to most in a head, and the queries that attend most to it; at most `k`."""
        head, pieces = self.heads[place], self.reading.pieces

        def largest(weights: Tensor) -> list[dict[str, Any]]:
            found = weights.nan_to_num().topk(min(k, len(weights)))
            pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
            return [{"at": at, "piece": pieces[at], "weight": weight} for at, weight in pairs if weight > 0]

        keys, queries = head[0, 0, token, :], head[0, 0, :, token]
        return {"piece": pieces[token], "keys": largest(keys), "queries": largest(queries)}

    def weights(self, cell: int, row: int, col: int, reduce: str, wanted: Wanted) -> list[list[float | None]]:
        """The weight of a cell in every head so far, by layers; None where the mask allows no pair of it."""
        sides = (range(at * cell, min(self.n, (at + 1) * cell)) for at in (row, col))
        rows, cols = (Span(side.start, side.stop) for side in sides)
        found: list[list[float | None]] = [[] for _ in self.subject.heads]
        for (layer, _), head in self.heads.items():
            mean, largest, _ = rectangle(head, rows, cols, cell, wanted)
            found[layer].append(_number(float(largest if reduce == "max" else mean)))
        return found

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


def words_of(name: str) -> dict[str, dict[str, str]]:
    """The label, description and unit of a statistic in each language."""
    found = {lang: describe(name, lang) for lang in LANGUAGES}
    return {lang: {"label": x.label, "about": x.about, "unit": x.unit} for lang, x in found.items() if x is not None}


def _number(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if abs(value) < float("inf") else None


READ, DRAW = 2, 1  # relative costs of computing and of pooling a head


class Reader:
    """Computes one text and sets its progress. Raises Unwanted if the text was cancelled."""

    def __init__(self, subject: LoadedModel, text: Text) -> None:
        self.subject, self.text = subject, text
        self._layer, self._done = 0, 0

    def read(self) -> None:
        """Compute all layers."""
        self._progress("reading", 0)
        reading = self.text.reading
        measures = wanted(known_of(reading), "viewer")
        with within(progress=self._rows), ExitStack() as hooks:
            for module in self.subject.model.modules():  # what a hook raises ends the forward pass
                hooks.enter_context(module.register_forward_pre_hook(lambda *_: self._stop()))
            self.subject.maps(reading.ids, measures=measures, on_map=self._computed)
        self._progress("ready", 0)

    def _computed(self, name: str, amap: AttentionMap) -> None:
        """Pool the heads of a computed layer."""
        text, layer = self.text, self.subject.layers.index(name)
        self._done += READ * text.n * amap.shape[1]
        text.add_layer(layer, amap)
        for head in range(amap.shape[1]):
            self._progress("drawing", 0)
            pyramid = head_pyramid(text.heads[layer, head], text.levels, self._drawn, text.wanted)
            text.pyramids = {**text.pyramids, (layer, head): pyramid}
            self._done += DRAW * text.n
        self._layer = layer + 1
        self._progress("reading", 0)

    def _rows(self, _: str, rows: int, __: int) -> None:
        self._stop()
        layer = min(self._layer, len(self.subject.heads) - 1)
        self._progress("reading", READ * self.subject.heads[layer] * self._work(rows))

    def _drawn(self, _: str, rows: int, __: int) -> None:
        self._progress("drawing", DRAW * self._work(rows))

    def _work(self, rows: int) -> int:
        """The cost of the first rows, in rows; under a causal mask they have few keys."""
        return rows * rows // max(1, self.text.n) if self.subject.causal else rows

    def _stop(self) -> None:
        if not self.text.wanted():
            raise Unwanted

    def _progress(self, what: str, more: int) -> None:
        whole = (READ + DRAW) * self.text.n * sum(self.subject.heads)
        self.text.progress(what, min(self._done + more, whole), whole, self._layer)


REMEMBERED = 16  # texts whose state can still be requested


class TooLong(HeadwiseError):
    """A text with more tokens or characters than the limit."""

    def __init__(self, says: Message) -> None:
        super().__init__(says)
        self.says = says


class Session:
    """A loaded model and the text that it computes. budget: bytes of the pyramids of all heads."""

    def __init__(self, subject: LoadedModel, *, max_tokens: int = MAX_TOKENS, budget: int = BUDGET) -> None:
        self.subject, self.budget = subject, budget
        self.limits = limits_of(subject, max_tokens)
        self.present: Text | None = None
        self._texts: dict[str, Text] = {}
        self._change = threading.Condition()
        self._next: Text | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="headwise-viewer", daemon=True)
        self._thread.start()

    def open(self, text: str, title: str = "") -> Text:
        """Start to compute a text, and cancel the previous one. TextError or TooLong if it cannot be read."""
        limits = self.limits
        most: dict[str, Any] = {"characters": limits.characters, "tokens": limits.tokens, "why": limits.why}
        if len(text) > limits.characters:
            raise TooLong(message("too_many_characters", n=len(text), **most))
        reading = self.subject.read(text)
        if len(reading) > limits.tokens:
            raise TooLong(message("too_many_tokens", n=len(reading), **most))
        levels = choose_levels(len(reading), sum(self.subject.heads), self.subject.causal, self.budget)
        new = Text(self.subject, reading, title, levels)
        with self._change:
            self._give_up(self.present)
            self.present = self._next = self._texts[new.id] = new
            while len(self._texts) > REMEMBERED:
                del self._texts[next(iter(self._texts))]
            self._change.notify_all()
        return new

    def find(self, name: str) -> Text | None:
        """The text of that id; None if it is not remembered."""
        return self._texts.get(name)

    def cancel(self, text: Text) -> None:
        """Cancel a text."""
        with self._change:
            self._give_up(text)
            if self.present is text:
                self.present = None

    def close(self, patience: float = 2.0) -> bool:
        """Cancel the current text; return whether the thread ended within `patience` seconds."""
        with self._change:
            self._closed = True
            self._give_up(self.present)
            self._change.notify_all()
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _give_up(self, text: Text | None) -> None:
        if text is not None:
            text.end(CANCELLED)
            text.let_go()
            if self._next is text:
                self._next = None

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or self._next is not None)
                text, self._next = self._next, None
                if self._closed or text is None:
                    return
            try:
                Reader(self.subject, text).read()
                text.advance(READY)
            except Unwanted:
                pass
            except Exception as error:  # the model's code may fail in any way; the server continues
                text.end(FAILED, _message(error))
            if not text.wanted():
                text.let_go()


def _message(error: Exception) -> Message:
    if isinstance(error, MemoryError) or (not isinstance(error, HeadwiseError) and "alloc" in str(error)):
        return message("no_memory")
    sentence = str(error)
    if not isinstance(error, HeadwiseError):
        sentence = f"{type(error).__name__}: {' '.join(sentence.split())[:300]}"
    return message("failure", sentence=sentence)
