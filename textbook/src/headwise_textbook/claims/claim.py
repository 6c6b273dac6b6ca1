"""A claim: its statement, its places, the expected verdict, and the function that measures it by checks.

A check holds or fails, and one rule derives the verdict from all of them.

>>> [check] = [equal(Bilingual("heads", "头数"), 3, 4)]
>>> check.held, check.text, check.text.zh
(False, 'heads: 3, not 4', '头数：3，不是 4')
>>> judge([check])
<Verdict.FAILS: 'does not hold'>
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from headwise.errors import ConfigError
from headwise.wording import Bilingual, joined, tr
from headwise_textbook.curves import Curve, Lines
from headwise_textbook.texts import Place, place, read_toml, words
from headwise_textbook.trace import seeded

QUICK_SECONDS, SLOW_SECONDS = 0.4, 15.0  # of a claim, the mean over all, measured on one core of an AMD Zen 4

# The groups in the order of the texts; the title of one, and what its claims say, is in a TOML file of its name.
ORDER = (
    "definitions", "scaling", "parameters", "published", "counts", "memory", "blocks", "forms", "capacity", "functions",
    "tasks", "trainings", "places", "learnt", "demonstration", "printed", "identities",
)  # fmt: skip
READ = {group: read_toml(__package__, f"{group}.toml") for group in ORDER}
GROUPS = {group: words(entries.pop("title")) for group, entries in READ.items()}


class Verdict(Enum):
    """The result of measuring a claim."""

    HOLDS = "holds"
    CONDITIONS = "holds under conditions"
    FAILS = "does not hold"
    MISLEADING = "faithful but misleading"
    MACHINE = "depends on the machine"
    UNDECIDED = "undecided"

    @property
    def words(self) -> Bilingual:
        """The verdict in both languages."""
        return words(VERDICTS[self.name])


VERDICTS = read_toml("headwise_textbook", "verdicts.toml")


class Role(Enum):
    """The purpose of a check."""

    STATED = "stated"  # the claim within its intended conditions
    BEYOND = "beyond its conditions"
    SUGGESTED = "suggested"  # what the claim leads a reader to believe
    MACHINE = "depends on the machine"  # a time that may be otherwise on another machine: shown, and not judged
    CONTROL = "control"  # where the result must be another one, or a baseline: the measurement can fail


@dataclass(frozen=True)
class Check:
    """A measured number and its expected value."""

    what: Bilingual
    value: float
    relation: str  # "=", "≤" or "≥"
    limit: float
    tolerance: float = 0.0  # for "=", relative to the limit
    role: Role = Role.STATED
    instead: float | None = None  # of a control, the number of the claim's own case, which a control must reject

    @property
    def held(self) -> bool:
        """Whether the number is as expected; of a control, also whether the claim's own number would not be."""
        return self._takes(self.value) and (self.instead is None or not self._takes(self.instead))

    @property
    def text(self) -> Bilingual:
        """The check as a short line, such as "heads: 3, not 4"."""
        held, value, limit = self._takes(self.value), number(self.value), number(self.limit)
        parts: list[str] = [self.what, tr(": "), value]
        if self.relation == "=" and not held:
            parts.append(tr(", not {limit}", limit=limit))
        elif self.relation != "=":
            sign = self.relation if held else {"≤": ">", "≥": "<"}[self.relation]
            parts.append(f" {sign} {limit}")
        if held and not self.held:
            parts.append(tr(", but so is {own}", own=number(self.instead or 0.0)))
        return joined(parts, "")

    def _takes(self, value: float) -> bool:
        if self.relation == "=":
            return abs(value - self.limit) <= self.tolerance * abs(self.limit)
        return value <= self.limit if self.relation == "≤" else value >= self.limit

    def beyond(self) -> "Check":
        """This check with the role BEYOND."""
        return replace(self, role=Role.BEYOND)

    def suggested(self) -> "Check":
        """This check with the role SUGGESTED."""
        return replace(self, role=Role.SUGGESTED)

    def of_machine(self) -> "Check":
        """This check with the role MACHINE."""
        return replace(self, role=Role.MACHINE)

    def control(self, instead: float | None = None) -> "Check":
        """This check with the role CONTROL. instead: the number of the own case, None for the first check."""
        return replace(self, role=Role.CONTROL, instead=None if instead is None else float(instead))


