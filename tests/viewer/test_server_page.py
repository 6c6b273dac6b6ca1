"""The page in a real browser, and the server behind it: a text is typed, read, seen by all heads, and zoomed into."""

import re

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")
from page_steps import at, fragment_of, idle, text_of
from server_samples import TOKEN, live, small_subject
from tile_samples import dense

from headwise.reports.viewer.session import Session

pytestmark = pytest.mark.browser

TEXT = "the tiger came 武松 and the tiger went 虎 " * 30


@pytest.mark.thorough
def test_a_text_from_the_keyboard_to_single_weights(chromium):
    session = Session(small_subject())
    with live(session) as server:
        page = chromium.page()
        page.open(f"http://127.0.0.1:{server.port}/?token={TOKEN}")
        page.wait("!document.querySelector('#entry').hidden")
        page.do("document.querySelector('#text').focus()")
        page.type(TEXT)
        page.do("document.querySelector('#read').click()")
        page.wait("!document.querySelector('#stage').hidden")
        page.wait("document.querySelectorAll('#grid canvas').length === 6")
        text = session.present
        assert text.reading.text == TEXT
        assert "64 tokens" in text_of(page, "#notes")
        name = f"http://127.0.0.1:{server.port}/?token={TOKEN}#text={text.id}&layer=2&head=1"
        i, j = 900, 700
        page.open(f"{name}&x={j}&y={i}&zoom=24")
        page.wait("!document.querySelector('#stage').hidden")
        idle(page)
        assert fragment_of(page)["head"] == "1"
        point = at(page, i, j, 24, j, i)
        page.mouse("mouseMoved", *point)
        page.wait("/\\d/.test(document.querySelector('#readout').textContent)")
        said = text_of(page, "#readout")
        weights, _ = dense(list(session.subject.maps(text.reading.ids).values())[2], 1)
        numbers = [float(x) for x in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", said.replace(",", ""))]
        assert any(np.isclose(number, weights[i, j], rtol=0.03) for number in numbers), (said, weights[i, j])
        assert page.said() == []
        page.close()
    assert session.close(60)
