"""Who begins a request and does not end it is not waited for; others are served meanwhile."""

import http.client
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")
from server_samples import PATIENCE, TOKEN, Live, live, small_subject, until

from headwise.reports.viewer import app
from headwise.reports.viewer.app import HEAD
from headwise.reports.viewer.session import Session

HALVES = {
    "nothing": b"",
    "a line": b"GET /api/model HTTP/1.1\r\n",
    "half a head": b"GET /api/model HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Sl",
    "a head without its body": f"POST /api/texts?token={TOKEN} HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
    "Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{".encode(),
}


@pytest.fixture
def session() -> Iterator[Session]:
    opened = Session(small_subject())
    yield opened
    opened.close()


@pytest.fixture
def many() -> Iterator[ExitStack]:
    """Sockets that are closed at the end."""
    with ExitStack() as opened:
        yield opened


def half(many: ExitStack, server: Live, sent: bytes) -> socket.socket:
    one = many.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE))
    one.sendall(sent.replace(b"%d", str(server.port).encode()))
    return one


def is_closed(one: socket.socket) -> bool:
    """Whether the other side has closed it, by now or within PATIENCE."""
    try:
        while one.recv(1 << 12):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.thorough
@pytest.mark.parametrize("sent", HALVES.values(), ids=HALVES)
def test_half_a_request_is_given_up(
    sent: bytes, session: Session, many: ExitStack, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "ARRIVAL", 0.3)
    with live(session) as server:
        waiting = [half(many, server, sent) for _ in range(12)]
        assert server.get("/api/model")[0] == 200
        assert all(map(is_closed, waiting))
        assert server.get("/api/model")[0] == 200
    assert capfd.readouterr().err == ""


@pytest.mark.thorough
def test_a_request_that_trickles_in_is_given_up(
    session: Session, many: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "ARRIVAL", 0.5)
    with live(session) as server:
        one = half(many, server, b"GET /api/model HTTP/1.1\r\n")
        one.settimeout(0.01)

        def refused() -> bool:
            try:
                one.sendall(b"X: y\r\n")
                return one.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        until(refused)


@pytest.mark.thorough
def test_a_second_request_on_a_connection_has_to_arrive_too(
    session: Session, many: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "ARRIVAL", 0.3)
    with live(session) as server:
        whole = f"GET /api/model?token={TOKEN} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode()
        one = half(many, server, whole)
        assert one.recv(15).startswith(b"HTTP/1.1 200")
        one.sendall(whole[:-9])
        assert is_closed(one)


@pytest.mark.thorough
def test_an_answer_takes_its_time(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what arrives is hurried, not what is computed."""
    monkeypatch.setattr(app, "ARRIVAL", 0.3)
    slow = session.open

    def opening(text: str, title: str = "") -> object:
        time.sleep(0.9)
        return slow(text, title)

    monkeypatch.setattr(session, "open", opening)
    with live(session) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        body, kind = b'{"text": "abc"}', {"Content-Type": "application/json"}
        connection.request("POST", f"/api/texts?token={TOKEN}", body, kind)
        assert connection.getresponse().status == 202
        connection.close()


@pytest.mark.thorough
def test_only_so_many_connections_are_held(session: Session, many: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MOST", 20)
    with live(session) as server:
        waiting = [half(many, server, HALVES["half a head"]) for _ in range(50)]
        assert all(map(is_closed, waiting[:30]))  # those that came first make room
        assert server.get("/api/model")[0] == 200
        for one in waiting[-10:]:
            one.settimeout(0.05)
            with pytest.raises(TimeoutError):
                one.recv(1)


@pytest.mark.thorough
def test_a_head_without_end_is_refused(session: Session, many: ExitStack) -> None:
    with live(session) as server:
        one = half(many, server, b"GET / HTTP/1.1\r\nX: " + b"y" * (HEAD + 1))
        assert one.recv(12) == b"HTTP/1.1 400"
