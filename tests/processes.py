"""What the processes of a test cost, and what they may write."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def processor_time() -> float:
    """Seconds of CPU time that this process and all that it started have taken; those that still run, where Linux
    lists them."""
    ended = sum(os.times()[:4])
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (AttributeError, ChildProcessError):  # no such system call here, or no child
        return ended
    taken: dict[int, tuple[int, int]] = {}  # of a process: its parent, and clock ticks, of its ended children too
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        taken[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    running = {os.getpid()}
    while more := {process for process, (parent, _) in taken.items() if parent in running} - running:
        running |= more
    return ended + sum(taken[process][1] for process in running - {os.getpid()}) / os.sysconf("SC_CLK_TCK")


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """What a full disk looks like from inside: a write that fails halfway."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
