"""Results as tables for terminals and notebooks, and as plain values for JSON."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np


def as_text(head: Sequence[str], body: Sequence[Sequence[str]], *, words: int = 0, gap: str = " ") -> str:
    """Columns lined up: the first `words` columns hold words and stand left, numbers stand right."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = [
        gap.join(
            cell.ljust(width) if i < words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *body]
    ]
    return "\n".join(lines)


def as_html(head: Sequence[str], body: Sequence[Sequence[str]], caption: str = "") -> str:
    """The same as an HTML table."""
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    top = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{top}<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{rows}</table>"


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
    """Lists for JSON, which knows no NaN and no infinity: None for what is not finite."""
    if x.dtype.kind != "f":
        return x.tolist()
    values = x.astype(object)
    values[~np.isfinite(x)] = None
    return values.tolist()


def duration(seconds: float) -> str:
    """A time in words: 1.5 s, 2 min 12 s, 3 h 4 min."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left} s" if minutes else f"{seconds:.1f} s"
