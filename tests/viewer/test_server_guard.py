"""Who may ask the viewer's server: this machine's browser, with the token; and what every answer carries."""

import re

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")
from server_samples import HOST, TOKEN, client_of, live, refused, settled, small_subject
from starlette.testclient import TestClient

from headwise.reports.page import digest
from headwise.reports.viewer import hosts_of
from headwise.reports.viewer.app import make_app, policy_of
from headwise.reports.viewer.session import Session

PATHS = ["/", "/api/model", "/api/font", "/api/texts/x", "/api/texts/x/tiles/0/0/1/0/0", "/nothing"]


@pytest.fixture(scope="module")
def session():
    session = Session(small_subject())
    yield session
    assert session.close()


@pytest.fixture
def bare(session) -> TestClient:
    """A client that sends no token by itself."""
    return TestClient(make_app(session, TOKEN, {HOST}), base_url=f"http://{HOST}")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "query",
    ["", "?token=", "?token=wrong", f"?token={TOKEN}x", f"?token={TOKEN[:-1]}", f"?token={TOKEN}&token={TOKEN}",
     f"?Token={TOKEN}", f"?token={TOKEN}&token=wrong", "?token=%E8%99%8E", "?token=%00", "?" + "a=1&" * 500],
)  # fmt: skip
def test_without_the_token_nothing_is_told(bare, path, query):
    refused(bare.get(path + query), 403, "token")


def test_a_browser_is_told_in_words(bare):
    answer = bare.get("/?token=wrong", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert (answer.status_code, answer.headers["content-type"]) == (403, "text/plain; charset=utf-8")
    assert answer.text.startswith("headwise: the token is missing or wrong; open the address that was printed")
    assert "令牌" in answer.text
    assert TOKEN not in answer.text


@pytest.mark.parametrize("method", ["post", "delete", "put", "options", "head"])
def test_nor_by_another_method(bare, session, method):
    answer = getattr(bare, method)("/api/texts?token=wrong")
    assert answer.status_code == 403
    assert session.present is None


def test_with_the_token_it_is(bare):
    assert bare.get(f"/api/model?token={TOKEN}").status_code == 200
    assert bare.get(f"/api/texts/x?token={TOKEN}").status_code == 404


def test_the_token_is_no_header_and_no_cookie(bare):
    headers = {"Authorization": f"Bearer {TOKEN}", "Cookie": f"token={TOKEN}", "X-Token": TOKEN}
    refused(bare.get("/api/model", headers=headers), 403)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8123", "127.0.0.1", "127.0.0.1:8124", "127.0.0.1:8123.evil.example",
             "localhost:8123", "[::1]:8123", "127.0.0.1:8123@evil.example", "", "0.0.0.0:8123", "127.1:8123"],
)  # fmt: skip
def test_another_name_for_this_machine_is_refused(bare, host):
    """DNS rebinding: a site's own name that leads here, so that its page could read the answers."""
    refused(bare.get(f"/api/model?token={TOKEN}", headers={"host": host}), 403, "address")


def test_names_that_are_ours():
    assert hosts_of(8123) == {"127.0.0.1:8123", "localhost:8123"}
    assert hosts_of(80) == {"127.0.0.1:80", "localhost:80", "127.0.0.1", "localhost"}


@pytest.mark.parametrize(
    ("origin", "status"),
    [(f"http://{HOST}", 200), ("http://evil.example", 403), ("null", 403), (f"https://{HOST}", 403),
     (f"http://{HOST}.evil.example", 403), ("http://127.0.0.1:8124", 403), ("", 403)],
)  # fmt: skip
def test_pages_of_other_origins_are_refused(bare, origin, status):
    assert bare.get(f"/api/model?token={TOKEN}", headers={"origin": origin}).status_code == status


@pytest.mark.parametrize(
    ("path", "site", "mode", "status"),
    [("/api/model", "same-origin", "cors", 200), ("/api/model", "none", "navigate", 200),
     ("/api/model", "cross-site", "no-cors", 403), ("/api/model", "same-site", "cors", 403),
     ("/api/model", "cross-site", "navigate", 403), ("/", "cross-site", "navigate", 200),
     ("/", "cross-site", "cors", 403)],
)  # fmt: skip
def test_what_a_browser_says_of_the_asking_page_counts(bare, path, site, mode, status):
    headers = {"sec-fetch-site": site, "sec-fetch-mode": mode}
    assert bare.get(f"{path}?token={TOKEN}", headers=headers).status_code == status


@pytest.mark.parametrize("query", ["", f"?token={TOKEN}"])
@pytest.mark.parametrize("path", PATHS)
def test_every_answer_is_sealed(bare, path, query):
    headers = bare.get(path + query).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store" or path == "/api/font"
    assert not [name for name in headers if name.startswith("access-control")]


def test_no_other_origin_is_let_in(bare):
    asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    answer = bare.options(f"/api/texts?token={TOKEN}", headers=asked)
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_page_runs_its_own_scripts_and_no_other():
    html = "<style>a{}</style><script>one()</script>\n<SCRIPT type='x'>two()\n</SCRIPT><p onclick='three()'>"
    policy = policy_of(html)
    assert digest("one()") in policy
    assert digest("two()\n") in policy
    assert digest("a{}") in policy
    assert digest("three()") not in policy
    assert "unsafe" not in policy


def test_the_policy_of_the_page_agrees_with_the_one_inside_it(session):
    answer = client_of(session).get("/")
    inside = re.search(r'http-equiv="Content-Security-Policy"[^>]*content="([^"]*)"', answer.text)
    assert inside
    for digested in re.findall(r"sha256-[\w+/=]+", inside[1]):
        assert digested in answer.headers["content-security-policy"]


def test_questions_in_chinese_come_through(session):
    client = client_of(session)
    name = client.post("/api/texts", json={"text": "武松打虎"}).json()["id"]
    answer = client.get(f"/api/texts/{name}/search", params={"q": "松"})
    assert answer.json()["positions"] == [1]
    settled(session.find(name))


@pytest.mark.thorough
def test_a_real_server_says_the_same(session):
    with live(session) as server:
        status, headers, _ = server.get("/api/model")
        assert status == 200
        assert "server" not in {name.lower() for name in headers}
        assert server.get("/api/model", Host="evil.example")[0] == 403
        assert server.get("/api/model", Origin="http://evil.example")[0] == 403
        assert server.get("/api/model", Connection="Upgrade", Upgrade="websocket")[0] == 200  # there are no WebSockets
