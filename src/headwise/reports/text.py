"""The report of a text: what every head of a model does with it, whole or in windows.

A text that is longer than a model was trained on is read in windows that overlap by half: a sliding window. Each window
is read by itself, with positions from 0, as in training. The attention of a token is taken from the window in which it
is in the second half, so that it has at least half a window before it; the first tokens have all there are.
"""

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.head_roles.result import roles
from headwise.base.run import Progress, ignored, part
from headwise.corpus.select import varied
from headwise.errors import ConfigError, TextError
from headwise.lm.loading import LoadedModel, TokenizedText
from headwise.lm.loading.base import check_window, whole_window
from headwise.map import AttentionMap
from headwise.masks import Span
from headwise.reports.data import Passage, Report
from headwise.reports.messages import message
from headwise.reports.numbers import (
    SOME_VALUES,
    VALUES,
    comparisons,
    importance,
    leading,
    nonfinite_counts,
    nonfinite_notes,
    statistics,
    wanted,
    writes,
)
from headwise.reports.passages import Places, Side, composed_passage, in_words, labels_of, passage
from headwise.stats import Measure, Tokens, of_tokens
from headwise.table.show import duration
from headwise.wording import counted, joined, tr

CAUTIONS = ("untrained_length",)  # remarks that belong into the head of a report
MARGIN = 0.5  # nats above the held-out losses, beyond which a text is of another kind
CELLS = 384  # maps of at most this width are shown exactly


