"""Roles as a table of plain text, and as HTML."""

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from headwise.science.roles.tally import DRAWS

if TYPE_CHECKING:
    from headwise.science.roles.result import Roles

SHORT = {"separator": "sep.", "punctuation": "punct.", "duplicate": "same", "induction": "induct.", "local": "nearby"}
LABELS = 2  # their column


def table(roles: "Roles", confidence: float) -> str:
    """See `Roles.table`."""
    head, body, below = _cells(roles, confidence)
    widths = [max(map(len, column)) for column in zip(head, *body, *below, strict=True)]
    lines = []
    for row in (head, *body, *below):
        cells = [
            cell.ljust(w) if i == 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    rule = "─" * max(map(len, lines))
    lines.insert(len(lines) - len(below), rule)
    return "\n".join([*lines, *_choices(roles), *_notes(roles, confidence)])


def html(roles: "Roles", confidence: float) -> str:
    """The same for a notebook."""
    head, body, below = _cells(roles, confidence)
    rows = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in (*body, *below))
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    notes = "".join(f"<p>{escape(line)}</p>" for line in (*_choices(roles), *_notes(roles, confidence)))
    return f"<table><tr>{names}</tr>{rows}</table>{notes}"


def _cells(roles: "Roles", confidence: float) -> tuple[list[str], list[list[str]], list[list[str]]]:
    head = ["layer", "head", "on this input", *(SHORT.get(name, name) for name in roles)]
    body = []
    for layer, one in np.ndindex(*roles.shape):
        words = ", ".join(label.text for label in roles.labels(layer, one, confidence)) or "·"
        numbers = [_number(float(score.mass[layer, one])) for score in roles.values()]
        best = roles["offset"].offset
        assert best is not None
        at = list(roles).index("offset")
        numbers[at] += f" at {best[layer, one]:+d}".replace("-", "−")
        body.append([str(layer), str(one), words, *numbers])
    below = [
        ["", "", "a uniform head", *(_number(_middle(score.uniform)) for score in roles.values())],
        ["", "", "eligible rows", *(_number(_middle(score.coverage)) for score in roles.values())],
    ]
    return head, body, below


def _choices(roles: "Roles") -> list[str]:
    asked = dict(roles.syntax)
    if roles.coreference is not None:
        asked["coreference"] = roles.coreference
    lines = []
    for name, choice in sorted(asked.items(), key=lambda item: -item[1].count):
        if choice.count:
            at = int(np.nan_to_num(choice.accuracy, nan=-1).argmax())
            best = divmod(at, roles.shape[1])
            lines.append(
                f"{name}: head {best[0]}.{best[1]} is right in {choice.accuracy[best]:.0%} of {choice.count} cases on "
                f"this input; {choice.rule or 'no rule'} in {choice.baseline:.0%}"
            )
    return lines


def _notes(roles: "Roles", confidence: float) -> list[str]:
    layers, heads = roles.shape
    return [
        f"{layers} × {heads} heads on this input of {roles.rows:,} rows; definitions {roles.version}.",
        f"A label is a score over its threshold, in {confidence:.0%} or more of {DRAWS} draws of a block bootstrap; "
        f"· is none.",
        "Weights say where a head looks, not what it is for.",
    ]


def _middle(x: np.ndarray) -> float:
    known = x[np.isfinite(x)]
    return float(known.mean()) if known.size else float("nan")


def _number(x: float) -> str:
    return f"{x:.2f}" if np.isfinite(x) else "—"
