"""`python -m tests.fuzz`: random cases until the time is over, then sequences of what is done to caches and edits of
padded batches, for a tenth of it each; exit code 1 if one failed."""

import argparse
import collections
import sys
import time

import torch

import headwise

from .case import Case, draw
from .check import Outcome, Runner
from .padded import Padded
from .sequences import Sequence
from .shrink import shrunk
from .source import source

TOLD = 2  # failures of one kind that are shown with their program


def main(given: list[str] | None = None) -> int:
    """Run what the command line says; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cases", type=int, help="so many cases instead of a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="this case alone")
    parser.add_argument("--sequence", type=int, help="this sequence of what is done to caches alone")
    parser.add_argument("--padded", type=int, help="this padded batch with edits alone")
    parser.add_argument("--no-shrink", action="store_true", help="show a failing case as it was drawn")
    parser.add_argument(
        "--skip", action="append", default=[], help="leave out cases with these features, joined by +; may be repeated"
    )
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    runner = Runner(headwise)
    skipped = [set(one.split("+")) for one in asked.skip]
    if asked.case is not None:
        outcome = runner.run(draw(asked.seed, asked.case, runner.targets))
        print(outcome.case)
        _tell(runner, outcome, asked.seed, asked.case, not asked.no_shrink)
        return int(outcome.failed)
    if asked.sequence is not None:
        return int(not _passes(Sequence, asked.seed, asked.sequence, tell=True))
    if asked.padded is not None:
        return int(not _passes(Padded, asked.seed, asked.padded, tell=True))
    wrong = _many(runner, asked, skipped)
    return wrong | _some(Sequence, asked, "sequences with caches") | _some(Padded, asked, "padded batches with edits")


def _some(kind: type[Sequence] | type[Padded], asked: argparse.Namespace, name: str) -> int:
    begun, ran, failed = time.monotonic(), 0, 0
    while ran * 25 < asked.cases if asked.cases is not None else time.monotonic() - begun < asked.seconds / 10:
        failed += not _passes(kind, asked.seed, ran, tell=failed < TOLD)
        ran += 1
    print(f"{ran} {name}, {failed} failures")
    return int(failed > 0)


def _passes(kind: type[Sequence] | type[Padded], seed: int, number: int, *, tell: bool) -> bool:
    """Whether what is drawn passes; if not, what it has done is told."""
    drawn = kind(seed, number)
    try:
        drawn.run()
    except Exception as error:
        if tell:
            what = kind.__name__.lower()
            print(f"\n== {what} {number} of seed {seed}: {type(error).__name__}: {error}", *drawn.told, sep="\n")
        return False
    return True


def _many(runner: Runner, asked: argparse.Namespace, skipped: list[set[str]]) -> int:
    begun = told = time.monotonic()
    kinds: collections.Counter[str] = collections.Counter()
    features: collections.Counter[str] = collections.Counter()
    failures: dict[str, list[int]] = {}
    number = ran = 0
    while ran < asked.cases if asked.cases is not None else time.monotonic() - begun < asked.seconds:
        case = draw(asked.seed, number, runner.targets)
        number += 1
        here = case.features()
        if any(one <= here for one in skipped):
            kinds["skipped"] += 1
            continue
        outcome = runner.run(case)
        ran += 1
        kinds[outcome.kind or "passed"] += 1
        features.update(here if outcome.kind != "refused" else ())
        if outcome.failed:
            failures.setdefault(outcome.kind, []).append(number - 1)
            if len(failures[outcome.kind]) <= TOLD:
                _tell(runner, outcome, asked.seed, number - 1, not asked.no_shrink)
        if time.monotonic() - told > 5:
            told = time.monotonic()
            wrong = sum(map(len, failures.values()))
            print(f"{ran} cases, {ran / (told - begun):.0f} a second, {wrong} failures", file=sys.stderr)
    seconds = time.monotonic() - begun
    print(f"\n{ran} cases in {seconds:.0f} s ({ran / max(seconds, 1e-9):.0f} a second), seed {asked.seed}")
    for kind, count in sorted(kinds.items()):
        print(f"  {count:6d} {kind}")
    print("cases that ran with:")
    width = 0
    for name, count in sorted(features.items()):
        part = f"  {name} {count}"
        width += len(part)
        print(part, end="\n" if width > 100 else "")
        width = 0 if width > 100 else width
    print("\nfailures:" if failures else "\nno failures")
    for kind, numbers in failures.items():
        print(f"  {kind}: {len(numbers)}, cases {', '.join(map(str, numbers[:12]))}")
    return int(bool(failures))


def _tell(runner: Runner, outcome: Outcome, seed: int, number: int, shrink: bool) -> None:
    """Print what failed, the smallest case of it, and its program."""
    if not outcome.failed:
        print(f"case {number} of seed {seed}: {outcome.kind or 'passed'}")
        return
    print(f"\n== case {number} of seed {seed}: {outcome.told}")

    def fails(case: Case) -> bool:
        return runner.run(case).kind == outcome.kind

    if shrink:
        outcome = runner.run(shrunk(outcome.case, fails))
        print(f"-- smallest: {outcome.told}")
    case = outcome.case
    if case.target or case.threads > 1:
        print(f"# target {case.target or 'as it is'}, {case.threads} threads")
    print(source(case).text(outcome.read), flush=True)


if __name__ == "__main__":
    sys.exit(main())