def both(words: str) -> Bilingual:
    """The words in both languages, which may be the same."""
    return words if isinstance(words, Bilingual) else Bilingual(words, words)


def equal(what: str, value: float, limit: float, tolerance: float = 0.0) -> Check:
    """Check that `value` equals `limit` up to a relative tolerance."""
    return Check(both(what), float(value), "=", float(limit), tolerance)


def at_most(what: str, value: float, limit: float) -> Check:
    """Check that `value` is at most `limit`."""
    return Check(both(what), float(value), "≤", float(limit))


def at_least(what: str, value: float, limit: float) -> Check:
    """Check that `value` is at least `limit`."""
    return Check(both(what), float(value), "≥", float(limit))


def same(what: str, one: Tensor, other: Tensor, tolerance: float = 1e-12) -> Check:
    """Check that two tensors are equal: their `difference` is at most `tolerance`."""
    return at_most(what, difference(one, other), tolerance)


def difference(one: Tensor, other: Tensor) -> float:
    """max |one − other| / max |other|, in float64; NaN if the shapes differ."""
    if one.shape != other.shape:
        return math.nan
    gap = (one.detach().double() - other.detach().double()).abs().max()
    return float(gap / other.detach().double().abs().max())


def differs(what: str, one: Tensor, other: Tensor, instead: float | None = None) -> Check:
    """A control: two tensors differ by at least 0.01. instead: as of `Check.control`."""
    return at_least(what, difference(one, other), 0.01).control(instead)


def number(value: float) -> str:
    """A number with three significant figures; whole numbers in full."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.3g}" if not 1e3 <= abs(value) < 1e9 else f"{value:,.0f}"


def judge(checks: Iterable[Check]) -> Verdict:
    """The verdict that follows from the checks; UNDECIDED also if a control fails or a number is not finite."""
    found = list(checks)
    of = {role: [check.held for check in found if check.role is role] for role in Role}
    stated, beyond, suggested = of[Role.STATED], of[Role.BEYOND], of[Role.SUGGESTED]
    finite = (math.isfinite(c.value) and (c.instead is None or math.isfinite(c.instead)) for c in found)
    if not stated or not all(of[Role.CONTROL]) or not all(finite):
        return Verdict.UNDECIDED
    rest = beyond + suggested
    if all(stated):
        if all(rest):
            return Verdict.MACHINE if of[Role.MACHINE] else Verdict.HOLDS
        if not any(rest) and not (beyond and suggested):
            return Verdict.MISLEADING if suggested else Verdict.CONDITIONS
        return Verdict.UNDECIDED
    return Verdict.UNDECIDED if any(stated + rest) else Verdict.FAILS


class Plot(NamedTuple):
    """Lines x → y of a measurement; the claim's entry says what they show. reference: lines not measured."""

    lines: Lines
    reference: Lines | None = None


@dataclass(frozen=True)
class Claim:
    """One claim, in our words. Raises ConfigError if there is no control, or neither a place nor literature."""

    statement: Bilingual
    formula: Bilingual
    places: tuple[Place, ...]
    also: Bilingual  # literature beside the five texts
    control: Bilingual  # the case in which the measurement must give another result, or the baseline
    note: Bilingual  # how it is measured, how an ambiguous sentence is read, and the reason for the verdict
    expected: Verdict
    measure: Callable[[], Sequence[Check | Plot]] = field(repr=False)
    slow: bool = False
    group: str = ""  # of GROUPS
    # For each plot its title, the names of its axes, and `log` of `Curve.of`.
    plots: Sequence[Mapping[str, Any]] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not self.control:
            raise ConfigError(
                f"claim {self.id!r}: declares no control; expected a case where it must fail, or a baseline"
            )
        if not self.places and not self.also:
            raise ConfigError(f"claim {self.id!r}: has no source; expected a place in a text, or literature")

    @property
    def source(self) -> Bilingual:
        """All places and the literature in one line."""
        return joined([*(place.where for place in self.places), *([self.also] if self.also else [])], tr("; "))

    @property
    def id(self) -> str:
        """The name of the claim on the command line: that of its function, with hyphens."""
        return self.function.replace("_", "-")

    @property
    def code(self) -> str:
        """The file that measures it, such as "textbook/src/headwise_textbook/claims/sizes.py"."""
        return f"textbook/src/{self.measure.__module__.replace('.', '/')}.py"

    @property
    def function(self) -> str:
        """The function in that file, such as "four_d_squared"."""
        return self.measure.__name__

    @property
    def line(self) -> int:
        """The line of the file at which that function begins."""
        return self.measure.__code__.co_firstlineno


