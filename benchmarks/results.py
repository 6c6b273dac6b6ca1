"""Results as data: rows that can be written to JSON and read."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, REWRITES, Case
from benchmarks.machine import Machine
from headwise.base.files import atomic_path


@dataclass(frozen=True)
class Row:
    """One contestant in one case.

    Attributes:
        kernel: whether it is one of headwise's.
        median: seconds a call; spread: interquartile range / median; rounds: how often.
        peak_share: the products' operations a second over the machine's peak; bandwidth_share: bytes that must be
            read a second over its bandwidth.
        memory: bytes beside inputs and outputs at the peak; memory_note: why it is not known.
        error: relative error of the output, relative to the reference or the first contestant.
        skipped: why it did not take part; all else is None then.
    """

    case: str
    contestant: str
    kernel: bool
    n: int
    median: float | None = None
    spread: float | None = None
    rounds: int = 0
    peak_share: float | None = None
    bandwidth_share: float | None = None
    memory: int | None = None
    memory_note: str | None = None
    error: float | None = None
    skipped: str | None = None


@dataclass
class Report:
    """A run: the machine, the settings, a row for each contestant in each case, and the sweep over n."""

    machine: Machine
    quick: bool
    rows: list[Row] = field(default_factory=list)
    sweep: list[Row] = field(default_factory=list)

    def of(self, case: str) -> list[Row]:
        """The rows of a case."""
        return [row for row in self.rows if row.case == case]

    def cases(self) -> list[Case]:
        """The cases that have rows, at the sizes they were run, in the table's order."""
        present = {row.case for row in self.rows}
        return [case.quick() if self.quick else case for case in CASES.values() if case.name in present]

    def write(self, path: Path) -> None:
        """Write as JSON, atomically."""
        data = {
            "machine": self.machine.to_json(),
            "quick": self.quick,
            "rows": [asdict(row) for row in self.rows],
            "sweep": [asdict(row) for row in self.sweep],
        }
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Report":
        """Read a file written by `write`."""
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        machine = Machine(**{**data["machine"], "flags": tuple(data["machine"]["flags"])})
        rows, sweep = ([Row(**row) for row in data[part]] for part in ("rows", "sweep"))
        return cls(machine, data["quick"], rows, sweep)


def median_of(rows: list[Row], name: str) -> float | None:
    """Seconds of a contestant by name; "rewrite" is the best of the rewrites."""
    names = REWRITES if name == "rewrite" else (name,)
    found = [row.median for row in rows if row.contestant in names and row.median is not None]
    return min(found, default=None)


def best_kernel(rows: list[Row]) -> Row | None:
    """The fastest of headwise's kernels, or the one with the least memory if nothing was timed."""
    timed = [row for row in rows if row.kernel and row.median is not None]
    if timed:
        return min(timed, key=lambda row: row.median or 0.0)
    lean = [row for row in rows if row.kernel and row.memory is not None]
    return min(lean, key=lambda row: row.memory or 0, default=None)


def ratio(rows: list[Row], row: Row, of: str = "sdpa") -> float | None:
    """A row's time over a peer's; above 1 is slower than the peer."""
    base = median_of(rows, of)
    return None if base is None or row.median is None else row.median / base
