"""The table of all heads for a terminal: readable on dark and light backgrounds, at 80 columns, and through a pipe."""

import numpy as np
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from headwise.errors import ConfigError
from headwise.reports.data import Report, Statistic
from headwise.stats import describe, known

BARS = "▁▂▃▄▅▆▇█"


def print_report(report: Report, console: Console, *, sort: str | None = None) -> None:
    """Print the facts, then one row per head with its statistics, each with a bar from the minimum to the maximum of
    the column, and the strongest pattern; then the notes. Columns that do not fit are listed at the end.

    Args:
        sort: a statistic to sort by, in descending order with NaN last; by layer and head if None.
    Raises:
        ConfigError: if `sort` is not a statistic of this report.
    """
    names = [s.name for s in report.statistics]
    if sort is not None and sort not in names:
        raise ConfigError(f"sort={sort!r}: expected one of {', '.join(names)}")
    margin = max((len(name) for name, _ in report.facts), default=0)
    for name, value in report.facts:
        console.print(Text(f"{name:>{margin}}  ", style="dim") + Text(value), soft_wrap=True)
    if report.facts:
        console.print()
    table, missing = _fitting(report, console, sort)
    console.print(table)
    if missing:
        words = f"Not shown here: {', '.join(missing)}. Use a wider terminal or the HTML report."
        console.print(Text(words, style="dim"))
    if report.notes:
        console.print()
    for note in report.notes:
        console.print(Text(note, style="dim"))


def _fitting(report: Report, console: Console, sort: str | None) -> tuple[Table, list[str]]:
    """The widest table that fits, and the names of the omitted statistics."""
    kept = list(report.statistics)
    # What a measure calls dispensable goes first; then others from the right.
    order = sorted(range(len(kept)), key=lambda i: (-_dispensable(kept[i].name), -i))
    drop = [kept[i] for i in order if kept[i].name != sort]
    missing: list[str] = []
    # Show one pattern per head if two do not fit.
    for patterns in (2, 1):
        table = _table(report, kept, patterns, sort)
        if _width(table, console) <= console.width:
            return table, missing
    while drop and _width(table, console) > console.width:
        gone = drop.pop(0)
        kept = [s for s in kept if s is not gone]
        missing.append(gone.name)
        table = _table(report, kept, 1, sort)
    return table, missing


def _width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def _table(report: Report, kept: list[Statistic], patterns: int, sort: str | None) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column("layer", justify="right")
    table.add_column("head", justify="right")
    for statistic in kept:
        mark = " ↓" if statistic.name == sort else ""
        table.add_column(_title(statistic.name) + mark, justify="right", no_wrap=True)
    if any(map(any, report.patterns)):
        table.add_column("strongest pattern", no_wrap=True, overflow="ellipsis")
    for layer, head in _order(report, sort):
        cells = [_cell(statistic.values, (layer, head)) for statistic in kept]
        pattern = ", ".join(report.patterns[layer][head].split(", ")[:patterns])
        row: list[str | Text] = [str(layer), str(head), *cells, Text(pattern)]
        table.add_row(*row[: len(table.columns)])
    return table


def _order(report: Report, sort: str | None) -> list[tuple[int, int]]:
    order = report.heads
    if sort is not None:
        values = next(s.values for s in report.statistics if s.name == sort)
        order.sort(key=lambda at: (bool(np.isnan(values[at])), -float(np.nan_to_num(values[at]))))
    return order


def _title(name: str) -> str:
    words = describe(name)
    return name.replace("_", " ") if words is None else words.short


def _dispensable(name: str) -> int:
    kind = known(name)
    return 0 if kind is None else int(kind.dispensable)


def _cell(values: np.ndarray, at: tuple[int, int]) -> Text:
    """A number with a bar for its position in the column's range; all numbers of a column have the same decimals."""
    x = float(values[at])
    if not np.isfinite(x):
        return Text("— ·", style="bold red")
    known = values[np.isfinite(values)]
    low, most = min(0.0, float(known.min())), float(np.abs(known).max())
    decimals = 0 if most >= 1000 else 1 if most >= 100 else 2
    share = (x - low) / (float(known.max()) - low) if known.max() > known.min() else 0.0
    number = Text(f"{x:.{decimals}f} ", style="dim" if share < 0.07 else "")
    return number.append(BARS[round(share * (len(BARS) - 1))], style="cyan" if share >= 0.07 else "dim")
