"""How a claim is judged: checks, each of which holds or fails, and one rule that derives the verdict from them.

>>> [check] = [equal(("heads", "头数"), 3, 4)]
>>> check.held, check.text, check.text.zh
(False, 'heads: 3, not 4', '头数：3，不是 4')
>>> judge([check])
<Verdict.FAILS: 'does not hold'>
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from torch import Tensor

from headwise.wording import Bilingual, in_language

Words = str | tuple[str, str]  # one text for both languages, or English and Chinese


def both(words: Words) -> Bilingual:
    """The words in both languages."""
    return Bilingual(words, in_language(words, "zh")) if isinstance(words, str) else Bilingual(*words)


class Verdict(Enum):
    """The result of measuring a claim."""

    HOLDS = "holds"
    CONDITIONS = "holds under conditions"
    FAILS = "does not hold"
    MISLEADING = "faithful but misleading"
    UNDECIDED = "undecided"

    @property
    def words(self) -> Bilingual:
        """The verdict in both languages."""
        return Bilingual(self.value, VERDICTS_IN_CHINESE[self.name])


VERDICTS_IN_CHINESE = {
    "HOLDS": "成立", "CONDITIONS": "有条件成立", "FAILS": "不成立", "MISLEADING": "属实但易误导", "UNDECIDED": "未定",
}  # fmt: skip


class Role(Enum):
    """The purpose of a check.

    STATED: tests the claim within its intended conditions. BEYOND: tests the claim outside of them. SUGGESTED: tests
    what the claim leads a reader to believe. CONTROL: the same measurement where the result must be another one, or on
    a baseline: it shows that the measurement can fail.
    """

    STATED = "stated"
    BEYOND = "beyond its conditions"
    SUGGESTED = "suggested"
    CONTROL = "control"


@dataclass(frozen=True)
class Check:
    """A measured number and its expected value.

    Attributes:
        what: a description of the number. value: the number. relation: "=", "≤" or "≥". limit: the expected value.
        tolerance: for "=", relative to the limit.
        instead: of a control, the number that the claim's own case gave; a control must reject it.
    """

    what: Bilingual
    value: float
    relation: str
    limit: float
    tolerance: float = 0.0
    role: Role = Role.STATED
    instead: float | None = None

    @property
    def held(self) -> bool:
        """Whether the number is as expected; of a control, also whether the claim's own number would not be."""
        return self._takes(self.value) and (self.instead is None or not self._takes(self.instead))

    @property
    def text(self) -> Bilingual:
        """The check as a short line, such as "heads: 3, not 4"."""
        held, value, limit = self._takes(self.value), number(self.value), number(self.limit)
        en = zh = ""
        if self.relation == "=" and not held:
            en = f", not {limit}"
            zh = f"，不是 {limit}"
        elif self.relation != "=":
            sign = self.relation if held else {"≤": ">", "≥": "<"}[self.relation]
            en = zh = f" {sign} {limit}"
        if held and not self.held:
            own = number(self.instead or 0.0)
            en, zh = f"{en}, but so is {own}", f"{zh}，但 {own} 也是如此"
        return Bilingual(f"{self.what}: {value}{en}", f"{self.what.zh}：{value}{zh}")

    def _takes(self, value: float) -> bool:
        """Whether a number would be as expected."""
        if self.relation == "=":
            return abs(value - self.limit) <= self.tolerance * abs(self.limit)
        return value <= self.limit if self.relation == "≤" else value >= self.limit

    def beyond(self) -> "Check":
        """Return this check with the role BEYOND."""
        return replace(self, role=Role.BEYOND)

    def suggested(self) -> "Check":
        """Return this check with the role SUGGESTED."""
        return replace(self, role=Role.SUGGESTED)

    def control(self, instead: float) -> "Check":
        """Return this check with the role CONTROL. instead: the number that the claim's own case gave."""
        return replace(self, role=Role.CONTROL, instead=float(instead))

    def forced(self) -> "Check":
        """A control as it would be if its case had given the number of the claim's own case."""
        assert self.instead is not None
        return replace(self, value=self.instead)


def equal(what: Words, value: float, limit: float, tolerance: float = 0.0) -> Check:
    """Check that `value` equals `limit` up to a relative tolerance."""
    return Check(both(what), float(value), "=", float(limit), tolerance)


def at_most(what: Words, value: float, limit: float) -> Check:
    """Check that `value` is at most `limit`."""
    return Check(both(what), float(value), "≤", float(limit))


def at_least(what: Words, value: float, limit: float) -> Check:
    """Check that `value` is at least `limit`."""
    return Check(both(what), float(value), "≥", float(limit))


def same(what: Words, one: Tensor, other: Tensor, tolerance: float = 1e-12) -> Check:
    """Check that two tensors are equal: their `difference` is at most `tolerance`."""
    return at_most(what, difference(one, other), tolerance)


def difference(one: Tensor, other: Tensor) -> float:
    """max |one − other| / max |other|, in float64; NaN if the shapes differ."""
    if one.shape != other.shape:
        return math.nan
    gap = (one.detach().double() - other.detach().double()).abs().max()
    return float(gap / other.detach().double().abs().max())


def judge(checks: Iterable[Check]) -> Verdict:
    """Return the verdict that follows from the checks.

    If all STATED checks hold, the verdict is HOLDS; CONDITIONS if all BEYOND checks fail; MISLEADING if all SUGGESTED
    checks fail. If no check holds, the verdict is FAILS. It is UNDECIDED in all other cases, if a control fails, or if
    a number is not finite: a broken measurement decides nothing.
    """
    found = list(checks)
    of = {role: [check.held for check in found if check.role is role] for role in Role}
    stated, beyond, suggested = of[Role.STATED], of[Role.BEYOND], of[Role.SUGGESTED]
    if not stated or not all(of[Role.CONTROL]) or not all(map(_is_finite, found)):
        return Verdict.UNDECIDED
    rest = beyond + suggested
    if all(stated):
        if all(rest):
            return Verdict.HOLDS
        if not any(rest) and not (beyond and suggested):
            return Verdict.MISLEADING if suggested else Verdict.CONDITIONS
        return Verdict.UNDECIDED
    return Verdict.UNDECIDED if any(stated + rest) else Verdict.FAILS


def _is_finite(check: Check) -> bool:
    return math.isfinite(check.value) and (check.instead is None or math.isfinite(check.instead))


def number(value: float) -> str:
    """Format a number with three significant figures; whole numbers in full."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.3g}" if not 1e3 <= abs(value) < 1e9 else f"{value:,.0f}"
