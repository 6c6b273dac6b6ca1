"""Programs of the tests, each a process forked from one that has imported what they need: they take no seconds to
begin, and what happens to them meets their work and not Python's imports."""

import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([
    "headwise.lm.train", "headwise.corpus", "headwise.compress", "headwise.cli", "headwise.parallel",
    "headwise.telemetry", "torch._dynamo", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint",
    "pytest",
])  # fmt: skip


def run_together(
    programs: Iterable[Sequence[object]], folder: Path, paths: Iterable[Path] = (), *, seconds: float
) -> str:
    """Run programs at once, each a Python file and its arguments, with more folders on sys.path, to their ends: "", or
    what those said that did not end well. Each says it to a file in `folder`."""
    jobs = []
    for at, (script, *args) in enumerate(programs):
        log = folder / f"{at}.said"
        call = (str(script), [*map(str, args)], [*map(str, paths)], str(log))
        jobs.append((SERVER.Process(target=_program, args=call), log))
        jobs[-1][0].start()
    try:
        for job, _ in jobs:
            job.join(seconds)
    finally:
        for job, _ in jobs:
            job.kill()
            job.join()
    return "\n".join(f"{job.exitcode}: {log.read_text(errors='replace')}" for job, log in jobs if job.exitcode)


def _program(script: str, args: list[str], paths: list[str], log: str) -> None:
    """In the new process."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 2)
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    warnings.simplefilter("ignore")
    sys.path[:0] = [str(Path(script).parent), *paths]
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")
