"""Whether "auto" is the right choice: `python -m benchmarks --check-auto`."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.cases import Case
from benchmarks.contestants import kernels
from benchmarks.machine import Machine
from benchmarks.results import Row, median_of
from benchmarks.runner import Settings, run_case

TOLERANCE = 1.10  # of the fastest kernel's time
TRIES = 3  # a case that is slower once was disturbed; one that is slower each time is not


@dataclass(frozen=True)
class Choice:
    """The rows of one case with every kernel and "auto", and how much longer "auto" took than the fastest of them."""

    rows: list[Row]
    fastest: str
    ratio: float

    @property
    def wrong(self) -> bool:
        """Whether naming another kernel would be faster by more than the tolerance."""
        return self.ratio > TOLERANCE

    def __str__(self) -> str:
        word = "WRONG" if self.wrong else "ok"
        return f'{self.rows[0].case:<38} "auto" takes {self.ratio:.2f} × the time of {self.fastest}: {word}'


def check(case: Case, settings: Settings, machine: Machine, say: Callable[[str], object]) -> Choice | None:
    """Measure a case up to `TRIES` times, until "auto" is within the tolerance, and print the result. None if the case
    is not timed."""
    names = [*kernels(list(settings.chosen)), "auto"]
    choice = None
    for _ in range(TRIES):
        choice = of_rows(run_case(case, replace(settings, memory=False), machine, names))
        if choice is None or not choice.wrong:
            break
        names = [choice.fastest, "auto"]  # turn by turn: the calls before may have emptied the caches
    if choice is not None:
        say(str(choice))
    return choice


def of_rows(rows: list[Row]) -> Choice | None:
    """The choice that these rows show; None if "auto" or every kernel was left out."""
    auto = median_of(rows, "auto")
    timed = [row for row in rows if row.contestant != "auto" and row.median is not None]
    if auto is None or not timed:
        return None
    fastest = min(timed, key=lambda row: row.median or 0.0)
    assert fastest.median is not None
    return Choice(rows, fastest.contestant, auto / fastest.median)
