"""Starts the ranks of a job once for all tests that ask for its outcome, in whatever process they run."""

import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from forked import run_together

HERE = Path(__file__).parent
BESIDE = [HERE.parent / "core", HERE.parent / "models"]  # what cases share with other tests
LONGEST = 900.0  # seconds; a machine that does nothing else needs a tenth of the first minute


@cache
def outcomes(module: str, ranks: int, shared: Path) -> dict[str, str]:
    """Of each case of a module: "" if it passed on every rank, or what went wrong.

    Args:
        shared: a folder that all workers of a test run have in common; the first to come runs the job.
    """
    return once(shared / f"{module}-{ranks}", lambda folder: _run(module, ranks, folder))


def once(folder: Path, run: Callable[[Path], Any]) -> Any:
    """What `run` finds, which is plain data: the first process to come runs it in that folder, the others wait."""
    done = folder / "outcomes.json"
    try:
        folder.mkdir()
    except FileExistsError:
        until = time.monotonic() + LONGEST
        while not done.exists() and time.monotonic() < until:
            time.sleep(0.2)
        return json.loads(done.read_text())
    found = run(folder)
    part = done.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(done)
    return found


def _run(module: str, ranks: int, folder: Path) -> dict[str, str]:
    programs = [(HERE / "ranks.py", module, rank, ranks, folder) for rank in range(ranks)]
    if wrong := run_together(programs, folder, BESIDE, seconds=LONGEST):
        return {"": wrong}
    return json.loads((folder / "0.json").read_text())