@dataclass(frozen=True)
class Finding:
    """A claim with the results of its measurement: checks, curves of the same run, and the seconds it took."""

    claim: Claim
    checks: tuple[Check, ...]
    seconds: float
    curves: tuple[Curve, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The verdict that follows from the checks."""
        return judge(self.checks)

    @property
    def agrees(self) -> bool:
        """Whether the verdict is the expected one."""
        return self.verdict is self.claim.expected

    @property
    def shown(self) -> list[Check]:
        """The checks about the claim, without controls."""
        return [check for check in self.checks if check.role is not Role.CONTROL]

    @property
    def controls(self) -> list[Check]:
        """The controls."""
        return [check for check in self.checks if check.role is Role.CONTROL]


def claim(measure: Callable[[], Sequence[Check | Plot]]) -> Claim:
    """Decorate the function that measures a claim. What is claimed is its entry in a group's TOML file."""
    group, given = entries().get(measure.__name__.replace("_", "-"), ("", {}))
    if not group:
        raise ConfigError(f"claim {measure.__name__!r}: no TOML file of a group has an entry of it")
    entry = dict(given)
    said: dict[str, Any] = {
        name: words(entry.pop(name, "")) for name in ("statement", "formula", "also", "control", "note")
    }
    places, expected = tuple(map(place, entry.pop("at", ()))), Verdict(entry.pop("expected", "holds"))
    return Claim(**said, places=places, expected=expected, measure=measure, group=group, **entry)


@cache
def entries() -> dict[str, tuple[str, dict[str, Any]]]:
    """The group of each claim and what it says, by id, in the order of the groups."""
    return {id: (group, entry) for group, entries in READ.items() for id, entry in entries.items()}


def expected_seconds(claims: Iterable[Claim]) -> float:
    """About how long `run` takes on two idle cores."""
    return sum(SLOW_SECONDS if claim.slow else QUICK_SECONDS for claim in claims)


def run(claims: Iterable[Claim], progress: Callable[[str, int, int], None] | None = None) -> list[Finding]:
    """Measure claims one after the other; ConfigError if a measurement returns no control.

    progress is called with (id, claims done, claims in all) before each claim, and at the end.
    """
    wanted, found = list(claims), []
    for done, one in enumerate(wanted):
        if progress is not None:
            progress(one.id, done, len(wanted))
        start = time.perf_counter()
        with seeded(0):  # new modules draw weights: results depend neither on the order of claims nor on the caller
            results = one.measure()
        checks = [x for x in results if isinstance(x, Check)]
        own = next((x.value for x in checks if x.role is Role.STATED), None)
        checks = [replace(x, instead=own) if x.role is Role.CONTROL and x.instead is None else x for x in checks]
        if not any(check.role is Role.CONTROL for check in checks):
            raise ConfigError(f"claim {one.id!r}: its measurement returns no control")
        plots = zip((x for x in results if isinstance(x, Plot)), one.plots, strict=True)
        curves = tuple(_curve(plot, said) for plot, said in plots)
        found.append(Finding(one, tuple(checks), time.perf_counter() - start, curves))
    if progress is not None:
        progress("done", len(wanted), len(wanted))
    return found


def _curve(plot: Plot, said: Mapping[str, Any]) -> Curve:
    title, x, y = (words(said[part]) for part in ("title", "x", "y"))
    return Curve.of(title, x, y, plot.lines, plot.reference, log=said.get("log", ""))
