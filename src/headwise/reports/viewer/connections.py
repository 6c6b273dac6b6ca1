"""Connections that end: a request that does not arrive is given up, and only so many are held at a time."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

ARRIVAL = 20.0  # seconds in which a request has to arrive, head and body; from another program here it takes a moment
MOST = 100  # connections; a browser opens six
HEAD = 1 << 14  # bytes of a request's head


class Connection(H11Protocol):
    """uvicorn's own, with an end to what it waits for.

    uvicorn closes a connection that is quiet between two requests, but waits without end for the rest of a request.
    """

    _arrival: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection. Where there are too many, the one that has waited longest for a request makes room."""
        super().connection_made(transport)
        if len(self.connections) > MOST:
            held = [one for one in self.connections if isinstance(one, Connection)]
            waiting = [(one._arrival.when(), one) for one in held if one._arrival is not None]
            first = min(waiting, key=lambda pair: pair[0])[1] if waiting else self
            first._stop()
            self.connections.discard(first)  # at once: the next connection may come before this one is closed
            first.transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """A part of a request."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """A request has its answer, and the next one may come."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side is gone, or was given up."""
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Count the time while a request is arriving, from its first moment to its last byte."""
        arriving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if not arriving or self.transport.is_closing():
            self._stop()
        elif self._arrival is None:
            self._arrival = self.loop.call_later(ARRIVAL, self.transport.abort)

    def _stop(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None
