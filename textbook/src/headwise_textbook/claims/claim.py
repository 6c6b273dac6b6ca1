"""A claim: its statement, its source, the expected verdict, and the function that measures it."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePosixPath
from typing import Any

from headwise.errors import ConfigError
from headwise.wording import Bilingual, joined
from headwise_textbook.claims.evidence import Check, Role, Verdict, judge
from headwise_textbook.curves import Curve
from headwise_textbook.data import read_toml
from headwise_textbook.seeds import seeded
from headwise_textbook.texts import Place, place, words

Measure = Callable[[], Sequence[Check | Curve]]


QUICK_SECONDS, SLOW_SECONDS = 0.4, 15.0  # of a claim, the mean over all, measured on one core of an AMD Zen 4


@dataclass(frozen=True)
class Claim:
    """One claim, in our words.

    Attributes:
        statement: what is claimed. formula: the same in symbols.
        places: where the five texts make it, each with what it says there. also: other literature, "" if there is none.
        control: the case in which the measurement must give another result, or the baseline.
        note: how it is measured, how an ambiguous sentence is read, and the reason for the verdict.
        expected: the verdict that the measurement must give.
        measure: returns the checks, at least one of them a control, and curves if there are any.
        slow: whether the measurement takes more than a few seconds.

    Raises ConfigError if there is no control, or neither a place nor literature.
    """

    statement: Bilingual
    formula: Bilingual
    places: tuple[Place, ...]
    also: Bilingual
    control: Bilingual
    note: Bilingual
    expected: Verdict
    measure: Measure = field(repr=False)
    slow: bool = False

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
        return joined([*(place.where for place in self.places), *([self.also] if self.also else [])], "; ", "；")

    @property
    def id(self) -> str:
        """The name of the claim on the command line: that of its function, with hyphens."""
        return self.function.replace("_", "-")

    @property
    def code(self) -> str:
        """The file that measures it, such as "textbook/src/headwise_textbook/claims/counts.py"."""
        module = self.measure.__module__.replace(".", "/")
        return str(PurePosixPath("textbook/src") / f"{module}.py")

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


def claim(measure: Measure) -> Claim:
    """Decorate the function that measures a claim; its name becomes the claim's `id`.

    What is claimed is the entry of that id in the TOML file beside the function's file. ConfigError if there is none.
    """
    package, _, group = measure.__module__.rpartition(".")
    entry = dict(entries(package, group).get(measure.__name__.replace("_", "-"), {}))
    if not entry:
        raise ConfigError(f"claim {measure.__name__!r}: {group}.toml has no entry of it")
    said: dict[str, Any] = {
        name: words(entry.pop(name, "")) for name in ("statement", "formula", "also", "control", "note")
    }
    places, expected = tuple(map(place, entry.pop("at", ()))), Verdict(entry.pop("expected", "holds"))
    return Claim(**said, places=places, expected=expected, measure=measure, **entry)


@cache
def entries(package: str, group: str) -> dict[str, Any]:
    """What the claims of a group say, by id."""
    return read_toml(package, f"{group}.toml")


def expected_seconds(claims: Iterable[Claim]) -> float:
    """About how long `run` takes on two idle cores."""
    return sum(SLOW_SECONDS if claim.slow else QUICK_SECONDS for claim in claims)


def run(claims: Iterable[Claim], progress: Callable[[str, int, int], None] | None = None) -> list[Finding]:
    """Measure claims one after the other; ConfigError if a measurement returns no control.

    Args:
        progress: called with (id, claims done, claims in all) before each claim, and at the end.
    """
    wanted, found = list(claims), []
    for done, one in enumerate(wanted):
        if progress is not None:
            progress(one.id, done, len(wanted))
        start = time.perf_counter()
        with seeded(0):  # new modules draw weights: results depend neither on the order of claims nor on the caller
            results = one.measure()
        checks = tuple(x for x in results if isinstance(x, Check))
        if not any(check.role is Role.CONTROL for check in checks):
            raise ConfigError(f"claim {one.id!r}: its measurement returns no control")
        curves = tuple(x for x in results if isinstance(x, Curve))
        found.append(Finding(one, checks, time.perf_counter() - start, curves))
    if progress is not None:
        progress("done", len(wanted), len(wanted))
    return found
