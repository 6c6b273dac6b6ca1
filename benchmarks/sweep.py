"""Time and memory against n, for the plot."""

from collections.abc import Callable
from dataclasses import replace

from benchmarks.cases import ROWS, Case
from benchmarks.machine import Machine
from benchmarks.results import Row
from benchmarks.runner import Settings, run_case

SIZES = (256, 512, 1024, 2048, 4096, 8192, 16_384)
SMALL_SIZES = (64, 128, 256)
OURS = "auto"  # the kernel that attend() chooses, with statistics

OUTPUT = Case(
    "sweep-output", "sweep", (1, 12, 0, 64), "", mask="causal", peers=("sdpa", "eager", "flex"), patience=8.0
)  # fmt: skip
STATISTICS = replace(OUTPUT, name="sweep-statistics", statistics=ROWS, peers=("eager_statistics",))


def run(settings: Settings, machine: Machine, say: Callable[[str], None]) -> list[Row]:
    """Rows of every contestant at every n, until it takes too long or too much memory."""
    settings = replace(settings, rounds=min(settings.rounds, 9), seconds=min(settings.seconds, 3.0))
    rows: list[Row] = []
    ended: set[str] = set()
    for n in SMALL_SIZES if settings.quick else SIZES:
        for case in (OUTPUT, STATISTICS):
            sized = replace(case, size=(1, 12, n, 64))
            names = settings.contestants(sized)
            if case is STATISTICS:
                names = [name for name in names if name in case.peers] + [OURS]
            names = [name for name in names if name + case.name not in ended]
            for row in run_case(sized, settings, machine, names):
                rows.append(row)
                if row.skipped is not None:
                    ended.add(row.contestant + case.name)
                    say(f"{row.contestant} ends before n = {n:,}: {row.skipped}")
        say(f"n = {n:,} done")
    return rows
