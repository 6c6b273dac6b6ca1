"""Peak memory of a call besides inputs and outputs, measured in a separate process.

The process is forked from a server that has PyTorch loaded and has run nothing. What counts is the highest resident
size during the call, minus the size before it and the size of its result.
"""

import ctypes
import multiprocessing
import re
import resource
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.contestants import Skip, build
from benchmarks.inputs import make

STATUS = Path("/proc/self/status")


# A call, and how many bytes of its result are the caller's.
Prepared = tuple[Callable[[], Any], Callable[[Any], int]]


def peak(case: Case, name: str, threads: int, patience: float | None = None) -> int:
    """Bytes besides inputs and outputs of one contestant in one case. Raises Skip if it cannot be measured."""
    return peak_of(partial(_contestant, case, name), threads, patience)


def peak_of(prepare: Callable[[], Prepared], threads: int, patience: float | None = None) -> int:
    """Peak bytes of a call, minus what was allocated before and its result.

    Args:
        prepare: picklable; makes the call, in the process, and does before all that happens only once.
        threads: of PyTorch. patience: in seconds; None waits for ever.
    Raises:
        Skip: if it cannot be measured.
    """
    try:
        context = multiprocessing.get_context("forkserver")
    except ValueError as error:
        raise Skip("this system cannot fork a process to measure it in") from error
    context.set_forkserver_preload(["torch", "headwise.map.attention", "benchmarks.contestants"])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(there, prepare, threads))
    process.start()
    there.close()
    try:
        if not here.poll(patience):
            process.kill()
            raise Skip(f"measuring its memory took longer than {patience:.0f} s")
        answer = here.recv()
    except EOFError as error:
        process.join()
        raise Skip(f"its process ended with {process.exitcode}: not enough memory?") from error
    finally:
        here.close()
    process.join()
    if isinstance(answer, str):
        raise Skip(answer)
    return answer


def _contestant(case: Case, name: str) -> Prepared:
    """Run a small case first, for everything that happens only once."""
    with torch.no_grad():
        small = case.shrunk(512)
        build(name, small, make(small, 0)).call()
    inputs = make(case, 0)
    contestant = build(name, case, inputs)
    call = torch.no_grad()(contestant.call)
    if name == "flex":
        call()  # it is compiled for these sizes
    given = {x.data_ptr() for x in inputs.leaves}

    def returned(result: Any) -> int:
        sizes = {x.data_ptr(): x.nbytes for x in contestant.named(result).values()}
        return sum(size for at, size in sizes.items() if at not in given)

    return call, returned


def _measure(pipe: Connection, prepare: Callable[[], Prepared], threads: int) -> None:
    """Measure in the child process."""
    torch.set_num_threads(threads)
    try:
        call, returned = prepare()
        _return_freed_memory()
        before = _reset_peak()
        result = call()
        high = _peak()
        pipe.send(max(0, high - before - returned(result)))
    except Skip as reason:
        pipe.send(str(reason))
    except Exception as error:  # printed by the parent as one line
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def _return_freed_memory() -> None:
    """glibc: give freed memory back, and take larger pieces from the system from now on, so that they are counted."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            m_mmap_threshold = -3
            libc.mallopt(m_mmap_threshold, 1 << 16)
            libc.malloc_trim(0)


def _reset_peak() -> int:
    """The current resident size in bytes; also resets the peak if the system supports it."""
    if not STATUS.exists():
        return _peak()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    """The highest resident size of this process, in bytes."""
    if STATUS.exists():
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise Skip(f"{STATUS} has no {field}")
    return 1024 * int(found[1])


def available() -> int:
    """Available bytes, or a large number if unknown."""
    info = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", info.read_text(), re.MULTILINE) if info.exists() else None
    return 1024 * int(found[1]) if found else 1 << 62
