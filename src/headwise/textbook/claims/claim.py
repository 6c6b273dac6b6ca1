"""What a claim is: a statement, where it stands, what we expect of it, and the function that measures it."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from headwise.progress import Progress
from headwise.reports.curves import Curve
from headwise.seeds import seeded
from headwise.textbook.claims.evidence import Check, Role, Verdict, judge

Measure = Callable[[], Sequence[Check | Curve]]


@dataclass(frozen=True)
class Claim:
    """One claim of the source texts, in our words.

    id: a short name. statement: what is claimed. formula: the same in letters. source: where it stands, and who else
    says it. expected: the verdict that its measurement has to give. measure: what runs, and returns the checks, and
    curves if there are any; its docstring says how, and why the verdict is what it is. slow: takes more than some
    seconds.
    """

    id: str
    statement: str
    formula: str
    source: str
    expected: Verdict
    measure: Measure = field(repr=False)
    slow: bool = False

    @property
    def why(self) -> str:
        """How it is measured, and the reason of the verdict."""
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
        """Where that function begins in its file."""
        return self.measure.__code__.co_firstlineno


@dataclass(frozen=True)
class Finding:
    """A claim and what measurement says of it: checks, curves of the same run, seconds that this took."""

    claim: Claim
    checks: tuple[Check, ...]
    seconds: float
    curves: tuple[Curve, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """What the checks add up to."""
        return judge(self.checks)

    @property
    def agrees(self) -> bool:
        """Whether the verdict is the one that was expected."""
        return self.verdict is self.claim.expected

    @property
    def shown(self) -> list[Check]:
        """The checks that say something of the claim: controls are left out unless they fail."""
        return [check for check in self.checks if check.role is not Role.CONTROL or not check.held]


def claim(
    id: str, statement: str, *, formula: str, source: str, expected: Verdict, slow: bool = False
) -> Callable[[Measure], Claim]:
    """Make a claim of the function below it, which measures it."""
    return lambda measure: Claim(id, statement, formula, source, expected, measure, slow)


def run(claims: Iterable[Claim], progress: Progress | None = None) -> list[Finding]:
    """Measure claims one after the other. progress: called before each one, with its id, and at the end."""
    wanted, found = list(claims), []
    for done, one in enumerate(wanted):
        if progress is not None:
            progress(one.id, done, len(wanted))
        start = time.perf_counter()
        with seeded(0):  # modules draw weights when they are made; neither order nor caller should matter
            given = one.measure()
        checks = tuple(x for x in given if isinstance(x, Check))
        curves = tuple(x for x in given if isinstance(x, Curve))
        found.append(Finding(one, checks, time.perf_counter() - start, curves))
    if progress is not None:
        progress("done", len(wanted), len(wanted))
    return found
