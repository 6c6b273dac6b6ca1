"""Timing two things fairly on a noisy machine: turn by turn in one run, medians."""

import statistics
import time
from collections.abc import Callable


def interleaved(calls: dict[str, Callable[[], object]], *, rounds: int, seconds: float = 20.0) -> dict[str, float]:
    """Median seconds of each call; every round runs all of them, and at least three rounds are run."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    begun = time.perf_counter()
    for done in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
        if done >= 2 and time.perf_counter() - begun > seconds:
            break
    return {name: statistics.median(values) for name, values in times.items()}
