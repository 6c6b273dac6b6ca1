"""Requests of the viewer's page: checked and bounded, refused in both languages, computed by a few threads."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import Request

from headwise.reports.messages import message
from headwise.reports.passages import short
from headwise.reports.viewer.session import CANCELLED, FAILED, Text
from headwise.reports.viewer.tiles import REDUCES, SIDE, Unwanted, Wanted
from headwise.wording import Message


class Refusal(HTTPException):
    """An error response: the status and its message."""

    def __init__(self, status: int, says: Message, *, retry_after: int | None = None) -> None:
        headers = None if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, str(says), headers)
        self.says = says


def misfit(name: str, sentence: str) -> Refusal:
    """400: an invalid request; the page itself never sends one."""
    return Refusal(400, message("misfit", name=name, sentence=sentence))


def error_body(says: Message) -> dict[str, Any]:
    """The body of an error response."""
    body = says.to_dict()
    return {"error": body.pop("text"), **body}


PIECES = 4096  # tokens a request
POSITIONS = 1000  # of a search
QUERY = 256  # characters of a search
TOPS = 64  # keys and queries of a token
CELLS = 16, 256  # of an overview, along a side
PAIR = 64  # tokens of a cell in all heads, along a side
TITLE = 200  # characters
ESCAPED = 12  # bytes of a character in JSON, at most: \\ud83d\\ude00


@dataclass(frozen=True)
class TileRequest:
    """A tile of a head's map."""

    layer: int
    head: int
    cell: int
    row: int
    col: int
    reduce: str


def whole(request: Request, name: str, default: int | None = None) -> int:
    """A whole number of the query or the path."""
    given = request.path_params.get(name, request.query_params.get(name))
    if given is None and default is not None:
        return default
    if given is None or not given.isascii() or not given.isdigit() or len(given) > 12:
        raise misfit(name, f"{name}: expected a whole number of at least 0, got {short(given)}")
    return int(given)


def reduce_of(request: Request) -> str:
    """The pooling: mean (default) or max."""
    given = request.query_params.get("reduce", "mean")
    if given not in REDUCES:
        raise misfit("reduce", f"reduce: expected {' or '.join(REDUCES)}, got {short(given)}")
    return given


def head_of(request: Request, text: Text) -> tuple[int, int]:
    """The requested layer and head. 404 if there is none, 409 if it is not yet computed."""
    layer, head = (whole(request, name) for name in ("layer", "head"))
    heads = text.subject.heads
    if layer >= len(heads) or head >= heads[layer]:
        raise Refusal(404, message("no_head", head=head, layer=layer))
    if (layer, head) not in text.heads:
        raise not_yet(text)
    return layer, head


def tile_of(request: Request, text: Text) -> TileRequest:
    """The requested tile. 404 for an unknown head, 400 for a tile outside the map, 409 for one not yet computed."""
    return TileRequest(*head_of(request, text), *cell_of(request, text, SIDE), reduce_of(request))


def cell_of(request: Request, text: Text, side: int = 1) -> tuple[int, int, int]:
    """The requested size of cells, and the row and column of a square of `side` × `side` of them."""
    cell, row, col = (whole(request, name) for name in ("cell", "row", "col"))
    levels = text.levels
    if cell & (cell - 1) or not 1 <= cell <= levels.coarsest:
        raise misfit("cell", f"cell: expected a power of two from 1 to {levels.coarsest}, got {cell}")
    if row * side * cell >= levels.n or col * side * cell >= levels.m:
        name = "tile" if side > 1 else "cell"
        raise misfit(
            name, f"{name} ({row}, {col}) of cells of {cell} lies outside the map of {levels.n} × {levels.m} tokens"
        )
    return cell, row, col


def not_yet(text: Text) -> Refusal:
    """The error for a text whose maps are not available."""
    if text.state == FAILED and text.error is not None:
        return Refusal(409, message("failed", error=text.error))
    if text.state == CANCELLED:
        return Refusal(404, message("given_up"))
    return Refusal(409, message("still_reading"), retry_after=1)


async def text_of(request: Request, characters: int) -> tuple[str, str]:
    """Text and title of a POST; bodies longer than the longest text are rejected while they are read."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise misfit("content-type", f"content-type: expected application/json, got {short(kind)}")
    most = ESCAPED * characters + 4 * ESCAPED * TITLE + 1024
    too_long = Refusal(413, message("too_large", characters=characters))
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > most:
        raise too_long
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise too_long
    try:
        data: Any = json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise misfit("body", "the body is not JSON; expected {text, title?}") from None
    if not isinstance(data, dict) or not isinstance(data.get("text"), str):
        raise misfit("body", "the body: expected an object with a text, {text, title?}")
    title = data.get("title") or ""
    if not isinstance(title, str):
        raise misfit("title", "title: expected a text")
    return data["text"], title.encode("utf-8", "replace").decode()[:TITLE]


Result = TypeVar("Result")
Key = TypeVar("Key")


class Workers:
    """Runs the work of requests in threads. queue: the number of waiting requests; further ones get status 503."""

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
