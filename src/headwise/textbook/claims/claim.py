"""A claim: its statement, its source, the expected verdict, and the function that measures it."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from headwise.progress import Progress
from headwise.reports.curves import Curve
from headwise.seeds import seeded
from headwise.textbook.claims.evidence import Check, Role, Verdict, judge

Measure = Callable[[], Sequence[Check | Curve]]


QUICK_SECONDS, SLOW_SECONDS = 0.25, 35.0  # of a claim, the mean over all, measured on two cores of an AMD Zen 4


@dataclass(frozen=True)
class Claim:
    """One claim of the source texts, in our words.

    Attributes:
        statement: what is claimed. formula: the same in symbols. source: where the claim is made.
        expected: the verdict that the measurement must give.
        measure: returns the checks, and curves if there are any; its docstring explains them and the verdict.
        slow: whether the measurement takes more than a few seconds.
    """

    statement: str
    formula: str
    source: str
    expected: Verdict
    measure: Measure = field(repr=False)
    slow: bool = False

    @property
    def id(self) -> str:
        """The name of the claim on the command line: that of its function, with hyphens."""
        return self.function.replace("_", "-")

    @property
    def why(self) -> str:
        """How the claim is measured, and the reason for the verdict."""
        return " ".join((self.measure.__doc__ or "").split())

    @property
    def code(self) -> str:
        """The file that measures it, such as "src/headwise/textbook/claims/counts.py"."""
        module = self.measure.__module__.replace(".", "/")
        return str(PurePosixPath("src") / f"{module}.py")

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
        """The checks to show: controls are left out unless they fail."""
        return [check for check in self.checks if check.role is not Role.CONTROL or not check.held]


def claim(
    statement: str, *, formula: str, source: str, expected: Verdict = Verdict.HOLDS, slow: bool = False
) -> Callable[[Measure], Claim]:
    """Decorate the function that measures a claim; its name becomes the claim's `id`."""
    return lambda measure: Claim(statement, formula, source, expected, measure, slow)


def expected_seconds(claims: Iterable[Claim]) -> float:
    """About how long `run` takes on two idle cores."""
    return sum(SLOW_SECONDS if claim.slow else QUICK_SECONDS for claim in claims)


def run(claims: Iterable[Claim], progress: Progress | None = None) -> list[Finding]:
    """Measure claims one after the other.

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
        curves = tuple(x for x in results if isinstance(x, Curve))
        found.append(Finding(one, checks, time.perf_counter() - start, curves))
    if progress is not None:
        progress("done", len(wanted), len(wanted))
    return found
