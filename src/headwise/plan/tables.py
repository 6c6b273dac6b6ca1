"""A plan as tables of plain numbers, how their cells are written, and its words in English and in Chinese."""

from collections.abc import Callable
from dataclasses import dataclass

from headwise.costs import Work
from headwise.wording import Bilingual, joined, scaled, three_figures, tr

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
