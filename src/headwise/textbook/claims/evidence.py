"""How a claim is judged: checks, each of which holds or fails, and one rule that derives the verdict from them.

>>> [check] = [equal("heads", 3, 4)]
>>> check.held, check.text
(False, 'heads: 3, not 4')
>>> judge([check])
<Verdict.FAILS: 'does not hold'>
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from torch import Tensor


class Verdict(Enum):
    """The result of measuring a claim."""

    HOLDS = "holds"
    CONDITIONS = "holds under conditions"
    FAILS = "does not hold"
    MISLEADING = "faithful but misleading"
    UNDECIDED = "undecided"


class Role(Enum):
    """The purpose of a check.

    STATED: tests the claim within its intended conditions. BEYOND: tests the claim outside of them. SUGGESTED: tests
    what the claim leads a reader to believe. CONTROL: tests that the measurement itself can fail.
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
    """

    what: str
    value: float
    relation: str
    limit: float
    tolerance: float = 0.0
    role: Role = Role.STATED

    @property
    def held(self) -> bool:
        """Whether the number is as expected."""
        if self.relation == "=":
            return abs(self.value - self.limit) <= self.tolerance * abs(self.limit)
        return self.value <= self.limit if self.relation == "≤" else self.value >= self.limit

    @property
    def text(self) -> str:
        """The check as a short line, such as "heads: 3, not 4"."""
        sign = {"=": ("=", "not"), "≤": ("≤", ">"), "≥": ("≥", "<")}[self.relation][not self.held]
        if self.relation == "=" and self.held:
            return f"{self.what}: {number(self.value)}"
        comma = "," if sign == "not" else ""
        return f"{self.what}: {number(self.value)}{comma} {sign} {number(self.limit)}"

    def beyond(self) -> "Check":
        """Return this check with the role BEYOND."""
        return replace(self, role=Role.BEYOND)

    def suggested(self) -> "Check":
        """Return this check with the role SUGGESTED."""
        return replace(self, role=Role.SUGGESTED)

    def control(self) -> "Check":
        """Return this check with the role CONTROL."""
        return replace(self, role=Role.CONTROL)


def equal(what: str, value: float, limit: float, tolerance: float = 0.0) -> Check:
    """Check that `value` equals `limit` up to a relative tolerance."""
    return Check(what, float(value), "=", float(limit), tolerance)


def at_most(what: str, value: float, limit: float) -> Check:
    """Check that `value` is at most `limit`."""
    return Check(what, float(value), "≤", float(limit))


def at_least(what: str, value: float, limit: float) -> Check:
    """Check that `value` is at least `limit`."""
    return Check(what, float(value), "≥", float(limit))


def same(what: str, one: Tensor, other: Tensor, tolerance: float = 1e-12) -> Check:
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
    if not stated or not all(of[Role.CONTROL]) or not all(math.isfinite(check.value) for check in found):
        return Verdict.UNDECIDED
    rest = beyond + suggested
    if all(stated):
        if all(rest):
            return Verdict.HOLDS
        if not any(rest) and not (beyond and suggested):
            return Verdict.MISLEADING if suggested else Verdict.CONDITIONS
        return Verdict.UNDECIDED
    return Verdict.UNDECIDED if any(stated + rest) else Verdict.FAILS


def number(value: float) -> str:
    """Format a number with three significant figures; whole numbers in full."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.3g}" if not 1e3 <= abs(value) < 1e9 else f"{value:,.0f}"
