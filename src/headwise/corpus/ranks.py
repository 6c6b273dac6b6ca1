"""The processes of a sweep: assignment of units, common progress, and failures.

torchrun gives every process the address of a store, which transfers numbers and strings only. Measurements are in the
files of the journal, so no tensors are sent, and processes can compute on CPUs or GPUs.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import count
from threading import Event, Thread
from typing import Any

from headwise.errors import ConfigError, HeadwiseError

BEAT = 2.0  # seconds between two signs of life
SILENCE = 120.0  # seconds without one after which a process is considered dead
JOINING = timedelta(minutes=30)  # for loading the model
PAUSE = 0.05  # seconds between two checks while waiting
LOOK = 0.5  # seconds between two checks of all other processes
SPACE = "headwise/measure/"


class Stopped(HeadwiseError):
    """Another process has failed; the message is its error."""


class Deserted(HeadwiseError):
    """Other processes have ended without an error."""


class Ranks:
    """The processes of a sweep, from the view of one; by default it is the only one.

    Attributes:
        rank: of this process, from 0. world: the number of processes.
    """

    def __init__(self, rank: int = 0, world: int = 1, store: Any = None) -> None:
        self.rank, self.world, self._store = rank, world, store
        self._alone: dict[str, float] = {}
        self._end = Event()
        self._beats: dict[int, tuple[int, float]] = {}
        self._looked = -LOOK
        if store is not None:
            Thread(target=self._beat, daemon=True).start()

    @classmethod
    def joined(cls) -> "Ranks":
        """The processes of torchrun's environment. ConfigError if it is incomplete, or the store does not respond."""
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls()
        store, rank, world, prefixed = _met()
        return cls(rank, world, prefixed(f"{SPACE}{next(_sweeps)}/", store))

    @property
    def first(self) -> bool:
        """Whether this is the process that plans, merges and prints."""
        return self.rank == 0

    def publish(self, key: str, value: Any) -> None:
        """Set a value for all processes."""
        if self._store is not None:
            self._call("set", key, json.dumps(value))

    def wait_for(self, key: str) -> Any:
        """Wait until a process has published a value, and return it."""
        while not self._call("check", [key]):
            self.check()
            time.sleep(PAUSE)
        return json.loads(self._call("get", key))

    def take(self, units: Sequence[int]) -> int | None:
        """The next unit that no process has taken; None if none is left."""
        at = int(self.count("taken", 1)) - 1
        return units[at] if at < len(units) else None

    def count(self, what: str, more: int) -> int:
        """Add to a shared number and return it."""
        if self._store is None:
            self._alone[what] = self._alone.get(what, 0) + more
            return int(self._alone[what])
        return int(self._call("add", what, more))

    def check(self) -> None:
        """Raise Stopped if a process has failed, and Deserted if one no longer responds. It can be called often: the
        store is queried at intervals."""
        if self._store is None or time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        if self._call("check", ["failed"]):
            raise Stopped(json.loads(self._call("get", "failed")))
        for rank in range(self.world):
            if rank != self.rank:
                self._check_beat(rank)

    def fail(self, message: str) -> None:
        """Publish why this process fails; only the first failure is kept."""
        if self._store is not None:
            with suppress(HeadwiseError):
                if not self._call("check", ["failed"]):
                    self.publish("failed", f"process {self.rank} of {self.world}: {message}")

    def leave(self) -> None:
        """Wait until the first process has printed its results, since a launcher ends all processes as soon as one
        ends; then stop the signs of life."""
        if self._store is not None:
            with suppress(HeadwiseError):
                if self.first:
                    self.publish("printed", True)
                else:
                    while not self._call("check", ["printed"]):
                        self._check_beat(0)
                        time.sleep(PAUSE)
        self._end.set()

    def _check_beat(self, rank: int) -> None:
        """Raise Deserted if a process has not given a sign of life for too long."""
        now = time.monotonic()
        beats = self._call("add", f"beat{rank}", 0)
        known, since = self._beats.get(rank, (-1, now))
        since = since if beats == known else now
        self._beats[rank] = (beats, since)
        patience = SILENCE if beats else JOINING.total_seconds()  # before its first sign, a process may be loading
        if now - since > patience:
            raise Deserted(f"process {rank} of {self.world} no longer responds; run the same command to resume")

    def _beat(self) -> None:
        while True:  # the first at once: the patience before it is much longer
            try:
                self._call("add", f"beat{self.rank}", 1)
            except HeadwiseError:
                return
            if self._end.wait(BEAT):
                return

    def _call(self, what: str, *args: Any) -> Any:
        try:
            return getattr(self._store, what)(*args)
        except RuntimeError:
            raise Deserted("the other processes have ended; run the same command to resume") from None


_sweeps = count()  # each has a prefix of its own, in the same order in all processes


@cache
def _met() -> tuple[Any, int, int, Any]:
    """The shared store, the rank, the number of processes, and the class that adds prefixes to a store."""
    import torch.distributed as dist

    if not dist.is_available():
        raise ConfigError("WORLD_SIZE is set, but this PyTorch has no torch.distributed; unset it for one process")
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=JOINING))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"the processes could not connect ({error}); start them with torchrun") from None
    return store, rank, world, dist.PrefixStore
