"""Roles as a table of plain text, and as HTML."""

from collections.abc import Mapping, Sequence

import numpy as np

from headwise.analysis.checks import head_name
from headwise.analysis.head_roles.score import Choice, RoleScore
from headwise.analysis.head_roles.tally import DRAWS
from headwise.table.show import as_html

SHORT = {"separator": "sep.", "punctuation": "punct.", "duplicate": "same", "induction": "induct.", "local": "nearby"}
FEWEST = 10  # cases from which a best head is named
NAMED = 6  # relations with fewer cases that are named


Words = Sequence[Sequence[str]]  # [layers][heads], the labels of each head


def text(scores: Mapping[str, RoleScore], words: Words, notes: Sequence[str]) -> str:
    """A line for each head with the notes below; see `Roles.text`."""
    head, body, below = _cells(scores, words)
    widths = [max(map(len, column)) for column in zip(head, *body, *below, strict=True)]
    lines = []
    for row in (head, *body, *below):
        cells = [
            cell.ljust(w) if i == 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    rule = "─" * max(map(len, lines))
    lines.insert(len(lines) - len(below), rule)
    return "\n".join([*lines, *notes])


def html(scores: Mapping[str, RoleScore], words: Words, notes: Sequence[str]) -> str:
    """The table as HTML for a notebook."""
    head, body, below = _cells(scores, words)
    return as_html(head, [*body, *below], notes=notes)


def choices(found: Mapping[str, Choice]) -> list[str]:
    """One line for each relation and for coreference, with the head that is right most often, or the number of tied
    heads. Relations with fewer than FEWEST cases, in which a head can be right by chance, share one line."""
    lines, few = [], []
    for name, choice in sorted(found.items(), key=lambda item: -item[1].count):
        if choice.count >= FEWEST:
            lines.append(
                f"{name}: {_winner(choice)} of {choice.count} cases on this input; {choice.rule or 'no rule'} in "
                f"{choice.baseline:.0%}"
            )
        elif choice.count:
            few.append(f"{name} ({choice.count})")
    if few:
        shown = "; ".join(few[:NAMED]) + (f"; and {len(few) - NAMED} more" if len(few) > NAMED else "")
        lines.append(f"Fewer than {FEWEST} cases, too few to name a head: {shown}")
    return lines


def _winner(choice: Choice) -> str:
    accuracy = np.nan_to_num(choice.accuracy, nan=-1.0)
    best = [head_name(*at) for at in np.argwhere(accuracy == accuracy.max())]
    share = f"{accuracy.max():.0%}"
    if len(best) == 1:
        return f"{best[0]} is right in {share}"
    return f"{' and '.join(best) if len(best) == 2 else f'{len(best)} heads'} tie, right in {share}"


def remarks(shape: tuple[int, int], rows: int, version: str, confidence: float) -> list[str]:
    """Notes on how to read the table."""
    return [
        f"{shape[0]} × {shape[1]} heads on this input of {rows:,} rows; definitions {version}.",
        f"A label is a score over its threshold, in {confidence:.0%} or more of {DRAWS} draws of a block bootstrap; "
        f"· is none.",
        "Weights show where a head attends, not what it is for.",
    ]


def _cells(scores: Mapping[str, RoleScore], words: Words) -> tuple[list[str], list[list[str]], list[list[str]]]:
    head = ["layer", "head", "on this input", *(SHORT.get(name, name) for name in scores)]
    best = scores["offset"].offset
    assert best is not None
    at = list(scores).index("offset")
    body = []
    for layer, one in np.ndindex(*best.shape):
        numbers = [_number(float(score.mass[layer, one])) for score in scores.values()]
        numbers[at] += f" at {best[layer, one]:+d}".replace("-", "−")
        body.append([str(layer), str(one), words[layer][one] or "·", *numbers])
    below = [
        ["", "", "a uniform head", *(_number(_middle(score.uniform)) for score in scores.values())],
        ["", "", "eligible rows", *(_number(_middle(score.coverage)) for score in scores.values())],
    ]
    return head, body, below


def _middle(x: np.ndarray) -> float:
    known = x[np.isfinite(x)]
    return float(known.mean()) if known.size else float("nan")


def _number(x: float) -> str:
    return f"{x:.2f}" if np.isfinite(x) else "—"
