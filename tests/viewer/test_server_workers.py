"""Few threads, a bounded queue, nothing computed for who has gone; and what is kept is bounded."""

import http.client
import socket
import threading

import anyio
import pytest
from hypothesis import given, strategies as st

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")
from server_samples import PATIENCE, TOKEN, live, settled, small_subject, until
from starlette.exceptions import HTTPException
from starlette.requests import Request

from headwise.reports.viewer import app as app_module
from headwise.reports.viewer.requests import Kept, Workers
from headwise.reports.viewer.session import Session
from headwise.reports.viewer.tiles import Unwanted


class Client:
    """A request whose client goes away when it is told to."""

    def __init__(self) -> None:
        self.gone = anyio.Event()
        self.request = Request({"type": "http", "method": "GET", "path": "/", "headers": []}, self._receive)
        self._sent = False

    async def _receive(self) -> dict:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}


class Work:
    """Work that lasts until it is let go, and counts who was computed for."""

    def __init__(self) -> None:
        self.let_go, self.begun, self.log = threading.Event(), threading.Event(), []

    def __call__(self, wanted, name="held"):
        self.log.append(name)
        self.begun.set()
        if name == "held":
            assert self.let_go.wait(PATIENCE)
        return name


@pytest.mark.thorough
def test_the_queue_is_bounded_and_who_went_away_is_left_out():
    work, answers = Work(), {}

    async def ask(workers: Workers, client: Client, name: str) -> None:
        try:
            answers[name] = await workers.run(client.request, lambda wanted: work(wanted, name))
        except (HTTPException, Unwanted) as error:
            answers[name] = error

    async def main() -> None:
        workers, clients = Workers(1, 2), {name: Client() for name in ("held", "leaves", "stays", "too many")}
        async with anyio.create_task_group() as group:
            group.start_soon(ask, workers, clients["held"], "held")
            await anyio.to_thread.run_sync(work.begun.wait)
            for name in ("leaves", "stays"):
                group.start_soon(ask, workers, clients[name], name)
            await anyio.wait_all_tasks_blocked()
            await ask(workers, clients["too many"], "too many")
            clients["leaves"].gone.set()
            while "leaves" not in answers:
                await anyio.lowlevel.checkpoint()
            assert set(answers) == {"leaves", "too many"}  # it does not wait for a thread to be told off
            work.let_go.set()

    anyio.run(main)
    assert work.log == ["held", "stays"]
    assert (answers["held"], answers["stays"]) == ("held", "stays")
    assert isinstance(answers["leaves"], Unwanted)
    assert (answers["too many"].status_code, answers["too many"].headers) == (503, {"Retry-After": "1"})


def test_work_is_told_when_its_client_goes():
    asked = threading.Event()

    def work(wanted) -> str:
        asked.set()
        until(lambda: not wanted())
        raise Unwanted

    async def main() -> None:
        client = Client()
        async with anyio.create_task_group() as group:

            async def leave() -> None:
                await anyio.to_thread.run_sync(asked.wait)
                client.gone.set()

            group.start_soon(leave)
            with pytest.raises(Unwanted):
                await Workers(1, 1).run(client.request, work)

    anyio.run(main)


@pytest.mark.parametrize("error", [ValueError("odd"), Unwanted(), KeyError("x")])
def test_errors_of_the_work_come_out_as_they_are(error):
    def work(wanted):
        raise error

    with pytest.raises(type(error)) as caught:
        anyio.run(Workers(1, 1).run, Client().request, work)
    assert caught.value is error


def test_a_client_that_hangs_up_is_not_computed_for(monkeypatch):
    """On a real socket: one request holds the only thread, a second hangs up, a third is answered."""
    session = Session(small_subject())
    text = session.open("武松打虎 abc " * 60)
    assert settled(text) == "ready"
    whole, seen, held, let_go = app_module.rectangle, [], threading.Event(), threading.Event()

    def rectangle(head, rows, cols, *given):
        seen.append((rows.start, cols.start))
        held.set()
        assert let_go.wait(PATIENCE)
        return whole(head, rows, cols, *given)

    monkeypatch.setattr(app_module, "rectangle", rectangle)
    monkeypatch.setattr(app_module, "THREADS", 1)
    path = f"/api/texts/{text.id}/tiles/0/0/1"
    with live(session) as server:
        answers = {}
        threads = [
            threading.Thread(target=lambda at=at: answers.update({at: server.get(f"{path}/{at}/0")})) for at in (0, 2)
        ]
        threads[0].start()
        assert held.wait(PATIENCE)
        leaving = socket.create_connection(("127.0.0.1", server.port))
        leaving.sendall(f"GET {path}/1/0?token={TOKEN} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
        workers = server.app.app.state.workers
        until(lambda: workers.waiting == 1)
        leaving.close()
        until(lambda: workers.waiting == 0)
        threads[1].start()
        until(lambda: workers.waiting == 1)
        let_go.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert [answers[at][0] for at in (0, 2)] == [200, 200]
    assert seen == [(0, 0), (512, 0)]
    assert session.close(PATIENCE)


@pytest.mark.thorough
def test_a_full_queue_sends_away_and_says_when_to_come_again(monkeypatch):
    session = Session(small_subject())
    text = session.open("abc " * 200)
    assert settled(text) == "ready"
    held, let_go, whole = threading.Event(), threading.Event(), app_module.rectangle

    def rectangle(*given):
        held.set()
        assert let_go.wait(PATIENCE)
        return whole(*given)

    monkeypatch.setattr(app_module, "rectangle", rectangle)
    monkeypatch.setattr(app_module, "THREADS", 1)
    monkeypatch.setattr(app_module, "QUEUE", 1)
    path = f"/api/texts/{text.id}/tiles/0/0/1"
    with live(session) as server:
        threads = [threading.Thread(target=server.get, args=(f"{path}/{at}/0",)) for at in range(2)]
        threads[0].start()
        assert held.wait(PATIENCE)
        threads[1].start()
        until(lambda: server.app.app.state.workers.waiting == 1)
        status, headers, body = server.get(f"{path}/2/0")
        assert (status, headers["retry-after"]) == (503, "1")
        assert b"too many" in body
        assert server.get(f"{path[:-1]}4/0/0")[0] == 200  # what is pooled already needs no thread
        assert server.get(f"/api/texts/{text.id}/search?q=abc")[0] == 200  # nor do small answers wait behind tiles
        let_go.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert session.close(PATIENCE)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60)), max_size=40), st.integers(1, 100))
def test_what_is_kept_is_what_was_used_last_within_the_budget(puts, budget):
    kept, model = Kept[int](budget), {}
    for key, size in puts:
        kept.put(key, bytes(size))
        model.pop(key, None)
        if size <= budget:
            model[key] = size
        while sum(model.values()) > budget:
            del model[next(iter(model))]
        if key % 3 == 0 and kept.get(0) is not None:
            model[0] = model.pop(0)
        assert kept.size == sum(model.values()) <= budget
        for each in range(10):
            assert (each in model) == (each in kept._held)
    kept.drop(lambda key: key % 2 == 0)
    assert kept.size == sum(size for key, size in model.items() if key % 2)


@pytest.mark.thorough
def test_http_is_spoken_as_it_should_be():
    session = Session(small_subject())
    with live(session) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        for _ in range(3):  # one connection for many requests
            connection.request("GET", f"/api/model?token={TOKEN}")
            answer = connection.getresponse()
            assert answer.status == 200
            assert answer.read()
        connection.close()
    assert session.close(PATIENCE)
