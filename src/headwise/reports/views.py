"""Views: ways to write a `Report`, by name; and its table for a terminal.

A view is a class in a file of its own and a line that registers it:

    class Arcs(View):
        name, about = "arcs", "the strongest key of each query, as arcs (SVG)"

        def write(self, report, path, *, lang): ...

    register(Arcs())                            # hw.reports.write_view(report, "arcs", "arcs.svg"), see --view arcs=…
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import ClassVar

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from headwise.analysis.checks import head_name
from headwise.errors import ConfigError, check_choice, check_declared
from headwise.reports.data import Report, value_range
from headwise.reports.findings import HEADS, Finding, findings, losses_without, telling
from headwise.reports.messages import message
from headwise.reports.numbers import SCORES, SOME_VALUES, VALUES
from headwise.reports.page import write_report
from headwise.reports.pictures import write_pngs
from headwise.reports.words import label, words
from headwise.stats import known
from headwise.wording import COMMA, LIST, Bilingual, in_language, joined, language_of, tr


class View(ABC):
    """One way to write a report.

    Attributes:
        name: by which it is requested. about: what it writes, for lists of views.
        folder: whether it writes a folder instead of a file.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    folder: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_declared(cls, View, {
            "name": "by which it is requested", "about": "what it writes", "write": "how it writes a report",
        })  # fmt: skip

    @abstractmethod
    def write(self, report: Report, path: Path, *, lang: str) -> None:
        """Write the report to the path, whole or not at all. lang: "en" or "zh"."""


VIEWS: dict[str, View] = {}


def register(view: View) -> View:
    """Make a view known by its name; returns it.

    Raises:
        ConfigError: if it is not a `View`, or another view has the same name.
    """
    if not isinstance(view, View):
        raise ConfigError(f"register({view!r}): expected a headwise.reports.views.View")
    if type(VIEWS.get(view.name, view)) is not type(view):
        raise ConfigError(f"register({type(view).__name__}): there is another view {view.name!r}; give it another name")
    VIEWS[view.name] = view
    return view


def view_of(name: str) -> View:
    """The view of that name; ConfigError with the known views if there is none."""
    if name not in VIEWS:
        known = joined((Bilingual(f"{one.name}: {one.about}", one.name) for one in VIEWS.values()), tr("; "))
        raise ConfigError("view={name!r}: no such view. Known: {known}", name=name, known=known)
    return VIEWS[name]


def write_view(report: Report, name: str, path: str | os.PathLike[str], *, lang: str | None = None) -> Path:
    """Write a report by the view of that name, in the language `lang` ("en" or "zh"; None for the
    locale's). Returns the path.

    Raises:
        ConfigError: for an unknown view or language. OSError: where the path cannot be written.
    """
    lang = language_of(lang)
    view_of(name).write(report, Path(path), lang=lang)
    return Path(path)


class _Page(View):
    name, about = "html", "one HTML page with every map, statistic and role"

    def write(self, report: Report, path: Path, *, lang: str) -> None:
        write_report(report, path, lang=lang)


class _Pictures(View):
    name, about, folder = "png", "a folder with a heat map of each head", True

    def write(self, report: Report, path: Path, *, lang: str) -> None:
        write_pngs(report, path, lang=lang)


for _view in (_Page(), _Pictures()):
    register(_view)


BARS = "▁▂▃▄▅▆▇█"


LINES = 22  # of the short form: a terminal of 24 lines also shows the command and the prompt
LEAST = 3  # heads in it, if there is no room for more
BRIEF = ("model", "text", "loss")  # facts in its first line, as far as they fit
EVIDENCE = ("effective_keys", "mean_distance")  # statistics beside the pattern of a head
CAUTIONS = ("caution", SCORES, VALUES, SOME_VALUES)  # codes of what the reader must know

Block = list[Text | Table]


