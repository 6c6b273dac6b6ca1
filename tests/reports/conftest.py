"""The report that most tests of the views show, and reports in a real browser."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from settled import KEPT, SETTLED
from view_samples import passage, report_of

from chromium import Browser, Page
from headwise.reports.data import Passage, Report
from headwise.reports.html import write_report


@pytest.fixture
def chinese() -> Report:
    """Two sentences of nine characters, exact."""
    one = passage("武松打虎。虎死了！")
    return report_of(Passage(one.title, one.tokens, one.maps, sentences=[(0, 5), (5, 9)]), title="《水浒传》")


@pytest.fixture
def show(chromium: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Open a report: show(report, "layer=0&head=1", theme="dark", …) -> Page. The console stays silent."""
    pages = []

    def opened(report: Report, fragment: str = "", lang: str = "en", **options: Any) -> Page:
        path = write_report(report, tmp_path / "report.html", lang=lang)
        page = chromium.page(**{"width": 1400, "height": 1000, **options})
        pages.append(page)
        page.before(KEPT)
        page.open(path.as_uri() + ("#" + fragment if fragment else ""))
        page.do(SETTLED)
        return page

    yield opened
    for page in pages:
        said = page.said()
        page.close()
        assert said == []
