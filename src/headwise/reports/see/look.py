"""Run a text through a model and report what every head does with it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.amounts import counted
from headwise.analysis.head_roles import roles
from headwise.errors import TextError
from headwise.lm.loading import LoadedModel, TokenizedText
from headwise.lm.loading.base import Look
from headwise.map import AttentionMap
from headwise.progress import Progress, ignored, part
from headwise.reports import nonfinite
from headwise.reports.data import Passage, Report
from headwise.reports.messages import message
from headwise.reports.see.heads import comparisons, importance
from headwise.reports.see.numbers import statistics, wanted
from headwise.reports.see.passages import Side, composed_passage, passage
from headwise.reports.see.patterns import patterns, roles_in_words
from headwise.reports.see.places import Places
from headwise.reports.see.windows import check_length, sample, size_for, slide
from headwise.reports.see.writes import writes
from headwise.stats import Measure, Tokens
from headwise.wording import joined

CAUTIONS = ("untrained_length",)  # remarks that belong into the head of a report
MARGIN = 0.5  # nats above the held-out losses, beyond which a text is of another kind
CELLS = 384  # maps of at most this width are shown exactly


@torch.no_grad()
def look_at(
    text: str, subject: LoadedModel, *, title: str = "", cells: int = CELLS, window: int | None = None,
    progress: Progress = ignored,
) -> Report:  # fmt: skip
    """Run the model over the text and report every head: statistics, strongest pattern, maps.

    Texts of at most `cells` tokens get exact maps; longer ones are pooled to that many cells, mean and maximum,
    without an n×n tensor. A text longer than a causal model was trained on is read in windows of that length that
    overlap by half; `window` gives another length, 0 reads it whole. Raises TextError if the text is empty, or longer
    than the model can read.
    """
    check_length(subject, text)
    reading = subject.read(text)
    measures, places = wanted(known_of(reading), causal=subject.causal), Places(subject.heads)
    size = size_for(subject, len(reading), window)
    seen = _whole(subject, reading, title, measures, places, cells, progress) if size is None else (
        _slid(subject, reading, title, size, measures, places, cells, progress)
    )  # fmt: skip
    maps, found, shown = seen.maps, seen.look, seen.passage
    progress("roles", 0, 1)
    played = [roles(amap, tokens=seen.ids, pieces=seen.pieces, embeddings=subject.embedding) for amap in maps]
    progress("roles", 1, 1)
    progress("comparing", 0, 1)
    alike, not_compared = comparisons(found.outputs, maps, places)
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
    notes += nonfinite.notes(seen.nonfinite)
    names = [""] * len(maps) if subject.kind == "headwise" else subject.layers
    return Report(
        title, [shown], statistics(seen.results, names), patterns(played, places), facts, notes,
        roles=roles_in_words(played, places), comparisons=alike, importance=needed,
    )  # fmt: skip


def check_beside(subject: LoadedModel, text: str, window: int | None) -> None:
    """Raise TextError or ConfigError for a second text that the model cannot read, before the first one is read."""
    if not text:
        raise TextError("beside: the second text is empty", "beside：第二段文本是空的")
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
    seen = _whole(subject, reading, title, [], places, cells, progress) if size is None else (
        _slid(subject, reading, title, size, [], places, cells, progress)
    )  # fmt: skip
    return replace(report, passages=[*report.passages, seen.passage], notes=[*report.notes, message("beside")])


def known_of(reading: TokenizedText) -> Tokens:
    """The tokens of a text, for measures."""
    return Tokens(reading.ids, [reading.pieces], torch.tensor([reading.special]))


def side_of(reading: TokenizedText) -> Side:
    """A tokenized text as one side of a map."""
    return Side(reading.words, reading.units, reading.special)


@dataclass(frozen=True)
class _Seen:
    """What a text gave: the statistics of each layer and the passage are of all of it; maps, head outputs, ids and
    pieces of all of it or of some of its windows. nonfinite: of each layer."""

    results: Sequence[Mapping[str, Tensor]]
    passage: Passage
    loss: float | None
    maps: list[AttentionMap]
    look: Look
    ids: Tensor
    pieces: Any
    nonfinite: Sequence[Mapping[str, Tensor]]


def _whole(
    subject: LoadedModel, reading: TokenizedText, title: str, measures: Sequence[Measure], places: Places, cells: int,
    progress: Progress,
) -> _Seen:  # fmt: skip
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
    return _Seen(
        results, shown, found.loss, maps, found, reading.ids, reading.pieces, list(map(nonfinite.counted, maps))
    )


def _slid(
    subject: LoadedModel, reading: TokenizedText, title: str, size: int, measures: Sequence[Measure], places: Places,
    cells: int, progress: Progress,
) -> _Seen:  # fmt: skip
    slid = slide(subject, reading, size, measures, places, cells, progress)
    ids, pieces = sample(reading, size)
    found = subject.look(ids)
    shown = composed_passage(title, slid.means, slid.cell, slid.peaks, side_of(reading))
    results = [{name: value[None] for name, value in layer.items()} for layer in slid.statistics]
    return _Seen(results, shown, slid.loss, list(found.maps.values()), found, ids, pieces, slid.nonfinite)
