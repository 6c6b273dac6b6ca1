"""`see` and `show`: the report of a text, a model or maps, in one call."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.base.run import Progress, ignored
from headwise.corpus.passages import Passages, check_model
from headwise.errors import ConfigError, TextError
from headwise.lm.loading import LoadedModel, load_model
from headwise.lm.texts import read_text
from headwise.map import AttentionMap
from headwise.reports.data import Report
from headwise.reports.figure import clipped, figure_class
from headwise.reports.images import images_of
from headwise.reports.numbers import check_sort, wanted
from headwise.reports.page import write_report
from headwise.reports.passages import inputs_of, text_of
from headwise.reports.pictures import write_pngs
from headwise.reports.text import CELLS, check_beside, known_of, look_at, with_beside
from headwise.reports.watched import of_map, report as report
from headwise.telemetry import Record, watch
from headwise.wording import in_language, language_of, tr

# Of the held-out parts of the embedded model's training: The Taming of the Shrew, and chapter 119 of Water Margin.
SAMPLE = tr(
    "KATHARINA:\nI know it is the moon.\n\nPETRUCHIO:\nNay, then you lie: it is the blessed sun.\n\nKATHARINA:\nThen, "
    "God be bless'd, it is the blessed sun:\nBut sun it is not, when you say it is not;\nAnd the moon changes even as "
    "your mind."
)


def see(
    text: str | Tensor | Mapping[str, Any] | None = None,
    model: LoadedModel | nn.Module | str | os.PathLike[str] | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    out: str | os.PathLike[str] | None = None,
    png: str | os.PathLike[str] | None = None,
    title: str = "",
    cells: int = CELLS,
    window: int | None = None,
    beside: str | None = None,
    sweep: str | os.PathLike[str] | Passages | None = None,
    lang: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Report what every head of a model attends to in a text: maps, statistics, roles, similarity and importance.

    >>> import headwise as hw
    >>> hw.see("武松打虎。")
    Report('武松打虎。': 4 layers, 32 heads; 1 passage, 5 tokens)

    The same as the command `headwise see`, without printing. `headwise.reports` writes reports as pages and pictures.

    Args:
        text: the text; if neither text nor file is given, a passage of Shakespeare, in Chinese of Water Margin. For
            an `nn.Module`: the token ids [n] or [b, n], the keyword arguments of its forward, or a text if there is a
            tokenizer.
        model: a `LoadedModel`; the path of a headwise checkpoint or of a folder of transformers (see `load_model`);
            None for the embedded decoder. Or any `nn.Module` that `watch` supports: it is called once, without
            gradients, and the report is that of `headwise.report`, without losses and importance.
        file: read the text from a UTF-8 file.
        tokenizer: for an `nn.Module`: of transformers, tokenizers, sentencepiece or tiktoken, or any object with
            encode(text) and decode(ids).
        out: write the report there, as one HTML file. png: write heat maps into this folder.
        title: of the report; by default the beginning of the text, or the name of the file.
        cells: longer texts are pooled to this many cells; no n×n tensor is made.
        window: a text longer than a causal model was trained on is read in overlapping windows of that length; this
            gives another length in tokens, 0 reads the text whole. Not for an `nn.Module`.
        beside: a second text for a loaded model, whose maps the page shows beside those of the first, with their
            difference. Statistics, roles and comparisons are those of the first.
        sweep: the table of `headwise measure` of the same model, or its passages: the page shows the passages of each
            head in which it is strongest.
        lang: language of the page, the pictures and the passage, "en" or "zh"; None for that of the locale.
        progress: called with (what, done, of) as the work proceeds.
    Returns:
        The `Report`.
    Raises:
        ConfigError: naming the argument. TextError: if the text is empty, or longer than the model can read.
        CheckpointError: if there is no model at the path, or the sweep has no passages.
    """
    lang = language_of(lang)
    asked = Asked(
        text, model, file, tokenizer=tokenizer, title=title, cells=cells, window=window, beside=beside, sweep=sweep,
        lang=lang,
    ).checked()  # fmt: skip
    if png is not None:
        figure_class()  # raises where matplotlib is missing
    found = report_of(asked, progress or ignored)
    if out is not None:
        write_report(found, out, lang=lang)
    if png is not None:
        write_pngs(found, png, progress=progress, lang=lang)
    return found


@dataclass(frozen=True)
class Asked:
    """What a report is asked for, the arguments of `see` and of the command; sort: the statistic of its table."""

    text: Any = None
    model: Any = None
    file: str | os.PathLike[str] | None = None
    tokenizer: Any = None
    title: str = ""
    cells: int = CELLS
    window: int | None = None
    beside: str | None = None
    sweep: str | os.PathLike[str] | Passages | None = None
    sort: str | None = None
    lang: str = "en"

    def checked(self) -> "Asked":
        """The same with the text of the file and the passages of the sweep, after all checks that need no model."""
        check_sort(self.sort)
        if self.text is not None and self.file is not None:
            raise ConfigError("give text or file=, not both")
        text, title, sweep = self.text, self.title, self.sweep
        if self.file is not None:
            text, title = read_text(Path(self.file)), title or Path(self.file).name
        if isinstance(self.model, nn.Module):
            if self.beside is not None:
                raise ConfigError("beside: requires a loaded model; for an nn.Module, give both texts as one batch")
            if sweep is not None:
                raise ConfigError(
                    tr("sweep: requires a loaded model, whose weights are compared with those of the sweep")
                )
            if self.window is not None:
                raise ConfigError(
                    "window: applies to a loaded model; an nn.Module is called once, with the whole input"
                )
        elif not isinstance(text, str | None):
            raise ConfigError(
                f"text: a loaded model reads a str, got {type(text).__name__}; token ids need an nn.Module"
            )
        if not isinstance(sweep, Passages | None):
            sweep = Passages.load(sweep)
        return replace(self, text=text, file=None, title=title, sweep=sweep)


