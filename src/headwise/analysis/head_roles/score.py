"""The scores of every head for one role or relation, and the labels that heads earn by them."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from headwise.analysis.head_roles.definitions import CASES, MARGIN, Definition
from headwise.analysis.head_roles.tally import Tally, pooled
from headwise.table import HeadColumn, HeadTable
from headwise.table.show import plain
from headwise.wording import Bilingual

LISTED = 8  # heads that are printed


@dataclass(frozen=True)
class Label:
    """A role that a head plays on this input."""

    text: str  # as printed, such as "offset −3"; Chinese too for a defined role
    role: str  # its name in `Roles`
    score: float  # of the head
    threshold: float  # required
    confidence: float  # share of the draws of a block bootstrap that reach the threshold
    source: str  # of the threshold

    def __str__(self) -> str:
        return f"{self.text} {self.score:.2f}"


class Scored(ABC):
    """Scores of all heads. Prints the heads that score most, by the first column of its table."""

    @property
    @abstractmethod
    def table(self) -> HeadTable:
        """The scores, with a title."""

    @property
    def _top(self) -> HeadTable:
        table = self.table
        top = table.top(next(iter(table)), LISTED)
        heads, more = len(table.places), len(table.places) - len(top.places)
        left = f"; {more} of {heads} heads are not shown" if more and top.places else ""
        return top.titled(f"{table.title}{left if top.places else f'; known for none of the {heads} heads'}")

    def __repr__(self) -> str:
        return repr(self._top)

    def _repr_html_(self) -> str:
        return self._top._repr_html_()


@dataclass(frozen=True, repr=False)
class RoleScore(Scored):
    """The scores of every head for one role; arrays are [layers, heads], NaN where no row is eligible.

    Attributes:
        definition: the role, its unit and threshold.
        mass: the score, mean over eligible rows (queries with at least one such key in sight).
        uniform: the score of a head with equal weights on all keys in sight, mean over the same rows.
        coverage: eligible rows over the rows with any key in sight.
        without_first: the scores with weights renormalised without the first key, over the rows that then keep at least
            1 % of their weight; None where this has no meaning.
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
        """mass / uniform: 1 is no preference; NaN where the baseline is 0, and for an excess over it."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where((self.uniform > 0) & (self.definition.unit != "excess"), self.mass / self.uniform, np.nan)

    @cached_property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the middle 95 % of the score over the draws of a block bootstrap."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NaN for a head without an eligible row
            low, high = np.nanquantile(self._drawn[0], (0.025, 0.975), axis=0)
        return low, high

    @cached_property
    def confidence(self) -> np.ndarray:
        """Share of the draws in which the score is enough for the role. Draws without eligible rows count as not
        enough; 0 with fewer than two stretches of rows."""
        if self.tally.total.shape[1] < 2:
            return np.zeros(self.mass.shape)
        return self.definition.holds(*self._drawn).mean(0)

    @property
    def holds(self) -> np.ndarray:
        """Whether the score itself is enough, on enough rows, boolean."""
        return self.definition.holds(self.mass, self.uniform) & (self.tally.count.sum(1) >= self.definition.rows)

    @property
    def _drawn(self) -> tuple[np.ndarray, np.ndarray]:
        return self.tally.drawn()

    @property
    def column(self) -> HeadColumn:
        """The score with its interval."""
        d = self.definition
        return HeadColumn(self.mass, unit=d.unit, description=d.what, error=np.stack(self.interval, -1))

    @property
    def table(self) -> HeadTable:
        """The score with its interval, the baseline, the share of eligible rows, and the confidence."""
        columns: dict[str, Any] = {
            "score": self.column, "uniform": self.uniform, "lift": self.lift, "rows": self.coverage
        }  # fmt: skip
        if self.offset is not None:
            columns["offset"] = self.offset
        d = self.definition
        title = f"{d.word}: {d.what} ({d.unit}); threshold {d.threshold:g}"
        return HeadTable({**columns, "confidence": self.confidence}, title=title)

    def label(self, at: tuple[int, int]) -> Label:
        """The label for the head at (layer, head)."""
        d = self.definition
        text = d.word
        if self.offset is not None:
            by = f"{int(self.offset[at]):+d}".replace("-", "−")
            text = Bilingual(f"{d.word} {by}", f"{d.word.zh} {by}")
        return Label(text, d.name, float(self.mass[at]), d.threshold, float(self.confidence[at]), d.limit)

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
    """The means of a tally; `rows` counts all rows with any key in sight."""
    mass, uniform = tally.mean()
    with np.errstate(invalid="ignore", divide="ignore"):
        coverage = tally.count.sum(1) / rows.total.sum(1)
    return RoleScore(definition, mass, uniform, coverage, tally)


@dataclass(frozen=True, repr=False)
class Choice(Scored):
    """How often each head gives most weight to the right one of a few candidates, beside rules without weights."""

    right: np.ndarray  # right answers [layers, groups, heads]; the bootstrap draws groups, such as sentences
    cases: np.ndarray  # [groups], cases with something to choose from
    total: int  # of all cases, those with a masked right candidate included
    rules: Mapping[str, int] = field(default_factory=dict)  # simple rules → the number of cases in which each is right

    @property
    def accuracy(self) -> np.ndarray:
        """Share of right answers [layers, heads]; NaN without cases."""
        return self._tally.mean()[0]

    @property
    def count(self) -> int:
        """The number of cases."""
        return int(self.cases.sum())

    @property
    def coverage(self) -> float:
        """Cases with something to choose from, over all cases."""
        return self.count / self.total if self.total else float("nan")

    @property
    def rule(self) -> str:
        """The best of the simple rules; "" if there is none."""
        return max(self.rules, key=lambda name: self.rules[name], default="")

    @property
    def baseline(self) -> float:
        """The accuracy of the best simple rule."""
        return self.rules.get(self.rule, 0) / self.count if self.count else float("nan")

    @cached_property
    def confidence(self) -> np.ndarray:
        """Share of bootstrap draws in which the head beats the baseline by MARGIN, [layers, heads]; 0 for one group."""
        if len(self.cases) < 2:
            return np.zeros_like(self.accuracy)
        drawn, _ = self._tally.drawn()
        with np.errstate(invalid="ignore"):
            return (drawn >= self.baseline + MARGIN).mean(0)

    @property
    def better(self) -> np.ndarray:
        """Heads better than the baseline by MARGIN, on CASES cases or more; boolean [layers, heads]."""
        if self.count < CASES:
            return np.zeros(self.accuracy.shape, bool)
        return self.accuracy >= self.baseline + MARGIN

    @property
    def table(self) -> HeadTable:
        """The share of right answers, and the confidence that it is above the baseline."""
        rule = f"{self.rule or 'no rule'}: {self.baseline:.3f}" if self.count else "nothing to choose from"
        title = f"share of right answers in {self.count} of {self.total} cases; {rule}"
        return HeadTable({"right": self.accuracy, "confidence": self.confidence}, title=title)

    @property
    def _tally(self) -> Tally:
        count = np.broadcast_to(self.cases[None, :, None], self.right.shape).astype(np.float64)
        return Tally(self.right, count, np.zeros_like(self.right))

    def merge(self, other: "Choice") -> "Choice":
        """The answers on both inputs."""
        right = np.concatenate((self.right, other.right), 1)
        cases = np.concatenate((self.cases, other.cases))
        rules = {name: self.rules.get(name, 0) + other.rules.get(name, 0) for name in {**self.rules, **other.rules}}
        return Choice(pooled(right), pooled(cases[None])[0], self.total + other.total, rules)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for unknown ones."""
        return {
            "accuracy": plain(self.accuracy), "confidence": self.confidence.tolist(), "cases": self.count,
            "coverage": self.coverage if self.total else None, "baseline": self.baseline if self.count else None,
            "rule": self.rule,
        }  # fmt: skip
