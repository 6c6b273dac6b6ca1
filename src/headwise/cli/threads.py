"""The number of threads of a command: no more than there are cores free.

PyTorch starts a thread for each core. Where other programs use the cores, each parallel loop waits for the thread that
does not run: on two busy cores, `headwise see` took 29 to 74 s with two threads and 9 to 10 s with one. Two settings of
OpenMP avoid that; they are made before PyTorch is imported, unless the user's environment has them.
"""

import os
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

GIVEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # the user's own choice
SAMPLES, PAUSE = 4, 0.005  # of the programs that run now, and seconds between them
# Their results depend on the number of threads, in the last bits, and a run may be resumed: they have all cores always.
RESUMABLE = ("train", "measure")


def settle(command: str | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set OpenMP's environment for a command: threads that wait let others run, and there are at most as many as free
    cores. Has no effect once PyTorch has been imported."""
    if "torch" in sys.modules:
        return
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    if command in RESUMABLE or any(environment.get(name) for name in GIVEN):
        return
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = threads_for(usable, os.cpu_count() or 1, others(), quota())
    if threads < usable:
        environment["OMP_NUM_THREADS"] = str(threads)


def threads_for(usable: int, cores: int, busy: float | None, allowed: float | None) -> int:
    """How many threads to use.

    Args:
        usable: cores that this process may use, of all `cores` of the machine.
        busy: cores that other programs use now; None if unknown. allowed: cores of CPU time that the container may
            use; None for any.
    """
    free = cores if busy is None else cores - round(busy)
    return max(1, min(usable, free, usable if allowed is None else int(allowed)))


def others(path: Path = Path("/proc/loadavg")) -> float | None:
    """How many other threads of the machine run or wait for a core now, or on other systems than Linux in the last
    minute; None if unknown."""
    try:
        found = []
        for sample in range(SAMPLES):
            time.sleep(PAUSE if sample else 0)
            running, _, _ = path.read_text(encoding="ascii").split()[3].partition("/")
            found.append(int(running) - 1)  # this one
        return max(0.0, sum(found) / SAMPLES)
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """The cores of CPU time that the control group of a container allows; None if any."""
    try:
        most, period = path.read_text(encoding="ascii").split()
        return None if most == "max" else float(most) / float(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
