"""The command line: `python -m benchmarks`; `--help` lists the options."""

import argparse
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import torch

import benchmarks
from benchmarks import auto, machine, plot, sweep, tables
from benchmarks.cases import CASES, FAMILIES, select
from benchmarks.checks import Disagreement
from benchmarks.contestants import PEERS
from benchmarks.results import Report
from benchmarks.runner import Settings, run_case
from headwise.kernels import KERNELS


def main() -> int:
    """Measure, print and write. Returns 1 if two contestants disagree, or with --check-auto if "auto" is slower than
    another kernel; no other result affects it."""
    parser = _parser()
    args = parser.parse_args()
    if args.list:
        for case in CASES.values():
            print(f"{case.name:<38} {'; '.join(map(str, case.goals)) or 'no goal':<16} {tables.describe(case)}")
        return 0
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot requires matplotlib: pip install matplotlib")
    say = _to_stderr if args.markdown else _to_stdout
    if args.read:
        report = Report.read(args.read)
        for case in [] if args.markdown else report.cases():
            _say_all(say, tables.case_lines(case, report.of(case.name), judged=not report.quick))
    else:
        try:
            cases = select(args.case)
        except KeyError as word:
            parser.error(f"--case {word.args[0]}: no such case or family; {', '.join(FAMILIES)}, or see --list")
        if args.threads:
            torch.set_num_threads(args.threads)
        settings = Settings(
            rounds=args.rounds or (1 if args.quick else Settings.rounds), seconds=args.seconds, quick=args.quick,
            memory=not args.no_memory, least=args.least, patience=args.patience, only=tuple(args.peer),
            chosen=tuple(args.kernel),
        )  # fmt: skip
        report = Report(machine.examine(0.05 if args.quick else 1.5), args.quick)
        _say_all(say, report.machine.lines())
        if args.least:
            say("times are the least of the rounds, not medians")
        try:
            if args.check_auto:
                found = [
                    auto.check(case.quick() if args.quick else case, settings, report.machine, say) for case in cases
                ]
                return 1 if any(choice is not None and choice.wrong for choice in found) and not args.quick else 0
            for case in [] if args.only_plot else cases:
                sized = case.quick() if args.quick else case
                known = args.quick and any(CASES[row.case].family == case.family for row in report.rows)
                rows = run_case(sized, replace(settings, memory=settings.memory and not known), report.machine)
                report.rows += rows
                _say_all(say, tables.case_lines(sized, rows, judged=not args.quick))
                if args.json:  # after every case: a long run that is stopped keeps what it has
                    report.write(args.json)
            if args.plot:
                report.sweep = sweep.run(settings, report.machine, say)
        except Disagreement as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        if args.json:
            report.write(args.json)
    if args.plot:
        if not report.sweep:
            parser.error(f"--plot: {args.read} holds no sweep over n; run with --plot and --json together")
        plot.draw(report, args.plot)
        say(f"wrote {args.plot}")
    if args.markdown:
        print(tables.markdown(report), end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=benchmarks.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--case", nargs="+", default=[], metavar="NAME", help="cases by name, family or pattern; all if not given")
    add("--kernel", nargs="+", default=[], choices=[*KERNELS, "auto"], metavar="NAME", help=f"of {', '.join(KERNELS)}")
    add("--peer", nargs="+", default=[], choices=list(PEERS), metavar="NAME", help=f"of {', '.join(PEERS)}")
    add("--quick", action="store_true", help="small sizes: that everything runs and agrees; the times say nothing")
    add("--rounds", type=int, help=f"rounds at most, {Settings.rounds} if not given")
    add("--seconds", type=float, default=Settings.seconds, help="seconds a case, more where five rounds take longer")
    add("--patience", type=float, help="seconds; who takes longer for one call is left out (each case has its own)")
    add("--threads", type=int, help="threads for PyTorch and the kernels")
    add("--check-auto", action="store_true", help='only whether "auto" is within 10 %% of the fastest kernel; 1 if not')
    add("--least", action="store_true", help="the least time of the rounds, of one thread its CPU time")
    add("--no-memory", action="store_true", help="time only")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    add("--plot", type=Path, metavar="FILE.png", help="also measure against n, and draw time and memory")
    add("--only-plot", action="store_true", help="no cases, only what --plot needs")
    add(
        "--markdown",
        action="store_true",
        help="print the tables for docs/performance_tables.md; progress goes to stderr",
    )
    add("--read", type=Path, metavar="FILE", help="show what --json wrote instead of measuring")
    add("--list", action="store_true", help="name the cases and their goals")
    return parser


def _to_stdout(line: str) -> None:
    print(line, flush=True)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _say_all(say: object, lines: list[str]) -> None:
    for line in lines:
        say(line)  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())
