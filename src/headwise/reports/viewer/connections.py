"""Connections with a time limit for incoming requests and a maximum number."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

ARRIVAL = 20.0  # seconds for a request to arrive, head and body
MOST = 100  # connections; a browser opens six
HEAD = 1 << 14  # bytes of a request's head


class Connection(H11Protocol):
    """uvicorn's HTTP connection with a time limit.

    uvicorn closes idle connections between requests, but waits for the rest of a request without limit.
    """

    _arrival: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; above the maximum, close the one that has waited longest for a request."""
        super().connection_made(transport)
        if len(self.connections) > MOST:
            held = [one for one in self.connections if isinstance(one, Connection)]
            waiting = [(one._arrival.when(), one) for one in held if one._arrival is not None]
            first = min(waiting, key=lambda pair: pair[0])[1] if waiting else self
            first._stop()
            self.connections.discard(first)  # now: the next connection may arrive before this one is closed
            first.transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit."""
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Run the time limit while a request is arriving."""
        arriving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if not arriving or self.transport.is_closing():
            self._stop()
        elif self._arrival is None:
            self._arrival = self.loop.call_later(ARRIVAL, self.transport.abort)

    def _stop(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None
