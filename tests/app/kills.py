"""Commands as processes that are killed: at a random time of their run, or as soon as their result is there."""

import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import SERVER

PATIENCE = 300.0


@dataclass(frozen=True)
class Ended:
    """code: of the exit, negative for a signal. said: both outputs. seconds: that it took."""

    code: int
    said: str
    seconds: float


def run(args: list[str], folder: Path) -> Ended:
    """The command in a folder, to its end."""
    return _Started(args, folder).wait()


def kill_at(seconds: float, args: list[str], folder: Path) -> Ended:
    """The command, killed after some time; it may have ended before."""
    started = _Started(args, folder)
    return started.kill_after(seconds)


def kill_when(there: Path, seconds: float, args: list[str], folder: Path) -> Ended:
    """The command, killed some time after a file is there that it writes; it may have ended before."""
    started, end = _Started(args, folder), time.monotonic() + PATIENCE
    while not there.exists() and started.alive and time.monotonic() < end:
        time.sleep(0.0005)
    return started.kill_after(seconds)


def survive(
    args: list[str], folders: Callable[[], Path], result: str, same: Callable[[Path], Any], kills: int, seed: int
) -> int:  # fmt: skip
    """Run a command once, and then `kills` times in new folders, each time killed and given again: it must exit with 0
    then, and leave what the first run left. Returns how many were killed while the result was there.

    Args:
        result: the file that the command writes last. same: what must be equal of a folder, beside the names in it.
    """
    whole = folders()
    first = run(args, whole)
    assert first.code == 0, first.said
    wanted, names = same(whole), _names(whole)
    draw, killed, late, tail = random.Random(seed), 0, 0, 0.05
    for attempt in range(20 * kills):
        if killed == kills:
            break
        folder = folders()
        if attempt % 3 == 2:  # what the command does after its last file takes a moment: most times would miss it
            ended = kill_when(folder / result, draw.uniform(0.0, tail), args, folder)
        else:
            ended = kill_at(draw.uniform(0.0, first.seconds), args, folder)
        if ended.code == 0:  # it was quicker
            tail /= 2
            continue
        assert ended.code == -9, ended.said
        killed += 1
        late += (folder / result).exists()
        again = run(args, folder)
        assert again.code == 0, again.said
        assert same(folder) == wanted, f"kill {killed}"
        assert _names(folder) == names, f"kill {killed}"
    assert killed == kills
    return late


class _Started:
    def __init__(self, args: list[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self._since = folder.with_name(f"{folder.name}.said"), time.monotonic()
        self._process = SERVER.Process(target=_headwise, args=(args, str(folder), str(self._log)))
        self._process.start()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def kill_after(self, seconds: float) -> Ended:
        self._process.join(seconds)
        self._process.kill()
        return self.wait()

    def wait(self) -> Ended:
        self._process.join(PATIENCE)
        assert self._process.exitcode is not None, "it does not end"
        said = self._log.read_text(encoding="utf-8") if self._log.exists() else ""
        return Ended(self._process.exitcode, said, time.monotonic() - self._since)


def _headwise(args: list[str], folder: str, log: str) -> None:
    """In the new process."""
    with open(log, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    sys.argv = ["headwise", *args]
    from headwise.cli import main

    main()


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
