"""A viewer's server for tests: in this process, asked without a network or through a real socket."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

import torch
from starlette.testclient import TestClient

from headwise.lm.loading import DecoderModel, LoadedModel
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.texts import CharTokenizer
from headwise.reports.viewer import bind, hosts_of, made_server
from headwise.reports.viewer.app import Guard, make_app
from headwise.reports.viewer.session import Session, Text

TOKEN = "the-token-of-the-tests"
HOST = "127.0.0.1:8123"
PATIENCE = 60.0  # seconds after which a test gives up; nothing waits so long


def small_subject(layers: int = 3, heads: int = 2) -> LoadedModel:
    """A decoder of random weights that knows the small letters, and reads quickly."""
    torch.manual_seed(7)
    tokenizer = CharTokenizer("abcdefghijklmnopqrstuvwxyz 武松")
    config = DecoderConfig(
        tokenizer.vocab_size, d_model=8 * heads, num_layers=layers, num_heads=heads, d_ff=16, context=64
    )
    return DecoderModel(Decoder(config), tokenizer, "small")


def until(condition: Callable[[], Any]) -> Any:
    """What the condition gives once it is true; AssertionError if it never is."""
    begun = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - begun < PATIENCE, "it never came true"
        time.sleep(0.002)
    return found


def settled(text: Text) -> str:
    """The state in which a text ends."""
    until(lambda: text.state in ("ready", "failed", "cancelled"))
    return text.state


class Client(TestClient):
    """Asks the application directly, with the token in every address."""

    def request(self, method: str, url: Any, *, params: Any = None, **options: Any) -> Any:
        query = urlencode({**(params or {}), "token": TOKEN})
        return super().request(method, f"{url}{'&' if '?' in url else '?'}{query}", **options)


def client_of(session: Session) -> TestClient:
    """A client of the session's application."""
    return Client(make_app(session, TOKEN, {HOST}), base_url=f"http://{HOST}", raise_server_exceptions=False)


def refused(answer: Any, status: int, *words: str) -> None:
    """An answer is an error in JSON, and its sentence holds the words."""
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert list(answer.json()) == ["error", "zh", "code", "values"]
    for word in words:
        assert word in answer.json()["error"]


class Gate:
    """Holds the forward pass of a subject before a layer, until it is opened."""

    def __init__(self, subject: LoadedModel, layer: int) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.passed: list[int] = []  # layers that were run
        for i, name in enumerate(subject.layers):
            subject.model.get_submodule(name).register_forward_hook(lambda *_, i=i: self.passed.append(i))
        # A hook of its own comes before those that the session adds.
        subject.model.get_submodule(subject.layers[layer]).register_forward_pre_hook(self._wait)

    def _wait(self, *_: Any) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE)


class Live:
    """A server on a real socket."""

    def __init__(self, app: Guard, port: int) -> None:
        self.app, self.port = app, port

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            sign = "&" if "?" in path else "?"
            connection.request("GET", f"{path}{sign}token={TOKEN}", headers=headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        """The body as data."""
        return json.loads(self.get(path)[2])


@contextmanager
def live(session: Session) -> Iterator[Live]:
    """The session's server, running in a thread."""
    with bind(0) as listening:
        port = listening.getsockname()[1]
        app = make_app(session, TOKEN, hosts_of(port))
        server = made_server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            until(lambda: server.started)
            yield Live(app, port)
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
