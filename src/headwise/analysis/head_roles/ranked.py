"""The few heads that score most, as a small table: what a result of many heads shows of itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.analysis.given import head_name
from headwise.table.show import as_html, as_text

MOST = 8  # lines


@dataclass(frozen=True)
class Ranked:
    """A caption, and the heads that score most. columns: heading → [layers, heads], whole
    numbers for signed steps; the first one is what ranks.

    Heads of which the score is not known (NaN) are not listed.
    """

    caption: str
    columns: Mapping[str, np.ndarray]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and cells, a row a head."""
        score = self._score
        first = np.argsort(-np.nan_to_num(score, nan=-np.inf).ravel(), kind="stable")[: self._listed]
        body = [
            [head_name(*at), *(_cell(x[at]) for x in self.columns.values())]
            for at in zip(*np.unravel_index(first, score.shape), strict=True)
        ]
        return ["head", *self.columns], body

    def note(self) -> str:
        """How many heads are not in the table."""
        score = self._score
        more = score.size - self._listed
        if more == score.size:
            return f"of no head is it known on this input ({score.size} heads)"
        return f"and {more} more of {score.size} heads" if more else ""

    def __str__(self) -> str:
        head, body = self.table()
        return "\n".join(filter(None, (self.caption, as_text(head, body) if body else "", self.note())))

    def html(self) -> str:
        """The same for a notebook."""
        return as_html(*self.table(), "; ".join(filter(None, (self.caption, self.note()))))

    @property
    def _score(self) -> np.ndarray:
        return next(iter(self.columns.values()))

    @property
    def _listed(self) -> int:
        """How many heads the table has."""
        return min(MOST, int(np.isfinite(self._score).sum()))


def _cell(x: Any) -> str:
    if isinstance(x, np.integer):
        return f"{int(x):+d}".replace("-", "−")
    return f"{float(x):.3f}" if np.isfinite(float(x)) else "—"
