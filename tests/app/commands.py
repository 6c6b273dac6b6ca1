"""How tests give commands: in their own process, or as a program."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from forked import Program


class Done(NamedTuple):
    """What a command leaves."""

    code: int
    out: str
    err: str


Command = Callable[..., Done]


def program(*args: object) -> Done:
    """`python -m headwise` with these arguments, as people start it."""
    env = {**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "headwise", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, encoding="utf-8")
    return Done(done.returncode, done.stdout, done.stderr)


def forked(folder: Path, *args: object, **environment: str) -> Done:
    """The command in a process of its own, with more of an environment; `folder` keeps what it prints."""
    call = (Path(__file__).with_name("run_headwise.py"), *args)
    return Done(*Program(call, folder / "printed", environment={"COLUMNS": "120", **environment}).wait(300.0))
