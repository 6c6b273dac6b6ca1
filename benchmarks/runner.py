"""One case from start to end: contestants, agreement, time and memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks import memory
from benchmarks.cases import Case
from benchmarks.checks import RELATIVE, Disagreement, Referee, fingerprint
from benchmarks.contestants import PEERS, Contestant, Skip, build, kernels, matrices
from benchmarks.inputs import Inputs, make
from benchmarks.machine import Machine
from benchmarks.results import Row
from benchmarks.timing import Times, interleaved

PROBED_FROM = 1e9  # operations; a smaller case is simply tried
ONE_SET_FROM = 1.0  # seconds a call; from there on one set of inputs is enough
SLOW = "one call would take some"  # the beginning of a reason to skip a contestant
ONCE_FROM = 10.0  # seconds a call; from there on the first call is the measurement


@dataclass(frozen=True)
class Settings:
    """The options of the command line. `least`: report the least time of the rounds, not the median; with one thread,
    of CPU time. `only` and `chosen` name peers and kernels; empty: all."""

    rounds: int = 25
    seconds: float = 10.0
    quick: bool = False
    memory: bool = True
    least: bool = False
    patience: float | None = None
    only: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()

    def contestants(self, case: Case) -> list[str]:
        """Peers first: the first one that returns a result is the reference of the others."""
        peers = [name for name in case.peers if not self.only or name in self.only]
        if self.quick and "flex" not in self.only:
            peers = [name for name in peers if name != "flex"]  # it compiles for many seconds
        return [*peers, *kernels(list(self.chosen))]


@dataclass
class _Entry:
    """The state of a contestant in a case."""

    calls: list[Contestant] = field(default_factory=list)
    prints: list[float] = field(default_factory=list)
    first: float = 0.0
    error: float | None = None


def run_case(case: Case, settings: Settings, machine: Machine, names: list[str] | None = None) -> list[Row]:
    """A row for each contestant, skipped ones included. Raises Disagreement if results differ."""
    names = settings.contestants(case) if names is None else names
    skipped: dict[str, str] = {}
    times: dict[str, Times] = {}
    errors: dict[str, float | None] = {}
    patience = case.patience if settings.patience is None else settings.patience
    with torch.no_grad():
        for name in names:
            try:
                _fits(case, name)
                if not settings.quick:
                    _probe(case, name, patience)
            except Skip as reason:
                skipped[name] = str(reason)
        running = [name for name in names if name not in skipped]
        if case.timed or settings.quick:
            entries = _warm(case, running, skipped)
            errors = {name: entry.error for name, entry in entries.items()}
            if case.timed:
                times = _time(case, entries, settings)
    rows = []
    for name in names:
        kernel = name not in PEERS
        if name in skipped:
            rows.append(Row(case.name, name, kernel, case.size[2], skipped=skipped[name]))
            continue
        took, note = None, None
        if settings.memory:
            try:
                took = memory.peak(case, name, torch.get_num_threads(), 4 * patience + 120)
            except Skip as reason:
                note = str(reason)
        rows.append(_row(case, name, kernel, machine, times.get(name), errors.get(name), took, note))
    return rows


def _fits(case: Case, name: str) -> None:
    need, free = matrices(name) * case.matrix_bytes, memory.available()
    if need > free / 2:
        raise Skip(f"its matrices take some {need / 1e9:.1f} GB, of {free / 1e9:.1f} GB free")


def _probe(case: Case, name: str, patience: float) -> None:
    """Skip contestants that would take longer than `patience` for one call, predicted from a smaller one."""
    if case.flops < PROBED_FROM:
        return
    short = case.shrunk(min(4096, max(128, case.size[2] // 8)))
    contestant = _ready(short, name, make(short, 0))
    for _ in range(2):  # the first may have to load or compile something
        seconds, _ = _timed(contestant.call)
        expected = seconds * case.flops / short.flops
        if expected <= patience:
            return
    raise Skip(f"{SLOW} {expected:.0f} s, and the patience for it is {patience:.0f} s")


def _ready(case: Case, name: str, inputs: Inputs) -> Contestant:
    """Build and call a contestant once; any failure of FlexAttention skips it."""
    try:
        contestant = build(name, case, inputs)
        if name == "flex":
            contestant.call()
    except Skip:
        raise
    except Exception as error:
        if name != "flex":
            raise
        first = str(error).strip().splitlines()
        raise Skip(f"it does not compile or run: {type(error).__name__}: {first[0] if first else ''}") from error
    return contestant


def _warm(case: Case, names: list[str], skipped: dict[str, str]) -> dict[str, _Entry]:
    """First calls with comparison of the results; contestants that fail go to `skipped`."""
    sets = [make(case, 0), make(case, 1)]
    referees = [Referee.of(case, one) for one in sets]
    entries: dict[str, _Entry] = {}
    for name in names:
        entry = _Entry()
        try:
            for inputs, referee in zip(sets, referees, strict=True):
                contestant = _ready(case, name, inputs)
                seconds, result = _timed(contestant.call)
                named = contestant.named(result)
                error = referee.check(name, named)
                entry.calls.append(contestant)
                entry.prints.append(fingerprint(named))
                del result, named
                if len(entry.calls) == 1:
                    entry.first, entry.error = seconds, error
                    if seconds > ONE_SET_FROM or name == "flex":  # flex is compiled for one set's tensors at a time
                        break
                else:
                    entry.first = min(entry.first, seconds)
        except Skip as reason:
            skipped[name] = str(reason)
            continue
        entries[name] = entry
    return entries


def _time(case: Case, entries: dict[str, _Entry], settings: Settings) -> dict[str, Times]:
    slow = {name: Times((entry.first,)) for name, entry in entries.items() if entry.first > ONCE_FROM}
    quick = {name: entry for name, entry in entries.items() if name not in slow}
    if not quick:
        return slow
    times, last = interleaved(
        {name: [one.call for one in entry.calls] for name, entry in quick.items()},
        estimates={name: entry.first for name, entry in quick.items()},
        rounds=settings.rounds,
        seconds=settings.seconds,
        clock=time.process_time if settings.least and torch.get_num_threads() == 1 else time.perf_counter,
    )
    for name, (index, result) in last.items():
        entry = quick[name]
        found = fingerprint(entry.calls[index].named(result))
        if abs(found - entry.prints[index]) > RELATIVE[case.dtype]:
            raise Disagreement(f"{case.name}: what {name} computed while it was timed is not what it computed before")
    return {**{name: replace(found, by_least=settings.least) for name, found in times.items()}, **slow}


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def _row(
    case: Case, name: str, kernel: bool, machine: Machine, times: Times | None, error: float | None,
    took: int | None, note: str | None,
) -> Row:  # fmt: skip
    common = {"memory": took, "memory_note": note, "error": error}
    if times is None:
        return Row(case.name, name, kernel, case.size[2], **common)  # type: ignore[arg-type]
    return Row(
        case.name, name, kernel, case.size[2], times.reported, times.spread, len(times.seconds),
        peak_share=case.flops / times.reported / machine.best_peak(case.dtype),
        bandwidth_share=case.read_bytes / times.reported / machine.bandwidth,
        **common,  # type: ignore[arg-type]
    )  # fmt: skip
