"""A plan as tables of plain numbers, how their cells are written, and its output: terminal, Markdown and JSON."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as Grid
from rich.text import Text

from headwise.costs import Work
from headwise.wording import Bilingual, in_language, joined, language, language_of, scaled, three_figures, tr

Value = int | float | str | None


@dataclass(frozen=True)
class Column:
    """name: the heading. unit: how `written` formats the values. key: the name in JSON, if different."""

    name: str
    unit: str = ""
    key: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of unformatted numbers. total: whether the last row is the sum of the others. note: printed below."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    total: bool = False
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """The input as (name, value) facts, and tables of results. notes: apply to all tables."""

    title: str
    facts: tuple[tuple[str, str], ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()

    def table(self, key: str) -> Table:
        """The table with this key."""
        return next(table for table in self.tables if table.key == key)


def masked(work: Work) -> Bilingual:
    """The mask of a plan's input in words, such as "causal, window of 128 after 4 sinks"."""
    words = [tr("causal") if work.causal else tr("full")]
    if work.window is not None and work.sinks:
        words.append(tr("window of {size:,} after {sinks:,} sinks", size=work.window, sinks=work.sinks))
    elif work.window is not None:
        words.append(tr("window of {size:,}", size=work.window))
    return joined(words)


def written(value: Value, unit: str) -> str:
    """Format a value: 1,234 counts, 1.5 GB (10⁹ bytes), 2.0 TFLOP, 3.1 ms, 12.5 %; "—" for None."""
    if value is None:
        return "—"
    return value if isinstance(value, str) else _WRITE[unit](value)


def _seconds(value: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= size * 0.9995:
            return f"{three_figures(value / size)} {unit}" if value < 999.5 or size < 1 else f"{value:,.0f} s"
    return f"{three_figures(value * 1e9)} ns"


_WRITE: dict[str, Callable[[float], str]] = {
    "": str,
    "count": lambda x: f"{x:,.0f}",
    "number": lambda x: f"{x:,.0f}" if x >= 9.995 else f"{x:.2f}",
    "bytes": lambda x: scaled(x, "B"),
    "flops": lambda x: scaled(x, "FLOP"),
    "figure": scaled,
    "seconds": _seconds,
    "share": lambda x: f"{100 * x:.1f} %",
}


# What `headwise.costs` names: parts of a model, steps, limits and ways.
NAMES = {
    "embedding": tr("embedding"),
    "positions, segments": tr("positions, segments"),
    "convolutions": tr("convolutions"),
    "attention": tr("attention"),
    "recurrent layers": tr("recurrent layers"),
    "states": tr("states"),
    "feed-forward": tr("feed-forward"),
    "norms": tr("norms"),
    "output": tr("output"),
    "pooler": tr("pooler"),
    "other parts": tr("other parts"),
    "not for text": tr("not for text"),
    "all": tr("all", sense="total"),
    "projections": tr("projections"),
    "scores": tr("scores"),
    "softmax": tr("softmax"),
    "head mixing": tr("head mixing"),
    "weighted sum": tr("weighted sum"),
    "vocabulary": tr("vocabulary"),
    "arithmetic": tr("arithmetic"),
    "memory": tr("memory"),
    "ring": tr("ring"),
    "head-parallel": tr("head-parallel"),
    "as given": tr("as given"),
    "hybrid": tr("hybrid {rest}"),
    "heads": tr("heads {rest}"),
}


def named(name: str) -> str:
    """A name of `headwise.costs` in both languages; as it is if it has no Chinese one.

    >>> named("hybrid 2 × 3").zh, named("Ulysses")
    ('混合 2 × 3', 'Ulysses')
    """
    first, _, rest = name.partition(" ")
    if name in NAMES:
        return NAMES[name]
    return NAMES[first].filled(rest=rest) if first in NAMES and rest[:1].isdigit() else name


def print_plan(plan: Plan, console: Console) -> None:
    """Print title, facts, each table with its note, then the notes, in the user's language; fits 80 columns."""
    lang = language()
    console.print(Text(in_language(plan.title, lang), style="bold"))
    named = [(in_language(name, lang), in_language(value, lang)) for name, value in plan.facts]
    margin = max((cell_len(name) for name, _ in named), default=0)
    facts = Grid.grid(padding=(0, 2))
    facts.add_column(justify="right", style="dim", min_width=margin, no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in named:
        facts.add_row(name, Text(value))
    console.print(facts)
    for table in plan.tables:
        console.print()
        console.print(Text(in_language(table.title, lang), style="bold cyan"))
        grids = [_grid(table, gap, lang, narrow) for gap, narrow in ((2, False), (1, False), (1, True))]
        options = console.options.update(max_width=10_000)
        fit = (grid for grid in grids if Measurement.get(console, options, grid).maximum <= console.width)
        console.print(next(fit, grids[-1]))
        if table.note:
            console.print(Text(in_language(table.note, lang), style="dim"))
    if plan.notes:
        console.print()
    for note in plan.notes:
        console.print(Text(in_language(note, lang), style="dim"))


def to_markdown(plan: Plan, lang: str | None = None) -> str:
    """Return the plan as Markdown. lang: "en" or "zh"; None for that of the locale."""
    lang = language_of(lang)
    lines = [f"## {in_language(plan.title, lang)}", ""]
    colon = "：" if lang == "zh" else ": "
    lines += [f"- {in_language(name, lang)}{colon}{in_language(value, lang)}" for name, value in plan.facts]
    for table in plan.tables:
        lines += ["", f"### {in_language(table.title, lang)}", "", markdown_table(table, lang).rstrip()]
        if table.note:
            lines += ["", in_language(table.note, lang)]
    lines += ["", *(in_language(note, lang) for note in plan.notes)] if plan.notes else []
    return "\n".join(lines) + "\n"


def markdown_table(table: Table, lang: str | None = None) -> str:
    """Return a table as Markdown with numbers aligned to the right. lang: "en" or "zh"; None for the locale's."""
    lang = language_of(lang)
    rows = [[column.name for column in table.columns], ["---:" if c.unit else "---" for c in table.columns]]
    every = [*rows, *_cells(table)]
    return "".join("| " + " | ".join(in_language(cell, lang) for cell in row) + " |\n" for row in every)


def to_json(plan: Plan) -> str:
    """Return the plan as JSON with unrounded numbers in bytes, FLOPs and seconds, under the columns' keys."""
    tables = {
        table.key: [
            {column.key or column.name: value for column, value in zip(table.columns, row, strict=True)}
            for row in table.rows
        ]
        for table in plan.tables
    }
    content = {"title": plan.title, "facts": dict(plan.facts), "tables": tables, "notes": list(plan.notes)}
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def _grid(table: Table, gap: int, lang: str, narrow: bool) -> Grid:
    """gap: blanks between columns. narrow: whether the words of a column's name are below one another."""
    grid = Grid(box=None, header_style="dim", pad_edge=False, padding=(0, gap, 0, 0))
    for i, column in enumerate(table.columns):
        name = in_language(column.name, lang)
        grid.add_column(
            name.replace(" ", "\n") if narrow else name,
            justify="right" if column.unit else "left",
            overflow="fold",
            no_wrap=i == 0,
        )
    rows = _cells(table)
    for i, row in enumerate(rows):
        last = table.total and i == len(rows) - 1
        grid.add_row(*(Text(in_language(cell, lang)) for cell in row), style="bold" if last else "")
    return grid


def _cells(table: Table) -> list[list[str]]:
    return [
        [written(value, column.unit) for value, column in zip(row, table.columns, strict=True)] for row in table.rows
    ]
