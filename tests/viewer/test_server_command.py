"""`headwise view` from the outside: the address it prints, ports, Ctrl-C; and how long a text may be."""

import inspect
import json
import os
import re
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")
from server_samples import PATIENCE, small_subject, until

from forked import Program
from headwise.cli import main
from headwise.cli.see import view
from headwise.errors import ConfigError
from headwise.reports import viewer as server_module
from headwise.reports.viewer import bind, serve, session as limits_module
from headwise.reports.viewer.session import Session, TooLong, bytes_a_token, free_memory, limits_of


@contextmanager
def serving(file: Path) -> Iterator[list[str]]:
    """`headwise view` of a file in a process of its own, and the two lines that it prints; ended by Ctrl-C."""
    folder = file.parent
    (folder / "view.py").write_text("from headwise.cli import main\nmain()\n")
    running = Program((folder / "view.py", "view", "--no-open", "--file", file), folder / "printed")
    try:
        yield until(lambda: len(lines := running.out.read_text().splitlines()) >= 2 and lines)
        os.kill(running.process.pid, signal.SIGINT)
        running.process.join(PATIENCE)
    finally:
        code, _, err = running.wait(0)
    assert (code, err) == (0, "")  # no log, no traceback


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is sent as a signal")
def test_it_serves_the_file_until_ctrl_c(tmp_path):
    file = tmp_path / "a tale.txt"
    file.write_text("话说武松打虎。" * 9, encoding="utf-8")
    with serving(file) as lines:
        found = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/\?token=([\w-]{40,})", lines[0])
        assert found, lines
        assert "only this machine" in lines[1].lower()

        def ask(path: str) -> dict:
            with urllib.request.urlopen(f"{found[1]}{path}?token={found[2]}", timeout=PATIENCE) as answer:
                return json.load(answer)

        name = ask("/api/model")["text"]
        told = until(lambda: (told := ask(f"/api/texts/{name}"))["state"] == "ready" and told)
        assert (told["title"], told["n"]) == ("a tale.txt", 63)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{found[1]}/", timeout=PATIENCE)


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is sent as a signal")
def test_ctrl_c_does_not_wait_for_a_long_text(tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("the tiger " * 6000, encoding="utf-8")
    with serving(file) as lines:
        assert lines[0].startswith("http://127.0.0.1")


@pytest.mark.thorough_except(
    "options0-0 to 65535",
    "options1-nowhere.txt",
    "options2-nowhere",
    "options4-empty",
    "options5-lang='fr': expected 'en' or 'zh'",
)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--port", "99999"], "0 to 65535"),
        (["--file", "nowhere.txt"], "nowhere.txt"),
        (["--model", "nowhere"], "nowhere"),
        (["--max-tokens", "5", "--file", "{long}"], "12 characters; at most 5"),
        (["--file", "{empty}"], "empty"),
        (["--lang", "fr"], "lang='fr': expected 'en' or 'zh'"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, monkeypatch, capsys, options, told):
    (tmp_path / "long").write_text("a" * 12, encoding="utf-8")
    (tmp_path / "empty").write_text("", encoding="utf-8")
    options = [option.format(long=tmp_path / "long", empty=tmp_path / "empty") for option in options]
    monkeypatch.setattr(sys, "argv", ["headwise", "view", "--no-open", *options])
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert told in err


def test_a_port_that_is_taken_is_told_with_the_way_out():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: is used by another program; .*--port"):
            bind(port)
    with bind(port) as free:  # and taken once it is free again
        assert free.getsockname() == ("127.0.0.1", port)


def test_only_this_machine_is_listened_to():
    with bind(0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("opens", [True, False])
def test_the_browser_is_sent_to_the_address(monkeypatch, opens):
    class Server:
        def run(self, sockets) -> None:
            assert not opens or sent.wait(PATIENCE)  # the socket listens by now: a browser may come before the server
            with socket.create_connection(sockets[0].getsockname(), timeout=PATIENCE):
                pass

    sent, visited, said = threading.Event(), [], []
    monkeypatch.setattr(server_module, "made_server", lambda app: Server())
    monkeypatch.setattr(server_module.webbrowser, "open", lambda address: (visited.append(address), sent.set()))
    assert serve(small_subject(), open_browser=opens, say=said.append)
    assert visited == (said if opens else [])
    assert len(said) == 1


def test_each_start_has_a_token_of_its_own(monkeypatch):
    class Server:
        def run(self, sockets) -> None:
            raise KeyboardInterrupt

    said = []
    monkeypatch.setattr(server_module, "made_server", lambda app: Server())
    for _ in range(2):
        assert serve(small_subject(), open_browser=False, say=said.append)
    tokens = {address.partition("token=")[2] for address in said}
    assert len(tokens) == 2
    assert all(len(token) >= 43 for token in tokens)  # 256 bits


def test_without_the_extra_the_way_out_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match="the viewer requires starlette: pip install starlette uvicorn"):
        serve(small_subject(), say=lambda _: None)


@pytest.mark.thorough
def test_limits_come_from_the_user_the_model_and_the_memory(monkeypatch):
    subject = small_subject()
    assert (limits_of(subject, 500).tokens, limits_of(subject, 500).characters) == (500, 500)
    assert "--max-tokens" in limits_of(subject, 500).why
    monkeypatch.setattr(subject, "limit", 77)
    assert limits_of(subject, 500).tokens == 77
    assert "77" not in limits_of(subject, 50).why
    assert "positions" in limits_of(subject, 500).why
    monkeypatch.setattr(limits_module, "free_memory", lambda: 2 * 40 * bytes_a_token(subject))
    assert limits_of(subject, 500).tokens == 40
    assert "memory" in limits_of(subject, 500).why
    monkeypatch.setattr(subject, "kind", "transformers")  # whose tokens may hold several characters
    assert limits_of(subject, 500).characters > 40
    monkeypatch.setattr(limits_module, "free_memory", lambda: 1)
    assert limits_of(subject, 500).tokens == 1
    monkeypatch.setattr(limits_module, "free_memory", lambda: None)
    assert limits_of(subject, 60).tokens == 60


def test_a_token_takes_at_least_what_the_maps_hold():
    subject = small_subject()
    maps = subject.maps(torch.zeros(1, dtype=torch.long)).values()
    held = sum(x.nbytes for amap in maps for x in (amap.q, amap.k, amap.lse))
    assert held < bytes_a_token(subject) < held + 10_000


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/meminfo is Linux's")
def test_free_memory_is_some_of_the_memory():
    assert 1 << 26 < free_memory() < 1 << 45


def test_a_text_beyond_the_limit_says_why():
    session = Session(small_subject(), max_tokens=30)
    with pytest.raises(TooLong, match=r"31 characters; at most 30 .*--max-tokens"):
        session.open("a" * 31)
    with pytest.raises(TooLong, match=r"33 tokens; at most 30"):
        session.open("虎" * 11)
    assert session.present is None
    assert session.close()


def test_the_command_and_the_library_agree_on_the_longest_text():
    assert inspect.signature(view).parameters["max_tokens"].default == limits_module.MAX_TOKENS