@torch.no_grad()
def look_at(
    text: str, subject: LoadedModel, *, title: str = "", cells: int = CELLS, window: int | None = None,
    progress: Progress = ignored,
) -> Report:  # fmt: skip
    """Run the model over the text and report every head. Maps of at most `cells` tokens are exact, longer ones pooled
    without an n×n tensor. window: as in `size_for`."""
    check_length(subject, text)
    reading = subject.read(text)
    measures, places = wanted(known_of(reading), causal=subject.causal), Places(subject.heads)
    size = size_for(subject, len(reading), window)
    seen = _seen(subject, reading, title, size, measures, places, cells, progress)
    maps = seen.maps
    progress("roles", 0, 1)
    played = [roles(amap, tokens=seen.ids, pieces=seen.pieces, embeddings=subject.embedding) for amap in maps]
    progress("roles", 1, 1)
    progress("comparing", 0, 1)
    alike, not_compared = comparisons(seen.outputs, maps, places)
    progress("comparing", 1, 1)
    needed, not_measured = importance(subject, reading, places, part(progress, "importance"))
    sizes = [counted("character", len(text))]
    sizes += [] if len(reading) == len(text) else [counted("token", len(reading))]
    facts: list[tuple[str, str]] = [
        (message("text"), joined(sizes)),
        (message("model"), subject.about),
        (message("kernel"), ", ".join(sorted({amap.kernel for amap in maps}))),
    ]
    if size is not None:
        facts.append((message("windows"), message("fact_windows", size=size, half=size // 2)))
    loss = seen.loss
    if loss is not None:
        facts.append((message("loss"), message("fact_loss", loss=loss)))
    if loss is not None and subject.heldout:
        least, most = min(subject.heldout.values()), max(subject.heldout.values())
        facts.append((message("heldout"), message("fact_heldout", least=least, most=most)))
        if loss > most + MARGIN:
            choices, usual = math.exp(loss), math.exp(most)
            caution = message("unknown_text", loss=loss, most=most, choices=choices, usual=usual)
            facts.append((message("caution"), caution))
    remarks = subject.remarks(size or len(reading))
    facts += [(message("caution"), remark) for remark in remarks if remark.code in CAUTIONS]
    rest = [remark for remark in remarks if remark.code not in CAUTIONS]
    sampled = [] if size is None else [message("windows_sampled", count=len(seen.ids))]
    notes = [message("explained"), *reading.remarks, *rest, *sampled, *not_compared, *not_measured]
    notes += nonfinite_notes(seen.nonfinite)
    names = [""] * len(maps) if subject.kind == "headwise" else subject.layers
    labels = labels_of(played, places)
    return Report(
        title, [seen.passage], statistics(seen.results, names), [list(map(in_words, row)) for row in labels], facts,
        notes, labels=labels, comparisons=alike, importance=needed,
    )  # fmt: skip


def check_beside(subject: LoadedModel, text: str, window: int | None) -> None:
    """Raise TextError or ConfigError for a second text that the model cannot read, before the first one is read."""
    if not text:
        raise TextError(tr("beside: the second text is empty"))
    check_length(subject, text)
    size_for(subject, len(subject.read(text)), window)


@torch.no_grad()
def with_beside(
    report: Report, text: str, subject: LoadedModel, *, title: str, cells: int, window: int | None = None,
    progress: Progress = ignored,
) -> Report:  # fmt: skip
    """The report with the maps of a second text, in windows as in `look_at`. Errors as in `check_beside`."""
    reading, places = subject.read(text), Places(subject.heads)
    size = size_for(subject, len(reading), window)
    shown = _seen(subject, reading, title, size, [], places, cells, progress).passage
    return replace(report, passages=[*report.passages, shown], notes=[*report.notes, message("beside")])


def known_of(reading: TokenizedText) -> Tokens:
    """The tokens of a text, for measures."""
    return Tokens(reading.ids, [reading.pieces], torch.tensor([reading.special]))


def side_of(reading: TokenizedText) -> Side:
    """A tokenized text as one side of a map."""
    return Side(reading.words, reading.units, reading.special)


@dataclass(frozen=True)
class _Seen:
    """What a text gave: the statistics of each layer, the passage and the loss in nats per token are of all of it;
    maps, head outputs, ids and pieces of all of it or of some of its windows. nonfinite: of each layer."""

    results: Sequence[Mapping[str, Tensor]]
    passage: Passage
    loss: float | None
    maps: list[AttentionMap]
    outputs: Sequence[Tensor]
    ids: Tensor
    pieces: Any
    nonfinite: Sequence[Mapping[str, Tensor]]


def _seen(
    subject: LoadedModel, reading: TokenizedText, title: str, size: int | None, measures: Sequence[Measure],
    places: Places, cells: int, progress: Progress,
) -> _Seen:  # fmt: skip
    """Read a text in windows of `size` tokens, or whole."""
    if size is not None:
        return _slide(subject, reading, title, size, measures, places, cells, progress)
    progress("reading", 0, 1)
    found = subject.look(reading.ids)
    progress("reading", 1, 1)
    maps = list(found.maps.values())
    results = [
        amap.measure(*measures, progress=part(progress, "measuring", i, len(maps))) for i, amap in enumerate(maps)
    ]
    shown = passage(title, maps, 0, (side_of(reading), None), places, cells, progress)
    if shown.cell == 1:
        shown = replace(shown, writes=writes(subject, reading, maps, places))
    counts = list(map(nonfinite_counts, maps))
    return _Seen(results, shown, found.loss, maps, found.outputs, reading.ids, reading.pieces, counts)


BATCH = 8  # windows at a time
MOST = 131_072  # tokens of a text
TRIED = 4096  # characters of a longer text that are read to estimate its tokens and the time
SLOWER = 4.0  # reading windows takes at most this many times the seconds of their forward pass: maps and statistics


@dataclass(frozen=True)
class Window:
    """A window: the leading special tokens of the text, then the tokens `start` to `stop`; it counts from `own` on."""

    start: int
    stop: int
    own: int


def size_for(subject: LoadedModel, tokens: int, window: int | None) -> int | None:
    """The tokens of a window for a text, None to read it whole. window: as the user gave it; None for the length that a
    causal model was trained on, 0 for the whole text."""
    window = whole_window(window)
    if window is not None and window != 0 and window < 8:
        raise ConfigError("window={window}: expected at least 8 tokens, or 0 to read the text whole", window=window)
    if window == 0 or (window is None and (subject.context is None or not subject.causal)):
        return None
    size = subject.context if window is None else window
    assert size is not None
    if window is not None:
        check_window(window, subject.limit, subject.name)
    if tokens <= size:
        return None
    if not subject.causal:
        raise ConfigError(
            "window={window}: {name} is not causal, so a window would hide keys from its tokens; leave it out, or use "
            "headwise measure",
            window=window,
            name=subject.name,
        )
    return size


def windows_of(tokens: int, size: int, lead: int) -> list[Window]:
    """Windows of `size` tokens over a longer text that begins with `lead` special tokens."""
    if size - lead < 2:
        raise ConfigError(
            "window={size}: expected at least {lead}, two more than the special tokens at the start",
            size=size,
            lead=lead + 2,
        )
    length = size - lead
    found = [Window(lead, size, 0)]
    while found[-1].stop < tokens:
        start = min(found[-1].start + max(1, length // 2), tokens - length)
        found.append(Window(start, start + length, found[-1].stop))
    return found


def check_length(subject: LoadedModel, text: str) -> None:
    """Raise TextError for a text that is far too long, with the time that it would take, before it is tokenized."""
    if len(text) <= MOST:
        return
    head = subject.read(text[:TRIED])
    tokens = len(head) * len(text) // min(TRIED, len(text))
    if tokens <= MOST:
        return
    size = min(len(head), subject.context or len(head))
    begun = time.monotonic()
    subject.look(head.ids[:size])
    seconds = (time.monotonic() - begun) * SLOWER * 2 * tokens / size
    raise TextError(
        "the text has about {tokens:,} tokens and would take about {time}; see reads at most {most:,}. `headwise "
        "view` opens the beginning of a long text at once (--max-tokens), and `headwise measure` measures a corpus of "
        "any size",
        tokens=tokens,
        time=duration(seconds),
        most=MOST,
    )


@torch.no_grad()
def _slide(
    subject: LoadedModel, reading: TokenizedText, title: str, size: int, measures: Sequence[Measure], places: Places,
    cells: int, progress: Progress,
) -> _Seen:  # fmt: skip
    """Read a text in windows of `size` tokens; maps and outputs are of some of them."""
    n, lead = len(reading), len(list(leading(reading.special)))
    windows = windows_of(n, size, lead)
    cell = -(-n // cells)
    canvas = _Canvas(places, n, cell)
    sums: list[dict[str, list[tuple[int, Tensor]]]] = [{} for _ in places.counts]
    bad: list[dict[str, Tensor]] = [{} for _ in places.counts]
    lost, counted, done = 0.0, 0, 0
    for own, group in _groups(windows, lead):
        progress("reading", done, len(windows))
        at = [[*range(lead), *range(window.start, window.stop)] for window in group]
        ids = torch.stack([reading.ids[tokens] for tokens in at])
        look = subject.look(ids, first=max(own, 1))  # nothing predicts the first token
        maps = list(look.maps.values())
        kinds = _for_tokens(measures, reading, at)
        rows = range(own, size)
        for layer, amap in enumerate(maps):
            ends = owned(amap, rows)
            for code, found in nonfinite_counts(ends).items():
                # Values are partly those of other windows too: that there are some is all that is known.
                code = SOME_VALUES if code == VALUES else code
                bad[layer][code] = bad[layer].get(code, 0) + found
            for name, value in ends.measure(*kinds).items():
                sums[layer].setdefault(name, []).append((len(group) * len(rows), value.cpu()))
            for entry, tokens in enumerate(at):
                canvas.add(layer, amap[entry, :, own:, :].cpu().numpy(), tokens[own:], tokens)
        if look.loss is not None:
            more = len(group) * (size - max(own, 1))
            lost, counted = lost + look.loss * more, counted + more
        done += len(group)
    progress("reading", len(windows), len(windows))
    largest = {measure.name for measure in measures if varied(measure).largest}
    means = [{name: _joined(found, name in largest)[None] for name, found in layer.items()} for layer in sums]
    ids, pieces = sample(reading, size)
    look = subject.look(ids)
    shown = composed_passage(title, *canvas.finished(), (side_of(reading), None))
    mean = lost / counted if counted else None
    return _Seen(means, shown, mean, list(look.maps.values()), look.outputs, ids, pieces, bad)


def sample(reading: TokenizedText, size: int) -> tuple[Tensor, list[list[str]]]:
    """Ids [w, tokens] and pieces of evenly spaced windows, for what is computed of a few."""
    lead = len(list(leading(reading.special)))
    windows = windows_of(len(reading), size, lead)
    chosen = np.unique(np.linspace(0, len(windows) - 1, BATCH).astype(int)).tolist()
    at = [[*range(lead), *range(windows[i].start, windows[i].stop)] for i in chosen]
    return torch.stack([reading.ids[tokens] for tokens in at]), [[reading.pieces[i] for i in tokens] for tokens in at]


def owned(amap: AttentionMap, rows: range) -> AttentionMap:
    """The map of the last rows of each window, and all keys."""
    if rows.start == 0:
        return amap
    at = Span(rows.start, rows.stop)
    return AttentionMap(
        amap.q[:, :, at.start :], amap.k, amap.lse[:, :, at.start :], amap.rule.rows(at), kernel=amap.kernel,
        named=amap.named, refusals=amap.refusals, nonfinite_values=amap.nonfinite_values,
    )  # fmt: skip


def _groups(windows: Sequence[Window], lead: int) -> Iterator[tuple[int, list[Window]]]:
    """Windows in a row of which as many tokens count, at most BATCH; with the first row that counts."""

    def first(window: Window) -> int:
        return 0 if window.own == 0 else lead + window.own - window.start

    for own, run in itertools.groupby(windows, first):
        every = list(run)
        for i in range(0, len(every), BATCH):
            yield own, every[i : i + BATCH]


def _for_tokens(measures: Sequence[Measure], reading: TokenizedText, at: Sequence[Sequence[int]]) -> list[Measure]:
    """The measures for other tokens, where they depend on them."""
    ids = torch.stack([reading.ids[tokens] for tokens in at])
    pieces = [[reading.pieces[i] for i in tokens] for tokens in at]
    special = torch.tensor([[reading.special[i] for i in tokens] for tokens in at])
    made = [of_tokens(measure.name, Tokens(ids, pieces, special)) for measure in measures]
    return [measure for measure in made if measure is not None]


def _joined(found: Sequence[tuple[int, Tensor]], largest: bool) -> Tensor:
    """One number a head from those of the entries of each group, weighted by their queries."""
    if largest:
        return torch.cat([value for _, value in found]).amax(0)
    weights = torch.tensor([float(rows) for rows, _ in found])
    return torch.stack([value.mean(0) for _, value in found]).mul(weights[:, None]).sum(0) / weights.sum()


class _Canvas:
    """Pictures of all heads, to which the rows of windows are added."""

    def __init__(self, places: Places, n: int, cell: int) -> None:
        side = -(-n // cell)
        shape = (len(places.counts), places.most, side, side)
        self._cell = cell
        self._sums, self._most = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._pairs = np.zeros((len(places.counts), side, side), np.float32)

    def add(self, layer: int, weights: np.ndarray, rows: Sequence[int], columns: Sequence[int]) -> None:
        """Weights [heads, rows, columns] of these tokens, both ascending."""
        (i, high), (j, wide) = (self._cells(tokens) for tokens in (rows, columns))
        heads = slice(0, len(weights))
        square = np.ix_(np.arange(len(weights)), i, j)
        self._sums[layer][square] += np.add.reduceat(np.add.reduceat(weights, high, 1), wide, 2)
        most = np.maximum.reduceat(np.maximum.reduceat(weights, high, 1), wide, 2)
        self._most[layer, heads][square] = np.maximum(self._most[layer, heads][square], most)
        visible = (np.asarray(columns)[None] <= np.asarray(rows)[:, None]).astype(np.float32)
        self._pairs[layer][np.ix_(i, j)] += np.add.reduceat(np.add.reduceat(visible, high, 0), wide, 1)

    def finished(self) -> tuple[np.ndarray, int, np.ndarray | None]:
        """Means, the tokens of a cell, and maxima; no maxima if each cell is one weight."""
        means = self._sums / np.maximum(self._pairs, 1)[:, None]
        return means, self._cell, None if self._cell == 1 else self._most

    def _cells(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The cells that tokens are in, and where each cell begins among them."""
        return np.unique(np.asarray(tokens) // self._cell, return_index=True)
