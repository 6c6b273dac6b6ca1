"""The result of a sweep in a terminal: the facts, each measure over the heads, and the first heads."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from headwise.corpus.result import CorpusMeasures
from headwise.errors import unknown_name
from headwise.table.show import as_text, duration, numbers

SHOWN = 12  # heads


def check_sort(sort: str | None, names: Sequence[str]) -> None:
    """Raise ConfigError if the heads cannot be sorted by this name."""
    if sort is not None and sort not in names:
        raise unknown_name("sort", sort, names)


def print_measures(
    found: CorpusMeasures, console: Console, *, sort: str | None = None, seconds: float | None = None
) -> None:
    """Print facts, a line a measure, and a line each for the first heads, with as many measures as fit.

    Args:
        sort: the measure to sort by, largest first; by layer and head if None. seconds: the duration.
    """
    about, total = found.about, found.total
    took = "" if seconds is None else f", in {duration(seconds)}"
    files = len(about["files"])
    facts = [
        ("model", f"{about['model']['name']}: {about['model']['about']}"),
        ("corpus", f"{files:,} file{'s' * (files > 1)}, {total.tokens:,} tokens in {total.windows:,} windows{took}"),
        ("kernel", ", ".join(about["kernels"])),
        ("table", f"{found.path}: {len(found.heads):,} heads × {len(found.measures)} measures"),
    ]
    for name, value in facts:
        console.print(Text(f"{name:>6}  ", style="dim") + Text(value), soft_wrap=True)
    console.print()
    _print_table(console, as_text(*found.overview(), words=2, gap="  "))
    console.print()
    table = found.table if sort is None else found.table.sort(sort)
    head = ["layer", "head", *table]
    cells = zip(*(numbers(column)[:SHOWN] for column in table.values()), strict=True)
    body = [[str(layer), str(at), *row] for (layer, at), row in zip(table.places[:SHOWN], cells, strict=True)]
    fits = _fitting(head, body, console.width, sort)
    shown = as_text([head[i] for i in fits], [[row[i] for i in fits] for row in body], gap="  ")
    _print_table(console, shown)
    rest = [f"{len(found.heads) - SHOWN:,} more heads"] if len(found.heads) > SHOWN else []
    hidden = [name for i, name in enumerate(head) if i not in fits]
    rest += [", ".join(hidden)] if hidden else []
    if rest:
        console.print(Text(f"The table also contains {' and '.join(rest)}.", style="dim"))
    _print_troubles(found, console)


def _fitting(head: list[str], body: list[list[str]], width: int, sort: str | None) -> list[int]:
    """The columns that fit: layer, head, the measure that is sorted by, then the others in their order."""
    widths = [max(map(len, column)) + 2 for column in zip(head, *body, strict=True)]
    order = sorted(range(2, len(head)), key=lambda i: head[i] != sort)
    taken, room = [0, 1], width + 2 - widths[0] - widths[1]
    for i in order:
        room -= widths[i]
        if room < 0:
            break
        taken.append(i)
    return sorted(taken)


def _print_table(console: Console, text: str) -> None:
    first, _, rest = text.partition("\n")
    console.print(Text(first, style="bold"), soft_wrap=True)
    console.print(Text(rest), soft_wrap=True)


def _print_troubles(found: CorpusMeasures, console: Console) -> None:
    rows, windows = (int(count) for count in found.total.lost.max(1).values)
    if not found.total.troubles:
        return
    console.print()
    message = f"NaN or infinity: up to {rows:,} queries of a head, in {windows:,} windows that were left out for it."
    if not rows:
        message = "NaN or infinity among the values of a head; its weights are finite, and nothing was left out."
    console.print(Text(message, style="bold red"))
    for trouble in found.total.troubles:
        console.print(Text(f"  {trouble}"), soft_wrap=True)