def print_report(
    report: Report, console: Console, *, sort: str | None = None, lang: str | None = None, everything: bool = False,
    last: Sequence[Text] = (),
) -> None:  # fmt: skip
    """Print the findings, the heads worth a look (or the largest by `sort`), and remarks, in at most LINES lines of
    80 columns with `last`; or `everything`: all facts, all heads with the statistics that fit, and all remarks."""
    lang = language_of(lang)
    if sort is not None:
        check_choice("sort", sort, report.statistics)
    found = findings(report)
    said = []
    for i, one in enumerate(found, 1):
        lines = Text(in_language(one.text, lang)).wrap(console, max(20, console.width - 3))
        said.append(Text(f"{i}. ") + Text("\n   ").join(lines))
    unbroken: Block = list(last)
    if everything:
        unbroken += (facts := _facts(report, console, lang))
        table, missing = _fitting(report, console, sort, lang)
        names = in_language(LIST, lang).join(label(name, lang) if lang == "zh" else name for name in missing)
        below = [message("not_shown", names=names)] if missing else []
        blocks: list[Block] = [facts, [*said], [table, *_dim(below, lang)]]
        blocks.append(_dim(report.notes, lang))
    else:
        blocks = _brief(report, console, (found, said), sort, lang, list(last))
    blocks.append(list(last))
    blocks = [block for block in blocks if block]
    spare = LINES - sum(_height(block, console) for block in blocks)
    for i, block in enumerate(blocks):
        if i and (everything or spare > 0):
            console.print()
            spare -= 1
        for part in block:
            console.print(part, highlight=False, soft_wrap=part in unbroken)


def _brief(
    report: Report, console: Console, found: tuple[list[Finding], list[Text]], sort: str | None, lang: str, last: Block
) -> list[Block]:
    """What fits into LINES lines with `last`: cautions before heads, heads before other remarks."""
    facts = {_code(name): in_language(value, lang) for name, value in report.facts}
    line = ""
    for more in (facts[code] for code in BRIEF if code in facts):
        longer = f"{line} · {more}" if line else more
        line = longer if not line or cell_len(longer) <= console.width else line
    above: Block = [*_dim([line] if line else [], lang), *found[1]]
    costs = "loss without it" in report.importance
    columns = [message("columns_loss" if costs else "columns")] if report.labels else []
    cautions = [value for name, value in report.facts if _code(name) in CAUTIONS]
    cautions += [note for note in report.notes if _code(note) in CAUTIONS]
    remarks = [note for note in report.notes if _code(note) not in (*CAUTIONS, "explained")]
    closing = _dim([message("all_heads", heads=len(report.heads))], lang)
    below = _dim(columns, lang)
    room = LINES - 1 - _height([*above, *below, *closing, *last], console)
    below += (known := _that_fit(_dim(cautions, lang), room - LEAST, console))
    room -= _height(known, console)
    table = _heads(report, found[0], sort, lang, min(HEADS, max(LEAST, room)))
    below += _that_fit(_dim(remarks, lang), room - table.row_count, console)
    return [above, [table, *below, *closing]]


def _that_fit(block: Block, lines: int, console: Console) -> Block:
    """The first parts, as many as that many lines take."""
    return [part for i, part in enumerate(block) if _height(block[: i + 1], console) <= lines]


def _code(text: str) -> str:
    return getattr(text, "code", "")


def _dim(texts: Iterable[str], lang: str) -> Block:
    return [Text(in_language(text, lang), style="dim") for text in texts]


def _height(block: Sequence[Text | Table], console: Console) -> int:
    """The lines that a block takes."""
    return sum(1 + x.row_count if isinstance(x, Table) else len(x.wrap(console, console.width)) for x in block)


def _heads(report: Report, found: list[Finding], sort: str | None, lang: str, count: int) -> Table:
    """Heads that are worth a look, with the evidence of their patterns."""
    every = telling(report, found) if sort is None else list(report.statistics.sort(sort).places)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column(words(lang, "report")["head"].lower(), no_wrap=True)
    table.add_column(words(lang, "report")["pattern"].lower(), no_wrap=True, overflow="ellipsis")
    for header in (tr("equal"), tr("queries")) if report.labels else ():
        table.add_column(in_language(header, lang), justify="right", no_wrap=True)
    names = [name for name in dict.fromkeys([sort, *EVIDENCE]) if name is not None and name in report.statistics]
    columns = {name: report.statistics.dense(name).numpy(force=True) for name in names}
    for name in names:
        table.add_column(label(name, lang, short=True) + (" ↓" if name == sort else ""), justify="right", no_wrap=True)
    if (losses := losses_without(report)) is not None:
        table.add_column(in_language(message("loss"), lang), justify="right", no_wrap=True)
    for at in every[:count]:
        own = report.labels[at[0]][at[1]][:1] if report.labels else []
        pattern = own[0].words if own else report.patterns[at[0]][at[1]]
        row: list[str | Text] = [
            head_name(*at),
            Text(in_language(pattern, lang) or "·", style="" if own and own[0].sure else "dim"),
        ]
        if report.labels:
            row += [f"{own[0].uniform:.2f}", str(own[0].rows)] if own else ["·", "·"]
        row += [_cell(values, at) for values in columns.values()]
        table.add_row(*row, *([] if losses is None else [f"{losses[at]:+.3f}"]))
    return table


