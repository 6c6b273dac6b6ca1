"""Output of a plan in the terminal, as Markdown and as JSON."""

import json

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as Grid
from rich.text import Text

from headwise.plan.tables import Plan, Table, written
from headwise.wording import in_language, language, language_of


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
        console.print(next((grid for grid in grids if _width(grid, console) <= console.width), grids[-1]))
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


def _width(grid: Grid, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), grid).maximum


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
