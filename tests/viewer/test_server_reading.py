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
from headwise.kernels import torch_blocks
from headwise.reports.viewer import session as reader_module, session as text_module, tiles
from headwise.reports.viewer.session import Session


def test_a_forward_pass_is_given_up_before_the_next_layer():
    subject = small_subject()
    session = Session(subject)
    gate = Gate(subject, 1)
    client = client_of(session)
    name = client.post("/api/texts", json={"text": "武松打虎" * 9}).json()["id"]
    assert gate.reached.wait(60)
    told = client.get(f"/api/texts/{name}").json()
    assert (told["state"], told["layer"], told["drawn"], 3 * told["done"]) == ("reading", 1, 2, told["of"])
    assert client.get(f"/api/texts/{name}/tiles/0/1/1/0/0").status_code == 200  # the first layer is there
    answer = client.get(f"/api/texts/{name}/tiles/1/0/1/0/0")
    refused(answer, 409, "still being computed")
    assert int(answer.headers["retry-after"]) >= 1
    assert client.delete(f"/api/texts/{name}").json()["state"] == "cancelled"
    assert client.get("/api/model").json()["text"] is None
    gate.opened.set()
    assert session.close(60)
    assert gate.passed == [0]
    assert session.find(name).heads == {}


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_heads_show_as_they_are_drawn(monkeypatch):
    subject = small_subject()
    session = Session(subject)
    client = client_of(session)
    made, go_on = [], threading.Semaphore(0)
    whole = reader_module.head_pyramid

    def one(*given):
        assert go_on.acquire(timeout=60)
        made.append(whole(*given))
        return made[-1]

    monkeypatch.setattr(reader_module, "head_pyramid", one)
    name = client.post("/api/texts", json={"text": "abcdefgh" * 80}).json()["id"]
    text = session.find(name)
    until(lambda: text.what == "drawing")
    refused(client.get(f"/api/texts/{name}/overview"), 409, "still")
    assert client.get(f"/api/texts/{name}/tiles/0/1/1/1/0").status_code == 200  # finer than what is kept
    refused(client.get(f"/api/texts/{name}/tiles/0/1/4/0/0"), 409, "still")
    go_on.release(2)
    until(lambda: len(text.pyramids) == 2)
    told = client.get(f"/api/texts/{name}").json()
    assert (told["state"], told["what"], told["drawn"]) == ("reading", told["what"], 2)
    assert len(told["statistics"]["entropy"]["values"]) in (1, 2)
    assert tiles.decode(client.get(f"/api/texts/{name}/overview").content).shape[0] == 2
    assert client.get(f"/api/texts/{name}/tiles/0/1/4/0/0").status_code == 200
    refused(client.get(f"/api/texts/{name}/tiles/1/0/4/0/0"), 409, "still")
    go_on.release()
    until(lambda: len(text.pyramids) == 3)
    assert session.find(name).status()["statistics"]["entropy"]["values"][1][0] > 0
    go_on.release(100)
    assert settled(text) == "ready"
    assert tiles.decode(client.get(f"/api/texts/{name}/overview").content).shape[0] == 6
    assert session.close(60)


@pytest.mark.thorough
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
    said = [note["text"] for note in told["notes"]]
    assert any("Layer 1, head 1" in note and "8 queries" in note for note in said)
    assert not any("Layer 0" in note or "head 0" in note for note in said if "layer 2" not in note.lower())
    assert {"layer": 1, "head": 1, "count": 8} in [note["values"] for note in told["notes"]]
    assert told["statistics"]["entropy"]["values"][1][0] is not None
    assert np.isnan(tiles.decode(client.get(f"/api/texts/{name}/tiles/1/1/1/0/0").content)).all()
    assert session.close(60)


@pytest.mark.thorough
def test_a_head_whose_values_are_not_finite_is_told_of():
    subject = small_subject()
    with torch.no_grad():
        subject.model.blocks[2].attention.v_proj.weight[8] = torch.inf  # of its second head
    session = Session(subject)
    client = client_of(session)
    name = client.post("/api/texts", json={"text": "abcdefgh"}).json()["id"]
    assert settled(session.find(name)) == "ready"
    notes = client.get(f"/api/texts/{name}").json()["notes"]
    assert [note["values"] for note in notes if "among its values" in note["text"]] == [
        {"layer": 2, "head": 1, "count": 8}
    ]
    assert session.close(60)


@pytest.mark.thorough
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
    assert told in client.get(f"/api/texts/{name}").json()["error"]["text"]
    refused(client.get(f"/api/texts/{name}/overview"), 409, told)
    handle.remove()
    again = client.post("/api/texts", json={"text": "abc"}).json()["id"]
    assert settled(session.find(again)) == "ready"
    assert session.close(60)


def test_a_text_that_fails_while_it_is_pooled_takes_no_memory_any_more(monkeypatch):
    def fail(*_):
        raise RuntimeError("odd")

    monkeypatch.setattr(reader_module, "head_pyramid", fail)
    session = Session(small_subject())
    text = session.open("abc" * 20)
    assert settled(text) == "failed"
    until(lambda: not text.heads and not text.reading.pieces)
    assert (text.n, text.error) == (60, "RuntimeError: odd")
    assert session.close(60)


def test_a_layer_is_given_up_between_blocks_of_queries(monkeypatch):
    """What is under way is one layer of the model, and nothing of it is waited for but the block."""
    monkeypatch.setattr(torch_blocks, "PAIRS", 1)
    subject = small_subject(layers=1)
    session = Session(subject)
    blocks = []
    held, let_go = threading.Event(), threading.Event()

    def progress(self, what, done, of, layer):
        blocks.append(done)
        if what == "reading" and 0 < done < of // 3:
            held.set()
            assert let_go.wait(60)

    monkeypatch.setattr(text_module.Text, "progress", progress)
    text = session.open("武松打虎" * 500)
    assert held.wait(60)
    newer = session.open("abc")
    let_go.set()
    monkeypatch.setattr(text_module.Text, "progress", lambda *_: None)
    assert settled(newer) == "ready"
    assert text.state == "cancelled"
    assert not text.heads
    assert 0 < max(blocks) < 2 * 3 * 2000 // 2
    assert session.close(60)