def _facts(report: Report, console: Console, lang: str) -> Block:
    """A line or more for each fact, aligned."""
    facts = [(in_language(name, lang), in_language(value, lang)) for name, value in report.facts]
    margin = max((cell_len(name) for name, _ in facts), default=0)
    found: Block = []
    for name, value in facts:
        first, *others = _lines(value, console, margin + 2)
        found.append(Text(f"{' ' * (margin - cell_len(name))}{name}  ", style="dim") + Text(first))
        found += [Text(" " * (margin + 2) + line) for line in others]
    return found


def _lines(value: str, console: Console, indent: int) -> list[str]:
    """The lines of a value in a terminal, broken at blanks alone, so that paths can be copied; one in a pipe."""
    if not console.is_terminal:
        return [value]
    return wrap(value, max(20, console.width - indent), break_long_words=False, break_on_hyphens=False) or [""]


def _fitting(report: Report, console: Console, sort: str | None, lang: str) -> tuple[Table, list[str]]:
    """The widest table that fits, and the names of the omitted statistics."""
    kept = list(report.statistics)
    # Drop the most dispensable measures first, then from the right.
    kinds = {name: known(name) for name in reversed(kept) if name != sort}
    drop = sorted(kinds, key=lambda name: 0 if kinds[name] is None else -int(kinds[name].dispensable))
    missing: list[str] = []
    # Show one pattern per head if two do not fit.
    for patterns in (2, 1):
        table = _table(report, kept, patterns, sort, lang)
        if _width(table, console) <= console.width:
            return table, missing
    while drop and _width(table, console) > console.width:
        missing.append(drop.pop(0))
        kept.remove(missing[-1])
        table = _table(report, kept, 1, sort, lang)
    return table, missing


def _width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def _table(report: Report, kept: list[str], patterns: int, sort: str | None, lang: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    page, between = words(lang, "report"), in_language(COMMA, lang)
    table.add_column(page["layer"].lower(), justify="right")
    table.add_column(page["head"].lower(), justify="right")
    for name in kept:
        mark = " ↓" if name == sort else ""
        table.add_column(label(name, lang, short=True) + mark, justify="right", no_wrap=True)
    if any(map(any, report.patterns)):
        table.add_column(page["pattern"].lower(), no_wrap=True, overflow="ellipsis")
    columns = {name: report.statistics.dense(name).numpy(force=True) for name in kept}
    for layer, head in report.heads if sort is None else list(report.statistics.sort(sort).places):
        cells = [_cell(values, (layer, head)) for values in columns.values()]
        pattern = between.join(in_language(report.patterns[layer][head], lang).split(between)[:patterns])
        row: list[str | Text] = [str(layer), str(head), *cells, Text(pattern)]
        table.add_row(*row[: len(table.columns)])
    return table


def _cell(values: np.ndarray, at: tuple[int, int]) -> Text:
    """A number with a bar for its position in the column's range; all numbers of a column have the same decimals."""
    x = float(values[at])
    if not np.isfinite(x):
        return Text("— ·", style="bold red")
    least, most = value_range(values)
    low, size = min(0.0, least), max(abs(least), abs(most))
    decimals = 0 if size >= 1000 else 1 if size >= 100 else 2
    share = (x - low) / (most - low) if most > least else 0.0
    number = Text(f"{round(x, decimals) + 0.0:.{decimals}f} ", style="dim" if share < 0.07 else "")  # + 0.0: no −0
    return number.append(BARS[round(share * (len(BARS) - 1))], style="cyan" if share >= 0.07 else "dim")
