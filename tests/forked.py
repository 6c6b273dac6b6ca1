"""Programs of the tests, each a process forked from one that has imported what they need: they take no seconds to
begin, and what happens to them meets their work and not Python's imports."""

import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([
    "headwise.lm.train", "headwise.corpus", "headwise.compress", "headwise.cli.program", "headwise.parallel",
    "headwise.telemetry", "torch._dynamo", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint",
    "pytest",
])  # fmt: skip


class Program:
    """A Python file that runs with arguments, more folders on sys.path and more of an environment.

    Attributes:
        process: it, started. out, err: the files of what it prints.
    """

    def __init__(
        self, call: Sequence[object], name: Path, paths: Iterable[Path] = (), environment: Mapping[str, str] = {}
    ) -> None:
        self.out, self.err = name.with_suffix(".out"), name.with_suffix(".err")
        for path in (self.out, self.err):
            path.touch()
        script, *args = map(str, call)
        given = (script, args, [*map(str, paths)], dict(environment), str(self.out), str(self.err))
        self.process: Any = SERVER.Process(target=_program, args=given)
        self.process.start()

    def wait(self, seconds: float) -> tuple[int, str, str]:
        """Its exit code, negative for a signal, and what it printed; killed if that takes longer."""
        try:
            self.process.join(seconds)
        finally:
            self.process.kill()
            self.process.join()
        return self.process.exitcode, *(path.read_text("utf-8", errors="replace") for path in (self.out, self.err))


def run_together(
    programs: Iterable[Sequence[object]], folder: Path, paths: Iterable[Path] = (), *, seconds: float
) -> str:
    """Run programs at once, each a Python file and its arguments, with more folders on sys.path, to their ends: "", or
    what those said that did not end well. Each says it to files in `folder`."""
    jobs = [Program(call, folder / str(at), paths) for at, call in enumerate(programs)]
    ended = [job.wait(seconds) for job in jobs]
    return "\n".join(f"{code}: {err}" for code, _, err in ended if code)


def _program(script: str, args: list[str], paths: list[str], more: dict[str, str], out: str, err: str) -> None:
    """In the new process."""
    for stream, path in ((1, out), (2, err)):
        with open(path, "w") as file:
            os.dup2(file.fileno(), stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", encoding="utf-8", buffering=1, closefd=False) for stream in (1, 2))
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", **more)
    warnings.simplefilter("ignore")
    sys.path[:0] = [str(Path(script).parent), *paths]
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")
