"""Every route of the viewer's server: what it gives, and what it says of a request that does not fit."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")
from server_samples import HOST, TOKEN, client_of, live, refused, settled, small_subject
from starlette.testclient import TestClient
from tile_samples import close, dense, pooled

from headwise.reports.viewer import app as app_module, tiles
from headwise.reports.viewer.app import make_app
from headwise.reports.viewer.session import Session
from headwise.stats import shown_in

TEXT = "the quick brown fox 武松 jumps over the lazy dog " * 13


@pytest.fixture(scope="module")
def session():
    session = Session(small_subject(), max_tokens=2000)
    yield session
    assert session.close()


@pytest.fixture
def client(session) -> TestClient:
    return client_of(session)


@pytest.fixture
def ready(session, client) -> str:
    """The path of a text that has been read."""
    answer = client.post("/api/texts", json={"text": TEXT, "title": "a fox"})
    assert answer.status_code == 202
    name = answer.json()["id"]
    assert settled(session.find(name)) == "ready"
    return f"/api/texts/{name}"


@pytest.mark.thorough
def test_model_is_described(client, ready):
    told = client.get("/api/model").json()
    assert told["name"] == told["zh"] == "small"
    assert told["kind"] == "headwise"
    assert told["context"] == 64
    assert told["causal"] is True
    assert told["layers"] == [{"name": f"blocks.{i}.attention", "heads": 2} for i in range(3)]
    assert told["limits"]["characters"] == told["limits"]["tokens"] == 2000
    assert told["text"] == ready.rpartition("/")[2]


@pytest.mark.parametrize("lang", [None, "en", "zh"])
def test_page_begins_in_the_language_that_was_asked_for(session, lang):
    app = make_app(session, TOKEN, {HOST}, lang)
    page = TestClient(app, base_url=f"http://{HOST}").get(f"/?token={TOKEN}").text
    assert f'<html lang="{lang or "en"}">' in page
    assert f'"lang":{json.dumps(lang)}' in page


def test_refusals_have_a_code_and_the_numbers(client):
    told = client.post("/api/texts", json={"text": "虎" * 667}).json()  # three tokens each
    assert (told["code"], told["values"]["n"], told["values"]["tokens"]) == ("too_many_tokens", 2001, 2000)
    assert told["values"]["why"] == {
        "text": "set by --max-tokens", "zh": "由 --max-tokens 设定", "code": "limit_of_option", "values": {},
    }  # fmt: skip
    assert "2,001 tokens" in told["error"]
    told = client.get("/api/texts/nobody").json()
    assert (told["code"], told["values"]) == ("no_text", {})
    assert client.get("/nowhere").json()["code"] == "misfit"


@pytest.mark.thorough
def test_text_is_read_to_the_end(client, ready, session):
    told = client.get(ready).json()
    assert (told["state"], told["title"], told["n"], told["error"]) == ("ready", "a fox", len(TEXT), None)
    assert told["done"] == told["of"] > 0
    assert (told["base"], told["coarsest"]) == (4, 64)
    assert any("64 tokens" in note["text"] for note in told["notes"])
    assert list(told["statistics"]) == list(shown_in("viewer"))
    maps = session.subject.maps(session.present.reading.ids)
    for name, statistic in told["statistics"].items():
        assert {lang: words["about"] != "" for lang, words in statistic["words"].items()} == {"en": True, "zh": True}
        truth = torch.stack([amap.measure(name)[name][0] for amap in maps.values()])
        assert np.allclose(np.array(statistic["values"]), truth.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_tokens_are_the_text(client, ready):
    pieces = client.get(f"{ready}/tokens?from=0&to={len(TEXT)}").json()["pieces"]
    assert "".join(pieces) == TEXT
    assert client.get(f"{ready}/tokens?from=20&to=23").json()["pieces"] == ["武", "松", " "]
    assert client.get(f"{ready}/tokens?from=5&to=5").json()["pieces"] == []
    assert client.get(f"{ready}/tokens").json()["pieces"] == pieces


@pytest.mark.thorough
@pytest.mark.parametrize(
    "query", ["from=5&to=4", "from=0&to=999999", "from=-1&to=4", "from=x", "to=1e3", "from=%C2%B2"]
)
def test_ranges_that_do_not_fit_are_refused(client, ready, query):
    refused(client.get(f"{ready}/tokens?{query}"), 400, "from" if "from" in query else "to")


@pytest.mark.thorough
def test_too_many_tokens_at_once_are_refused(client, session):
    longer = Session(session.subject, max_tokens=6000)
    asks = client_of(longer)
    name = asks.post("/api/texts", json={"text": "a" * 5000}).json()["id"]
    refused(asks.get(f"/api/texts/{name}/tokens?from=0&to=4097"), 400, "4096")
    assert len(asks.get(f"/api/texts/{name}/tokens?from=0&to=4096").json()["pieces"]) == 4096
    assert longer.close(60)


@pytest.mark.thorough
def test_search_finds_where_it_begins(client, ready):
    def found(q: str, limit: int = 100) -> list[int]:
        answer = client.get(f"{ready}/search", params={"q": q, "limit": limit}).json()
        assert answer["more"] is (len(answer["positions"]) == limit)
        return answer["positions"]

    length = len(TEXT) // 13
    assert found("fox") == [16 + length * i for i in range(13)]
    assert found("FOX 武松") == found("fox")
    assert found("fox", 5) == found("fox")[:5]
    assert found("nowhere") == []
    assert found("x 武") == [18 + length * i for i in range(13)]
    assert found(".*") == []  # letters, not a pattern


@pytest.mark.thorough
@pytest.mark.parametrize("query", ["", "q=", "q=" + "a" * 257, "q=a&limit=0", "q=a&limit=1001", "q=a&limit=-1"])
def test_searches_that_do_not_fit_are_refused(client, ready, query):
    refused(client.get(f"{ready}/search?{query}"), 400, "limit")


@pytest.mark.thorough
def test_search_of_characters_that_take_several_tokens(client, session):
    """Characters out of the vocabulary are read as bytes: a match begins at the last of them, which shows it."""
    name = client.post("/api/texts", json={"text": "a虎b虎虎"}).json()["id"]
    path = f"/api/texts/{name}"
    pieces = client.get(f"{path}/tokens").json()["pieces"]
    assert pieces == ["a", "", "", "虎", "b", "", "", "虎", "", "", "虎"]
    positions = client.get(f"{path}/search", params={"q": "虎"}).json()["positions"]
    assert [pieces[i] for i in positions] == ["虎"] * 3
    assert client.get(f"{path}/search", params={"q": "虎虎"}).json()["positions"] == [7]
    settled(session.find(name))


@pytest.mark.thorough
@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize(("layer", "head"), [(0, 0), (2, 1)])
def test_tiles_of_every_level_are_the_dense_map_pooled(client, ready, session, layer, head, reduce):
    amap = list(session.subject.maps(session.present.reading.ids).values())[layer]
    weights, allowed = dense(amap, head)
    for cell in (1, 2, 4, 8, 16, 32, 64):
        truth = pooled(weights, allowed, cell, reduce)
        for row in range(-(-len(truth) // 256)):
            for col in range(-(-len(truth) // 256)):
                answer = client.get(f"{ready}/tiles/{layer}/{head}/{cell}/{row}/{col}?reduce={reduce}")
                assert answer.status_code == 200
                assert answer.headers["content-type"] == "application/octet-stream"
                part = truth[row * 256 : row * 256 + 256, col * 256 : col * 256 + 256]
                close(tiles.decode(answer.content)[0], part, of_half=2.0**-10)


def test_a_pair_has_the_weights_of_the_map_in_every_head(client, ready, session):
    maps = list(session.subject.maps(session.present.reading.ids).values())
    for cell, row, col, reduce in ((1, 211, 17, "mean"), (1, 17, 211, "mean"), (8, 20, 20, "max"), (4, 30, 11, "mean")):
        found = client.get(f"{ready}/pair/{cell}/{row}/{col}?reduce={reduce}").json()["weights"]
        assert [len(layer) for layer in found] == list(session.subject.heads)
        for layer, amap in enumerate(maps):
            truth = [pooled(*dense(amap, head), cell, reduce)[row, col] for head in range(amap.shape[1])]
            assert np.float64(found[layer]) == pytest.approx(np.float64(truth), rel=1e-5, nan_ok=True)
    assert client.get(f"{ready}/pair/128/0/0").status_code == 400
    assert client.get(f"{ready}/pair/1/0/999999").status_code == 400


def test_tops_are_the_largest_weights_of_a_row_and_a_column(client, ready, session):
    text = session.find(ready.rpartition("/")[2])
    token, weights = 211, dense(list(session.subject.maps(text.reading.ids).values())[1], 1)[0]
    found = client.get(f"{ready}/tops/1/1/{token}?k=5").json()
    assert found["piece"] == text.reading.pieces[token]
    for name, row in (("keys", weights[token]), ("queries", weights[:, token])):
        largest = np.sort(row)[::-1][:5]
        np.testing.assert_allclose([line["weight"] for line in found[name]], largest, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose([row[line["at"]] for line in found[name]], largest, rtol=1e-4, atol=1e-7)
        assert [line["piece"] for line in found[name]] == [text.reading.pieces[line["at"]] for line in found[name]]
    refused(client.get(f"{ready}/tops/1/1/{text.n}"), 400, "token")
    refused(client.get(f"{ready}/tops/1/1/0?k=0"), 400, "k: 1 to 64")
    refused(client.get(f"{ready}/tops/9/1/0"), 404, "no head")


@pytest.mark.thorough
def test_mean_is_what_is_given_unless_asked_otherwise(client, ready):
    tile, overview = f"{ready}/tiles/1/0/8/0/0", f"{ready}/overview"
    assert client.get(tile).content == client.get(f"{tile}?reduce=mean").content
    assert client.get(overview).content == client.get(f"{overview}?reduce=mean&cells=64").content


@pytest.mark.thorough
@pytest.mark.parametrize("cells", [16, 64, 100, 256])
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_overview_is_every_head_in_order(client, ready, session, cells, reduce):
    found = tiles.decode(client.get(f"{ready}/overview?reduce={reduce}&cells={cells}").content)
    maps = list(session.subject.maps(session.present.reading.ids).values())
    cell = {16: 64, 64: 16, 100: 8, 256: 4}[cells]  # of 650 tokens
    assert found.shape[0] == 6
    for i in range(6):
        truth = pooled(*dense(maps[i // 2], i % 2), cell, reduce)
        assert max(truth.shape) <= cells
        close(found[i], truth, of_half=2.0**-9)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("path", "status", "word"),
    [
        ("tiles/3/0/1/0/0", 404, "layer 3"),
        ("tiles/0/2/1/0/0", 404, "head 2"),
        ("tiles/0/0/3/0/0", 400, "power of two"),
        ("tiles/0/0/0/0/0", 400, "power of two"),
        ("tiles/0/0/128/0/0", 400, "64"),
        ("tiles/0/0/1/3/0", 400, "outside"),
        ("tiles/0/0/1/0/3", 400, "outside"),
        ("tiles/0/0/64/1/1", 400, "outside"),
        ("tiles/0/0/1/-1/0", 400, "row"),
        ("tiles/0/0/1/0/x", 400, "col"),
        ("tiles/0/0/1/0/" + "9" * 40, 400, "col"),
        ("tiles/0/0/1/0/0?reduce=sum", 400, "mean or max"),
        ("overview?reduce=sum", 400, "mean or max"),
        ("overview?cells=15", 400, "16 to 256"),
        ("overview?cells=257", 400, "16 to 256"),
        ("overview?cells=", 400, "cells"),
        ("nothing", 404, "Not Found"),
    ],
)
def test_what_does_not_fit_is_told(client, ready, path, status, word):
    refused(client.get(f"{ready}/{path}"), status, word)


@pytest.mark.parametrize("path", ["", "/tokens", "/search?q=a", "/overview", "/tiles/0/0/1/0/0"])
def test_unknown_texts_are_not_found(client, path):
    refused(client.get(f"/api/texts/nobody{path}"), 404, "no text")


@pytest.mark.thorough
def test_wrong_methods_are_refused(client, ready):
    assert client.put("/api/texts", json={"text": "a"}).status_code == 405
    assert client.post(ready).status_code == 405
    assert client.options("/api/texts").status_code == 405


def test_empty_texts_and_half_characters_are_refused(client):
    refused(client.post("/api/texts", json={"text": ""}), 400, "empty")
    half = json.dumps({"text": "a\ud800"}).encode()
    refused(client.post("/api/texts", content=half, headers={"content-type": "application/json"}), 400, "surrogate")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"text"', b'{"text": 3}', b'{"title": "x"}', b'{"text": "a", "title": 3}', b"[" * 9000]
)
def test_bodies_that_hold_no_text_are_refused(client, body):
    answer = client.post("/api/texts", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_forms_of_other_pages_are_refused(client, kind):
    """Only JSON is read, which no page can send to another origin without being asked first."""
    answer = client.post("/api/texts", content=b'{"text": "a"}', headers={"content-type": kind})
    refused(answer, 400, "application/json")


@pytest.mark.thorough
def test_texts_that_are_too_long_are_refused_with_the_limit_and_why(client, session, ready):
    refused(client.post("/api/texts", json={"text": "a" * 2001}), 413, "2,001", "2,000", "--max-tokens")
    # Characters out of the vocabulary take three tokens each.
    refused(client.post("/api/texts", json={"text": "虎" * 700}), 413, "2,100 tokens", "2,000")
    assert client.get(ready).json()["state"] == "ready"  # what was there is there still


@pytest.mark.thorough
def test_bodies_without_end_are_not_read(client):
    read = []

    def parts():
        yield b'{"text": "'
        for i in range(10_000):
            read.append(i)
            yield b"a" * 10_000

    headers = {"content-type": "application/json", "content-length": "999999999"}
    refused(client.post("/api/texts", content=b"{}", headers=headers), 413, "2,000 characters")
    refused(client.post("/api/texts", content=parts(), headers={"content-type": "application/json"}), 413)


@pytest.mark.thorough
def test_hostile_text_stays_data(client, session):
    hostile = "</script><img src=x onerror=alert(1)>\u2028{{title}}\x00"
    name = client.post("/api/texts", json={"text": hostile, "title": hostile}).json()["id"]
    told = client.get(f"/api/texts/{name}")
    assert told.headers["content-type"] == "application/json"
    assert told.headers["x-content-type-options"] == "nosniff"
    assert told.json()["title"] == hostile
    assert "".join(client.get(f"/api/texts/{name}/tokens").json()["pieces"]) == hostile
    settled(session.find(name))


def test_page_and_font(client):
    page = client.get("/")
    assert page.status_code == 200
    assert page.text.startswith("<!doctype html>")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy
    font = client.get("/api/font")
    assert font.headers["content-type"] == "font/otf"
    assert font.content[:4] in (b"OTTO", b"\x00\x01\x00\x00")


def test_a_single_character_is_a_text(client, session):
    name = client.post("/api/texts", json={"text": "a"}).json()["id"]
    assert settled(session.find(name)) == "ready"
    assert tiles.decode(client.get(f"/api/texts/{name}/tiles/0/0/1/0/0").content).tolist() == [[[1.0]]]
    assert tiles.decode(client.get(f"/api/texts/{name}/overview").content).shape == (6, 1, 1)


@pytest.mark.thorough
def test_a_newer_text_takes_the_place_of_the_older(client, ready, session):
    newer = client.post("/api/texts", json={"text": "abc"}).json()["id"]
    assert client.get(ready).json()["state"] == "cancelled"
    for path in ("tiles/0/0/1/0/0", "tiles/0/0/8/0/0", "tokens", "overview", "search?q=a"):
        refused(client.get(f"{ready}/{path}"), 404, "newer")
    assert client.get("/api/model").json()["text"] == newer
    assert settled(session.find(newer)) == "ready"


@pytest.mark.thorough
def test_only_the_last_texts_are_remembered(client, session):
    names = [client.post("/api/texts", json={"text": "abc"}).json()["id"] for _ in range(20)]
    assert client.get(f"/api/texts/{names[0]}").status_code == 404
    assert client.get(f"/api/texts/{names[-5]}").json()["state"] in ("cancelled", "ready")
    assert settled(session.find(names[-1])) == "ready"


def test_an_error_of_ours_is_no_page_of_code(client, ready, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("a secret of the code")

    monkeypatch.setattr(app_module, "rectangle", fail)
    refused(client.get(f"{ready}/tiles/0/0/1/1/0"), 500, "the terminal shows details")
    assert "a secret of the code" in capsys.readouterr().err


@pytest.mark.thorough
def test_computed_tiles_are_kept(client, ready, monkeypatch):
    first = client.get(f"{ready}/tiles/1/1/2/0/0").content
    monkeypatch.setattr(app_module, "rectangle", lambda *_: pytest.fail("it was computed again"))
    assert client.get(f"{ready}/tiles/1/1/2/0/0").content == first


def test_many_ask_at_once(session, ready):
    """Through a real socket: every tile of every head, from eight threads, and each is right."""
    maps = list(session.subject.maps(session.present.reading.ids).values())
    wanted = [
        (layer, head, row, col) for layer in range(3) for head in range(2) for row in range(3) for col in range(3)
    ]
    with live(session) as server, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda at: server.get(f"{ready}/tiles/{at[0]}/{at[1]}/1/{at[2]}/{at[3]}"), wanted))
    for (layer, head, row, col), (status, _, body) in zip(wanted, answers, strict=True):
        assert status == 200
        weights, allowed = dense(maps[layer], head)
        part = np.where(allowed, weights, np.nan)[row * 256 : row * 256 + 256, col * 256 : col * 256 + 256]
        close(tiles.decode(body)[0], part, of_half=2.0**-10)
