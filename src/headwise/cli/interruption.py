"""Ctrl-C, one line and exit code 130; and the number of threads. Imports little: it may come during the imports.

The number of threads of a command: no more than there are cores free. PyTorch starts a thread for each core. Where
other programs use the cores, each parallel loop waits for the thread that does not run: on two busy cores, `headwise
see` took 29 to 74 s with two threads and 9 to 10 s with one. Two settings of OpenMP avoid that; they are made before
PyTorch is imported, unless the user's environment has them.
"""

import _thread
import os
import signal
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.wording import in_language, language, tr

CODE = 130  # 128 + SIGINT, as shells have it
INTERRUPTED = tr("Interrupted.")
_came: list[int] = []
_lost: list[int] = []  # those of which Python ignored the exception, and which come again


@contextmanager
def noted() -> Iterator[None]:
    """Within the block, Ctrl-C raises KeyboardInterrupt as usual, and `is_interruption` recognises it."""
    _came.clear()
    _lost.clear()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    try:
        signal.signal(signal.SIGINT, _note)
    except ValueError:  # not in the main thread, which does not receive Ctrl-C
        yield
        return
    before, sys.unraisablehook = sys.unraisablehook, _unraisable(sys.unraisablehook)
    try:
        yield
    finally:
        sys.unraisablehook = before
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _came.clear()
        _lost.clear()


def is_interruption(error: BaseException) -> bool:
    """Whether an error is Ctrl-C or came of it: a library that swallows it while it is imported fails later."""
    return isinstance(error, KeyboardInterrupt) or bool(_came)


def check_interrupted() -> None:
    """Raise KeyboardInterrupt if Ctrl-C came and a library swallowed it, as some do while they are imported."""
    if _came:
        raise KeyboardInterrupt


def is_first(number: int) -> bool:
    """Note a signal that ends the command. Returns False for a repeated one, such as launchers send."""
    first = not _came or bool(_lost)
    _came.append(number)
    _lost.clear()
    return first


def print_interrupted() -> None:
    """Print one line to standard error."""
    if sys.stderr is not None:  # closed
        sys.stderr.write(f"{in_language(INTERRUPTED, spoken())}\n")
        sys.stderr.flush()


def spoken() -> str:
    """The language of the reader; English where HEADWISE_LANG is wrong, which a message says."""
    try:
        return language()
    except HeadwiseError:
        return "en"


def leave() -> None:
    """End the process with `CODE`. Where Ctrl-C passed through the evaluation of a string, Python would end the process
    by the signal itself, unless another one is evaluated afterwards: to make a named tuple does that."""
    namedtuple("Afterwards", ())
    sys.exit(CODE)


def _unraisable(before: Callable[[Any], object]) -> Callable[[Any], object]:
    """A hook for exceptions that Python ignores, as those of finalizers and of callbacks of the import system: Ctrl-C,
    or another signal, that came in one comes again a moment later."""

    def hook(ignored: Any) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            before(ignored)
            return
        number = _came[-1] if _came else signal.SIGINT
        _lost.append(number)
        threading.Timer(0.02, _interrupt, [number]).start()

    return hook


def _interrupt(number: int) -> None:
    """Send a signal to the main thread, which ends its waiting where the system can do that."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        _thread.interrupt_main(signal.Signals(number))


def _note(number: int, frame: Any) -> None:
    _came.append(number)
    raise KeyboardInterrupt


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
    """How many threads to use. busy: cores in use, None if unknown; allowed: in the container, None for any."""
    free = cores if busy is None else cores - round(busy)
    return max(1, min(usable, free, usable if allowed is None else int(allowed)))


def others(path: Path = Path("/proc/loadavg")) -> float | None:
    """Other threads that run or wait for a core now, outside of Linux in the last minute; None if unknown."""
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
