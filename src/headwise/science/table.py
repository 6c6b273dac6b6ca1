"""Tables of results, for terminals and notebooks."""

from collections.abc import Sequence
from html import escape


def as_text(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns lined up at the right."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = [" ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *body]]
    return "\n".join(lines)


def as_html(head: Sequence[str], body: Sequence[Sequence[str]], caption: str = "") -> str:
    """The same as an HTML table."""
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    top = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{top}<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{rows}</table>"
