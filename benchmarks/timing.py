"""Timing several things fairly on a noisy machine: turn by turn in one process, medians, and how far they spread."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SHORTEST = 2e-3  # seconds; what is quicker is repeated within a round until it takes that long
ROUNDS_AT_LEAST = 5


@dataclass(frozen=True)
class Times:
    """Seconds a call, one entry a round; what is reported of them is the median, or the least."""

    seconds: tuple[float, ...]
    by_least: bool = False

    @property
    def reported(self) -> float:
        """The median of the rounds, or the least of them."""
        return min(self.seconds) if self.by_least else self.median

    @property
    def median(self) -> float:
        """The middle of the rounds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float | None:
        """(third quartile − first quartile) / median; None for fewer than four rounds."""
        if len(self.seconds) < 4:
            return None
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (third - first) / self.median


def medians(calls: dict[str, Callable[[], Any]], *, estimate: float, seconds: float) -> tuple[dict[str, float], float]:
    """Seconds of each call, and the widest spread of any; `estimate` is about how long one of them takes."""
    turns = {name: [call] for name, call in calls.items()}
    found, _ = interleaved(turns, estimates=dict.fromkeys(calls, estimate), rounds=99, seconds=seconds)
    return {name: times.median for name, times in found.items()}, max(times.spread or 0.0 for times in found.values())


def interleaved(
    calls: dict[str, Sequence[Callable[[], Any]]], *, estimates: dict[str, float], rounds: int, seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, Times], dict[str, tuple[int, Any]]]:  # fmt: skip
    """Times of each, and of each the last result with the index of the call that gave it.

    Args:
        calls: name → the same call on different inputs; round r takes call r modulo their number.
        estimates: name → about how long one call takes, in seconds.
        rounds: maximum number; every round runs all of them, starting with a different one.
        seconds: no new round is begun after that, except to reach `ROUNDS_AT_LEAST`.
        clock: of the times of calls.
    """
    repeats = {name: max(1, int(SHORTEST / max(estimates[name], 1e-7))) for name in calls}
    times: dict[str, list[float]] = {name: [] for name in calls}
    last: dict[str, tuple[int, Any]] = {}
    names = list(calls)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    begun = time.perf_counter()
    try:
        for done in range(rounds):
            for name in names[done % len(names) :] + names[: done % len(names)]:
                index = done % len(calls[name])
                call, again = calls[name][index], range(repeats[name])
                last.pop(name, None)
                start = clock()
                for _ in again:
                    result = call()
                times[name].append((clock() - start) / len(again))
                last[name] = index, result
                del result
            if done + 1 >= ROUNDS_AT_LEAST and time.perf_counter() - begun > seconds:
                break
    finally:
        if collecting:
            gc.enable()
    return {name: Times(tuple(values)) for name, values in times.items()}, last
