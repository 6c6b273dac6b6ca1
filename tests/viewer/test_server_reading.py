"""A text on its way: given up in the middle, replaced by a newer one, shown head by head, or failed."""

import threading

import numpy as np
import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")
from server_samples import Gate, client_of, refused, settled, small_subject, until

from headwise.errors import CheckpointError
from headwise.viewer import session as session_module, wire
from headwise.viewer.session import Session


def test_a_forward_pass_is_given_up_before_the_next_layer():
    subject = small_subject()
    session = Session(subject)
    gate = Gate(subject, 1)
    client = client_of(session)
    name = client.post("/api/texts", json={"text": "武松打虎" * 9}).json()["id"]
    assert gate.reached.wait(60)
    told = client.get(f"/api/texts/{name}").json()
    assert (told["state"], told["done"], told["of"]) == ("reading", 1, 3)
    for path in ("tiles/0/0/1/0/0", "overview"):
        answer = client.get(f"/api/texts/{name}/{path}")
        refused(answer, 409, "still being read")
        assert int(answer.headers["retry-after"]) >= 1
    assert client.delete(f"/api/texts/{name}").json()["state"] == "cancelled"
    assert client.get("/api/model").json()["text"] is None
    gate.opened.set()
    assert session.close(60)
    assert gate.passed == [0]
    assert session.find(name).heads == {}


def test_a_newer_text_does_not_wait_for_the_rest_of_the_older():
    subject = small_subject()
    session = Session(subject)
    gate = Gate(subject, 1)
    first = session.open("abc" * 50)
    assert gate.reached.wait(60)
    between, last = session.open("def" * 20), session.open("ghi" * 30)
    assert (first.state, between.state, last.what) == ("cancelled", "cancelled", "waiting")
    gate.opened.set()
    assert settled(last) == "ready"
    assert gate.passed == [0, 0, 1, 2]  # the one between was never begun
    assert (len(first.pyramids), len(between.pyramids), len(last.pyramids)) == (0, 0, 6)
    assert session.close(60)


def test_heads_show_as_they_are_pooled(monkeypatch):
    subject = small_subject()
    session = Session(subject)
    client = client_of(session)
    made, go_on = [], threading.Semaphore(2)
    whole = session_module.head_pyramid

    def one(*given):
        assert go_on.acquire(timeout=60)
        made.append(whole(*given))
        return made[-1]

    monkeypatch.setattr(session_module, "head_pyramid", one)
    name = client.post("/api/texts", json={"text": "abcdefgh" * 80}).json()["id"]
    text = session.find(name)
    until(lambda: len(text.pyramids) == 2)
    told = client.get(f"/api/texts/{name}").json()
    assert told["state"] == "pooling"
    assert told["statistics"]
    assert wire.decode(client.get(f"/api/texts/{name}/overview").content).shape[0] == 2
    assert client.get(f"/api/texts/{name}/tiles/0/1/4/0/0").status_code == 200
    refused(client.get(f"/api/texts/{name}/tiles/1/0/4/0/0"), 409, "still")
    assert client.get(f"/api/texts/{name}/tiles/2/1/1/1/0").status_code == 200  # finer than what is pooled
    go_on.release(100)
    assert settled(text) == "ready"
    assert wire.decode(client.get(f"/api/texts/{name}/overview").content).shape[0] == 6
    assert session.close(60)


def test_a_head_whose_scores_are_not_finite_is_told_of():
    subject = small_subject()
    weight = subject.model.blocks[1].attention.q_proj.weight
    with torch.no_grad():
        weight[8:] = torch.nan  # of its second head
    session = Session(subject)
    client = client_of(session)
    name = client.post("/api/texts", json={"text": "abcdefgh"}).json()["id"]
    assert settled(session.find(name)) == "ready"
    told = client.get(f"/api/texts/{name}").json()
    assert any("Layer 1, head 1" in note and "8 queries" in note for note in told["notes"])
    assert not any("Layer 0" in note or "head 0" in note for note in told["notes"] if "layer 2" not in note.lower())
    assert told["statistics"]["entropy"]["values"][1][0] is not None
    assert np.isnan(wire.decode(client.get(f"/api/texts/{name}/tiles/1/1/1/0/0").content)).all()
    assert session.close(60)


@pytest.mark.parametrize(
    ("error", "told"),
    [(CheckpointError("weights are gone"), "weights are gone"), (RuntimeError("odd\nsizes"), "RuntimeError: odd sizes"),
     (RuntimeError("can't allocate memory"), "not enough memory"), (MemoryError(), "not enough memory")],
)  # fmt: skip
def test_a_model_that_fails_is_told_of_and_the_server_goes_on(error, told):
    subject = small_subject()
    session = Session(subject)
    client = client_of(session)

    def fail(*_):
        raise error

    handle = subject.model.blocks[1].register_forward_pre_hook(fail)
    name = client.post("/api/texts", json={"text": "abc"}).json()["id"]
    assert settled(session.find(name)) == "failed"
    assert told in client.get(f"/api/texts/{name}").json()["error"]
    refused(client.get(f"/api/texts/{name}/overview"), 409, told)
    handle.remove()
    again = client.post("/api/texts", json={"text": "abc"}).json()["id"]
    assert settled(session.find(again)) == "ready"
    assert session.close(60)


def test_a_text_that_fails_while_it_is_pooled_takes_no_memory_any_more(monkeypatch):
    def fail(*_):
        raise RuntimeError("odd")

    monkeypatch.setattr(session_module, "head_pyramid", fail)
    session = Session(small_subject())
    text = session.open("abc" * 20)
    assert settled(text) == "failed"
    until(lambda: not text.heads and not text.reading.pieces)
    assert (text.n, text.error) == (60, "RuntimeError: odd")
    assert session.close(60)
