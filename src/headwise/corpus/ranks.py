"""The processes of a sweep: who takes which unit, how far all are, and who has failed.

torchrun gives every process the address of a store; nothing but numbers and words goes through it. What is measured
lies in the journal's files, so no tensor travels, and it does not matter whether the processes compute on CPUs or GPUs.
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
SILENCE = 120.0  # seconds without one after which a process is taken for dead
JOINING = timedelta(minutes=30)  # models take their time to load
PAUSE = 0.05  # seconds between two looks while waiting
LOOK = 0.5  # seconds between two looks at all the others
SPACE = "headwise/measure/"


class Stopped(HeadwiseError):
    """Another process has failed, and this is what it says."""


class Deserted(HeadwiseError):
    """The others are gone without a word."""


class Ranks:
    """The processes as one of them sees them; this one alone does it all where nobody started more.

    Attributes:
        rank: of this process, from 0. world: how many there are.
    """

    def __init__(self, rank: int = 0, world: int = 1, store: Any = None) -> None:
        self.rank, self.world, self._store = rank, world, store
        self._alone: dict[str, float] = {}
        self._end = Event()
        self._heard: dict[int, tuple[int, float]] = {}
        self._looked = -LOOK
        if store is not None:
            Thread(target=self._beat, daemon=True).start()

    @classmethod
    def joined(cls) -> "Ranks":
        """As torchrun's environment says. ConfigError if it says half of it, or the store does not answer."""
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls()
        store, rank, world, prefixed = _met()
        return cls(rank, world, prefixed(f"{SPACE}{next(_sweeps)}/", store))

    @property
    def first(self) -> bool:
        """Whether this is the process that plans, merges and speaks."""
        return self.rank == 0

    def say(self, key: str, value: Any) -> None:
        """Tell all."""
        if self._store is not None:
            self._call("set", key, json.dumps(value))

    def hear(self, key: str) -> Any:
        """What somebody says, as soon as it is said."""
        while not self._call("check", [key]):
            self.check()
            time.sleep(PAUSE)
        return json.loads(self._call("get", key))

    def take(self, units: Sequence[int]) -> int | None:
        """The next unit that nobody has taken, of those that all processes know of; None if none is left."""
        at = int(self.count("taken", 1)) - 1
        return units[at] if at < len(units) else None

    def count(self, what: str, more: int) -> int:
        """Add to a number that all share, and see what it is now."""
        if self._store is None:
            self._alone[what] = self._alone.get(what, 0) + more
            return int(self._alone[what])
        return int(self._call("add", what, more))

    def check(self) -> None:
        """Stopped if a process has failed; Deserted if one has given no sign of life for long. It may be called at any
        time: the store is asked once in a while."""
        if self._store is None or time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        if self._call("check", ["failed"]):
            raise Stopped(json.loads(self._call("get", "failed")))
        for rank in range(self.world):
            if rank != self.rank:
                self._listen(rank)

    def fail(self, message: str) -> None:
        """Tell the others why this process gives up; the first one to say so is heard."""
        if self._store is not None:
            with suppress(HeadwiseError):
                if not self._call("check", ["failed"]):
                    self.say("failed", f"process {self.rank} of {self.world}: {message}")

    def leave(self) -> None:
        """Stay until the first process has printed what is to be said: a launcher ends all as soon as one has ended.
        Then no more signs of life."""
        if self._store is not None:
            with suppress(HeadwiseError):
                if self.first:
                    self.say("told", True)
                else:
                    while not self._call("check", ["told"]):
                        self._listen(0)
                        time.sleep(PAUSE)
        self._end.set()

    def _listen(self, rank: int) -> None:
        """Deserted if a process has been silent for long."""
        now = time.monotonic()
        beats = self._call("add", f"beat{rank}", 0)
        known, since = self._heard.get(rank, (-1, now))
        since = since if beats == known else now
        self._heard[rank] = (beats, since)
        patience = SILENCE if beats else JOINING.total_seconds()  # one that was never heard is on its way
        if now - since > patience:
            raise Deserted(f"process {rank} of {self.world} no longer responds; run the same command to resume")

    def _beat(self) -> None:
        while True:  # the first one at once: a process that was never heard is waited for much longer
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


_sweeps = count()  # each has words of its own, in the same order in all processes


@cache
def _met() -> tuple[Any, int, int, Any]:
    """The store that all processes share, the rank and the number of them; and what gives words a space of their
    own."""
    import torch.distributed as dist

    if not dist.is_available():
        raise ConfigError("WORLD_SIZE is set, but this PyTorch has no torch.distributed; unset it for one process")
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=JOINING))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"the processes could not connect ({error}); start them with torchrun") from None
    return store, rank, world, dist.PrefixStore
