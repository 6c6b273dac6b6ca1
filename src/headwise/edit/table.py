"""A result of surgery as lines of text."""

from collections.abc import Iterable, Sequence

from torch import nn

from headwise.table.show import as_text


def aligned(head: Sequence[str], rows: Iterable[Sequence[object]], *, words: int = 1) -> str:
    """Columns under their headings; the first `words` columns hold words and stand left, numbers stand right."""
    return as_text(head, [[str(cell) for cell in row] for row in rows], words=words, gap="  ")


def numbers(values: Iterable[int], most: int = 12) -> str:
    """Head numbers as a list that does not grow beyond a line: 0 3 7 … (31 in all)."""
    found = list(values)
    shown = " ".join(map(str, found[:most]))
    return shown if len(found) <= most else f"{shown} … ({len(found)} in all)"


def change(before: int, after: int) -> str:
    """1,234 → 1,000 (−19.0 %); without a share where nothing changed."""
    share = f" ({100 * (after - before) / before:+.1f} %)".replace("-", "−") if before and after != before else ""
    return f"{before:,} → {after:,}{share}"


def count_parameters(model: nn.Module) -> int:
    """Of the whole model; one that stands in two places counts once."""
    return sum(parameter.numel() for parameter in model.parameters())
