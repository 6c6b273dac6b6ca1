"""Run a text through a model and report what every head does with it."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from headwise.analysis.head_roles import Roles, roles
from headwise.lm.loading import LoadedModel, TokenizedText
from headwise.map import AttentionMap
from headwise.progress import Progress, ignored, part
from headwise.reports.data import Report
from headwise.reports.messages import message
from headwise.reports.see.heads import comparisons, importance
from headwise.reports.see.numbers import statistics, wanted
from headwise.reports.see.passages import Side, passage
from headwise.reports.see.patterns import patterns, roles_in_words
from headwise.reports.see.places import Places
from headwise.reports.see.writes import writes
from headwise.stats import Tokens

CAUTIONS = ("untrained_length",)  # remarks that belong into the head of a report
MARGIN = 0.5  # nats above the held-out losses, beyond which a text is of another kind
CELLS = 384  # maps of at most this width are shown exactly


@torch.no_grad()
def look_at(
    text: str, subject: LoadedModel, *, title: str = "", cells: int = CELLS, progress: Progress = ignored
) -> Report:
    """Run the model over the text and report every head: statistics, strongest pattern, maps.

    Texts of at most `cells` tokens get exact maps; longer ones are pooled to that many cells, mean and maximum,
    without an n×n tensor. Raises TextError if the text is empty, or longer than the model can read.
    """
    reading = subject.read(text)
    progress("reading", 0, 1)
    found = subject.look(reading.ids)
    progress("reading", 1, 1)
    maps, places = list(found.maps.values()), Places(subject.heads)
    measures = wanted(known_of(reading), causal=subject.causal)
    results = [
        amap.measure(*measures, progress=part(progress, "measuring", i, len(maps))) for i, amap in enumerate(maps)
    ]
    shown = passage(title, maps, 0, (side_of(reading), None), places, cells, progress)
    if shown.cell == 1:
        shown = replace(shown, writes=writes(subject, reading, maps, places))
    progress("roles", 0, 1)
    played = _roles(maps, reading)
    progress("roles", 1, 1)
    progress("comparing", 0, 1)
    alike, not_compared = comparisons(found.outputs, maps, places)
    progress("comparing", 1, 1)
    needed, not_measured = importance(subject, reading, places, part(progress, "importance"))
    size = "fact_characters" if len(reading) == len(text) else "fact_tokens"
    facts: list[tuple[str, str]] = [
        (message("text"), message(size, count=len(text), tokens=len(reading))),
        (message("model"), subject.about),
        (message("kernel"), ", ".join(sorted({amap.kernel for amap in maps}))),
    ]
    if found.loss is not None:
        facts.append((message("loss"), message("fact_loss", loss=found.loss)))
    if found.loss is not None and subject.heldout:
        least, most = min(subject.heldout.values()), max(subject.heldout.values())
        facts.append((message("heldout"), message("fact_heldout", least=least, most=most)))
        if found.loss > most + MARGIN:
            sizes = {"choices": math.exp(found.loss), "usual": math.exp(most)}
            facts.append((message("caution"), message("unknown_text", loss=found.loss, most=most, **sizes)))
    remarks = subject.remarks(len(reading))
    facts += [(message("caution"), remark) for remark in remarks if remark.code in CAUTIONS]
    rest = [remark for remark in remarks if remark.code not in CAUTIONS]
    notes = [message("explained"), *reading.remarks, *rest, *not_compared, *not_measured]
    names = [""] * len(maps) if subject.kind == "headwise" else subject.layers
    return Report(
        title, [shown], statistics(results, names), patterns(played, places), facts, notes,
        roles=roles_in_words(played, places), comparisons=alike, importance=needed,
    )  # fmt: skip


def known_of(reading: TokenizedText) -> Tokens:
    """The tokens of a text, for measures."""
    return Tokens(reading.ids, [reading.pieces], torch.tensor([reading.special]))


def side_of(reading: TokenizedText) -> Side:
    """A tokenized text as one side of a map."""
    return Side(reading.words, reading.units, reading.special)


def _roles(maps: Sequence[AttentionMap], reading: TokenizedText) -> list[Roles]:
    return [roles(amap, tokens=reading.ids, pieces=reading.pieces) for amap in maps]
