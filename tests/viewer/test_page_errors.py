"""What the viewer's page says and does when the server refuses, is busy, or is away: one line, and patience."""

import pytest
from fake_server import Fake

from chromium import Page

pytestmark = pytest.mark.browser
TEXT = "武松打虎。" * 400


@pytest.fixture
def page(chromium):
    made = chromium.page()
    yield made
    assert not any("Uncaught" in line for line in made.said())
    made.close()


def line(page: Page, kind: str) -> str:
    """One of the two lines at the top."""
    return page.do(f"document.querySelector('#{kind}').hidden ? '' : document.querySelector('#{kind}').textContent")


def read(page: Page, text: str = TEXT) -> None:
    """Give a text to the form."""
    page.do(f"document.querySelector('#text').value = {text!r}; document.querySelector('#form').requestSubmit()")


def refuse(fake: Fake, status: int, sentence: str, times: int, part: str) -> None:
    """Answer so, for the next requests whose path holds the part."""
    left = [times]

    def answer(method: str, path: str) -> tuple[int, str] | None:
        if part in f"{method} {path}" and left[0] > 0:
            left[0] -= 1
            return status, sentence
        return None

    fake.answer = answer


@pytest.mark.thorough
def test_a_wrong_token_is_named(page, fake):
    page.open(fake.url.replace("token=a", "token=b"))
    page.wait("!document.querySelector('#alert').hidden")
    assert line(page, "alert").startswith("The token in the address of this page is wrong")
    assert sum("/api/" in asked for asked in fake.asked) == 1


@pytest.mark.thorough
def test_a_text_that_is_too_long_is_refused_here_and_there(page, fake):
    fake.limit = 100
    page.open(fake.url)
    page.wait("document.querySelector('#count').textContent.includes('100')")
    read(page, "虎" * 101)
    assert line(page, "alert") == "The text has 101 characters; this model supports at most 100."
    assert not any(asked.startswith("POST") for asked in fake.asked)
    refuse(fake, 413, "the text has 90 tokens; at most 50 are read", 1, "POST")
    read(page, "虎" * 90)
    page.wait("document.querySelector('#alert').textContent.includes('at most 50')")
    assert line(page, "alert") == "the text has 90 tokens; at most 50 are read"
    read(page, "虎" * 80)
    page.wait("!document.querySelector('#stage').hidden")
    assert line(page, "alert") == ""


@pytest.mark.thorough
@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again(page, fake, status):
    refuse(fake, status, "busy", 2, "POST")
    page.open(fake.url)
    page.wait("document.querySelector('#model').textContent")
    read(page)
    page.wait("document.querySelector('#status').textContent === 'headwise is busy; retrying …'")
    page.wait("!document.querySelector('#stage').hidden")
    assert line(page, "status") == ""
    assert sum(asked.startswith("POST") for asked in fake.asked) == 3


@pytest.mark.thorough
def test_a_lost_connection_is_told_and_tried_again(page, fake):
    page.open(fake.url)
    page.wait("document.querySelector('#model').textContent")
    refuse(fake, 0, "", 3, "GET /api/texts/t0")
    read(page)
    page.wait("document.querySelector('#status').textContent === 'Connection to headwise lost; retrying …'")
    page.wait("!document.querySelector('#stage').hidden")
    page.wait("document.querySelector('#status').hidden")


@pytest.mark.thorough
def test_tiles_that_are_refused_are_told_once_and_the_page_goes_on(page, fake):
    name = fake.add(TEXT)
    refuse(fake, 409, "this text was given up for a newer one", 1000, "/tiles/")
    page.open(fake.url + f"#text={name}&layer=0&head=0")
    page.wait("!document.querySelector('#alert').hidden")
    assert line(page, "alert") == "this text was given up for a newer one"
    asked = len(fake.tiles())
    page.do("new Promise((done) => setTimeout(done, 600))")
    assert len(fake.tiles()) == asked  # no hammering
    page.do("document.querySelector('#head-after').click()")
    page.wait("document.querySelector('#map-title').textContent === 'Layer 0 · head 1'")


@pytest.mark.thorough
def test_a_file_is_read_and_one_that_is_no_text_is_refused(page, fake, tmp_path):
    page.open(fake.url)
    good, bad = tmp_path / "水浒.txt", tmp_path / "bad.bin"
    good.write_text("武松打虎\n", encoding="utf-8")
    bad.write_bytes(b"\xff\xfe\xfa")
    page.wait("document.querySelector('#model').textContent")
    root = page.send("DOM.getDocument")["root"]["nodeId"]
    node = page.send("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
    page.send("DOM.setFileInputFiles", files=[str(bad)], nodeId=node)
    page.wait("!document.querySelector('#alert').hidden")
    assert line(page, "alert") == "bad.bin is not a UTF-8 text file."
    page.send("DOM.setFileInputFiles", files=[str(good)], nodeId=node)
    page.wait("document.querySelector('#text').value")
    assert page.do("document.querySelector('#text').value") == "武松打虎\n"
    page.do("document.querySelector('#form').requestSubmit()")
    page.wait("document.querySelector('#progress').hidden && !document.querySelector('#stage').hidden")
    assert fake.texts["t0"] == {
        "text": "武松打虎\n", "title": "水浒.txt", "left": -1, "state": "ready", "drawn": 11,
    }  # fmt: skip


@pytest.mark.thorough
def test_an_empty_text_is_not_sent(page, fake):
    page.open(fake.url)
    page.wait("document.querySelector('#model').textContent")
    read(page, "  ")
    assert line(page, "alert") == "Enter a text first."
