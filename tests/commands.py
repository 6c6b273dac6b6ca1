"""How tests give commands: in their own process, or as a program."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from forked import Program
from headwise.cli import main


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


@pytest.fixture
def headwise(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line, in this process: commands take no second."""

    def run(*args: object, answer: str | bytes | None = "") -> Done:
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(sys, "argv", ["headwise", *map(str, args)])
        given = answer.encode() if isinstance(answer, str) else answer
        monkeypatch.setattr(sys, "stdin", None if given is None else io.TextIOWrapper(io.BytesIO(given)))
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return Done(code, *capsys.readouterr())

    return run
