"""Results of pruning and merging as text."""

from collections.abc import Iterable, Sequence

from torch import nn

from headwise.table.show import as_text


def aligned(head: Sequence[str], rows: Iterable[Sequence[object]], *, words: int = 1) -> str:
    """Align columns under their headings: the first `words` columns to the left, the others to the right."""
    return as_text(head, [[str(cell) for cell in row] for row in rows], words=words, gap="  ")


def numbers(values: Iterable[int], most: int = 12) -> str:
    """Format head numbers, at most `most` of them: 0 3 7 … (31 in all)."""
    found = list(values)
    shown = " ".join(map(str, found[:most]))
    return shown if len(found) <= most else f"{shown} … ({len(found)} in all)"


def change(before: int, after: int) -> str:
    """Format a change: 1,234 → 1,000 (−19.0 %)."""
    share = f" ({100 * (after - before) / before:+.1f} %)".replace("-", "−") if before and after != before else ""
    return f"{before:,} → {after:,}{share}"


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
