"""How a claim is judged: by checks that hold or do not, and one rule that makes a verdict of them.

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
    """What measurement says of a claim."""

    HOLDS = "holds"
    CONDITIONS = "holds under conditions"
    FAILS = "does not hold"
    MISLEADING = "faithful but misleading"
    UNDECIDED = "undecided"


class Role(Enum):
    """What a check is for.

    STATED: the claim itself, where it is meant. BEYOND: the claim where its conditions are broken. SUGGESTED: what a
    reader takes from it. CONTROL: that the measurement can tell right from wrong; no part of the claim.
    """

    STATED = "stated"
    BEYOND = "beyond its conditions"
    SUGGESTED = "suggested"
    CONTROL = "control"


@dataclass(frozen=True)
class Check:
    """A measured number beside what it should be.

    what: in words. value, limit: numbers. relation: "=", "≤" or "≥". tolerance: of "=", relative to the limit.
    """

    what: str
    value: float
    relation: str
    limit: float
    tolerance: float = 0.0
    role: Role = Role.STATED

    @property
    def held(self) -> bool:
        """Whether the number is what it should be."""
        if self.relation == "=":
            return abs(self.value - self.limit) <= self.tolerance * abs(self.limit)
        return self.value <= self.limit if self.relation == "≤" else self.value >= self.limit

    @property
    def text(self) -> str:
        """The check in a few words."""
        sign = {"=": ("=", "not"), "≤": ("≤", ">"), "≥": ("≥", "<")}[self.relation][not self.held]
        if self.relation == "=" and self.held:
            return f"{self.what}: {number(self.value)}"
        comma = "," if sign == "not" else ""
        return f"{self.what}: {number(self.value)}{comma} {sign} {number(self.limit)}"

    def beyond(self) -> "Check":
        """The same check, of the claim where its conditions are broken."""
        return replace(self, role=Role.BEYOND)

    def suggested(self) -> "Check":
        """The same check, of what the claim suggests."""
        return replace(self, role=Role.SUGGESTED)

    def control(self) -> "Check":
        """The same check, of the measurement."""
        return replace(self, role=Role.CONTROL)


def equal(what: str, value: float, limit: float, tolerance: float = 0.0) -> Check:
    """`value` should be `limit`, up to a relative tolerance."""
    return Check(what, float(value), "=", float(limit), tolerance)


def at_most(what: str, value: float, limit: float) -> Check:
    """`value` should not be above `limit`."""
    return Check(what, float(value), "≤", float(limit))


def at_least(what: str, value: float, limit: float) -> Check:
    """`value` should not be below `limit`."""
    return Check(what, float(value), "≥", float(limit))


def same(what: str, one: Tensor, other: Tensor, tolerance: float = 1e-12) -> Check:
    """Two tensors should be equal up to `tolerance`, the largest difference relative to the largest entry."""
    return at_most(what, difference(one, other), tolerance)


def difference(one: Tensor, other: Tensor) -> float:
    """max |one − other| / max |other|, in float64; NaN if the shapes differ."""
    if one.shape != other.shape:
        return math.nan
    gap = (one.detach().double() - other.detach().double()).abs().max()
    return float(gap / other.detach().double().abs().max())


def judge(checks: Iterable[Check]) -> Verdict:
    """The verdict that the checks add up to.

    All that is stated holds: HOLDS; or CONDITIONS, if it holds nowhere beyond; or MISLEADING, if nothing that it
    suggests does. Nothing holds: FAILS. Anything else, a control that fails, and a number that is not finite leave the
    claim UNDECIDED, so that a broken measurement is no verdict.
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
    """Three figures; whole numbers in full."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.3g}" if not 1e3 <= abs(value) < 1e9 else f"{value:,.0f}"
