"""A fake server and a real browser, for tests of the viewer's page."""

from collections.abc import Callable, Iterator

import pytest
from fake_server import Fake, serving
from page_steps import IDLE, TEXT, idle

from chromium import Page
from headwise.reports.viewer.app import viewer_page


@pytest.fixture
def fake() -> Iterator[Fake]:
    """A server whose maps are formulas."""
    with serving(Fake(viewer_page("en"))) as running:
        yield running


@pytest.fixture
def view(new_page: Callable[..., Page], fake: Fake) -> Callable[..., Page]:
    """Open a view of a text: view("layer=0&head=1", text=TEXT, theme="dark", …) -> Page."""

    def opened(fragment: str = "", text: str = TEXT, title: str = "水浒", **options) -> Page:
        page = new_page(**options)
        name = fake.add(text, title)
        page.open(fake.url + f"#text={name}" + ("&" + fragment if fragment else ""))
        page.wait("!document.querySelector('#stage').hidden")
        page.do(IDLE)
        if "layer" in fragment:
            idle(page)
        return page

    return opened
