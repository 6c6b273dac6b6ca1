"""The score of every head for one role, and the label that it may earn."""

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from headwise.analysis.head_roles.definitions import Definition
from headwise.analysis.head_roles.ranked import Ranked
from headwise.analysis.head_roles.tally import Tally
from headwise.table.show import plain
from headwise.wording import Bilingual


@dataclass(frozen=True)
class Label:
    """A role that a head plays on this input.

    Attributes:
        text: as it is printed, such as "offset −3", which has a Chinese version for a defined role; role: its
            name in `Roles`.
        score, threshold: what the head has and what it takes; confidence: share of the draws of a block bootstrap in
            which it is still enough; source: of the threshold.
    """

    text: str
    role: str
    score: float
    threshold: float
    confidence: float
    source: str

    def __str__(self) -> str:
        return f"{self.text} {self.score:.2f}"


@dataclass(frozen=True, repr=False)
class RoleScore:
    """One role's score of every head; arrays are [layers, heads], NaN where no row is eligible. Prints the heads that
    score most.

    Attributes:
        definition: what it is, its unit and threshold.
        mass: the score, mean over eligible rows (queries that may see at least one such key).
        uniform: what a head would score that looks alike at all that it may see, mean over the same rows.
        coverage: eligible rows over the rows that see something.
        without_first: the same with weights renormalised without the first key, over the rows that keep at least 1 % of
            their weight then; None where that has no meaning.
        offset, weight: of the role "offset" alone: the best offset, and the mean weight there.
    """

    definition: Definition
    mass: np.ndarray
    uniform: np.ndarray
    coverage: np.ndarray
    tally: Tally
    without_first: "RoleScore | None" = None
    offset: np.ndarray | None = None
    weight: np.ndarray | None = None

    @property
    def lift(self) -> np.ndarray:
        """mass / uniform: 1 is no preference; NaN where the baseline is 0."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.uniform > 0, self.mass / self.uniform, np.nan)

    @cached_property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """The middle 95 % of the score over the draws of a block bootstrap, two arrays."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a head without an eligible row: NaN, as it should be
            low, high = np.nanquantile(self._drawn[0], (0.025, 0.975), axis=0)
        return low, high

    @cached_property
    def confidence(self) -> np.ndarray:
        """Share of the draws in which the score is enough for the role; a draw without eligible rows is not, and with
        fewer than two stretches of rows nothing is sure (0)."""
        if self.tally.total.shape[1] < 2:
            return np.zeros(self.mass.shape)
        return self.definition.holds(*self._drawn).mean(0)

    @property
    def holds(self) -> np.ndarray:
        """Whether the score itself is enough, boolean."""
        return self.definition.holds(self.mass, self.uniform)

    @property
    def _drawn(self) -> tuple[np.ndarray, np.ndarray]:
        return self.tally.drawn()

    def ranked(self) -> Ranked:
        """The heads that score most, as what is printed."""
        columns = {"score": self.mass, "uniform": self.uniform, "lift": self.lift, "rows": self.coverage}
        if self.offset is not None:
            columns |= {"offset": self.offset}
        columns |= {"confidence": self.confidence}
        d = self.definition
        return Ranked(f"{d.word}: {d.what} ({d.unit}); a head plays it from {d.threshold:g} on", columns)

    def __repr__(self) -> str:
        return str(self.ranked())

    def _repr_html_(self) -> str:
        return self.ranked().html()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None where no row is eligible."""
        low, high = self.interval
        arrays = {
            "mass": self.mass, "uniform": self.uniform, "lift": self.lift, "coverage": self.coverage, "low": low,
            "high": high, "confidence": self.confidence,
        }  # fmt: skip
        if self.offset is not None and self.weight is not None:
            arrays |= {"offset": self.offset, "weight": self.weight}
        found: dict[str, Any] = {name: plain(x) for name, x in arrays.items()}
        d = self.definition
        found |= {"what": d.what, "unit": d.unit, "threshold": d.threshold, "source": d.source, "limit": d.limit}
        if self.without_first is not None:
            found["without_first"] = {
                name: plain(getattr(self.without_first, name)) for name in ("mass", "uniform", "lift", "coverage")
            }
        return found


def of_tally(definition: Definition, tally: Tally, rows: Tally) -> RoleScore:
    """The means of a tally; `rows` has all rows that see something."""
    mass, uniform = tally.mean()
    with np.errstate(invalid="ignore", divide="ignore"):
        coverage = tally.count.sum(1) / rows.total.sum(1)
    return RoleScore(definition, mass, uniform, coverage, tally)


def label(score: RoleScore, at: tuple[int, int]) -> Label:
    """The label that the head at (layer, head) earns by its score."""
    d = score.definition
    text = d.word
    if score.offset is not None:
        by = f"{int(score.offset[at]):+d}".replace("-", "−")
        text = Bilingual(f"{d.word} {by}", f"{d.word.zh} {by}")
    return Label(text, d.name, float(score.mass[at]), d.threshold, float(score.confidence[at]), d.limit)