def report_of(asked: Asked, progress: Progress) -> Report:
    """The report of what was `checked`: of one forward of a module, or of a text that a loaded model reads."""
    if isinstance(asked.model, nn.Module):
        return _of_module(asked.text, asked.model, asked.tokenizer, asked.title, asked.cells)
    text = str(in_language(SAMPLE, asked.lang)) if asked.text is None else asked.text
    loaded = asked.model if isinstance(asked.model, LoadedModel) else load_model(asked.model, window=asked.window)
    if asked.sort is not None:  # which statistics there are depends on the model
        measures = wanted(known_of(loaded.read(text)), causal=loaded.causal)
        check_sort(asked.sort, [measure.name for measure in measures])
    corpus = asked.sweep if isinstance(asked.sweep, Passages) else None  # `checked` has read it
    if corpus is not None:
        check_model(corpus, loaded)
    if asked.beside is not None:
        check_beside(loaded, asked.beside, asked.window)
    how: dict[str, Any] = {"cells": asked.cells, "window": asked.window, "progress": progress}
    found = replace(look_at(text, loaded, title=asked.title or _start(text), **how), corpus=corpus)
    if asked.beside is None:
        return found
    return with_beside(found, asked.beside, loaded, title=_start(asked.beside), **how)


def show(
    thing: LoadedModel | nn.Module | Record | AttentionMap | str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    text: str | Tensor | Mapping[str, Any] | None = None,
    *,
    tokens: Any = None,
    pieces: Any = None,
    written: str = "text",
    entries: int | Sequence[int] | None = None,
    image: Any = None,
    grid: tuple[int, int] | None = None,
    image_start: int | Sequence[int] = 0,
    side: str = "keys",
    title: str = "",
    cells: int = CELLS,
    lang: str | None = None,
) -> Report:
    """Show every head of a model, a record or a map, in the last line of a notebook's cell.

        hw.show(model, tokenizer, "The tiger sleeps.")          # any model that `watch` supports
        hw.show("minilm", text="The tiger sleeps.")             # a model by name or folder, as in `load_model`
        hw.show(record, tokenizer, tokens=ids)                  # of hw.watch(model, maps="lazy")
        hw.show(amap, pieces=["The", " tiger", " sleeps"])      # of hw.attend(…, return_map=True)

    Args:
        thing: what to show; None for the embedded decoder.
        tokenizer, text: as in `see`; for a record, the tokenizer of `tokens`.
        tokens, pieces, written, entries: the tokens of a record or a map, as in `report`.
        image, grid, image_start, side: an image whose patches are tokens of a record or a map, as in `report`.
        title, cells: as in `see`.
        lang: "en" or "zh"; None for that of the locale.
    Returns:
        The `Report`, which a notebook shows as its page: offline, in a frame of its own, with pictures below for
        notebooks without JavaScript.
    Raises:
        ConfigError: for arguments that do not belong to `thing`, and as in `see` and `report`.
    """
    lang = language_of(lang)
    known = isinstance(thing, Record | AttentionMap)
    others = {"text": text} if known else {"tokens": tokens, "pieces": pieces, "entries": entries, "image": image}
    for name, given in others.items():
        if given is not None:
            raise ConfigError(f"show({name}=…): does not apply to {type(thing).__name__}; {_OTHER[known]}")
    options: dict[str, Any] = {"title": title, "cells": cells, "lang": lang}
    if isinstance(thing, Record):
        found = report(
            thing, tokens=tokens, pieces=pieces, tokenizer=tokenizer, written=written, entries=entries, image=image,
            grid=grid, image_start=image_start, side=side, **options,
        )  # fmt: skip
    elif isinstance(thing, AttentionMap):
        texts = text_of("", tokens, pieces, tokenizer, written), None
        found = of_map(thing, texts, entries, title, cells, images_of(image, grid, image_start, side))
    else:
        found = see(text, thing, tokenizer=tokenizer, **options)
    return replace(found, lang=lang)


_OTHER = {True: "give tokens=…, pieces=… or both", False: "give text=…, the text, its token ids or the model's inputs"}


def _of_module(text: Any, model: nn.Module, tokenizer: Any, title: str, cells: int) -> Report:
    """The report of one forward of a model."""
    if isinstance(text, str) and tokenizer is not None:
        title = title or _start(text)
        text = inputs_of(text, tokenizer)
    if not isinstance(text, Tensor | Mapping):
        raise ConfigError(
            f"text: for an nn.Module expected token ids, the keyword arguments of its forward, or a text with "
            f"tokenizer=…; got {type(text).__name__}"
        )
    tokens = text.get("input_ids") if isinstance(text, Mapping) else text
    if isinstance(tokens, Tensor) and not tokens.numel():
        raise TextError(tr("the text is empty; give at least one token"))
    with torch.no_grad(), watch(model, maps="lazy") as record:
        model(**text) if isinstance(text, Mapping) else model(torch.atleast_2d(text))
    named = tokenizer if isinstance(tokens, Tensor) else None
    return report(record, tokens=tokens, tokenizer=named, title=title, cells=cells)


def _start(text: str) -> str:
    """A title for a text; those who show it break it into lines, or cut it to their width."""
    return clipped(" ".join(text.split()), 120)
