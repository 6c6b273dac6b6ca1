"""The table of all heads for a terminal."""

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.errors import ConfigError
from headwise.views.data import Report

SHORT = {
    "normalized_entropy": "norm. entropy", "effective_keys": "keys", "top1_mass": "top 1", "max_logit": "max logit",
    "mean_distance": "distance", "local_mass": "local", "sink_mass": "first", "previous_mass": "previous",
    "self_mass": "self", "received_mass": "received", "punctuation_mass": "punct.",
}  # fmt: skip
# Dropped one after the other when the terminal is too narrow.
DISPENSABLE = (
    "received_mass", "normalized_entropy", "local_mass", "top1_mass", "self_mass", "max_logit", "punctuation_mass",
)  # fmt: skip


def print_report(report: Report, console: Console, *, sort: str | None = None) -> None:
    """Facts, then a line for each head: statistics, shaded by size in each column, and the strongest pattern.

    Args:
        sort: a statistic to sort by, largest first; by layer and head if None.
    """
    names = [s.name for s in report.statistics]
    if sort is not None and sort not in names:
        raise ConfigError(f"sort={sort!r}: expected one of {', '.join(names)}")
    for name, value in report.facts:
        console.print(Text(f"{name:>7}  ", style="dim") + Text(value))
    console.print(_table(report, sort, _fitting(report, console.width)))
    for note in report.notes:
        console.print(Text(note, style="dim"))


def _fitting(report: Report, width: int) -> list[int]:
    """Which statistics fit: about 9 columns each, beside the head's name and its pattern."""
    keep = list(range(len(report.statistics)))
    for name in DISPENSABLE:
        needed = 10 + sum(max(7, len(_title(report.statistics[k].name))) + 2 for k in keep) + 26
        if needed <= width:
            break
        keep = [k for k in keep if report.statistics[k].name != name]
    return keep


def _table(report: Report, sort: str | None, keep: list[int]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column("layer", justify="right")
    table.add_column("head", justify="right")
    for k in keep:
        table.add_column(_title(report.statistics[k].name), justify="right", no_wrap=True)
    table.add_column("strongest pattern", overflow="fold")
    layers, heads = report.shape
    order = [(layer, head) for layer in range(layers) for head in range(heads)]
    if sort is not None:
        values = next(s.values for s in report.statistics if s.name == sort)
        order.sort(key=lambda at: -np.nan_to_num(values[at]))
    for at in order:
        cells = [_shaded(report.statistics[k].values, at) for k in keep]
        table.add_row(str(at[0]), str(at[1]), *cells, report.patterns[at[0]][at[1]])
    return table


def _title(name: str) -> str:
    return SHORT.get(name, name.replace("_", " "))


def _shaded(values: np.ndarray, at: tuple[int, int]) -> Text:
    """A number on a ground that is the stronger, the larger it is in its column."""
    x = float(values[at])
    if not np.isfinite(x):
        return Text("—", style="bold red")
    decimals = 0 if abs(x) >= 1000 else 1 if abs(x) >= 100 else 2
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    share = 0.0 if high <= low else (x - low) / (high - low)
    red, green, blue = (int(a + (b - a) * share) for a, b in ((92, 255), (99, 209), (132, 102)))
    return Text(f"{x:.{decimals}f}", style=f"rgb({red},{green},{blue})")
