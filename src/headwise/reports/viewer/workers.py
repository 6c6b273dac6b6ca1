"""A few threads for many requests: a bounded queue, and no work for clients that have disconnected."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import anyio
from starlette.requests import Request

from headwise.reports.messages import message
from headwise.reports.viewer.refusals import Refusal
from headwise.reports.viewer.tiles import Unwanted, Wanted

Result = TypeVar("Result")
Key = TypeVar("Key")


class Workers:
    """Runs the work of requests in threads.

    Args:
        threads: the number of threads. queue: the number of waiting requests; further ones get status 503.
    """

    def __init__(self, threads: int, queue: int) -> None:
        self._threads, self._queue = anyio.CapacityLimiter(threads), queue

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._threads.statistics().tasks_waiting

    async def run(self, request: Request, work: Callable[[Wanted], Result]) -> Result:
        """Return the result of `work`, which is called with a function that returns whether the client is connected.

        Raises:
            Refusal: 503 if the queue is full.
            Unwanted: if the client disconnected, or `work` raised it.
        """
        if self.waiting >= self._queue:
            raise Refusal(503, message("busy"), retry_after=1)
        gone = threading.Event()
        outcome: list[Result | Exception] = []

        async def leave_with_client() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            gone.set()
            group.cancel_scope.cancel()  # removes it from the queue if it still waits

        async with anyio.create_task_group() as group:
            group.start_soon(leave_with_client)
            try:
                call = partial(work, lambda: not gone.is_set())
                outcome.append(await anyio.to_thread.run_sync(call, limiter=self._threads))
            except Exception as error:  # raised below: a task group would wrap it
                outcome.append(error)
            group.cancel_scope.cancel()
        result = outcome[0] if outcome else Unwanted()
        if isinstance(result, Exception):
            raise result
        return result


class Kept(Generic[Key]):
    """A cache of the most recently used byte strings, of at most `budget` bytes."""

    def __init__(self, budget: int) -> None:
        self._budget, self._size = budget, 0
        self._held: OrderedDict[Key, bytes] = OrderedDict()

    @property
    def size(self) -> int:
        """Bytes held."""
        return self._size

    def get(self, key: Key) -> bytes | None:
        """The value of the key, which counts as used; None if it is not held."""
        found = self._held.get(key)
        if found is not None:
            self._held.move_to_end(key)
        return found

    def put(self, key: Key, value: bytes) -> None:
        """Hold the value, and drop the least recently used ones."""
        self.drop(lambda held: held == key)
        if len(value) > self._budget:
            return
        self._held[key] = value
        self._size += len(value)
        while self._size > self._budget:
            self._size -= len(self._held.popitem(last=False)[1])

    def drop(self, unwanted: Callable[[Key], bool]) -> None:
        """Drop the values of these keys."""
        for key in [key for key in self._held if unwanted(key)]:
            self._size -= len(self._held.pop(key))
