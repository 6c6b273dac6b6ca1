"""A tab that serves page after page: nothing of one is in the next."""

from pathlib import Path

import pytest

from chromium import Browser

pytestmark = pytest.mark.browser

FOUND = """(async () => [
  window.mine ?? null, history.length, localStorage.length, sessionStorage.length, document.cookie,
  (await indexedDB.databases()).length,
  window.name, innerWidth, devicePixelRatio, matchMedia("(prefers-color-scheme: dark)").matches,
  matchMedia("print").matches,
  document.querySelectorAll(":hover").length, moved,
])()"""


@pytest.mark.thorough
def test_a_page_leaves_nothing_to_the_next_one(chromium: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    # In a new tab: the empty page, and this one.
    path.write_text("<script>moved = 0; onmousemove = onmouseover = () => moved++</script><h1>text</h1>")
    one = chromium.page(700, 500, scale=2.0, theme="dark", touch=True)
    one.before("window.mine = 1")
    one.open(path.as_uri())
    one.do("localStorage.a = sessionStorage.a = window.name = 1; console.warn('said'); onbeforeunload = () => 'stay'")
    one.do("new Promise((done) => { indexedDB.open('a', 1).onsuccess = done; })")
    one.do("history.pushState(null, '', '#further')")
    one.send("Emulation.setEmulatedMedia", media="print")
    one.mouse("mouseMoved", 20, 20)
    one.mouse("mousePressed", 20, 20, button="left", clickCount=1)
    one.send("Emulation.setScriptExecutionDisabled", value=True)
    assert len(one.said()) == 1
    one.close()
    other = chromium.page(1100, 800)
    other.open(path.as_uri())
    assert other.do(FOUND) == [None, 2, 0, 0, "", 0, "", 1100, 1, False, False, 0, 0]
    assert other.said() == []
    other.close()
    assert other._target == one._target


def test_two_pages_that_are_open_are_two_tabs(chromium: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("<h1>text</h1>")
    pages = [chromium.page(), chromium.page()]
    for at, page in enumerate(pages):
        page.open(path.as_uri())
        page.do(f"localStorage.a = {at}")
    assert [page.do("localStorage.a") for page in pages] == ["0", "1"]
    for page in pages:
        page.close()
