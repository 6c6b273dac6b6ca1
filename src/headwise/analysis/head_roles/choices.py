"""How often a head picks the right one among a few candidates, beside simple rules that look at no weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from headwise.analysis.head_roles.definitions import CASES, MARGIN
from headwise.analysis.head_roles.ranked import Ranked
from headwise.analysis.head_roles.tally import Tally, pooled
from headwise.table.show import plain


@dataclass(frozen=True, repr=False)
class Choice:
    """One question, asked of every head. Prints the heads that are right most often.

    Attributes:
        right: right answers [layers, groups, heads]; cases: [groups], in how many cases there was something to choose;
            groups are what is drawn anew for the confidence, such as sentences.
        asked: all cases, those included in which the query may not see the right one.
        rules: simple rules → in how many of the cases each is right.
    """

    right: np.ndarray
    cases: np.ndarray
    asked: int
    rules: Mapping[str, int] = field(default_factory=dict)

    @property
    def accuracy(self) -> np.ndarray:
        """Share of right answers [layers, heads]; NaN without cases."""
        return self._tally.mean()[0]

    @property
    def count(self) -> int:
        """Cases."""
        return int(self.cases.sum())

    @property
    def coverage(self) -> float:
        """Cases over all that were asked."""
        return self.count / self.asked if self.asked else float("nan")

    @property
    def rule(self) -> str:
        """The best of the simple rules; "" if there is none."""
        return max(self.rules, key=lambda name: self.rules[name], default="")

    @property
    def baseline(self) -> float:
        """The accuracy of that rule."""
        return self.rules.get(self.rule, 0) / self.count if self.count else float("nan")

    @cached_property
    def confidence(self) -> np.ndarray:
        """Share of the draws of a bootstrap over groups in which the head is better than the baseline by MARGIN;
        [layers, heads], 0 for fewer than two groups."""
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

    def ranked(self) -> Ranked:
        """The heads that are right most often, as what is printed."""
        rule = f"{self.rule or 'no rule'}: {self.baseline:.3f}" if self.count else "nothing to choose"
        columns = {"right": self.accuracy, "confidence": self.confidence}
        return Ranked(f"share of right answers in {self.count} of {self.asked} cases; {rule}", columns)

    def __repr__(self) -> str:
        return str(self.ranked())

    def _repr_html_(self) -> str:
        return self.ranked().html()

    @property
    def _tally(self) -> Tally:
        count = np.broadcast_to(self.cases[None, :, None], self.right.shape).astype(np.float64)
        return Tally(self.right, count, np.zeros_like(self.right))

    def merge(self, other: "Choice") -> "Choice":
        """Of both inputs."""
        right = np.concatenate((self.right, other.right), 1)
        cases = np.concatenate((self.cases, other.cases))
        rules = {name: self.rules.get(name, 0) + other.rules.get(name, 0) for name in {**self.rules, **other.rules}}
        return Choice(pooled(right), pooled(cases[None])[0], self.asked + other.asked, rules)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for what is not known."""
        return {
            "accuracy": plain(self.accuracy), "confidence": self.confidence.tolist(), "cases": self.count,
            "coverage": self.coverage if self.asked else None, "baseline": self.baseline if self.count else None,
            "rule": self.rule,
        }  # fmt: skip
