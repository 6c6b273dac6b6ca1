"""Tables as text for terminals and as HTML for notebooks; what notebooks show of any object, found by its class.

`register(Table, draw)`, looked up along bases, has draw(table, lang) return HTML; `reports.notebook` registers all.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.table.columns import HeadColumn
from headwise.wording import Message, language, tr

DRAWN_IN = "headwise.reports.notebook"  # its modules call `register`; it imports much, so only when it is needed
Draw = Callable[[Any, str], str]
DRAWN: dict[type, Draw] = {}


class Shown:
    """A class whose objects are drawn in notebooks."""

    def _repr_html_(self) -> str:
        return html_of(self)


def register(kind: type, draw: Draw) -> None:
    """Draw objects of this class, and of classes that inherit from it, by `draw(thing, lang)`."""
    DRAWN[kind] = draw


def html_of(thing: Any, lang: str | None = None) -> str:
    """The HTML of an object of a registered class. lang: "en" or "zh", None for `wording.language()`."""
    import_module(DRAWN_IN)
    draw = next(DRAWN[kind] for kind in type(thing).__mro__ if kind in DRAWN)
    return draw(thing, language() if lang is None else lang)


Place = tuple[int, int]  # layer and head
ROWS = 20  # shown at most
_HEAT = "rgba(47, 125, 225, {:.2f})"  # background of a number, translucent for light and dark pages
_STRONGEST = 0.55
_RIGHT = "text-align: right; font-variant-numeric: tabular-nums;"


def as_text(head: Sequence[str], body: Sequence[Sequence[str]], *, words: int = 0, gap: str = " ") -> str:
    """Aligned columns: the first `words` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = [
        gap.join(
            cell.ljust(width) if i < words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *body]
    ]
    return "\n".join(lines)


def as_html(head: Sequence[str], body: Sequence[Sequence[str]], caption: str = "", notes: Sequence[str] = ()) -> str:
    """The same as an HTML table, with paragraphs below."""
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    top = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{top}<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{rows}</table>" + "".join(
        f"<p>{escape(note)}</p>" for note in notes
    )


class Printed(ABC):
    """A result that prints itself as a title above a table of words, in terminals and notebooks."""

    @property
    @abstractmethod
    def title(self) -> str:
        """One line above the table."""

    @abstractmethod
    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Header and cells."""

    def __repr__(self) -> str:
        return f"{self.title}\n{as_text(*self.rows())}"

    def _repr_html_(self) -> str:
        return as_html(*self.rows(), self.title)


def plain(x: np.ndarray) -> Any:
    """Lists for JSON, with None for NaN and infinity, and without −0."""
    if x.dtype.kind != "f":
        return x.tolist()
    values = (x + 0.0).astype(object)
    values[~np.isfinite(x)] = None
    return values.tolist()


def duration(seconds: float) -> Message:
    """A duration: 1.5 s, 2 min 12 s, 3 h 4 min."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return tr("{hours} h {minutes} min", hours=hours, minutes=minutes)
    if minutes:
        return tr("{minutes} min {seconds} s", minutes=minutes, seconds=left)
    return tr("{seconds:.1f} s", seconds=seconds)


def text(
    title: str, layers: Sequence[str], places: Sequence[Place], columns: Mapping[str, HeadColumn], first: str = "layer"
) -> str:
    """The rows as aligned columns, at most `ROWS` of them. first: the name of the first column."""
    shown = min(len(places), ROWS)
    cells = [_cells(column, shown) for column in columns.values()]
    words = _words(layers, places[:shown])
    body = [[*words[row], *(column[row] for column in cells)] for row in range(shown)]
    head = [first, "head", *(_named(name, column) for name, column in columns.items())]
    lines = [title] if title else []
    lines.append(as_text(head, body, words=int(any(layers)), gap="  "))
    if more := len(places) - shown:
        lines.append(f"… and {more:,} more heads")
    return "\n".join(lines)


def html(
    title: str, layers: Sequence[str], places: Sequence[Place], columns: Mapping[str, HeadColumn], first: str = "layer"
) -> str:
    """The same as an HTML table; the background colour of a number is stronger the larger it is in its column."""
    shown = min(len(places), ROWS)
    head = ""
    for name, column in columns.items():
        tip = "; ".join(filter(None, (column.description, column.range)))
        title_of = f' title="{escape(tip)}"' if tip else ""
        head += f'<th style="{_RIGHT}"{title_of}>{escape(_named(name, column))}</th>'
    cells = [
        [f'<td style="{_RIGHT}{_colour(share)}">{escape(cell)}</td>' for cell, share in zip(
            _cells(column, shown), _shares(column.flat)[:shown], strict=True
        )]
        for column in columns.values()
    ]  # fmt: skip
    body = ""
    for row, (layer, number) in enumerate(_words(layers, places[:shown])):
        body += f"<tr><td>{escape(layer)}</td><td>{number}</td>{''.join(column[row] for column in cells)}</tr>"
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    more = len(places) - shown
    last = f'<tr><td colspan="{len(columns) + 2}">… and {more:,} more heads</td></tr>' if more else ""
    return f"<table>{caption}<tr><th>{first}</th><th>head</th>{head}</tr>{body}{last}</table>"


def grid(layers: Sequence[str], heads: Sequence[Sequence[int]], column: HeadColumn) -> str:
    """One column as text: a row per layer, a column per head, at most `ROWS` of either."""
    most = min(max((head + 1 for row in heads for head in row), default=0), ROWS)
    body = []
    for i, (name, row) in enumerate(zip(layers[:ROWS], heads, strict=False)):
        cells = dict(zip(row, map(number, column[i].tolist()), strict=True))
        body.append([f"L{i} {name}".rstrip(), *(cells.get(head, "") for head in range(most))])
    lines = [as_text(["layer", *(f"H{head}" for head in range(most))], body, words=1, gap="  ")]
    left = [f"{len(layers) - ROWS:,} more layers"] if len(layers) > ROWS else []
    widest = max(map(len, heads), default=0)
    left += [f"up to {widest - most:,} more heads a layer"] if widest > most else []
    return "\n".join([*lines, *([f"… and {' and '.join(left)}"] if left else [])])


def numbers(column: HeadColumn) -> list[str]:
    """Every number as text, with its error."""
    return _cells(column, len(column.flat))


def number(x: float) -> str:
    """Four significant digits, including zeros; "—" for NaN."""
    if math.isnan(x):
        return "—"
    return "∞" if x == math.inf else "-∞" if x == -math.inf else f"{x:#.4g}".rstrip(".")


def _words(layers: Sequence[str], places: Sequence[Place]) -> list[tuple[str, str]]:
    """Layer and head of each row, with the layer's name if it has one."""
    return [(f"{layer} {layers[layer]}".rstrip(), str(head)) for layer, head in places]


def _named(name: str, column: HeadColumn) -> str:
    return f"{name} ({column.unit})" if column.unit else name


def _cells(column: HeadColumn, shown: int) -> list[str]:
    values = column.flat[:shown].tolist()
    counts = bool((column.flat == column.flat.round()).all()) and float(column.flat.abs().max() if values else 0) < 1e15
    words = [f"{x:,.0f}" for x in values] if counts and column.flat_error is None else list(map(number, values))
    if column.flat_error is None:
        return words
    errors = column.flat_error[:shown].tolist()
    known = zip(words, values, errors, strict=True)
    return [word if math.isnan(x) else word + _known(error) for word, x, error in known]


def _known(error: float | list[float]) -> str:
    if isinstance(error, list):
        return "" if any(map(math.isnan, error)) else f" [{number(error[0])}, {number(error[1])}]"
    return "" if math.isnan(error) else f" ± {error:.2g}"


def _shares(flat: Tensor) -> list[float]:
    """The position of each number between the smallest and the largest finite one, 0 to 1; NaN for non-finite ones."""
    known = flat[flat.isfinite()]
    if not len(known):
        return [math.nan] * len(flat)
    low, high = known.min(), known.max()
    span = float(high - low)
    shares = (flat - low) / span if 0 < span < math.inf else torch.zeros_like(flat)
    return shares.where(flat.isfinite(), torch.nan).tolist()


def _colour(share: float) -> str:
    return "" if math.isnan(share) else f" background: {_HEAT.format(_STRONGEST * share)};"
